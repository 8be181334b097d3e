"""Training: the straight line from a configuration to a trained adapter.

config -> prompts -> rollout -> rewards -> advantages -> update -> metrics -> checkpoint
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from agent_tunix.algorithm.advantages import group_advantages, shuffle_within_groups
from agent_tunix.config.load import write_config
from agent_tunix.config.schema import Config
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.metrics import Record, RunFolder, peak_memory_gb, read_records
from agent_tunix.engine.rng import Purpose, step_key
from agent_tunix.engine.rollout import Sampling, sample
from agent_tunix.engine.update import UpdateRule, UpdateStats, init_state, reference_logprobs, update
from agent_tunix.models.lora import policy
from agent_tunix.tasks.datasets import Example, Stream
from agent_tunix.tasks.rewards import Scorer
from agent_tunix.types import Batch, Prompts, Rollouts, TrainState
from agent_tunix.workflows import setup
from agent_tunix.workflows.display import Display, print_summary
from agent_tunix.workflows.evaluate import complete, grade
from agent_tunix.workflows.plan import Plan, make_optimizer, make_plan

SAMPLES_SHOWN = 3
SMALLEST_BUCKET = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that stays the same over a run."""

    cfg: Config
    model: setup.Model
    task: setup.Task
    plan: Plan
    sampling: Sampling
    rule: UpdateRule
    scorer: Scorer
    stream: Stream


@dataclasses.dataclass(frozen=True)
class Scored:
    """A batch of completions with their rewards; arrays are on the host."""

    texts: list[str]
    values: dict[str, np.ndarray]
    rewards_PG: np.ndarray
    advantages_PG: np.ndarray


def prepare(cfg: Config, console: Console) -> Run:
    """Loads what the run needs; whatever the user must mend is found here, before anything is written."""
    setup.start_device()
    model = setup.load_model(cfg.model)
    scorer = Scorer(cfg.reward.functions, cfg.reward.weights)
    task = setup.load_task(cfg, model.tokenizer, console.print)
    plan = make_plan(cfg, len(task.train))
    if cfg.training.num_batches and plan.batches_per_epoch < cfg.training.num_batches:
        console.print(f"The data holds {plan.batches_per_epoch} batches an epoch, not training.num_batches={cfg.training.num_batches}.")
    size = cfg.training.prompts_per_step
    rule = UpdateRule(
        arch=model.arch,
        optimizer=make_optimizer(cfg.optimizer),
        schedule=plan.schedule,
        epsilon=cfg.grpo.epsilon,
        beta=cfg.grpo.beta,
        temperature=cfg.generation.temperature,
        micro_batches=size // cfg.training.micro_batch_size,
    )
    stream = Stream(task.train, size, plan.batches_per_epoch, cfg.seed)
    return Run(cfg, model, task, plan, setup.training_sampling(cfg, model.tokenizer), rule, scorer, stream)


def run(cfg: Config, path: Path, console: Console) -> Record:
    """`run_training.py`: trains, or continues the run in `path`; returns the summary that it also writes there."""
    started = time.monotonic()
    r = prepare(cfg, console)
    adapters = setup.new_adapters(cfg.model, r.model.arch, step_key(cfg.seed, 0, Purpose.INIT))
    state, position = init_state(adapters, r.rule.optimizer), 0
    folder = RunFolder(path)
    checkpoints = Checkpoints(path / "checkpoints", cfg.training.max_checkpoints_to_keep)
    if checkpoints.steps():
        state, position = checkpoints.restore(state)
    folder.rewind(int(state.step))
    write_config(path / "config.yaml", cfg)
    with _Interruption() as interruption, Display(console, r.plan.total_steps, int(state.step)) as display:
        before = evaluate_policy(r, state, folder, display)
        try:
            state, position = _loop(r, state, position, folder, checkpoints, display, interruption)
            status = "interrupted" if interruption.requested else "completed"
        except BaseException:
            _summarise(r, folder, "failed", started)
            raise
        checkpoints.save(state, position)
        after = evaluate_policy(r, state, folder, display) if status == "completed" else []
    checkpoints.close()
    summary = _summarise(r, folder, status, started)
    folder.close()
    print_summary(console, path, summary, before, after)
    return summary


