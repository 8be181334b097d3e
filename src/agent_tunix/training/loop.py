"""Training, from a configuration to a trained adapter:

    problems -> completions -> rewards -> advantages -> update -> guard -> log -> checkpoint

`train_loop` is that line. Around it, `training` opens a run's folder, evaluates before and after, and writes the summary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from agent_tunix.config.commands import value_text
from agent_tunix.config.imports import OWN, Origin
from agent_tunix.config.load import config_text
from agent_tunix.config.schema import Config
from agent_tunix.engine import distributed
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.fused import StoppedError
from agent_tunix.engine.progress import Progress
from agent_tunix.engine.random_keys import Purpose
from agent_tunix.engine.update import evaluation_trainable
from agent_tunix.environments.rewards import RewardFunction
from agent_tunix.errors import DivergenceError
from agent_tunix.training import loading, solve_rates
from agent_tunix.training.advisor import Advisor
from agent_tunix.training.answering import Asking, answers_to
from agent_tunix.training.best import best_kept, best_saved, stopped_early
from agent_tunix.training.evaluation import GREEDILY
from agent_tunix.training.grading import grade, grade_each, table_of
from agent_tunix.training.guard import MAX_ROLLBACKS, Interruption, fault_of
from agent_tunix.training.horizon import hyperparameters
from agent_tunix.training.metrics import Clock, cost_record, update_record
from agent_tunix.training.play import Answers, turns_of
from agent_tunix.training.progress import Bars, Display, print_summary, say
from agent_tunix.training.resume import counting_on, restored
from agent_tunix.training.rollouts import demonstrations, make_batch, sample_groups
from agent_tunix.training.run_folder import (
    RunFolder,
    claimed,
    evaluations_on,
    read_records,
    replace_text,
    run_folder,
    validations,
)
from agent_tunix.training.setup import SILENT, Loaded, Setup, Way, compile_ahead, prepare
from agent_tunix.training.solve_rates import on_solvable
from agent_tunix.training.summary import ended_by, overrides_of, summarise
from agent_tunix.types import Record, TrainState

SAMPLES_SHOWN = 3
Pause = Callable[[int], bool]  # whether a run is to rest after so many updates, from which it can go on


def never(step: int) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run: its summary, and a few completions from before and after."""

    summary: Record
    before: list[Record]
    after: list[Record]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where a run writes and shows what it does."""

    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    rollbacks: list[Record]  # made by the guard so far
    warned: set[str] = dataclasses.field(default_factory=set)  # illnesses that were told of


def run(
    cfg: Config,
    path: Path,
    console: Console,
    overrides: Sequence[str] = (),
    origin: Origin = OWN,
    advisor: Advisor = SILENT,
    reward_functions: Mapping[str, RewardFunction] | None = None,
) -> Record:
    """`run_training.py`: trains, or continues the run in `path`; returns the summary that it also writes there."""
    loading.refuse_others(path, "config.yaml")
    loading.start_device(partial(say, console))
    with contextlib.ExitStack() as to_the_end:
        with Bars(console) as bars:
            r = prepare(cfg, Loaded(reward_functions), bars.notice, overrides, origin, advisor)
            r = on_solvable(r, bars.notice, path)
            interruption = to_the_end.enter_context(Interruption())  # before, there is nothing to save
            outcome = training(r, path, bars.display("training", r.plan.total_steps), interruption)
        print_summary(console, path, outcome.summary, outcome.before, outcome.after, best_kept(cfg, path))
    return outcome.summary


def training(r: Setup, path: Path, display: Display, interruption: Interruption, pause: Pause = never) -> Outcome:
    """A run from its beginning, or from its last checkpoint, to its summary; a paused run is evaluated, and can go on."""
    compile_ahead(r)
    fresh = loading.new_state(r.cfg, r.model)
    _ = r.model.weights  # read now, so that a fault in them is found before anything is written
    distributed.make_shared(path)
    with claimed(path):
        return _in_folder(r, fresh, path, display, interruption, pause)


def _in_folder(
    r: Setup, fresh: TrainState, path: Path, display: Display, interruption: Interruption, pause: Pause
) -> Outcome:
    """As `training`, from the fresh state on, in a folder that no other process writes to."""
    checkpoints = Checkpoints(path / "checkpoints", r.cfg.training.max_checkpoints_to_keep)
    state, progress = restored(r, path, checkpoints, fresh, display.notice)
    r = counting_on(r, path)
    folder = run_folder(path, int(state.step), partial(r.open_loggers, path, display.notice))
    if distributed.first():
        if r.solve_rates:
            replace_text(path / solve_rates.FILE, r.solve_rates)
        replace_text(path / "config.yaml", config_text(r.cfg))
    display.begin(int(state.step))
    out = Outputs(folder, checkpoints, display, list(progress.rollbacks))
    status, fault = "failed", ""
    stopped: Record | None = None
    try:
        before = evaluate_policy(r, fresh, out)
        state, progress = train_loop(r, state, progress, out, interruption, pause)
        at_end, paused = progress.position == r.plan.total_batches, pause(int(state.step))
        stopped = None if at_end else early_stop(r, int(state.step), out)
        completed = at_end or stopped is not None
        best = best_step(r, int(state.step), out)
        checkpoints.save(state, dataclasses.replace(progress, midway=not completed), best=best, used_up=False)
        after = evaluate_policy(r, state, out) if completed or paused else []
        checkpoints.settle()
        status = "completed" if completed else "paused" if paused else "interrupted"
        if stopped:
            display.notice(_told_of_stop(r, path, stopped))
    except Exception as error:
        status, fault = ended_by(error)
        raise
    except (StoppedError, KeyboardInterrupt):  # another run of the sweep failed; Ctrl-C was pressed twice
        status = "interrupted"
        raise
    finally:
        summary = summarise(r, folder, out.rollbacks, status, fault, stopped)
        checkpoints.close()
        folder.close()
        if distributed.first():
            r.advisor.report(path, display.notice)
        display.end(status)
    return Outcome(summary, before, after)


def train_loop(
    r: Setup, state: TrainState, progress: Progress, out: Outputs, interruption: Interruption, pause: Pause = never
) -> tuple[TrainState, Progress]:
    """From a position in the data to its end, an early stop, a pause or an interruption; returns state and progress."""
    training, iterations, total = r.cfg.training, r.plan.iterations, r.plan.total_batches
    if training.on_divergence == "rollback" and not out.checkpoints.steps():
        out.checkpoints.save(state, progress)
    stopped = early_stop(r, int(state.step), out)
    while progress.position < total and not (
        stopped or distributed.any_of(interruption.requested) or pause(int(state.step))
    ):
        if progress.position in progress.skipped:
            state = _passed_over(state, iterations)
        else:
            state, fault = train_batch(r, state, progress, out)
            if fault is not None and (earlier := recover(r, state, progress, fault, out)):
                state, progress = earlier
                continue
        progress = progress.advanced()
        step = int(state.step)
        evaluated_after = progress.position == total or pause(step)
        evaluated = _due(training.eval_every_n_steps, step, iterations) and not evaluated_after
        if evaluated:
            evaluate_policy(r, state, out)
            _warn_early(r, out)
            stopped = early_stop(r, step, out)
        due = _due(training.save_interval_steps, step, iterations)
        best = best_step(r, step, out) if evaluated or due else None
        if due or best == step:
            out.checkpoints.save(state, progress, best=best)
    return state, progress


def train_batch(r: Setup, state: TrainState, progress: Progress, out: Outputs) -> tuple[TrainState, str | None]:
    """All updates from the batch at the run's position; says what went wrong where one could not be applied."""
    clock, position = Clock(), progress.position
    try:
        if r.cfg.training.method == "supervised":
            made = demonstrations(r, position)
        else:
            policy = r.engine.policy(state.trainable)
            sampled = sample_groups(r, policy, position, clock)  # problems, completions, rewards
            made = make_batch(r, policy, position, sampled)  # advantages, weights of tokens, log-probabilities
    except DivergenceError as fault:  # a reward is not finite
        return _passed_over(state, r.plan.iterations), str(fault)
    fault_seen = None
    for iteration in range(r.plan.iterations):
        h = hyperparameters(r.cfg, r.plan, int(state.step) + 1, progress.rate_scale)
        state, stats = r.engine.update(state, made.batch, h)
        fault_seen = fault_seen or fault_of(stats, r.cfg.training.max_kl)
        if iteration == 0:  # later, the policy has moved away from the one that sampled
            mismatch_kl = float(stats.loss.mismatch_kl)
        record = update_record(int(state.step), stats) | made.record | {"mismatch/kl": mismatch_kl}
        clock.lap("time/update")
        record |= cost_record(made.lengths_B, clock)
        out.folder.metrics(record)
        out.display.step(record)
    out.folder.samples([{"step": int(state.step)} | sample for sample in made.samples])
    return state, fault_seen


