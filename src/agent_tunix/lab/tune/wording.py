"""What a search says: conclusions of stages and the verdict, in plain sentences with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.doctor.seeds import over_seeds, paired_difference
from agent_tunix.lab.tune.selection import Result, Standing
from agent_tunix.lab.tune.stages import Settings, Stage
from agent_tunix.training.progress import counted
from agent_tunix.types import Record


def label(settings: Settings) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value:g}" for key, value in settings.items())


def rung(place: int, results: Sequence[Result], jobs: Mapping[Any, str], going_on: Sequence[Any]) -> Record:
    """A rung of tune.json: who was there, how they stood, and who goes on."""
    rows = []
    for result in results:
        row: Record = {"job": jobs[result.value], "value": result.value, "accuracy": None, "kept": result.value in going_on}
        if result.accuracy is not None:
            low, high = result.accuracy.interval
            row |= {"accuracy": result.accuracy.share, "low": low, "high": high, "n": result.accuracy.n}
        rows.append(row)
    return {"steps": place, "jobs": rows}


def stage_conclusion(stage: Stage, chosen: float, end: Accuracy, others: Sequence[Standing]) -> str:
    """The chosen value, and how each other one stood when both were last measured."""
    said = [f"{chosen:g} ends at {over_seeds([end])} held-out accuracy."]
    tied = [one for one in others if one.tied]
    same, early = ([_against(one) for one in tied if (one.chosen.step < end.step) is soon] for soon in (False, True))
    if same:
        kept = f", so {chosen:g} is kept" if chosen == stage.incumbent else ""
        said.append(f"No difference within noise: {', '.join(same)}{kept}.")
    if early:
        said.append(f"Set aside before there was a difference: {', '.join(early)}.")
    worse = [_against(one) for one in others if not one.tied]
    return " ".join([*said, *([f"Behind beyond noise: {', '.join(worse)}."] if worse else [])])


def _against(one: Standing) -> str:
    if one.accuracy is None:
        return f"{one.value:g} (diverged)"
    after = counted(one.chosen.step, "update")
    return f"{one.value:g} ({_share(one.accuracy.share)} against {_share(one.chosen.share)} at {after})"


def all_diverged(stage: Stage, history: Sequence[Sequence[Result]]) -> str:
    """For a stage in which every candidate that was kept diverged; those that were dropped before did not."""
    last = {result.value: result.accuracy for results in history for result in results}
    diverged, dropped = (", ".join(f"{v:g}" for v in sorted(last) if (last[v] is None) is gone) for gone in (True, False))
    if not dropped:
        return f"Every {stage.title.lower()} that was tried diverged."
    return f"{stage.title}: all that were kept diverged, {diverged}; dropped before for their accuracy: {dropped}."


def finalists_rung(place: int, finalists: Sequence[Settings], groups: Sequence[Sequence[Accuracy]]) -> Record:
    """As a rung, with one row for all seeds of a finalist."""
    rows = []
    for i, (settings, group) in enumerate(zip(finalists, groups, strict=True)):
        interval = over_seeds(group)
        jobs = [str(i * len(group) + k) for k in range(len(group))]
        shares = {"accuracy": interval.middle, "low": interval.low, "high": interval.high}
        rows.append({"jobs": jobs, "value": label(settings), "accuracies": [a.share for a in group], **shares})
    return {"steps": place, "jobs": rows}


def finalists_conclusion(finalists: Sequence[Settings], groups: Sequence[Sequence[Accuracy]], best: int) -> str:
    """The best finalist against each of the others, by their differences seed by seed."""
    said = [f"Over {len(groups[best])} seeds {label(finalists[best])} reaches {over_seeds(groups[best])}"]
    same, behind = list[str](), list[str]()
    for i, (settings, group) in enumerate(zip(finalists, groups, strict=True)):
        if i != best:
            told = paired_difference(group, groups[best]).low > 0
            (behind if told else same).append(f"{label(settings)} with {over_seeds(group)}")
    said += [f"no difference within noise: {', '.join(same)}"] if same else []
    said += [f"behind beyond noise: {', '.join(behind)}"] if behind else []
    return "; ".join(said) + "."


def verdict(settings: Settings, accuracies: Sequence[Accuracy], before: float | None, notes: Sequence[str]) -> str:
    """The recommended settings, what they reach, and what should be known of it."""
    seeds = f"over {len(accuracies)} seeds" if len(accuracies) > 1 else "with one seed"
    start = f", from {_share(before)} before training" if before is not None else ""
    reached = f"reaches {over_seeds(accuracies)} held-out accuracy {seeds}{start}."
    return " ".join([f"The run with {label(settings)} {reached}", *notes])


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"
