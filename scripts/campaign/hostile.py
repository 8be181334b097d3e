"""Values and texts that a program should meet with suspicion."""

from __future__ import annotations

import json
import random
from typing import Any

# Sequences that a terminal obeys: they clear it, write to the clipboard, rename the window, go back over what was said.
ESCAPES = ["\x1b[2J", "\x1b]52;c;cm0gLXJmIC8=\x07", "\x1b]0;title\x07", "\x9b31m", "\x07", "\rsafe", "\x08\x08", "\x7f"]
ESCAPES += ["\x85"]
NUMBERS = ["-1", "0", "1e999", "-1e999", "nan", "inf", "1e-400", "2147483648", "9223372036854775808", "1_000", "0x10", "٣"]
WORDS = ["''", "null", "true", "fast", "???", "~", "~nobody/x", "/dev/zero", "/proc/self/mem", "../..", "a" * 5000]
WORDS += ["\udcff", "\u202e"]
SHAPES = ["[]", "{}", "{a:1}", "[1,[2,[3]]]", "[" * 3000, "(" * 3000, "{" * 500, "'", '"', "[,]", "1,", "a=b", "9" * 5000]
REFERENCES = ["${oc.env:HOME}", "${seed}", "${now:%Y}", "${", "${oc.decode:1}", "${.x}", "${oc.env:NOWHERE}"]
CALLS = ["choice(1,2)", "range(0,1)", "glob(*)", "interval(0,1)", "sort(3,2)", "extend_list(1)", "shuffle(", "int(x)"]
CALLS += ["cast(1)"]
# Of JSON, as it is written: what libraries would not write, others do.
JSON_VALUES = ["null", "true", "-1", "0", "2147483648", "1e999", "-0.0", "NaN", "-Infinity", "9" * 5000, '""', '"x"']
JSON_VALUES += ["[]", "{}"]
JSON_VALUES += ["[" * 100_000, '{"a":' * 50_000, "[" * 900 + "]" * 900, '"\\ud800"', '"\\u0000"']
JSON_VALUES += ['"' + "x" * 10**6 + '"', "18446744073709551616"]


def word(rng: random.Random) -> str:
    """A value of an override."""
    return rng.choice(rng.choice([NUMBERS, WORDS, SHAPES, REFERENCES, CALLS, [f"a{escape}b" for escape in ESCAPES]]))


def text(rng: random.Random) -> str:
    """A text that a terminal would obey."""
    return f"Ann{rng.choice(ESCAPES)} has{rng.choice(ESCAPES)}"


def json_value(rng: random.Random) -> str:
    return json.dumps(text(rng)) if rng.random() < 0.2 else rng.choice(JSON_VALUES)


def spoilt(content: Any, rng: random.Random, raw: str | None = None) -> str:
    """JSON in which one value, wherever it lies, is another one, is missing, or is there twice."""
    content = json.loads(json.dumps(content))
    spots = [*_spots(content)]
    place, key = rng.choice(spots)
    way = rng.random()
    if raw is None and way < 0.15:
        del place[key]
        return json.dumps(content)
    if raw is None and way < 0.25 and isinstance(place, dict):
        place[rng.choice(["", text(rng), key + "_", "__class__"])] = place.pop(key)
        return json.dumps(content, ensure_ascii=False)
    place[key] = "@@"
    return json.dumps(content).replace('"@@"', raw or json_value(rng), 1)


def _spots(content: Any):
    """Every place in it that holds a value."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield content, key
        yield from _spots(value)
