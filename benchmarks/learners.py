"""What both learners of `as_trl_learns.py` are given and give back; and our own, which is our trainer without a folder."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from agent_tunix.config.compose import compose_config
from agent_tunix.config.load import config_folder, config_text, validate
from agent_tunix.config.schema import Config, ExportConfig
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.progress import Progress
from agent_tunix.engine.random_keys import Purpose
from agent_tunix.engine.update import init_state
from agent_tunix.environments.stream import Example
from agent_tunix.models.checkpoints.peft import write_adapters
from agent_tunix.models.lora import Adapters
from agent_tunix.training import export, loading
from agent_tunix.training.answering import Asking, answers_to
from agent_tunix.training.grading import grade
from agent_tunix.training.horizon import Plan, hyperparameters
from agent_tunix.training.metrics import Clock
from agent_tunix.training.rollouts import make_batch, sample_groups
from agent_tunix.training.setup import Loaded, Setup, prepare

# TRL's names of our objectives: its loss, and what it takes the ratio of.
OBJECTIVES = {
    "grpo": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "dapo": ("dapo", "token"),
    "gspo": ("grpo", "sequence"),
}


@dataclasses.dataclass(frozen=True)
class Round:
    """A batch of problems with their completions: `completion_ids` and `rewards` lie by problem."""

    examples: Sequence[Example]
    completion_ids: list[list[int]]
    rewards: np.ndarray


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What a trainer did: by update its loss, the norm of its gradient and its rate, by batch the mean reward."""

    losses: list[float]
    gradient_norms: list[float]
    rates: list[float]
    rewards: list[float]
    adapters: Adapters
    rounds: list[Round] = dataclasses.field(default_factory=list)
    clipped: list[float] = dataclasses.field(default_factory=list)


def setup(overrides: Sequence[str], loaded: Loaded) -> Setup:
    """What our run is made of, in float32."""
    composed = compose_config("config", [*overrides, "model.dtype=float32", "training.loggers=[]"], [config_folder()])
    return prepare(loading.described(validate(composed, Config)), loaded, lambda told: print(told, file=sys.stderr))


def train(r: Setup, batches: int | None = None) -> Learnt:
    """Our training, as in `training/loop.py`, without a folder, of all batches or the first ones; completions are kept."""
    state = loading.new_state(r.cfg, r.model)
    rounds, updates = [], []
    for position in range(r.plan.total_batches if batches is None else batches):
        policy = r.engine.policy(state.trainable)
        sampled = sample_groups(r, policy, position, Clock())
        made = make_batch(r, policy, position, sampled)
        tokens = np.asarray(made.batch.tokens_BC)
        ids = [row[:length].tolist() for row, length in zip(tokens, made.lengths_B, strict=True)]
        rounds.append(Round(sampled[0].examples, ids, sampled[0].scored.rewards_PG))
        for _ in range(r.plan.iterations):
            h = hyperparameters(r.cfg, r.plan, int(state.step) + 1)
            state, stats = r.engine.update(state, made.batch, h)
            assert stats.applied, "an update was out of hand"
            numbers = stats.loss.loss, stats.grad_norm, stats.lr, stats.loss.clip_fraction
            updates.append([float(number) for number in numbers])
    losses, norms, rates, clipped = (list(column) for column in zip(*updates, strict=True))
    return Learnt(losses, norms, rates, [float(one.rewards.mean()) for one in rounds], state.trainable, rounds, clipped)


def accuracy(r: Setup, adapters: Adapters) -> float:
    """Greedy, of the held-out problems, by our evaluation, whoever has trained the adapters."""
    greedily, *_ = r.evaluation_ways()
    asking = Asking(r.task.prompt_width, r.cfg.evaluation.batch_size, r.key(0, Purpose.EVALUATION), *greedily)
    found = answers_to(r.engine, r.engine.policy(adapters), None, r.task.validation, asking)
    return grade(r.task.validation, found.texts)["accuracy"]