def recover(r: Setup, state: TrainState, progress: Progress, fault: str, out: Outputs) -> tuple[TrainState, Progress] | None:
    """Does what `training.on_divergence` says: returns where to go back to, or None to go on; to stop, it raises."""
    step, mode = int(state.step), r.cfg.training.on_divergence
    if mode == "ignore" and not _in_vain(r, progress, out):
        out.display.notice(f"step {step}: {fault}; the batch is dropped (training.on_divergence=ignore).")
        return None
    if mode != "rollback" or len(progress.rollbacks) >= MAX_ROLLBACKS:
        raise DivergenceError(_diverged(r, step, progress, fault, out), fault)
    restored, saved = out.checkpoints.restore(state, out.checkpoints.last_due())
    with out.folder.rewinding(int(restored.step)):  # before a checkpoint is deleted, all records have been read
        out.checkpoints.forget_after(int(restored.step))
    progress = progress.rolled_back(saved, step, fault)
    out.rollbacks.append(progress.rollbacks[-1])
    out.display.guard(f"rolled back {len(progress.rollbacks)}x, rate x {progress.rate_scale:g}")
    out.display.notice(
        f"step {step}: {fault}; back to step {int(restored.step)}, without that batch and at a tenth of the rate."
    )
    return restored, progress


def _diverged(r: Setup, step: int, progress: Progress, fault: str, out: Outputs) -> str:
    """What to say of a run that diverged."""
    tried = f" after {len(progress.rollbacks)} rollbacks" if progress.rollbacks else ""
    where = out.folder.path / "checkpoints"
    kept = f" The last good checkpoint is kept in {where}." if out.checkpoints.steps() else ""
    happened = f"The run diverged at step {step}{tried}: {fault}.\nThe update did not reach the weights.{kept}"
    return f"{happened}\n{r.advisor.after_divergence(r.cfg, overrides_of(r), fault, bool(progress.rollbacks))}".rstrip()


