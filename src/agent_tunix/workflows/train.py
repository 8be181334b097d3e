"""Training: the straight line from a configuration to a trained adapter.

config -> prompts -> rollout -> rewards -> advantages -> update -> metrics -> checkpoint

A run asks for its work on the device by `yield`, so that one run and the many of a sweep are the same code.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from agent_tunix.config.guidance import warnings
from agent_tunix.config.imports import OWN, Origin
from agent_tunix.config.load import config_text
from agent_tunix.config.schema import Config
from agent_tunix.engine import ahead, processes
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.guard import MAX_ROLLBACKS, Interruption, Progress, fault_of
from agent_tunix.engine.metrics import (
    Clock,
    Record,
    claimed,
    cost_record,
    read_records,
    replace_text,
    run_folder,
    update_record,
)
from agent_tunix.engine.population import Conversation, Foresight, Ready, alone
from agent_tunix.engine.rng import Purpose
from agent_tunix.engine.rollout import Sampling
from agent_tunix.engine.update import evaluation_trainable
from agent_tunix.errors import DivergenceError
from agent_tunix.tasks.datasets import Stream
from agent_tunix.types import TrainState
from agent_tunix.workflows import doctor, setup
from agent_tunix.workflows.closing import ended_by, remedy, summarise, validations
from agent_tunix.workflows.desk import NEVER, Desk, Pause
from agent_tunix.workflows.diagnosis.examination import early_warnings
from agent_tunix.workflows.diagnosis.remedies import ways_to
from agent_tunix.workflows.display import Bars, Display, print_summary, say
from agent_tunix.workflows.dry_run import too_large
from agent_tunix.workflows.evaluate import complete, grade
from agent_tunix.workflows.examples import Notice
from agent_tunix.workflows.gather import Run, asked_ahead, evaluation_ways, foreseen, gather, update_of, with_demonstrations
from agent_tunix.workflows.plan import make_plan, too_few
from agent_tunix.workflows.report.page import report_on
from agent_tunix.workflows.resuming import counting_on, restored

SAMPLES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run: its summary, and a few completions from before and after."""

    summary: Record
    before: list[Record]
    after: list[Record]


def prepare(cfg: Config, shelf: setup.Shelf, notice: Notice, overrides: Sequence[str] = (), origin: Origin = OWN) -> Run:
    """Opens what the run needs; whatever the user must mend is found here, before anything is written."""
    started = time.monotonic()
    model = shelf.model(cfg)
    unusual = setup.unusual_adapters(cfg, model.arch)
    scorer = shelf.scorer(cfg, origin, notice)
    task = shelf.task(cfg, model, notice)
    if cfg.training.method == "supervised":
        longest = cfg.generation.max_generation_steps
        train = with_demonstrations(task.train, model.tokenizer, model.arch, longest, notice)
        task = dataclasses.replace(task, train=train)
    plan = make_plan(cfg, len(task.train))
    too_much = too_large(cfg, task.prompt_width)
    for line in (*unusual, *too_few(cfg, plan), *too_much, *warnings(cfg, len(task.train))):
        notice(f"warning: {line}")
    stream = Stream(task.train, cfg.training.prompts_per_step, plan.batches_per_epoch, cfg.seed)
    sampling = setup.training_sampling(cfg, model.tokenizer)
    reference = setup.earlier_adapters(cfg, model)
    return Run(cfg, model, reference, task, plan, sampling, scorer, stream, tuple(overrides), started, shelf.beginnings)


def run(cfg: Config, path: Path, console: Console, overrides: Sequence[str] = (), origin: Origin = OWN) -> Record:
    """`run_training.py`: trains, or continues the run in `path`; returns the summary that it also writes there."""
    setup.refuse_others(path, "config.yaml")
    setup.start_device(partial(say, console))
    with Interruption() as interruption, Bars(console) as bars:
        r = prepare(cfg, setup.Shelf(), bars.notice, overrides, origin)
        outcome = alone(training(r, path, bars.display("training", r.plan.total_steps), interruption))
    print_summary(console, path, outcome.summary, outcome.before, outcome.after)
    return outcome.summary


def training(
    r: Run, path: Path, display: Display, interruption: Interruption, pause: Pause = NEVER
) -> Conversation[Outcome]:
    """A run from its beginning, or from its last checkpoint, to its summary; a paused run is evaluated, and can go on."""
    yield Foresight(foreseen(r))
    fresh = setup.new_state(r.cfg, r.model)
    _ = r.model.weights  # read now, so that a fault in them is found before anything is written
    processes.make_shared(path)
    with claimed(path):
        return (yield from _in_folder(r, fresh, path, display, interruption, pause))


