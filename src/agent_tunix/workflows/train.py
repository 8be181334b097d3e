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

from agent_tunix.config.guidance import warnings
from agent_tunix.config.load import write_config
from agent_tunix.config.schema import Config
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.guard import MAX_ROLLBACKS, Interruption, Progress, fault_of
from agent_tunix.engine.metrics import Clock, Record, RunFolder, cost_record, read_records, update_record
from agent_tunix.engine.rng import Purpose
from agent_tunix.engine.update import evaluation_trainable, init_state, update
from agent_tunix.errors import DivergenceError
from agent_tunix.tasks.datasets import Stream
from agent_tunix.tasks.rewards import Scorer
from agent_tunix.types import TrainState
from agent_tunix.workflows import doctor, setup
from agent_tunix.workflows.diagnosis.examination import early_warnings
from agent_tunix.workflows.display import Display, print_summary, shell_command
from agent_tunix.workflows.evaluate import complete, grade
from agent_tunix.workflows.gather import Run, gather, with_demonstrations
from agent_tunix.workflows.plan import hyperparameters, make_plan
from agent_tunix.workflows.report.page import report_on

SAMPLES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Desk:
    """Where a run writes to and what it listens to."""

    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    interruption: Interruption
    rollbacks: list[Record]
    warned: set[str]


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
    for line in warnings(cfg, len(task.train)):
        console.print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)
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
    state, progress = checkpoints.restore(fresh) if checkpoints.steps() else (fresh, Progress())
    folder = RunFolder(path, int(state.step))
    write_config(path / "config.yaml", cfg)
    status, after = "failed", []
    with Interruption() as interruption, Display(console, r.plan.total_steps, int(state.step)) as display:
        desk = Desk(folder, checkpoints, display, interruption, list(progress.rollbacks), set())
        try:
            before = evaluate_policy(r, fresh, desk)
            state, progress = train_loop(r, state, progress, desk)
            checkpoints.save(state, progress)
            status = "completed" if progress.position == r.plan.total_batches else "interrupted"
            after = evaluate_policy(r, state, desk) if status == "completed" else []
        except DivergenceError:
            status = "diverged"
            raise
        finally:
            summary = _summarise(r, desk, status, started)
            checkpoints.close()
            folder.close()
            report_on(path, display.notice)
    print_summary(console, path, summary, before, after)
    return summary


def train_loop(r: Run, state: TrainState, progress: Progress, desk: Desk) -> tuple[TrainState, Progress]:
    """From a position in the data to its end, or to an interruption; returns the state and the progress made."""
    training, iterations = r.cfg.training, r.plan.iterations
    if training.on_divergence == "rollback" and not desk.checkpoints.steps():
        desk.checkpoints.save(state, progress)
    while progress.position < r.plan.total_batches and not desk.interruption.requested:
        if progress.position in progress.skipped:
            state, progress = _passed_over(state, iterations), progress.advanced()
            continue
        state, fault = train_batch(r, state, progress, desk)
        if fault is not None:
            state, progress = recover(r, state, progress, fault, desk)
            continue
        progress = progress.advanced()
        step = int(state.step)
        if _due(training.eval_every_n_steps, step, iterations):
            evaluate_policy(r, state, desk)
            _warn_early(desk)
        if _due(training.save_interval_steps, step, iterations):
            desk.checkpoints.save(state, progress)
    return state, progress


