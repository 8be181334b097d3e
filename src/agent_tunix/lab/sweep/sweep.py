"""A sweep: many runs in one process, and in one program where that pays.

Jobs that differ only in numbers the compiled programs take as inputs can be trained together: K adapters over one base.
On a device that waits for its launches (a GPU at small batches) that costs little more than one run; on one that is busy
already (a CPU) it saves nothing, and the jobs run one after another, sharing weights, data and compiled programs.
Which it is, is measured once, and written down: a sweep that was killed goes on when it is started again in the same
folder, by the programs that it began with. Each job's folder holds what it would hold had it run alone.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from rich.console import Console

from agent_tunix.config.commands import value_text
from agent_tunix.config.load import keys, read_saved, validate
from agent_tunix.config.resumed import saved_steps
from agent_tunix.config.schema import Config
from agent_tunix.engine import ahead_of_time
from agent_tunix.engine.calls import Answer, CompileAhead, alone
from agent_tunix.engine.decode_cost import ReadTokens
from agent_tunix.engine.fused import together
from agent_tunix.errors import DivergenceError, UserError
from agent_tunix.lab.advice import LabAdvisor
from agent_tunix.lab.doctor.records import FINISHED
from agent_tunix.lab.plan import memory
from agent_tunix.lab.plan.plan import USABLE, card, shapes
from agent_tunix.lab.report.page import report_on
from agent_tunix.lab.sweep.sweep_folder import APART, Group, groups_of, job_folders, labels, read_index, results, write_index
from agent_tunix.training import loading
from agent_tunix.training.data import Notice
from agent_tunix.training.guard import Interruption
from agent_tunix.training.loop import Outcome, training
from agent_tunix.training.progress import Bars, say
from agent_tunix.training.run_folder import claimed, validations
from agent_tunix.training.setup import Loaded, Setup, compile_ahead, prepare
from agent_tunix.training.solve_rates import on_solvable
from agent_tunix.types import Record

INPUTS = [key for key, field in keys(Config).items() if (field.json_schema_extra or {}).get("input")]
WORTH = 0.5  # fuse where a decode step of all costs less than this share of their steps one by one
TRIALS = 3
TOKENS = 8  # that a trial reads on a device that is given its work by calls; a processor needs no more than one
Fuse = Literal["auto", "always", "never"]


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep, with the overrides that lead to it; `label` tells it from the others.

    `stop_after` pauses it after that many updates, until a later call continues it; it is no part of the run itself.
    """

    cfg: Config
    folder: Path
    overrides: tuple[str, ...]
    label: str = ""
    stop_after: int | None = None

    def rests(self, step: int) -> bool:
        return self.stop_after is not None and step >= self.stop_after


def run(jobs: Sequence[Job], folder: Path, console: Console, fuse: Fuse = "auto") -> list[Record]:
    """Runs the jobs that are not finished yet; returns the results of all, in their order, and writes sweep.json."""
    folder.mkdir(parents=True, exist_ok=True)
    again = f"the same command with {shlex.quote(f'hydra.sweep.dir={value_text(str(folder))}')} goes on from here."
    with Interruption() as interruption, claimed(folder):
        loading.start_device(partial(say, console))
        try:
            found = train_all(jobs, folder, console, Loaded(), interruption, fuse)
        except Exception:
            if job_folders(folder):
                report_on(folder, console.print)
                say(console, f"An error has ended the sweep; see {folder / 'report.html'}. Once it is mended, {again}")
            raise
    if interruption.requested:
        say(console, f"Interrupted: {again}")
    return found


def train_all(
    jobs: Sequence[Job], folder: Path, console: Console, loaded: Loaded, interruption: Interruption, fuse: Fuse = "auto"
) -> list[Record]:
    """As `run`, for one of several sweeps of a process, which share what is loaded (`loaded`) and one interruption."""
    if not all(job.folder.name.isdecimal() and job.folder.parent == folder for job in jobs):
        raise UserError("hydra.sweep.subdir must stay the job's number; hydra.sweep.dir=<folder> says where the sweep goes.")
    folder.mkdir(parents=True, exist_ok=True)
    index = read_index(folder)
    modes, decided = set(index["mode"].split(", ")) - {APART}, groups_of(index)  # of what is going on here
    overrides = {job.folder.name: job.overrides for job in jobs}
    unfinished = {job.folder: _unfinished(job) for job in jobs}
    grouped = groups((job for job in _labelled(jobs) if unfinished[job.folder]), decided)
    for job in jobs:
        if not unfinished[job.folder] and _lacks_report(job.folder):
            report_on(job.folder, console.print)
    try:
        with Bars(console, several=True) as bars:
            # All of them first: what the user must mend in any is found before one is trained.
            runs = {job.folder: _prepared(job, loaded, bars) for group, _ in grouped for job in group}
            for group, earlier in grouped:
                if interruption.requested:
                    break
                kept = decide(group, [runs[job.folder] for job in group], bars.notice, fuse, earlier)
                decided += [] if kept == earlier else [kept]
                modes |= {"fused" if kept.at_once > 1 else "one after another"}
                for part in kept.parts():
                    left = [job for job in group if job.folder.name in part]
                    if left and not interruption.requested:
                        running = {job.folder.name for job in left}
                        write_index(folder, overrides, ", ".join(sorted(modes)), running, decided)
                        _train(left, [runs.pop(job.folder) for job in left], kept, len(part), bars, interruption)
    finally:
        if modes:
            write_index(folder, overrides)
    return [results(job.folder) for job in jobs]


