"""Training: the straight line from a configuration to a trained adapter.

config -> prompts -> rollout -> rewards -> advantages -> update -> metrics -> checkpoint
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from agent_tunix.config.load import write_config
from agent_tunix.config.schema import Config
from agent_tunix.engine.batch import make_batch, score, trim
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.guard import Interruption
from agent_tunix.engine.metrics import Clock, Record, RunFolder, read_records, sample_records, step_record
from agent_tunix.engine.rng import Purpose, step_key
from agent_tunix.engine.rollout import Sampling, sample
from agent_tunix.engine.update import init_state, reference_logprobs, update
from agent_tunix.models.lora import policy
from agent_tunix.tasks.datasets import Stream
from agent_tunix.tasks.rewards import Scorer
from agent_tunix.types import Prompts, Rollouts, TrainState
from agent_tunix.workflows import setup
from agent_tunix.workflows.display import Display, print_summary, shell_command
from agent_tunix.workflows.evaluate import complete, grade
from agent_tunix.workflows.plan import Plan, hyperparameters, make_plan

SAMPLES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that stays the same over a run."""

    cfg: Config
    model: setup.Model
    task: setup.Task
    plan: Plan
    sampling: Sampling
    scorer: Scorer
    stream: Stream

    @property
    def micro_batches(self) -> int:
        return self.cfg.training.prompts_per_step // self.cfg.training.micro_batch_size

    def key(self, step: int, purpose: Purpose) -> jax.Array:
        return step_key(self.cfg.seed, step, purpose)


@dataclasses.dataclass(frozen=True)
class Desk:
    """Where a run writes to and what it listens to."""

    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    interruption: Interruption


def prepare(cfg: Config, console: Console) -> Run:
    """Loads what the run needs; whatever the user must mend is found here, before anything is written."""
    setup.start_device()
    model = setup.load_model(cfg.model)
    scorer = Scorer(cfg.reward.functions, cfg.reward.weights)
    task = setup.load_task(cfg, model.tokenizer, console.print)
    plan = make_plan(cfg, len(task.train))
    if cfg.training.num_batches and plan.batches_per_epoch < cfg.training.num_batches:
        console.print(
            f"The data holds {plan.batches_per_epoch} batches, not training.num_batches={cfg.training.num_batches}."
        )
    stream = Stream(task.train, cfg.training.prompts_per_step, plan.batches_per_epoch, cfg.seed)
    return Run(cfg, model, task, plan, setup.training_sampling(cfg, model.tokenizer), scorer, stream)


def run(cfg: Config, path: Path, console: Console) -> Record:
    """`run_training.py`: trains, or continues the run in `path`; returns the summary that it also writes there."""
    started = time.monotonic()
    r = prepare(cfg, console)
    adapters = setup.new_adapters(cfg.model, r.model.arch, r.key(0, Purpose.INIT))
    fresh = init_state(adapters)
    checkpoints = Checkpoints(path / "checkpoints", cfg.training.max_checkpoints_to_keep)
    state, position = checkpoints.restore(fresh) if checkpoints.steps() else (fresh, 0)
    folder = RunFolder(path, int(state.step))
    write_config(path / "config.yaml", cfg)
    status = "failed"
    with Interruption() as interruption, Display(console, r.plan.total_steps, int(state.step)) as display:
        desk = Desk(folder, checkpoints, display, interruption)
        try:
            before = evaluate_policy(r, fresh, desk)
            state, position = train_loop(r, state, position, desk)
            checkpoints.save(state, position)
            after = evaluate_policy(r, state, desk)
            status = "completed" if position == r.plan.total_batches else "interrupted"
        finally:
            summary = _summarise(r, folder, status, started)
            checkpoints.close()
            folder.close()
    print_summary(console, path, summary, before, after)
    return summary


