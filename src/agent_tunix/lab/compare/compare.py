"""`agent-tunix compare A B`: which of two runs solves more of the same problems, and whether that may be noise.

A run keeps in answers.jsonl which problems each of its evaluations has found solved. Evaluations are compared that drew
their answers in the same way and share problems: of each kind the last, or that of the step that is asked for.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_tunix.config.commands import shell_command
from agent_tunix.errors import UserError
from agent_tunix.lab.compare.paired import Paired, paired
from agent_tunix.lab.doctor.records import read_run
from agent_tunix.lab.report.settings import settings
from agent_tunix.training.intervals import interval_text
from agent_tunix.training.progress import counted, say
from agent_tunix.training.run_folder import read_records
from agent_tunix.types import Record

USAGE = """usage: agent-tunix compare <run>[@step] <run>[@step] [--json]
  The folders of two runs, or of evaluations of a base model; @step is one of its evaluated steps, else it is the last.
  Of a single run, its first evaluation is compared with its last."""
RARE = 0.05  # how seldom chance may do it for a difference to be one
SHOWN = 12  # settings that differ


@dataclasses.dataclass(frozen=True)
class Side:
    """A run as it was at a step, or at the last that was evaluated."""

    given: str
    folder: Path
    step: int | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two evaluations on the problems that both have; `asked` is how many each has."""

    set: str
    inference: str
    steps: tuple[int, int]
    asked: tuple[int, int]
    result: Paired


def main(arguments: Sequence[str], console: Console) -> None:
    given = [argument for argument in arguments if not argument.startswith("-")]
    options = {argument for argument in arguments if argument.startswith("-")}
    if options & {"--help", "-h"}:
        print(USAGE)
        return
    if len(given) not in (1, 2) or options - {"--json"}:
        raise UserError(USAGE)
    one, other = sides(given)
    found = compare(one, other)
    if "--json" in options:
        print(json.dumps(as_json(one, other, found), indent=2))
    else:
        show(one, other, found, console)


def sides(given: Sequence[str]) -> tuple[Side, Side]:
    read = [_side(one) for one in given]
    if len(read) == 2:
        return read[0], read[1]
    steps = sorted({record["step"] for record in _answers(read[0])})
    if len(steps) < 2:
        raise UserError(f"{given[0]} was evaluated at one step only; give two runs to compare.\n{USAGE}")
    first, last = (Side(f"{given[0]}@{step}", read[0].folder, step) for step in (steps[0], steps[-1]))
    return first, last


def _side(given: str) -> Side:
    folder, at, step = given.rpartition("@")
    if Path(given).is_dir() or not at:
        folder, step = given, ""
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is not a folder.\n{USAGE}")
    if step and not step.isdecimal():
        raise UserError(f"{given}: a step is a number, as in {folder}@40.\n{USAGE}")
    return Side(given, Path(folder), int(step) if step else None)


def compare(one: Side, other: Side) -> list[Comparison]:
    """All that can be compared: at most one comparison for each kind of evaluation that the first has."""
    first, second = _last(one), _last(other)
    found = []
    for (of_set, inference), a in first.items():
        alike = {name: b for (name, way), b in second.items() if way == inference and _shared(a, b)}
        if alike:  # a set may have another name in the other run
            b = alike.get(of_set) or max(alike.values(), key=lambda b: len(_shared(a, b)))
            found.append(_compared(of_set, inference, a, b))
    if not found:
        raise UserError(
            f"{one.given} and {other.given} have not been asked the same problems in the same way, so there is nothing to "
            "compare.\nEvaluate both on the same data:\n"
            + "".join(f"  {shell_command('evaluate')} run={side.folder}{_step(side)}\n" for side in (one, other)).rstrip(
                "\n"
            )
        )
    return found


def _compared(of_set: str, inference: str, a: Record, b: Record) -> Comparison:
    names = _shared(a, b)
    shares = [[_by_name(record)[name] for name in names] for record in (a, b)]
    asked = len(a["problems"]), len(b["problems"])
    return Comparison(of_set, inference, (a["step"], b["step"]), asked, paired(*shares))


def _last(side: Side) -> dict[tuple[str, str], Record]:
    """The last evaluation of each kind, by its set and the way in which answers were drawn; later steps come later."""
    found = {}
    for record in sorted(_answers(side), key=lambda record: record["step"]):
        if side.step in (None, record["step"]):
            found[record.get("set") or record["split"], record["inference"]] = record
    if not found:
        steps = sorted({record["step"] for record in _answers(side)})
        raise UserError(f"{side.given}: the steps that were evaluated are {', '.join(map(str, steps))}.")
    return found