def _labelled(jobs: Sequence[Job]) -> list[Job]:
    found = labels([job.overrides for job in jobs])
    return [dataclasses.replace(job, label=label or job.folder.name) for job, label in zip(jobs, found, strict=True)]


def groups(jobs: Iterable[Job], decided: Sequence[Group] = ()) -> list[tuple[list[Job], Group | None]]:
    """Jobs that one program can train, in the order of their first, with what was decided when they began; else None."""
    found: dict[tuple[str, Group | None], list[Job]] = {}
    for job in jobs:
        latest = (group for group in reversed(decided) if job.folder.name in group.jobs and group.until == job.stop_after)
        found.setdefault((_program(job.cfg), next(latest, None)), []).append(job)
    return [(alike, earlier) for (_, earlier), alike in found.items()]


def _program(cfg: Config) -> str:
    """What jobs must have in common to be fused: all but the inputs. Without a reference pass the program is another."""
    tree = cfg.model_dump(mode="json")
    tree["reference pass"] = cfg.grpo.beta > 0
    if cfg.model.lora_rank == 0:  # all weights are trained: nothing is shared
        return json.dumps(tree)
    for key in INPUTS:
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch[section]
        del branch[name]
    return json.dumps(tree)


def decide(
    group: Sequence[Job], runs: Sequence[Setup], notice: Notice, fuse: Fuse = "auto", earlier: Group | None = None
) -> Group:
    """How jobs are trained that one program can train: all at once that memory holds where that pays, else one by one.

    What was decided `earlier` of them, and of some that have ended since, stays, unless the user asks for something else or
    this device cannot hold it.
    """
    count = len(group)
    if earlier is not None and fuse in ("auto", "always" if earlier.at_once > 1 else "never"):
        if earlier.at_once <= _most_that_fit(runs[0], earlier.at_once, earlier.prompt_width):
            if count > 1:
                how = f"by a program of {earlier.at_once}" if earlier.at_once > 1 else "one after another"
                notice(f"{count} jobs go on {how}, as they began.")
            return earlier
        notice(f"{count} jobs began with {earlier.at_once} in one program, which memory does not hold here.")
    elif earlier is not None:
        began = f"with {earlier.at_once} in one program" if earlier.at_once > 1 else "one after another"
        notice(f"{count} jobs began {began}, and fuse={fuse} changes that: last digits will be others.")
    size = _fused_size(runs, notice, fuse) if count > 1 and fuse != "never" else 1
    return Group(tuple(job.folder.name for job in group), group[0].stop_after, size, _width(runs))


def _train(
    jobs: Sequence[Job], runs: Sequence[Setup], group: Group, size: int, bars: Bars, interruption: Interruption
) -> None:
    """Trains jobs by a program for so many at once; one that diverges does not end the others."""

    def loop(r: Setup, job: Job, answer: Answer) -> Outcome:
        r = dataclasses.replace(r, engine=dataclasses.replace(r.engine, answer=answer))
        return training(r, job.folder, bars.display(job.label, r.plan.total_steps), interruption, job.rests)

    begun = _begun(runs, group.prompt_width if size > 1 else 0)
    loops = [partial(loop, r, job) for r, job in zip(begun, jobs, strict=True)]
    for job, outcome in zip(jobs, _outcomes(loops, size), strict=True):
        if isinstance(outcome, DivergenceError):
            bars.labelled(job.label)(str(outcome))


def _width(runs: Sequence[Setup]) -> int:
    """That of prompts that one program reads: other seeds have other prompts."""
    return max(r.task.prompt_width for r in runs)


def _begun(runs: Sequence[Setup], width: int) -> list[Setup]:
    """The runs as of now, with prompts of one width, if that is given."""
    width, now = max(width, _width(runs)), time.monotonic()
    return [dataclasses.replace(r, task=dataclasses.replace(r.task, prompt_width=width), started=now) for r in runs]