def train_loop(r: Run, state: TrainState, position: int, desk: Desk) -> tuple[TrainState, int]:
    """From a position in the data to its end, or to an interruption; returns the state and the position reached."""
    training, shuffle = r.cfg.training, r.cfg.grpo.shuffle_advantages
    for index in range(position, r.plan.total_batches):
        if desk.interruption.requested:
            return state, index
        clock = Clock()
        examples = r.stream.batch(index)
        prompts = setup.pad_prompts(examples, r.task.prompt_width, r.model.tokenizer)
        weights, adapters = policy(r.model.weights, state.trainable)
        key = r.key(index, Purpose.ROLLOUT)
        rollouts = trim(sample(weights, adapters, prompts, key, arch=r.model.arch, sampling=r.sampling))
        texts = [r.model.tokenizer.decode(row) for row in np.asarray(rollouts.tokens_BC)]
        clock.lap("time/rollout")
        scored = score(r.scorer, examples, texts, r.key(index, Purpose.SHUFFLE) if shuffle else None)
        clock.lap("time/reward")
        batch = make_batch(prompts, rollouts, scored.advantages_PG, reference(r, prompts, rollouts))
        for iteration in range(r.cfg.grpo.num_iterations):
            h = hyperparameters(r.cfg, r.plan, int(state.step) + 1)
            state, stats = update(state, batch, r.model.weights, h, arch=r.model.arch, micro_batches=r.micro_batches)
            if iteration == 0:  # later, the policy has moved away from the one that sampled
                mismatch_kl = stats.loss.mismatch_kl
            record = step_record(int(state.step), stats, mismatch_kl, scored, rollouts, clock)
            desk.folder.metrics(record)
            desk.display.step(record)
        step = int(state.step)
        desk.folder.samples(sample_records(step, examples[0], scored))
        if _due(training.eval_every_n_steps, step, r.cfg.grpo.num_iterations):
            evaluate_policy(r, state, desk)
        if _due(training.save_interval_steps, step, r.cfg.grpo.num_iterations):
            desk.checkpoints.save(state, index + 1)
    return state, r.plan.total_batches


def reference(r: Run, prompts: Prompts, rollouts: Rollouts) -> jax.Array | None:
    """The base model's log-probabilities of the completions; beta 0 costs no pass."""
    if r.cfg.grpo.beta == 0:
        return None
    return reference_logprobs(
        prompts,
        rollouts.tokens_BC,
        rollouts.mask_BC,
        r.model.weights,
        r.cfg.generation.temperature,
        arch=r.model.arch,
        micro_batches=r.micro_batches,
    )


def evaluate_policy(r: Run, state: TrainState, desk: Desk) -> list[Record]:
    """Writes one line of evals.jsonl, unless that step has one; returns a few greedy completions to show."""
    step, examples = int(state.step), r.task.validation
    greedy = dataclasses.replace(r.sampling, temperature=0.0, num_generations=1)
    common = (r.model, state.trainable, examples, r.task.prompt_width, r.cfg.evaluation.batch_size)
    key = r.key(step, Purpose.EVALUATION)
    texts = complete(*common, greedy, key)
    if step not in [record["step"] for record in _validations(desk.folder)]:
        record = {"step": step, "split": "validation", **grade(examples, texts)}
        if r.cfg.evaluation.sampled:
            drawn = complete(*common, dataclasses.replace(r.sampling, num_generations=1), key)
            record["sampled_accuracy"] = grade(examples, drawn)["accuracy"]
        desk.folder.evaluation(record)
        desk.display.evaluation(record)
    shown = list(zip(examples, texts, strict=True))[:SAMPLES_SHOWN]
    return [{"question": e.question, "answer": e.answer, "completion": text[0]} for e, text in shown]


def _validations(folder: RunFolder) -> list[Record]:
    return [record for record in read_records(folder.path / "evals.jsonl") if record["split"] == "validation"]


def _due(interval: int | None, step: int, num_iterations: int) -> bool:
    """Whether the batch whose updates ended at `step` reached or passed a multiple of the interval."""
    return interval is not None and step // interval > (step - num_iterations) // interval


def _summarise(r: Run, folder: RunFolder, status: str, started: float) -> Record:
    evals = _validations(folder)
    steps = max((record["step"] for record in read_records(folder.path / "metrics.jsonl")), default=0)
    summary: Record = {
        "status": status,
        "steps": steps,
        "first_eval": evals[0] if evals else None,
        "best_eval": max(evals, key=lambda record: record["accuracy"], default=None),
        "final_eval": evals[-1] if evals else None,
        "seconds": round(time.monotonic() - started, 1),
        "optimizer": r.cfg.optimizer.model_dump(),
        "scheduler": {
            **r.cfg.scheduler.model_dump(),
            "warmup_steps": r.plan.warmup_steps,
            "total_steps": r.plan.total_steps,
        },
        "advice": _advice(status, folder.path),
    }
    folder.summary(summary)
    return summary


def _advice(status: str, path: Path) -> list[str]:
    train, evaluate = shell_command("train"), shell_command("evaluate")
    if status != "completed":
        return [f"{train} training.resume={path}"]
    return [
        f"{evaluate} run={path} inference_config=standard num_passes=8",
        f"{train} +experiment=control",
        f"{train} +experiment=quick_test --multirun optimizer.learning_rate=1e-7,1e-6,1e-5,1e-4",
    ]