def _in_vain(r: Setup, progress: Progress, out: Outputs) -> bool:
    """Whether this is the last batch, and all before it were dropped too."""
    if progress.position + 1 < r.plan.total_batches:
        return False
    applied = distributed.first() and any(r.get("update_survival") for r in read_records(out.folder.path / "metrics.jsonl"))
    return not distributed.any_of(applied)


def evaluate_policy(r: Setup, state: TrainState, out: Outputs) -> list[Record]:
    """Writes one line of evals.jsonl, unless that step has one; returns a few greedy completions to show."""
    step, examples = int(state.step), r.task.validation
    greedy, *as_trained = r.evaluation_ways()
    missing = step not in [record["step"] for record in validations(out.folder.path)]
    whole = distributed.any_of(missing and distributed.first())
    found = _answers(r, state, greedy, whole)
    if whole:
        numbers, each = grade_each(examples, found.texts, r.judge, found.solved)
        head = {"step": step, "split": "validation"}
        record = head | numbers | found.record
        for way in as_trained:
            drawn = _answers(r, state, way, whole)
            record["sampled_accuracy"] = grade(examples, drawn.texts, r.judge, drawn.solved)["accuracy"]
        out.folder.answers(head | GREEDILY | each)
        out.folder.evaluation(record)
        out.folder.completions(record, table_of(step, examples, found, each["right"]))
        out.display.evaluation(record)
    evaluate_sets(r, state, out)
    shown: list[Record] = [
        {"question": example.question, "answer": example.answer, "completion": texts[0]}
        for example, texts in zip(examples[:SAMPLES_SHOWN], found.texts, strict=False)
    ]
    for sample, transcript in zip(shown, found.transcripts, strict=False):
        sample["turns"] = turns_of(transcript)
    return shown


