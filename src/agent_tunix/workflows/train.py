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
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.guard import Interruption
from agent_tunix.engine.metrics import Clock, Record, RunFolder, cost_record, read_records, update_record
from agent_tunix.engine.rng import Purpose
from agent_tunix.engine.update import evaluation_trainable, init_state, update
from agent_tunix.tasks.datasets import Stream
from agent_tunix.tasks.rewards import Scorer
from agent_tunix.types import TrainState
from agent_tunix.workflows import setup
from agent_tunix.workflows.display import Display, print_summary, shell_command
from agent_tunix.workflows.evaluate import complete, grade
from agent_tunix.workflows.gather import Run, gather, with_demonstrations
from agent_tunix.workflows.plan import hyperparameters, make_plan

SAMPLES_SHOWN = 3


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
    model = setup.load_model(cfg)
    scorer = Scorer(cfg.reward.functions, cfg.reward.weights)
    task = setup.load_task(cfg, model.tokenizer, console.print)
    if cfg.training.method == "supervised":
        longest = cfg.generation.max_generation_steps
        train = with_demonstrations(task.train, model.tokenizer, longest, console.print)
        task = dataclasses.replace(task, train=train)
    plan = make_plan(cfg, len(task.train))
    if cfg.training.num_batches and plan.batches_per_epoch < cfg.training.num_batches:
        console.print(
            f"The data holds {plan.batches_per_epoch} batches, not training.num_batches={cfg.training.num_batches}."
        )
    stream = Stream(task.train, cfg.training.prompts_per_step, plan.batches_per_epoch, cfg.seed)
    sampling = setup.training_sampling(cfg, model.tokenizer)
    return Run(cfg, model, setup.earlier_adapters(cfg, model), task, plan, sampling, scorer, stream)


def run(cfg: Config, path: Path, console: Console) -> Record:
    """`run_training.py`: trains, or continues the run in `path`; returns the summary that it also writes there."""
    started = time.monotonic()
    r = prepare(cfg, console)
    # All of the state is put in one place, so that the second update finds it where the first did.
    trainable = setup.new_trainable(cfg, r.model)
    fresh = jax.device_put(init_state(trainable, cfg.optimizer.optimizer_name), setup.placement(cfg.model))
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
    training, iterations = r.cfg.training, r.plan.iterations
    for index in range(position, r.plan.total_batches):
        if desk.interruption.requested:
            return state, index
        clock = Clock()
        gathered = gather(r, state, index, clock)
        lengths_B = np.asarray(gathered.batch.mask_BC).sum(axis=1)
        for iteration in range(iterations):
            h = hyperparameters(r.cfg, r.plan, int(state.step) + 1)
            state, stats = update(
                state,
                gathered.batch,
                r.model.weights,
                h,
                arch=r.model.arch,
                micro_batches=r.micro_batches,
                optimizer=r.cfg.optimizer.optimizer_name,
            )
            if iteration == 0:  # later, the policy has moved away from the one that sampled
                mismatch_kl = float(stats.loss.mismatch_kl)
            record = update_record(int(state.step), stats) | gathered.record | {"mismatch/kl": mismatch_kl}
            clock.lap("time/update")
            record |= cost_record(lengths_B, clock)
            desk.folder.metrics(record)
            desk.display.step(record)
        step = int(state.step)
        desk.folder.samples({"step": step} | sample for sample in gathered.samples)
        if _due(training.eval_every_n_steps, step, iterations):
            evaluate_policy(r, state, desk)
        if _due(training.save_interval_steps, step, iterations):
            desk.checkpoints.save(state, index + 1)
    return state, r.plan.total_batches


def evaluate_policy(r: Run, state: TrainState, desk: Desk) -> list[Record]:
    """Writes one line of evals.jsonl, unless that step has one; returns a few greedy completions to show."""
    step, examples = int(state.step), r.task.validation
    greedy = dataclasses.replace(r.sampling, temperature=0.0, num_generations=1)
    trainable = evaluation_trainable(state, r.cfg.optimizer.optimizer_name)
    common = (r.model, trainable, examples, r.task.prompt_width, r.cfg.evaluation.batch_size)
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
        "advice": _advice(r.cfg, status, folder.path),
    }
    folder.summary(summary)
    return summary


def _advice(cfg: Config, status: str, path: Path) -> list[str]:
    """The commands to try next."""
    train, evaluate, export = (shell_command(verb) for verb in ("train", "evaluate", "export"))
    if status != "completed":
        return [f"{train} training.resume={path}"]
    advice = [f"{evaluate} run={path} inference_config=standard num_passes=8", f"{export} run={path} format=peft"]
    if cfg.training.method == "supervised":
        return [f"{train} training.init_from={path}", *advice]
    if cfg.model.model_size == "tiny":
        sweep = "--multirun optimizer.learning_rate=1e-7,1e-6,1e-5,1e-4"
        return [*advice[:1], f"{train} +experiment=control", f"{train} +experiment=quick_test {sweep}"]
    return advice
