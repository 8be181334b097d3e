from __future__ import annotations

import json
import math
from pathlib import Path

from agent_tunix.lab.report.plain import LONGEST_TEXT, PAGE_TEXT, bounded, plain
from agent_tunix.lab.report.samples import Column, Completion


def page(columns: int) -> dict:
    text = 10_000 * "x"
    shown = [Column(step, text, text, [Completion(text, 1.0, {}, 0.5)] * 2) for step in range(columns)]
    return {"sections": [{"charts": [], "samples": [{"name": "", "columns": shown}]}]}


def texts(record: dict) -> list[str]:
    columns = record["sections"][0]["samples"][0]["columns"]
    return [text for c in columns for text in (c.prompt, c.answer, *(one.text for one in c.completions))]


def test_texts_are_cut_to_what_one_and_all_of_a_page_may_have():
    marks = len(" ... (10000 more characters)")
    assert all(LONGEST_TEXT < len(text) < LONGEST_TEXT + marks for text in texts(bounded(page(1))))
    many = texts(bounded(page(200)))
    assert PAGE_TEXT // 2 < sum(map(len, many)) <= PAGE_TEXT + marks * len(many)


def test_whatever_a_record_holds_becomes_strict_json():
    odd = {1: math.nan, "b": (math.inf, 1 / 3, None, True), "c": Completion("x", None, {}, 0.5), "d": Path("here")}
    found = json.loads(json.dumps(plain(odd), allow_nan=False))
    completion = {"text": "x", "reward": None, "rewards": {}, "advantage": 0.5, "turns": [], "ending": ""}
    assert found == {"1": None, "b": [None, 0.333333, None, True], "c": completion, "d": "here"}