def write_base(r: Setup, folder: Path) -> Path:
    """The base as transformers reads it, from a run that has not learnt anything yet."""
    begun, written = folder / "begun", folder / "base"
    begun.mkdir()
    (begun / "config.yaml").write_text(config_text(r.cfg))
    checkpoints = Checkpoints(begun / "checkpoints", 1)
    checkpoints.save(init_state(first_adapters(r)), Progress())
    checkpoints.close()
    asked = ExportConfig(run=str(begun), step=None, format="merged", output=str(written), dtype="float32")
    return export.run(asked, Console(quiet=True))


def first_adapters(r: Setup) -> Adapters:
    fresh = loading.new_trainable(r.cfg, r.model)
    assert isinstance(fresh, Adapters), "model.lora_rank=0 trains no adapters"
    return fresh


def write_peft(r: Setup, adapters: Adapters, base: Path, folder: Path) -> Path:
    folder.mkdir()
    write_adapters(folder, adapters, r.cfg.model.lora_alpha, str(base), False, "float32", r.cfg.model.use_rslora)
    return folder


def trl_settings(cfg: Config, plan: Plan, at_once: int) -> dict[str, Any]:
    """A run's settings by TRL's names, with `at_once` sequences in a micro-batch. Refuses what these do not say."""
    g, o, drawn = cfg.grpo, cfg.optimizer, cfg.generation
    told = {
        "grpo.kl_estimator": (g.kl_estimator, "k3"),
        "grpo.importance_correction": (g.importance_correction, "none"),
        "grpo.overlong": (g.overlong, "keep"),
        "grpo.resample_rounds": (g.resample_rounds, 0),
        "grpo.shuffle_advantages": (g.shuffle_advantages, False),
        "optimizer.optimizer_name": (o.optimizer_name, "adamw"),
        "scheduler.scheduler_name": (cfg.scheduler.scheduler_name, "warmup_cosine"),
        "training.num_epochs": (cfg.training.num_epochs, 1),
    }
    for key, (value, wanted) in told.items():
        assert value == wanted, f"{key}={value}: only {wanted} is compared"
    sequences = cfg.training.prompts_per_step * g.num_generations
    assert sequences % at_once == 0, f"{sequences} sequences are not a multiple of {at_once}"
    loss, level = OBJECTIVES[g.objective]
    return {
        "loss_type": loss,
        "importance_sampling_level": level,
        "scale_rewards": g.scale_rewards,
        "beta": g.beta,
        "use_bias_correction_kl": g.kl_correction,
        "epsilon": g.epsilon,
        "epsilon_high": g.epsilon_high,
        "delta": g.delta,
        "num_iterations": g.num_iterations,
        "num_generations": g.num_generations,
        "max_completion_length": drawn.max_generation_steps,
        "temperature": drawn.temperature,
        "top_p": drawn.top_p,
        "top_k": drawn.top_k or 0,
        "learning_rate": o.learning_rate,
        "weight_decay": o.weight_decay,
        "adam_beta1": o.betas[0],
        "adam_beta2": o.betas[1],
        "adam_epsilon": o.eps,
        "max_grad_norm": o.max_grad_norm,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": cfg.scheduler.lr_min},
        "warmup_steps": plan.warmup_steps,
        "max_steps": plan.total_steps,
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": sequences // at_once,
        "seed": cfg.seed,
    }


def equal_groups(rewards: Sequence[float], generations: int) -> np.ndarray:
    """By completion, whether all of its group were rewarded alike."""
    rewards_PG = np.asarray(rewards, np.float32).reshape(-1, generations)
    return np.repeat(np.ptp(rewards_PG, axis=1) == 0, generations)


def variety(prompt: str, completion: str, answer: str) -> float:
    """A reward that differs between completions of a model that solves nothing: how many of its words are different ones."""
    words = completion.split()
    return len({*words}) / max(len(words), 1)