def _loop(r: Run, state: TrainState, position: int, folder, checkpoints, display, interruption) -> tuple[TrainState, int]:
    for index in range(position, r.plan.total_batches):
        if interruption.requested:
            return state, index
        clock = _Clock()
        examples = r.stream.batch(index)
        prompts = setup.pad_prompts(examples, r.task.prompt_width, r.model.tokenizer)
        key = step_key(r.cfg.seed, index, Purpose.ROLLOUT)
        weights, adapters = policy(r.model.weights, state.trainable)
        rollouts = jax.block_until_ready(sample(weights, adapters, prompts, key, arch=r.model.arch, sampling=r.sampling))
        clock.lap("time/rollout")
        scored = score(r, examples, rollouts, index)
        clock.lap("time/reward")
        batch = make_batch(r, prompts, rollouts, scored)
        for iteration in range(r.cfg.grpo.num_iterations):
            state, stats = update(state, batch, r.model.weights, rule=r.rule)
            mismatch = stats.loss.mismatch_kl if iteration == 0 else mismatch
            record = _record(int(state.step), stats, float(mismatch), scored, rollouts, clock)
            folder.metrics(record)
            display.step(record)
        folder.samples(_samples(int(state.step), examples[0], scored))
        if _due(r.cfg.training.save_interval_steps, r, int(state.step)):
            checkpoints.save(state, index + 1)
        if _due(r.cfg.training.eval_every_n_steps, r, int(state.step)) and index + 1 < r.plan.total_batches:
            evaluate_policy(r, state, folder, display)
    return state, r.plan.total_batches


def score(r: Run, examples: Sequence[Example], rollouts: Rollouts, index: int) -> Scored:
    """Rewards and advantages of a batch of completions."""
    G = r.sampling.num_generations
    texts = [r.model.tokenizer.decode(row) for row in np.asarray(rollouts.tokens_BC)]
    of = [example for example in examples for _ in range(G)]
    values = r.scorer([e.question for e in of], texts, [e.answer for e in of])
    rewards_PG = r.scorer.total(values).reshape(-1, G)
    advantages_PG = group_advantages(rewards_PG)
    if r.cfg.grpo.shuffle_advantages:
        advantages_PG = shuffle_within_groups(step_key(r.cfg.seed, index, Purpose.SHUFFLE), advantages_PG)
    return Scored(texts, values, rewards_PG, np.asarray(advantages_PG))


def make_batch(r: Run, prompts: Prompts, rollouts: Rollouts, scored: Scored) -> Batch:
    """Completions cut to the bucket of the longest, with the reference's log-probabilities where beta asks for them."""
    width = bucket(int(np.asarray(rollouts.mask_BC).sum(axis=1).max()), r.sampling.max_steps)
    tokens_BC, mask_BC = rollouts.tokens_BC[:, :width], rollouts.mask_BC[:, :width]
    reference = None
    if r.cfg.grpo.beta > 0:
        rule = r.rule
        reference = reference_logprobs(
            prompts,
            tokens_BC,
            mask_BC,
            r.model.weights,
            arch=rule.arch,
            temperature=rule.temperature,
            micro_batches=rule.micro_batches,
        )
    return Batch(prompts, tokens_BC, mask_BC, rollouts.logprobs_BC[:, :width], reference, scored.advantages_PG.reshape(-1))


