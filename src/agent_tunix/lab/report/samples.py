"""Completions from early to late in a run, side by side, so that one can read what was learnt."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_tunix.training.run_folder import finite, read_records
from agent_tunix.types import Record

COLUMNS = 5
OFTEN = 3  # steps that must show the same prompt before others are left out for it


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one side says in an episode. `who` is a role or the name of a tool; `calls` are those that were read in it."""

    who: str
    text: str
    calls: list[str]


@dataclasses.dataclass(frozen=True)
class Completion:
    """`text` is all of an answer, or the last of an episode's `turns`. `ending` says what stopped one that did not end."""

    text: str
    reward: float | None
    rewards: dict[str, float]
    advantage: float | None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    ending: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """What one step made of a prompt."""

    step: int
    prompt: str
    answer: str
    completions: list[Completion]


def columns(folder: Path) -> list[Column]:
    """A few steps, evenly spaced from the first to the last; of one prompt where it came again and again."""
    by_step: dict[int, list[Record]] = defaultdict(list)
    for record in read_records(folder / "samples.jsonl"):
        if finite(record.get("step")) and isinstance(record.get("completion"), str):
            by_step[int(record["step"])].append(record)
    steps = _same_prompt(by_step) or sorted(by_step)
    last = len(steps) - 1
    picked = sorted({round(i * last / (COLUMNS - 1)) for i in range(COLUMNS)}) if steps else []
    return [_column(steps[i], by_step[steps[i]]) for i in picked]


def _same_prompt(by_step: Mapping[int, Sequence[Record]]) -> list[int]:
    """The steps of the prompt that came most often, if that was often enough."""
    seen: dict[str, list[int]] = defaultdict(list)
    for step in sorted(by_step):
        seen[str(by_step[step][0].get("prompt"))].append(step)
    most = max(seen.values(), key=len, default=[])
    return most if len(most) >= OFTEN else []


def _column(step: int, records: Sequence[Record]) -> Column:
    first = records[0]
    return Column(step, str(first.get("prompt", "")), str(first.get("answer", "")), [_completion(r) for r in records])


def _completion(record: Record) -> Completion:
    rewards = record.get("rewards")
    named = {str(k): float(v) for k, v in rewards.items() if finite(v)} if isinstance(rewards, dict) else {}
    ending = ": ".join(str(record[key]) for key in ("ending", "fault") if record.get(key))
    given = _number(record.get("reward")), named, _number(record.get("advantage"))
    return Completion(record["completion"], *given, _turns(record.get("transcript")), ending)


def _turns(transcript: Any) -> list[Turn]:
    """The turns of an episode from the model's first on; what stands before it is the prompt."""
    messages = [one for one in transcript if isinstance(one, dict)] if isinstance(transcript, list) else []
    first = next((place for place, one in enumerate(messages) if one.get("role") == "assistant"), len(messages))
    turns = []
    for one in messages[first:]:
        calls = one.get("tool_calls")
        written = [_call(call) for call in calls] if isinstance(calls, list) else []
        turns.append(Turn(str(one.get("name") or one.get("role", "")), str(one.get("content", "")), written))
    return turns


def _call(call: Any) -> str:
    """A call as Python writes it; one that could not be read as what was wrong with it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "error" in function:
        return str(function["error"] if isinstance(function, dict) else call)
    arguments = function.get("arguments")
    named = arguments.items() if isinstance(arguments, dict) else ()
    return f"{function.get('name')}({', '.join(f'{name}={value!r}' for name, value in named)})"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and finite(value) else None


def shortened(found: Sequence[Column], most: int) -> list[Column]:
    """Columns with texts of at most so many characters, so that a page stays small."""

    def cut(text: str, most: int = most) -> str:
        return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more characters)"

    def short(one: Completion) -> Completion:
        each = most // max(1, sum(1 + len(turn.calls) for turn in one.turns))
        turns = [Turn(cut(turn.who, each), cut(turn.text, each), [cut(c, each) for c in turn.calls]) for turn in one.turns]
        return dataclasses.replace(one, text=cut(one.text), turns=turns, ending=cut(one.ending))

    return [
        dataclasses.replace(
            column,
            prompt=cut(column.prompt),
            answer=cut(column.answer),
            completions=[short(one) for one in column.completions],
        )
        for column in found
    ]