def _answers(side: Side) -> list[Record]:
    """What answers.jsonl holds; refuses a run that has none, as earlier versions wrote none."""
    kinds = {"step": int, "split": str, "inference": str, "num_passes": int, "problems": list, "right": list}
    found = [
        record
        for record in read_records(side.folder / "answers.jsonl")
        if all(isinstance(record.get(key), kind) for key, kind in kinds.items())
        and len(record["problems"]) == len(record["right"])
    ]
    if found:
        return found
    if (side.folder / "evals.jsonl").is_file():
        raise UserError(
            f"{side.folder} does not say which problems were solved: it has no answers.jsonl, as it was evaluated by an "
            f"earlier version, which kept sums only.\nEvaluate it again: "
            f"{shell_command('evaluate')} run={side.folder}{_step(side)}"
        )
    raise UserError(f"{side.folder} holds no evaluation: it has no answers.jsonl. Give the folder of a run.")


def _step(side: Side) -> str:
    return "" if side.step is None else f" step={side.step}"


def _by_name(record: Record) -> dict[str, float]:
    """The share of right completions of each problem; a problem that comes several times has names of its own."""
    times: dict[str, int] = defaultdict(int)
    shares = {}
    for name, right in zip(record["problems"], record["right"], strict=True):
        times[name] += 1
        shares[f"{name} {times[name]}"] = right / record["num_passes"]
    return shares


def _shared(a: Record, b: Record) -> list[str]:
    others = _by_name(b)
    return [name for name in _by_name(a) if name in others]


def differing(one: Side, other: Side) -> dict[str, str]:
    """The settings in which two runs differ; none where one is no run, but the evaluation of a base model."""
    try:
        runs = [read_run(side.folder) for side in (one, other)]
    except UserError:
        return {}
    return {setting.key: setting.value for setting in settings(runs) if setting.varied}


def as_json(one: Side, other: Side, found: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "a": one.given,
        "b": other.given,
        "settings": differing(one, other),
        "comparisons": [
            {
                "set": c.set,
                "inference": c.inference,
                "steps": list(c.steps),
                "asked": list(c.asked),
                **dataclasses.asdict(c.result),
                "conclusion": conclusion(c.result),
            }
            for c in found
        ],
    }


def show(one: Side, other: Side, found: Sequence[Comparison], console: Console) -> None:
    say(console, f"A  {one.given}\nB  {other.given}")
    if differ := differing(one, other):
        _show_settings(differ, console)
    for c in found:
        r = c.result
        asked = "" if c.asked == (r.n, r.n) else f", those that both were asked of {c.asked[0]} and {c.asked[1]}"
        say(console, f"\n{c.set}, {c.inference}: {counted(r.n, 'problem')}{asked}")
        for name, step, share in (("A", c.steps[0], r.a), ("B", c.steps[1], r.b)):
            say(console, f"  {name}  step {step:<6} {share:6.1%}  (95 % interval {interval_text(share, r.n)})")
        more = "" if c.inference == "greedy" else ", more often than the other"
        say(console, f"  only A solves {r.only_a}{more}; only B solves {r.only_b}")
        say(console, f"  {conclusion(r)}")
    if len(found) > 2:
        say(console, f"\n{len(found)} comparisons were made; by chance one in {round(1 / RARE)} has p below {RARE:g}.")
    say(console, "\nThis tells the two models apart, not their settings: another seed may give other models.")


def _show_settings(differ: Mapping[str, str], console: Console) -> None:
    say(console, "They differ in")
    for key, value in list(differ.items())[:SHOWN]:
        say(console, f"  {key}: {value}")
    if len(differ) > SHOWN:
        say(console, f"  and {len(differ) - SHOWN} more")


def conclusion(r: Paired) -> str:
    """In plain words, with the interval of the difference and the test."""
    points = f"{100 * abs(r.difference):.1f} points"
    # of the better one's lead, so that both ends are read the same way
    low, high = (r.low, r.high) if r.difference >= 0 else (-r.high, -r.low)
    ends = f"95 % interval {100 * low:.1f} to {100 * high:.1f}"
    by = f"p = {r.p:.3g}, {r.test}"
    if r.only_a == r.only_b == 0:
        return f"They solve the same problems ({ends}; {by})."
    better, worse = ("B", "A") if r.difference > 0 else ("A", "B")
    if r.p < RARE:
        return f"{better} is better than {worse} by {points} ({ends}). Chance alone would hardly do that ({by})."
    lead = f"{better} is ahead by {points}" if r.difference else "They solve equally many"
    return f"{lead} ({ends}), which may be chance ({by}). More problems would tell."