def bucket(length: int, longest: int) -> int:
    """The smallest of longest, longest/2, longest/4 that holds `length`: at most three programs are ever compiled."""
    fitting = [longest // part for part in (4, 2) if longest // part >= max(length, SMALLEST_BUCKET)]
    return min(fitting, default=longest)


def evaluate_policy(r: Run, state: TrainState, folder: RunFolder, display: Display) -> list[Record]:
    """Writes one line of evals.jsonl (none twice); returns a few completions to show."""
    step, examples = int(state.step), r.task.validation
    greedy = dataclasses.replace(r.sampling, temperature=0.0, num_generations=1)
    key = step_key(r.cfg.seed, step, Purpose.EVALUATION)
    common = (r.model, state.trainable, examples, r.task.prompt_width)
    texts = complete(*common, greedy, r.cfg.evaluation.batch_size, key)
    if step not in {record["step"] for record in read_records(folder.path / "evals.jsonl")}:
        record = {"step": step, "split": "validation", **grade(examples, texts)}
        if r.cfg.evaluation.sampled:
            sampled = dataclasses.replace(r.sampling, num_generations=1)
            drawn = complete(*common, sampled, r.cfg.evaluation.batch_size, key)
            record["sampled_accuracy"] = grade(examples, drawn)["accuracy"]
        folder.evaluation(record)
        display.evaluation(record)
    shown = list(zip(examples, texts, strict=True))[:SAMPLES_SHOWN]
    return [{"question": e.question, "answer": e.answer, "completion": text[0]} for e, text in shown]


def _due(interval: int | None, r: Run, step: int) -> bool:
    """Whether the batch that ended at `step` passed a multiple of the interval."""
    return interval is not None and step // interval > (step - r.cfg.grpo.num_iterations) // interval


def _record(step: int, stats: UpdateStats, mismatch: float, scored: Scored, rollouts: Rollouts, clock: _Clock) -> Record:
    clock.lap("time/update")
    lengths_B = np.asarray(rollouts.mask_BC).sum(axis=1)
    return {
        "step": step,
        "loss": float(stats.loss.loss),
        "lr": float(stats.lr),
        "grad_norm": float(stats.grad_norm),
        "update_norm": float(stats.update_norm),
        "update_survival": float(stats.update_survival),
        "reward/mean": float(scored.rewards_PG.mean()),
        "reward/std": float(scored.rewards_PG.std()),
        **{f"reward/{name}": float(value.mean()) for name, value in scored.values.items()},
        "kl": float(stats.loss.kl),
        "entropy": float(stats.loss.entropy),
        "clip_fraction": float(stats.loss.clip_fraction),
        "groups/zero_variance": float((np.ptp(scored.rewards_PG, axis=1) == 0).mean()),
        "completion/length": float(lengths_B.mean()),
        "completion/truncated": float(1 - np.asarray(rollouts.ended_B).mean()),
        "mismatch/kl": mismatch,
        **clock.laps,
        "tokens_per_second": float(lengths_B.sum() / clock.total()),
        "memory/peak_gb": peak_memory_gb(),
    }


def _samples(step: int, example: Example, scored: Scored) -> list[Record]:
    """The best and the worst completion of the batch's first prompt."""
    rewards_G = scored.rewards_PG[0]
    return [
        {
            "step": step,
            "prompt": example.question,
            "answer": example.answer,
            "completion": scored.texts[g],
            "reward": float(rewards_G[g]),
            "rewards": {name: float(value[g]) for name, value in scored.values.items()},
            "advantage": float(scored.advantages_PG[0, g]),
        }
        for g in (int(rewards_G.argmax()), int(rewards_G.argmin()))
    ]


def _summarise(r: Run, folder: RunFolder, status: str, started: float) -> Record:
    evals = [record for record in read_records(folder.path / "evals.jsonl") if record["split"] == "validation"]
    steps = max((record["step"] for record in read_records(folder.path / "metrics.jsonl")), default=0)
    summary: Record = {
        "status": status,
        "steps": steps,
        "first_eval": evals[0] if evals else None,
        "best_eval": max(evals, key=lambda record: record["accuracy"], default=None),
        "final_eval": evals[-1] if evals else None,
        "seconds": round(time.monotonic() - started, 1),
        "optimizer": r.cfg.optimizer.model_dump(),
        "scheduler": {**r.cfg.scheduler.model_dump(), "warmup_steps": r.plan.warmup_steps, "total_steps": r.plan.total_steps},
        "advice": _advice(status, folder.path),
    }
    folder.summary(summary)
    return summary


def _advice(status: str, path: Path) -> list[str]:
    if status != "completed":
        return [f"python run_training.py training.resume={path}"]
    return [
        f"python evaluate.py run={path} inference_config=standard num_passes=8",
        f"tensorboard --logdir {path / 'tensorboard'}",
        "python run_training.py +experiment=quick_test --multirun optimizer.learning_rate=1e-7,1e-6,1e-5,1e-4",
    ]


class _Clock:
    """Laps of one batch, in seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    def total(self) -> float:
        return self._last - self._start


class _Interruption:
    """Turns the first SIGINT or SIGTERM into a request to stop after the current batch; a second one acts as usual."""

    def __enter__(self) -> _Interruption:
        self.requested = False
        self._previous: dict[int, Any] = {s: signal.signal(s, self._request) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        self.requested = True
        self.__exit__()