def _in_folder(
    r: Run, fresh: TrainState, path: Path, display: Display, interruption: Interruption, pause: Pause
) -> Conversation[Outcome]:
    """As `training`, from the fresh state on, in a folder that no other process writes to."""
    checkpoints = Checkpoints(path / "checkpoints", r.cfg.training.max_checkpoints_to_keep)
    state, progress = restored(r, path, checkpoints, fresh, display.notice)
    r = counting_on(r, path)
    folder = run_folder(path, int(state.step))
    if processes.first():
        replace_text(path / "config.yaml", config_text(r.cfg))
    display.begin(int(state.step))
    commands = ways_to(r.cfg.model_dump(mode="json")) if ahead.serves() else iter(())  # for Desk.by_steps; a CPU has no time
    rollbacks = list(progress.rollbacks)
    desk = Desk(folder, checkpoints, display, interruption, pause, asked_ahead(r), rollbacks, by_steps=commands)
    status, fault = "failed", ""
    try:
        before = yield from evaluate_policy(r, fresh, desk)
        state, progress = yield from train_loop(r, state, progress, desk)
        status, after = yield from _finish(r, state, progress, desk)
    except Exception as error:
        status, fault = ended_by(error)
        raise
    except (GeneratorExit, KeyboardInterrupt):  # another run of the sweep failed; Ctrl-C was pressed twice
        status = "interrupted"
        raise
    finally:
        summary = summarise(r, folder, desk.rollbacks, status, fault)
        checkpoints.close()
        folder.close()
        if processes.first():
            report_on(path, display.notice)
        display.end(status)
    return Outcome(summary, before, after)


def _finish(r: Run, state: TrainState, progress: Progress, desk: Desk) -> Conversation[tuple[str, list[Record]]]:
    """Saves the last state, and evaluates it unless the run was interrupted; returns its status and a few completions."""
    completed, paused = progress.position == r.plan.total_batches, desk.rests(int(state.step))
    last = dataclasses.replace(progress, midway=not completed)
    desk.later(partial(desk.checkpoints.save, state, last, used_up=False))
    if jax.process_count() > 1:  # they wait for each other by their devices, which must have nothing else to do
        desk.catch_up()
    after: list[Record] = []
    try:
        if completed or paused:
            after = yield from evaluate_policy(r, state, desk)
    finally:
        desk.catch_up()  # what was learnt is saved, whatever becomes of the evaluation
    desk.checkpoints.settle()
    return "completed" if completed else "paused" if paused else "interrupted", after


def train_loop(r: Run, state: TrainState, progress: Progress, desk: Desk) -> Conversation[tuple[TrainState, Progress]]:
    """From a position in the data to its end, a pause or an interruption; returns the state and the progress made."""
    training, iterations = r.cfg.training, r.plan.iterations
    if training.on_divergence == "rollback" and not desk.checkpoints.steps():
        desk.save(state, progress)
    while progress.position < r.plan.total_batches and not (desk.interrupted() or desk.rests(int(state.step))):
        if progress.position in progress.skipped:
            state = _passed_over(state, iterations)
        else:
            state, fault = yield from train_batch(r, state, progress, desk)
            if fault is not None and (earlier := recover(r, state, progress, fault, desk)):
                state, progress = earlier
                continue
        progress = progress.advanced()
        step = int(state.step)
        evaluated_after = progress.position == r.plan.total_batches or desk.rests(step)
        if _due(training.eval_every_n_steps, step, iterations) and not evaluated_after:
            yield from evaluate_policy(r, state, desk)
            _warn_early(desk)
        if _due(training.save_interval_steps, step, iterations):
            desk.save(state, progress)
    desk.catch_up()
    return state, progress


def train_batch(r: Run, state: TrainState, progress: Progress, desk: Desk) -> Conversation[tuple[TrainState, str | None]]:
    """All updates from the batch at the run's position; says what went wrong where one could not be applied."""
    clock = Clock()
    try:
        gathered = yield from gather(r, state, desk.asked_at(progress.position), clock, desk.catch_up)
    except DivergenceError as fault:
        return _passed_over(state, r.plan.iterations), str(fault)
    desk.asked_at(progress.position + 1)  # while the reference is made: once an update is begun, more would wait for it
    fault_seen = None
    for iteration in range(r.plan.iterations):
        state, stats = yield update_of(r, state, gathered.batch, int(state.step) + 1, progress.rate_scale)
        desk.catch_up()
        yield Ready(stats)
        if iteration == 0:  # later, the policy has moved away from the one that sampled
            mismatch_kl = float(stats.loss.mismatch_kl)
        record = update_record(int(state.step), stats) | gathered.record | {"mismatch/kl": mismatch_kl}
        clock.lap("time/update")
        desk.write(record | cost_record(gathered.lengths_B, clock))
        fault_seen = fault_seen or fault_of(stats, r.cfg.training.max_kl)
    desk.write_samples([{"step": int(state.step)} | sample for sample in gathered.samples])
    return state, fault_seen