def best_step(r: Setup, step: int, out: Outputs) -> int | None:
    """The best by `training.keep_best` of the steps that have a checkpoint, and of this one, if it was evaluated."""
    if (metric := r.cfg.training.keep_best) is None:
        return None
    saved = {step, *out.checkpoints.steps()}
    found = _of_first(lambda: best_saved(out.folder.path, metric, saved))
    return found["step"] if found else None


def early_stop(r: Setup, step: int, out: Outputs) -> Record | None:
    """Where and why the run is to stop at this step, by `training.early_stopping`."""
    return _of_first(lambda: stopped_early(r.cfg, out.folder.path, step)) if r.cfg.training.early_stopping else None


def _of_first(read: Callable[[], Record | None]) -> Record | None:
    """What process 0 reads in its folder: the others might see it later."""
    return json.loads(distributed.everyones(json.dumps(read() if distributed.first() else None))[0])


def _told_of_stop(r: Setup, path: Path, stopped: Record) -> str:
    patience, metric = r.cfg.training.early_stopping, stopped["metric"].replace("_", " ")
    return (
        f"Stopped early at step {stopped['step']} of {r.plan.total_steps}: {patience} evaluations in a row have not had a "
        f"better {metric} than step {stopped['best_step']}.\nTo go on: training.resume={value_text(str(path))} "
        f"training.early_stopping=null, or a number larger than {patience}."
    )


def evaluate_sets(r: Setup, state: TrainState, out: Outputs) -> None:
    """Writes a line of evals.jsonl for each further test set, unless that step has one."""
    step, greedy = int(state.step), r.evaluation_ways()[0]
    for name, examples in r.task.sets.items():
        made = [record["step"] for record in evaluations_on(out.folder.path, name)]
        if distributed.any_of(step not in made and distributed.first()):
            head = {"step": step, "split": "test", "set": name}
            found = _answers(r, state, greedy, whole=True, name=name)
            numbers, each = grade_each(examples, found.texts, r.set_judges[name], found.solved)
            record = head | numbers | found.record
            out.folder.answers(head | GREEDILY | each)
            out.folder.evaluation(record)
            out.folder.completions(record, table_of(step, examples, found, each["right"]))
            out.display.evaluation(record)


def _answers(r: Setup, state: TrainState, way: Way, whole: bool, name: str | None = None) -> Answers:
    """Completions of the held-out problems or, where some are only to be shown, of the first that are asked for at once; or
    of the problems of a further test set.

    Those of a policy before its first update serve all runs that begin with it.
    """
    step = int(state.step)
    shared = r.beginning(way, name) if step == 0 else None
    if shared in r.first_answers:
        return r.first_answers[shared]
    policy = r.engine.policy(evaluation_trainable(state, r.cfg.optimizer.optimizer_name))
    at_once = r.cfg.evaluation.batch_size
    problems, width = (
        (r.task.validation, r.task.prompt_width) if name is None else (r.task.sets[name], r.task.width_of(name))
    )
    problems = problems if whole else problems[:at_once]
    asking = Asking(width, at_once, r.key(step, Purpose.EVALUATION), *way, shared)
    answers = answers_to(r.engine, policy, r.playing, problems, asking)
    if shared is not None and whole:
        r.first_answers[shared] = answers
    return answers


def _warn_early(r: Setup, out: Outputs) -> None:
    """Says what goes wrong by now, each illness once."""
    for illness, told in r.advisor.midway(out.folder.path) if distributed.first() else ():
        if illness not in out.warned:
            out.warned.add(illness)
            out.display.notice(f"early warning: {told}")


def _passed_over(state: TrainState, steps: int) -> TrainState:
    """The state after a batch that taught nothing: only the count goes on, so that the schedule keeps its length."""
    return dataclasses.replace(state, step=state.step + steps)


def _due(interval: int | None, step: int, num_iterations: int) -> bool:
    """Whether the batch whose updates ended at `step` reached or passed a multiple of the interval."""
    return interval is not None and step // interval > (step - num_iterations) // interval
