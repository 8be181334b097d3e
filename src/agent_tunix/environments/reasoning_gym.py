"""Problems of reasoning-gym's generators, and its own scorers as a reward and as what counts as solved.

A problem follows from the task, the split and its place, so training, validation and test are made of other random numbers.
A question comes once in a split. Those of the validation split are left out of training; a task that knows few questions may
ask some of the test split in training, of which `evaluate.py` warns.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agent_tunix.config.schema import DataSection
from agent_tunix.environments import answers
from agent_tunix.environments.tables import Row
from agent_tunix.errors import UserError, calling, named

TRIES = 3  # problems that are made for each that is wanted, as questions may come again; some tasks make all beforehand
VAIN = 100  # questions in a row that came before: the task knows no others
SETTLED = ("seed", "size")  # of a generator, which the split has


def rows(data: DataSection, split: str, count: int, seed: int, without: Collection[str] = ()) -> list[Row]:
    """At most `count` problems of a split with different questions, and none that is among `without`.

    Training problems follow from the run's seed; those held out are the same for every seed.
    """
    task = str(data.task)
    begun = zlib.crc32(f"{task} {split} {seed if split == 'train' else ''}".encode())
    settings = _settings(task, data.level, data.settings)
    refused = f"data.task={task} with data.settings={settings}: reasoning-gym refuses it"
    with calling(lambda fault: UserError(f"{refused}: {named(fault)}")):
        generator = _library().create_dataset(task, seed=begun, size=TRIES * count, **settings)
    seen, found, vain = set(without), list[Row](), 0
    for entry in _entries(task, generator):
        if len(found) == count or vain == VAIN:
            break
        question, answer = str(entry["question"]).strip(), entry["answer"]
        vain = vain + 1 if question in seen else 0
        if not vain:
            seen.add(question)
            found.append(Row(question, "" if answer is None else str(answer), fields=entry))
    return found


def score(prompt: str, completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """What the task's own scorer gives to the answer block; 0 without one. From 0 to 1, and 1 is solved."""
    found = answers.tagged_answer(completion)
    if found is None:
        return 0.0
    scorer = _library().get_score_answer_fn(row["metadata"]["source_dataset"])
    try:
        return min(max(float(scorer(found, row)), 0.0), 1.0)
    except Exception:  # many raise where they cannot read an answer, which is none then
        return 0.0


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as fault:
        missing = "data=reasoning_gym needs the package reasoning-gym: pip install 'agent-tunix[reasoning-gym]'"
        raise UserError(missing) from fault
    return reasoning_gym


def _settings(task: str, level: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the task's generator: what a level has, and what is given."""
    _library()
    from reasoning_gym.factory import CURRICULA, DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UserError(f"data.task={task}: reasoning-gym has no such task{hint}\nIt has {', '.join(sorted(DATASETS))}.")
    if taken := [key for key in SETTLED if key in given]:
        raise UserError(f"data.settings.{taken[0]} follows from the split; leave it out.")
    if level is None:
        return dict(given)
    if task not in CURRICULA:
        raise UserError(f"data.level={level}: reasoning-gym has no levels for {task}; use data.settings instead.")
    return {**_of_level(task, level, CURRICULA[task]()), **given}


def _of_level(task: str, level: int, curriculum: Any) -> dict[str, Any]:
    """The settings of a level of a task's curriculum: each of its attributes is as hard as that level has it."""
    hardest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > hardest:
        raise UserError(f"data.level={level}: the levels of {task} go from 0 to {hardest}.")
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    made = curriculum.generate_configuration()
    return {key: value for key, value in vars(made).items() if key not in SETTLED}


def _entries(task: str, generator: Any) -> Iterator[Mapping[str, Any]]:
    for place in range(len(generator)):
        with calling(lambda fault: UserError(f"data.task={task}: reasoning-gym cannot make a problem: {named(fault)}")):
            entry = generator[place]
        yield entry