def _prepared(job: Job, loaded: Loaded, bars: Bars) -> Setup:
    """Silently where a job goes on, as it gave its notices before, or is one of a search, which tries unusual values."""
    silent = job.stop_after is not None or (job.folder / "config.yaml").exists()
    notice = (lambda text: None) if silent else bars.labelled(job.label)
    return on_solvable(prepare(job.cfg, loaded, notice, job.overrides, advisor=LabAdvisor()), notice, job.folder)


def _outcomes(loops: Sequence[Callable[[Answer], Outcome]], size: int) -> list[Outcome | DivergenceError]:
    if size > 1:
        return together(loops, size)
    try:
        return [loops[0](alone)]
    except DivergenceError as fault:  # one bad candidate does not end a sweep
        return [fault]


def _fused_size(runs: Sequence[Setup], notice: Notice, fuse: Fuse) -> int:
    """How many of a group to train at once: 1 where the device gains nothing, else as many as its memory holds."""
    r, jobs = runs[0], len(runs)
    members = _most_that_fit(r, jobs, _width(runs))
    if members < 2:
        notice(f"{jobs} jobs run one after another: memory holds one at a time.")
        return 1
    programs = -(-jobs // members)
    size = -(-jobs // programs)
    trial = CompileAhead((_trial_call(r, outline=True),))
    CompileAhead.answer([trial] * size)
    CompileAhead.answer([trial])
    together([partial(_compile_ahead, of) for of in _begun(runs[:size], _width(runs))])  # while this is measured
    ratio = cost_of_many(r, size)
    measured = f"a decode step of {size} jobs at once takes {ratio:.1f} times that of one"
    if fuse == "auto" and ratio > WORTH * size:
        notice(f"{jobs} jobs run one after another: {measured}.")
        return 1
    notice(f"{jobs} jobs run as one program{f', in {programs} parts' if programs > 1 else ''}: {measured}.")
    return size


def _compile_ahead(r: Setup, answer: Answer) -> None:
    compile_ahead(dataclasses.replace(r, engine=dataclasses.replace(r.engine, answer=answer)))


def _most_that_fit(r: Setup, wanted: int, prompt_width: int) -> int:
    """How many of so many jobs the device's memory holds at once, by the plan's count."""
    planned, (_, limit) = shapes(r.cfg, prompt_width), card()
    fitting = (n for n in range(wanted, 1, -1) if memory.peak_of_several(planned, n) <= USABLE * limit)
    return next(fitting, 1)


def cost_of_many(r: Setup, members: int) -> float:
    """How many times as long a decode step of several jobs takes on this device as that of one: rows through all layers."""
    trial = _trial_call(r)

    def seconds(count: int) -> float:
        times = []
        for _ in range(1 + TRIALS):
            started = time.perf_counter()
            jax.block_until_ready(ReadTokens.answer([trial] * count))
            times.append(time.perf_counter() - started)
        return min(times)

    return seconds(members) / seconds(1)


def _trial_call(r: Setup, *, outline: bool = False) -> ReadTokens:
    """A few tokens for every completion of a batch; of shapes alone, if it is only to be compiled."""
    count = TOKENS if ahead_of_time.serves() else 1
    tokens_B1 = np.ones((r.cfg.training.prompts_per_step * r.cfg.grpo.num_generations, 1), np.int32)
    if outline:
        return ReadTokens(r.model.shapes, loading.state_shapes(r.cfg, r.model).trainable, tokens_B1, r.model.arch, count)
    trainable = loading.new_trainable(r.cfg, r.model)  # made before weights are read: its program is soon compiled
    return ReadTokens(r.model.weights, trainable, tokens_B1, r.model.arch, count)


def _lacks_report(folder: Path) -> bool:
    """Whether a kill came between the summary of a job and its page."""
    page, summary = folder / "report.html", folder / "summary.json"
    return summary.exists() and (not page.exists() or page.stat().st_mtime_ns < summary.stat().st_mtime_ns)


def _unfinished(job: Job) -> bool:
    """Whether a job is still to be run or continued; refuses the folder of another run."""
    if not (file := job.folder / "config.yaml").exists():
        return True
    if validate(read_saved(file), Config, str(file)) != job.cfg:
        raise UserError(f"{job.folder} holds another run; choose another folder, as in hydra.sweep.dir=multirun/new.")
    found = results(job.folder)
    rested = found["status"] == "paused" and job.rests(found["steps"])
    return found["status"] not in FINISHED and not rested and not _passed(job)


def _passed(job: Job) -> bool:
    """Whether a job was killed after the step at which it is to rest: it was evaluated there, and has a later checkpoint."""
    evaluated = [record["step"] for record in validations(job.folder)]
    return job.stop_after in evaluated and any(map(job.rests, saved_steps(job.folder)))