def recover(r: Run, state: TrainState, progress: Progress, fault: str, desk: Desk) -> tuple[TrainState, Progress] | None:
    """Does what `training.on_divergence` says: returns where to go back to, or None to go on; to stop, it raises."""
    desk.catch_up()
    step, mode = int(state.step), r.cfg.training.on_divergence
    if mode == "ignore" and not _in_vain(r, progress, desk):
        desk.display.notice(f"step {step}: {fault}; the batch is dropped (training.on_divergence=ignore).")
        return None
    if mode != "rollback" or len(progress.rollbacks) >= MAX_ROLLBACKS:
        kept = desk.folder.path / "checkpoints" if desk.checkpoints.steps() else None
        raise DivergenceError(remedy(r, kept, step, fault, progress), fault)
    restored, saved = desk.checkpoints.restore(state, desk.checkpoints.last_due())
    with desk.folder.rewinding(int(restored.step)):  # before a checkpoint is deleted, all records have been read
        desk.checkpoints.forget_after(int(restored.step))
    progress = progress.rolled_back(saved, step, fault)
    desk.rollbacks.append(progress.rollbacks[-1])
    desk.display.guard(f"rolled back {len(progress.rollbacks)}x, rate x {progress.rate_scale:g}")
    desk.display.notice(
        f"step {step}: {fault}; back to step {int(restored.step)}, without that batch and at a tenth of the rate."
    )
    return restored, progress


def _in_vain(r: Run, progress: Progress, desk: Desk) -> bool:
    """Whether this is the last batch, and all before it were dropped too."""
    if progress.position + 1 < r.plan.total_batches:
        return False
    applied = processes.first() and any(r.get("update_survival") for r in read_records(desk.folder.path / "metrics.jsonl"))
    return not processes.any_of(applied)


def evaluate_policy(r: Run, state: TrainState, desk: Desk) -> Conversation[list[Record]]:
    """Writes one line of evals.jsonl, unless that step has one; returns a few greedy completions to show."""
    step, examples = int(state.step), r.task.validation
    greedy, *as_trained = evaluation_ways(r)
    missing = step not in [record["step"] for record in validations(desk.folder.path)]
    whole = processes.any_of(missing and processes.first())
    texts = yield from _answers(r, state, greedy, desk.catch_up, whole)
    if whole:
        record = {"step": step, "split": "validation", **grade(examples, texts)}
        for way in as_trained:
            drawn = yield from _answers(r, state, way, desk.catch_up, whole)
            record["sampled_accuracy"] = grade(examples, drawn)["accuracy"]
        desk.folder.evaluation(record)
        desk.display.evaluation(record)
    shown = list(zip(examples, texts, strict=False))[:SAMPLES_SHOWN]
    return [{"question": e.question, "answer": e.answer, "completion": text[0]} for e, text in shown]


def _answers(
    r: Run, state: TrainState, way: tuple[Sampling, float], meanwhile: Callable[[], None], whole: bool
) -> Conversation[list[list[str]]]:
    """Completions of the held-out problems or, where some are only to be shown, of the first that are asked for at once.

    Those of a policy before its first update serve all runs that begin with it.
    """
    step = int(state.step)
    shared = r.beginning(way) if step == 0 else None
    if shared in r.beginnings:
        return r.beginnings[shared]
    trainable = evaluation_trainable(state, r.cfg.optimizer.optimizer_name)
    at_once = r.cfg.evaluation.batch_size
    problems = r.task.validation if whole else r.task.validation[:at_once], r.task.prompt_width, at_once
    key = r.key(step, Purpose.EVALUATION)
    answers = yield from complete(r.model, trainable, *problems, *way, key, shared, meanwhile)
    if shared is not None and whole:
        r.beginnings[shared] = answers
    return answers


def _warn_early(desk: Desk) -> None:
    """Says what the doctor would say by now, each illness once."""
    desk.catch_up()
    for finding in early_warnings(doctor.read(desk.folder.path)) if processes.first() else ():
        if finding.illness not in desk.warned:
            desk.warned.add(finding.illness)
            desk.display.notice(f"early warning: {finding.illness}, {finding.evidence}\n  try: {finding.remedy}")


def _passed_over(state: TrainState, steps: int) -> TrainState:
    """The state after a batch that taught nothing: only the count goes on, so that the schedule keeps its length."""
    return dataclasses.replace(state, step=state.step + steps)


def _due(interval: int | None, step: int, num_iterations: int) -> bool:
    """Whether the batch whose updates ended at `step` reached or passed a multiple of the interval."""
    return interval is not None and step // interval > (step - num_iterations) // interval
