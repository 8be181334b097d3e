"""What a run will do, before it does it: how many updates, at which rates."""

from __future__ import annotations

import dataclasses
import math

from agent_tunix.algorithm import schedules
from agent_tunix.algorithm.objectives import Coefficients, LossForm
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.algorithm.schedules import Schedule
from agent_tunix.config.schema import Config
from agent_tunix.errors import UserError


@dataclasses.dataclass(frozen=True)
class Plan:
    """`total_steps` counts optimizer updates: batches times iterations."""

    batches_per_epoch: int
    total_batches: int
    iterations: int
    total_steps: int
    warmup_steps: int
    schedule: Schedule


def make_plan(cfg: Config, num_examples: int) -> Plan:
    """The true counts for a training split of `num_examples`; raises UserError where the run is impossible."""
    training, size = cfg.training, cfg.training.prompts_per_step
    available = num_examples // size
    if available == 0:
        raise UserError(
            f"The training split has {num_examples} examples, fewer than one batch of {size} prompts; "
            "lower training.batch_size and training.micro_batch_size, or give more data."
        )
    per_epoch = min(training.num_batches or available, available)
    total_batches = per_epoch * training.num_epochs
    iterations = cfg.grpo.num_iterations if training.method == "grpo" else 1
    total_steps = total_batches * iterations
    horizon = cfg.scheduler.total_steps or total_steps
    warmup = cfg.scheduler.warmup_steps
    if warmup is None:
        warmup = schedules.warmup_steps_from_ratio(cfg.optimizer.warmup_ratio, horizon)
    if warmup > min(horizon, total_steps):
        longest = f"scheduler.total_steps={horizon}" if horizon < total_steps else f"the run of {total_steps}"
        raise UserError(
            f"Warm-up of {warmup} updates is longer than {longest}: the rate would never reach its peak. "
            "Lower scheduler.warmup_steps or optimizer.warmup_ratio, or make that longer."
        )
    schedule = make_schedule(cfg, warmup, horizon)
    return Plan(per_epoch, total_batches, iterations, total_steps, warmup, schedule)


def too_few(cfg: Config, plan: Plan) -> list[str]:
    """What to say where the data holds fewer batches than were asked for."""
    asked, there = cfg.training.num_batches, plan.batches_per_epoch
    return [f"the data holds {there} batches, not training.num_batches={asked}"] if asked and there < asked else []


def make_schedule(cfg: Config, warmup_steps: int, total_steps: int) -> Schedule:
    """The configured schedule with the keys that it uses; the schema ensures that exactly those are given."""
    section = cfg.scheduler
    keys = {"lr_min": section.lr_min, "decay_ratio": section.decay_ratio, "num_cycles": section.num_cycles}
    if section.num_cycles is not None and section.num_cycles > max(total_steps - warmup_steps, 1):
        raise UserError(
            f"scheduler.num_cycles={section.num_cycles}: after warm-up there are only {total_steps - warmup_steps} updates."
        )
    if section.warmup_steps and section.decay_ratio and warmup_steps + int(section.decay_ratio * total_steps) > total_steps:
        raise UserError(
            f"scheduler.warmup_steps={warmup_steps} and scheduler.decay_ratio={section.decay_ratio:g} are more than all "
            f"{total_steps} updates; lower one of them."
        )
    used = {key: value for key, value in keys.items() if value is not None}
    return schedules.SCHEDULES[section.scheduler_name](cfg.optimizer.learning_rate, warmup_steps, total_steps, **used)


def hyperparameters(cfg: Config, plan: Plan, t: int, rate_scale: float = 1.0) -> Hyperparameters:
    """The scalars of the t-th update, counted from 1; the guard may have scaled the rate down."""
    o = cfg.optimizer
    return Hyperparameters(
        learning_rate=plan.schedule(t) * rate_scale,
        weight_decay=o.weight_decay,
        beta1=o.betas[0],
        beta2=o.betas[1],
        eps=o.eps,
        max_grad_norm=o.max_grad_norm,
        norm_decay=o.weight_decay if o.decay_norms else 0.0,
    )


def coefficients(cfg: Config) -> Coefficients:
    """The scalars of the loss."""
    g = cfg.grpo
    return Coefficients(
        temperature=cfg.generation.temperature,
        beta=g.beta,
        epsilon=g.epsilon,
        epsilon_high=g.epsilon if g.epsilon_high is None else g.epsilon_high,
        delta=math.inf if g.delta is None else g.delta,
        importance_cap=g.importance_cap,
        sapo_temperature_pos=g.sapo_temperature_pos,
        sapo_temperature_neg=g.sapo_temperature_neg,
    )


def loss_form(cfg: Config) -> LossForm:
    """What of the loss is compiled; demonstrations have the same loss under every objective."""
    if cfg.training.method == "supervised":
        return LossForm()
    g = cfg.grpo
    return LossForm(g.objective, g.kl_estimator, g.kl_correction, g.importance_correction)