def train_batch(r: Run, state: TrainState, progress: Progress, desk: Desk) -> tuple[TrainState, str | None]:
    """All updates from the batch at the run's position; says what went wrong where one could not be applied."""
    clock = Clock()
    try:
        gathered = gather(r, state, progress.position, clock)
    except DivergenceError as fault:
        return _passed_over(state, r.plan.iterations), str(fault)
    lengths_B = np.asarray(gathered.batch.mask_BC).sum(axis=1)
    max_kl, fault_seen = r.cfg.training.max_kl, None
    for iteration in range(r.plan.iterations):
        h = hyperparameters(r.cfg, r.plan, int(state.step) + 1, progress.rate_scale)
        state, stats = update(
            state,
            gathered.batch,
            r.model.weights,
            h,
            max_kl,
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
        fault_seen = fault_seen or fault_of(stats, max_kl)
    desk.folder.samples({"step": int(state.step)} | sample for sample in gathered.samples)
    return state, fault_seen


def recover(r: Run, state: TrainState, progress: Progress, fault: str, desk: Desk) -> tuple[TrainState, Progress]:
    """What `training.on_divergence` says of a batch that went wrong; `stop` raises DivergenceError with the remedy."""
    step, mode = int(state.step), r.cfg.training.on_divergence
    if mode == "ignore":
        desk.display.notice(f"step {step}: {fault}; the batch is dropped (training.on_divergence=ignore).")
        return state, progress.advanced()
    if mode == "stop" or len(progress.rollbacks) >= MAX_ROLLBACKS:
        raise DivergenceError(_remedy(r, desk.folder.path, step, fault, progress))
    restored, saved = desk.checkpoints.restore(state)
    desk.folder.rewind(int(restored.step))
    progress = progress.rolled_back(saved, step, fault)
    desk.rollbacks.append(progress.rollbacks[-1])
    desk.display.guard(f"rolled back {len(progress.rollbacks)}x, rate x {progress.rate_scale:g}")
    desk.display.notice(
        f"step {step}: {fault}; back to step {int(restored.step)}, without that batch and at a tenth of the rate."
    )
    return restored, progress


def _warn_early(desk: Desk) -> None:
    """Says what the doctor would say already, each illness once."""
    for finding in early_warnings(doctor.read(desk.folder.path)):
        if finding.illness not in desk.warned:
            desk.warned.add(finding.illness)
            desk.display.notice(f"early warning: {finding.illness}, {finding.evidence}\n  try: {finding.remedy}")


def _passed_over(state: TrainState, steps: int) -> TrainState:
    """The state after a batch that taught nothing: only the count goes on, so that the schedule keeps its length."""
    return dataclasses.replace(state, step=state.step + steps)


def _remedy(r: Run, path: Path, step: int, fault: str, progress: Progress) -> str:
    rate, train = r.cfg.optimizer.learning_rate, shell_command("train")
    tried = f" after {len(progress.rollbacks)} rollbacks" if progress.rollbacks else ""
    saved = f"The last good checkpoint is kept in {path / 'checkpoints'}." if (path / "checkpoints").exists() else ""
    return (
        f"The run diverged at step {step}{tried}: {fault}.\n"
        f"The update did not reach the weights. {saved}\n"
        "Most often the learning rate is too high. Try, in this order:\n"
        f"  {train} optimizer.learning_rate={rate / 10:g}\n"
        f"  {train} optimizer.max_grad_norm={min(0.01, r.cfg.optimizer.max_grad_norm / 10):g}\n"
        f"  {train} training.on_divergence=rollback"
    )


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


def _summarise(r: Run, desk: Desk, status: str, started: float) -> Record:
    folder, evals = desk.folder, _validations(desk.folder)
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
        "rollbacks": desk.rollbacks,
        "warnings": warnings(r.cfg, len(r.task.train)),
        "advice": _advice(r.cfg, status, folder.path),
    }
    folder.summary(summary)
    return summary


def _advice(cfg: Config, status: str, path: Path) -> list[str]:
    """The commands to try next."""
    train, evaluate, export = (shell_command(verb) for verb in ("train", "evaluate", "export"))
    if status == "diverged":
        return [f"{train} optimizer.learning_rate={cfg.optimizer.learning_rate / 10:g}"]
    if status != "completed":
        return [f"{train} training.resume={path}"]
    advice = [f"{evaluate} run={path} inference_config=standard num_passes=8", f"{export} run={path} format=peft"]
    advice.append(f"{shell_command('doctor')} {path}")
    if cfg.training.method == "supervised":
        return [f"{train} training.init_from={path}", *advice]
    if cfg.model.model_size == "tiny":
        sweep = "--multirun optimizer.learning_rate=1e-7,1e-6,1e-5,1e-4"
        return [advice[0], advice[2], f"{train} +experiment=control", f"{train} +experiment=quick_test {sweep}"]
    return advice
