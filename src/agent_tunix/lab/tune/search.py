"""The search: steps 1 to 4 of the optimizer reference, one stage each, and a last one for the finalists."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from typing import Any

from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.doctor.seeds import paired_difference
from agent_tunix.lab.sweep.sweep_folder import read_index
from agent_tunix.lab.tune import wording
from agent_tunix.lab.tune.halving import Price, kept
from agent_tunix.lab.tune.selection import Result, best_finalist, choose, standings, survivors, tied
from agent_tunix.lab.tune.session import PACE, AllDivergedError, Session
from agent_tunix.lab.tune.stages import Settings, Stage, possible, stages
from agent_tunix.training.run_folder import read_records
from agent_tunix.types import Record

FINALISTS = "5-finalists"
TIMED = 2  # batches that are timed to know the pace


@dataclasses.dataclass(frozen=True)
class Best:
    """The settings that a search ends with, the accuracies of their seeds, and what noise does not tell from them."""

    settings: Settings
    accuracies: Sequence[Accuracy]
    tied: Sequence[Settings] = ()


def search(s: Session, settings: dict[str, Any]) -> Best:
    """All stages in turn; `settings` are those of the best so far, wherever it ends."""
    for i in range(len(stages(s.cfg, settings, s.end))):
        stage = stages(s.cfg, settings, s.end)[i]
        settings[stage.key] = run_stage(s, stage, settings)
        s.record["best"] = possible(s.base, settings)
        s.write()
    return run_finalists(s, settings)


def run_stage(s: Session, stage: Stage, settings: Settings) -> float:
    """Trains a stage's candidates, fewer at every rung; returns the value that is kept."""
    entry = _entry(s, stage.name, stage.title, stage.key)
    s.say(f"\n{stage.name[0]}. {stage.title}: {', '.join(f'{value:g}' for value in stage.values)}")
    trials = {value: s.trial(stage.name, i, {**settings, stage.key: value}) for i, value in enumerate(stage.values)}
    jobs = {value: trial.job.folder.name for value, trial in trials.items()}
    alive, history = list(stage.values), list[list[Result]]()
    for rung, place in enumerate(s.places):
        s.train([trials[value] for value in alive], place)
        history.append(results := [Result(value, trials[value].measured(place)) for value in alive])
        if place < s.end:
            alive = [r.value for r in survivors(results, stage.incumbent, kept(len(stage.values), rung + 1))]
        entry["rungs"].append(wording.rung(place, results, jobs, alive))
        s.write()
        if not alive:
            break
    return conclude(s, stage, entry, history)


def conclude(s: Session, stage: Stage, entry: Record, history: Sequence[Sequence[Result]]) -> float:
    """Chooses by the last rung, and says how the others stood."""
    chosen = choose(history[-1], stage.incumbent)
    if chosen is None:
        raise AllDivergedError(wording.all_diverged(stage, history))
    (end,) = (r.accuracy for r in history[-1] if r.value == chosen and r.accuracy)
    others = standings(history, chosen)
    entry |= {"chosen": chosen, "conclusion": wording.stage_conclusion(stage, chosen, end, others)}
    entry["no_difference"] = bool(others) and all(one.tied for one in others)
    s.say(entry["conclusion"])
    return chosen


def run_finalists(s: Session, settings: Settings) -> Best:
    """Trains the settings that noise does not tell from the best with several seeds, and compares them again."""
    ended = s.ended()
    own = next(accuracy for one, accuracy in ended if one == settings)
    others = [(one, accuracy) for one, accuracy in ended if one != settings and tied(accuracy, own)]
    same = [one for one, _ in others]
    others.sort(key=lambda pair: (-pair[1].share, wording.label(pair[0])))
    finalists = [dict(settings), *(one for one, _ in others)][: s.cfg.tune.finalists]
    seeds = s.cfg.tune.seeds
    if seeds == 1:
        return Best(settings, [own], same)
    entry = _entry(s, FINALISTS, "Finalists, with several seeds", "finalist")
    s.say(f"\n5. Finalists: {len(finalists)} with {seeds} seeds each")
    plan = [(one, s.cfg.seed + k) for one in finalists for k in range(seeds)]
    trials = [s.trial(FINALISTS, i, {**one, "seed": seed}) for i, (one, seed) in enumerate(plan)]
    s.train(trials, s.end)
    lost = Accuracy(s.end, 0.0, own.n)  # a run that diverged is worth nothing
    found = [trial.measured(s.end) or lost for trial in trials]
    groups = [found[i : i + seeds] for i in range(0, len(found), seeds)]
    best = best_finalist(groups)
    entry["rungs"] = [wording.finalists_rung(s.end, finalists, groups)]
    entry["chosen"] = wording.label(finalists[best])
    entry["conclusion"] = wording.finalists_conclusion(finalists, groups, best)
    s.say(entry["conclusion"])
    behind = [paired_difference(group, groups[best]).low > 0 for group in groups]
    same = [one for i, one in enumerate(finalists) if i != best and not behind[i]]
    return Best(finalists[best], groups[best], same)


def _entry(s: Session, name: str, title: str, key: str) -> Record:
    entry: Record = {"name": name, "title": title, "key": key, "folder": name, "conclusion": "", "chosen": None, "rungs": []}
    s.record["stages"].append(entry)
    s.write()
    return entry


def measure_pace(s: Session, settings: Settings, iterations: int) -> Price:
    """What an update of a candidate takes here, and a rung besides, in seconds: by the first batches of the first stage.

    The batch that compiles is not timed. Where candidates run as one program, each of them counts its share of it.
    """
    stage = stages(s.cfg, settings, s.end)[0]
    trials = [s.trial(PACE, i, {**settings, stage.key: value}) for i, value in enumerate(stage.values)]
    shutil.rmtree(s.folder / PACE, ignore_errors=True)
    try:
        s.run(trials, iterations)
        started = time.monotonic()
        s.run(trials, (1 + TIMED) * iterations)
        wall = time.monotonic() - started
        records = [r for trial in trials for r in read_records(trial.job.folder / "metrics.jsonl") if r["step"] > iterations]
        at_once = max(job["at_once"] for job in read_index(s.folder / PACE)["jobs"])
    finally:
        shutil.rmtree(s.folder / PACE, ignore_errors=True)
    busy = sum(value for record in records for key, value in record.items() if key.startswith("time/")) / at_once
    return Price(update=busy / max(len(records), 1), rung=max(0.0, wall - busy) / len(trials))
