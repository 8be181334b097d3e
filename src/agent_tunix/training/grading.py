"""Grading: how many held-out problems a policy has solved.

    accuracy          well formed, and the answer block holds the truth; or what `data.scorer` gives a 1
    partial_accuracy  the answer block's number is within 10 % of the truth; or the mean of what `data.scorer` gives
    format_accuracy   reasoning and answer in their tags, nothing else
    lenient_accuracy  as accuracy, or the last number anywhere is the truth

With several passes, also the accuracy of the majority's answer and pass@k, the share of problems solved by at least one
of k completions (the unbiased estimate of Chen et al., 2021, arXiv:2107.03374).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from agent_tunix.environments import answers
from agent_tunix.environments.rewards import Judge
from agent_tunix.environments.stream import Example
from agent_tunix.training.play import Answers, turns_of
from agent_tunix.types import Record

BY_TAGS = Judge()
TABLED = 64  # problems of which loggers are told what was answered


def grade(
    examples: Sequence[Example],
    completions: Sequence[Sequence[str]],
    judge: Judge = BY_TAGS,
    solved: Sequence[float | None] = (),
) -> Record:
    """The evaluation's numbers, averaged over problems and passes; `solved` is what a world says of them, where it does."""
    return grade_each(examples, completions, judge, solved)[0]


def grade_each(
    examples: Sequence[Example],
    completions: Sequence[Sequence[str]],
    judge: Judge = BY_TAGS,
    solved: Sequence[float | None] = (),
) -> tuple[Record, Record]:
    """As `grade`, and of each problem, by a name that is the same in every run, how many of its completions are right."""
    pairs = [(example, text) for example, texts in zip(examples, completions, strict=True) for text in texts]
    passes = len(completions[0])
    scores = judge([example for example, _ in pairs], [text for _, text in pairs])
    for place, by_world in enumerate(solved):
        scores[place] = scores[place] if by_world is None else by_world
    right = scores == 1
    partially = [_partially_right(text, e.answer) for e, text in pairs] if judge.by_tags else scores
    leniently = [r or _last_number_right(text, e.answer) for r, (e, text) in zip(right, pairs, strict=True)]
    record: Record = {
        "n": len(examples),
        "accuracy": float(right.mean()),
        "partial_accuracy": float(np.mean(partially)),
        "format_accuracy": float(np.mean([answers.well_formed(text) for _, text in pairs])),
        "lenient_accuracy": float(np.mean(leniently)),
    }
    right = right.reshape(-1, passes)
    if passes > 1:
        judged = zip(completions, right, strict=True)
        record["majority_accuracy"] = float(np.mean([_majority_right(texts, right_ones) for texts, right_ones in judged]))
        for k in (k for k in (1, 2, 4, 8, 16, 32, 64) if k <= passes):
            record[f"pass@{k}"] = float(np.mean([pass_at_k(passes, int(row.sum()), k) for row in right]))
    each = {"problems": [problem_name(example) for example in examples], "right": [int(row.sum()) for row in right]}
    return record, each


def problem_name(example: Example) -> str:
    """What a problem is called in answers.jsonl: it follows from question and answer, or from a row without them."""
    asked = [example.question, example.answer] if example.question else sorted(map(str, example.row.items()))
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _partially_right(completion: str, truth: str) -> bool:
    found = answers.tagged_answer(completion)
    return found is not None and answers.near(answers.first_number(found), answers.first_number(truth))


def _last_number_right(completion: str, truth: str) -> bool:
    """An answer in words, or of several numbers, has no last number to compare."""
    return answers.same_number(answers.last_number(completion), answers.only_number(truth))


def _majority_right(completions: Sequence[str], solved: Sequence[bool]) -> bool:
    """Whether the answer given most often (the earliest among equals) is right; 18 and 18.00 are one answer.

    Those who do not keep to the format have no vote, as they would not count as right.
    """
    given = [
        (answers.tagged_answer(text), right)
        for text, right in zip(completions, solved, strict=True)
        if answers.well_formed(text)
    ]
    votes = Counter(answer for answer, _ in given if answer is not None)
    if not votes:
        return False
    winner = max(votes, key=lambda text: sum(votes[other] for other in votes if answers.same_answer(other, text)))
    return any(right for answer, right in given if answer == winner)


def table_of(step: int, examples: Sequence[Example], found: Answers, right: Sequence[int]) -> list[Record]:
    """Rows for loggers that have tables: the first problems, so that they stay the same, and the first completion of each.

    `right` says how many completions of each problem are.
    """
    rows: list[Record] = [
        {"step": step, "question": example.question, "answer": example.answer, "completion": texts[0], "right": number}
        for example, texts, number in zip(examples[:TABLED], found.texts, right, strict=False)
    ]
    for row, transcript in zip(rows, found.transcripts, strict=False):
        row["turns"] = json.dumps(turns_of(transcript), ensure_ascii=False)
    return rows
