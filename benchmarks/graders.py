r"""Compares our grading of answers with Math-Verify's: agreement with the right verdict, and time a call.

    PYTHONPATH=src python benchmarks/graders.py [math | tests | gsm8k | hostile]

Ours is measured as it is installed: with the extra `math` it asks Math-Verify of expressions too. Math-Verify by itself
is given its best chance: the truth is `$truth$`, and the answer is right as it is or as `$answer$`. Its limits on time are
off, as a run calls rewards from threads.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
import statistics
import subprocess
import sys
import time
from pathlib import Path

from agent_tunix.environments import answers, notation, symbolic

ROOT = Path(__file__).parents[1]
GSM8K = ROOT.parent / "shared/data/gsm8k/test.jsonl.gz"
# By kind: the truth, answers that state it, answers that do not.
PAIRS: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "numbers": [
        ("18", ["18", "18.0", "$18", "18 dollars", "The answer is 18.", r"\boxed{18}"], ["81", "-18", "1.8", "18.5"]),
        ("1234", ["1,234", "1{,}234", r"1\,234", "1234.00"], ["1.234", "234"]),
        ("-7", ["-7", "−7", "x = -7"], ["7", "-7.5"]),
        ("0.5", [".5", r"\frac{1}{2}", "1/2", r"\frac12", "0.50"], ["5", "2", "0.05"]),
        ("300000", [r"3 \times 10^5", "3e5", "300,000"], [r"3 \times 10^4", "30000"]),
        ("50", [r"50\%", "50%"], [r"5\%", "49%"]),
    ],
    "fractions": [
        (r"\frac{3}{4}", ["0.75", "3/4", r"\dfrac{3}{4}", r"\tfrac{3}{4}", r"\frac{6}{8}"], ["4/3", "0.7", "3"]),
        (r"-\frac{2}{3}", ["-2/3", r"\frac{-2}{3}", r"-\dfrac{2}{3}"], ["2/3", "-3/2"]),
        (r"2\frac{1}{2}", ["2.5", "5/2", r"\frac{5}{2}", "2 1/2"], ["1", "21/2"]),
        (r"\frac{x+1}{2}", [r"\frac{1}{2}(x+1)", "(x+1)/2", r"\frac{x}{2}+\frac{1}{2}"], ["x+1/2", r"\frac{x-1}{2}"]),
        (r"\frac{\pi}{4}", [r"\pi/4", r"\frac14\pi", r"\frac{1}{4} \pi"], [r"\frac{\pi}{2}", "1/4"]),
    ],
    "roots": [
        (r"\sqrt{3}", [r"\sqrt3", r"\sqrt{3}", r"3^{1/2}"], ["3", r"\sqrt{2}", "9"]),
        (r"2\sqrt{3}", [r"\sqrt{12}", r"2 \sqrt{3}", r"2\cdot\sqrt{3}"], [r"\sqrt{6}", r"3\sqrt{2}", "6"]),
        (r"\frac{\sqrt{2}}{2}", [r"\frac{1}{\sqrt{2}}", r"\sqrt{2}/2", r"\sqrt{\frac{1}{2}}"], [r"\sqrt{2}", r"\frac12"]),
        (r"1+\sqrt{2}", [r"\sqrt{2}+1", r"1 + \sqrt{2}"], [r"1-\sqrt{2}", r"\sqrt{3}"]),
        (r"\sqrt[3]{2}", [r"2^{1/3}", r"\sqrt[3]{2}"], [r"\sqrt{2}", r"3\sqrt{2}"]),
    ],
    "polynomials": [
        ("x^2+2x+1", ["(x+1)^2", "x^2 + 2x + 1", "1+2x+x^2"], ["x^2+1", "x^2+2x", "(x-1)^2"]),
        ("3x-5", ["3x - 5", "-5+3x", "3*x-5"], ["5-3x", "3x+5", "3x"]),
        ("(x-2)(x+3)", ["(x+3)(x-2)", "x^2+x-6"], ["(x+2)(x-3)", "x^2-x-6"]),
        ("2^{10}", ["1024", "2^{10}", "4^5"], ["20", "2^9", "210"]),
        ("ab+c", ["c+ab", "ba+c"], ["a(b+c)", "abc"]),
        ("3+4i", ["4i+3", "3 + 4i"], ["3-4i", "7i", "7"]),
    ],
    "sets and intervals": [
        (r"\{1,2,3\}", [r"\{3,2,1\}", r"\{1, 2, 3\}"], [r"\{1,2\}", r"\{1,2,4\}"]),
        ("1,2", ["1, 2", "2,1", "1 and 2"], ["1,3", "1"]),
        ("(2,3)", ["(2, 3)", r"\left(2,3\right)"], ["(3,2)", "(2,4)", "2"]),
        ("[2,5)", ["[2, 5)", r"\left[2,5\right)", r"2 \le x < 5"], ["(2,5]", "[2,5]", "(2,5)"]),
        (r"(-\infty,0)\cup(1,\infty)", [r"(1,\infty)\cup(-\infty,0)"], [r"(-\infty,0)", r"(-\infty,1)\cup(0,\infty)"]),
        (r"\left(\frac{1}{2},3\right)", [r"(0.5,3)", r"(1/2, 3)"], [r"(3,\frac12)", r"(\frac13,3)"]),
        (r"x \ge 2", [r"x \geq 2", "x >= 2", r"[2,\infty)"], ["x > 2", r"x \le 2"]),
        (r"\emptyset", [r"\varnothing", r"\{\}"], ["0", r"\{0\}"]),
    ],
    "equations": [
        ("5", ["x=5", "x = 5", r"x = 2 + 3 = 5"], ["x=6", "5 = x + 1 = 6"]),
        ("y=2x+3", ["y = 2x + 3", "y=3+2x", "2x+3"], ["y=2x-3", "y=3x+2"]),
        ("x=1,x=2", ["x=1 or x=2", "x=2, x=1", "1,2"], ["x=1", "x=1,x=3"]),
    ],
    "units": [
        ("5 cm", ["5", r"5\text{ cm}", r"5\,\mathrm{cm}", "5cm"], ["6 cm", "5 km"]),
        (r"12\text{ m}^2", ["12", r"12\ \text{m}^2", "12 square meters"], ["144", "12 cm^2"]),
        (r"45^\circ", ["45", "45 degrees", "45°"], [r"54^\circ", "45 radians"]),
        (r"\$18.50", ["18.5", "$18.50", r"\$18.5"], ["18", "1850"]),
        ("10%", ["10\\%", "10%", "10"], ["1%", "100%"]),
    ],
    "functions and constants": [
        (r"2\pi", ["2 pi", r"2 \cdot \pi", r"\pi \cdot 2"], [r"\pi", "2", r"\pi^2"]),
        (r"\log 2", [r"\log(2)", r"\log{2}"], [r"\log 3", "2"]),
        (r"\ln 4", [r"2\ln 2", r"\ln(4)"], [r"\ln 2", "4"]),
        (r"\sin x", [r"\sin(x)", r"\sin{x}"], [r"\cos x", "x"]),
        ("e^2", ["e^{2}", r"e \cdot e"], ["2e", "2"]),
        ("5!", ["120", "5!"], ["5", "24"]),
        (r"\binom{5}{2}", ["10", r"\binom{5}{3}"], ["5", "20"]),
    ],
    "matrices and words": [
        (
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            [r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"],
            [r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"],
        ),
        (r"\text{east}", ["east", r"\text{East}"], ["west", r"\text{west}"]),
        (r"\text{(B)}", ["B", "(B)"], ["A", "(C)"]),
        ("9:45", ["9:45 am", "9:45"], ["9:50", "9"]),
        ("101_2", ["101_{2}", "101_2"], ["101", "110_2"]),
    ],
}
HOSTILE = {
    "9**9**9": "9**9**9",
    "9^{9^{9^9}}": r"$9^{9^{9^9}}$",
    "10,000 brackets": "$" + "(" * 10_000 + "1" + ")" * 10_000 + "$",
    "100 brackets": "$" + "(" * 100 + "1" + ")" * 100 + "$",
    "500 of \\frac in each other": "$" + r"\frac{1}{" * 500 + "2" + "}" * 500 + "$",
    "1000000!": "$1000000!$",
    "(x+y+z)^{300}": "$(x+y+z)^{300}-(x+y+z+1)^{300}$",
    "sum of 300 roots": "$" + "+".join(rf"\sqrt{{{n}}}" for n in range(2, 302)) + "$",
    "an integral": r"$\int_0^1 \sin(x^x)\,dx$",
    "20,000 of 5-": "5-" * 20_000,
    "20,000 of $": "$" * 20_000,
}


def ours(found: str, truth: str) -> bool:
    return answers.same_answer(found, truth)


def theirs(found: str, truth: str) -> bool:
    from math_verify import parse, verify

    limits = {"parsing_timeout": None, "raise_on_error": False}
    wanted = parse(f"${truth}$", **limits)
    given = [parse(text, **limits) for text in (found, f"${found}$")]
    return any(verify(wanted, each, timeout_seconds=None, raise_on_error=False) for each in given)


def graded(found: str, truth: str) -> tuple[tuple[bool, bool], tuple[float, float]]:
    """Both verdicts and their milliseconds. What ours remembers of other calls is forgotten."""
    verdicts, times = [], []
    for grade in (ours, theirs):
        symbolic.same_expression.cache_clear()
        for remembering in (answers._statement, notation.plain, notation.values, notation.in_expression, notation.spelt):
            remembering.cache_clear()
        begun = time.perf_counter()
        verdicts.append(grade(found, truth))
        times.append((time.perf_counter() - begun) * 1000)
    return (verdicts[0], verdicts[1]), (times[0], times[1])


def compare(pairs: list[tuple[str, str, str, bool]]) -> None:
    """Prints, for each kind of pair, how many of the verdicts are right."""
    rows: dict[str, list[int]] = {}
    spent = []
    for kind, found, truth, right in pairs:
        verdicts, times = graded(found, truth)
        spent.append(times)
        row = rows.setdefault(kind, [0] * 7)
        row[0] += 1
        for grader, verdict in enumerate(verdicts):
            row[1 + 3 * grader] += verdict == right
            row[2 + 3 * grader] += verdict and not right
            row[3 + 3 * grader] += right and not verdict
        if len(set(verdicts)) > 1 and len(pairs) < 1000:
            print(f"  {right!s:5} ours {verdicts[0]!s:5} theirs {verdicts[1]!s:5} {found[:60]!r} for {truth[:60]!r}")
    print(f"{'':24} pairs | ours: right, false yes, false no | Math-Verify: the same")
    for kind, row in {**rows, "all": [sum(column) for column in zip(*rows.values(), strict=True)]}.items():
        print(f"{kind:24} {row[0]:5} | {row[1]:5} {row[2]:4} {row[3]:4} | {row[4]:5} {row[5]:4} {row[6]:4}")
    for name, values in zip(("ours", "Math-Verify"), zip(*spent, strict=True), strict=True):
        values = sorted(values)
        print(
            f"{name}: ms a call, median {statistics.median(values):.3f}, 95 % {values[int(0.95 * len(values))]:.2f}, "
            f"largest {values[-1]:.1f}"
        )


def math() -> None:
    compare(
        [
            (kind, found, truth, right)
            for kind, rows in PAIRS.items()
            for truth, same, others in rows
            for right, stated in ((True, same), (False, others))
            for found in stated
        ]
    )


def tests() -> None:
    """The pairs of tests/unit/environments/test_answers.py, by the parameters of its tests."""
    file = ROOT / "tests/unit/environments/test_answers.py"
    spec = importlib.util.spec_from_file_location("test_answers", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def parameters(name: str) -> list:
        return getattr(module, name).pytestmark[0].args[1]

    pairs = [("an answer and a truth", *pair) for pair in parameters("test_an_answer_states_the_truth")]
    pairs += [
        ("another spelling", found, truth, True)
        for found, truth in parameters("test_an_expression_may_be_spelt_in_other_ways")
    ]
    pairs += [
        ("an expression in another", found, truth, False)
        for found, truth in parameters("test_an_expression_is_not_found_in_another")
    ]
    pairs += [("18 in a sentence", found, "18", True) for found in module.EIGHTEEN]
    pairs += [
        ("18 reckoned with", found, "18", False)
        for found in parameters("test_a_number_that_is_reckoned_with_is_not_the_answer")
    ]
    for minus in parameters("test_a_minus_is_seen_however_it_is_written"):
        pairs += [("a minus", minus, "-5", True), ("a minus", "5", minus, False)]
    compare(pairs)


def gsm8k() -> None:
    """All truths of the test set: each as it is, in a sentence, in a box, with decimals, and four that are wrong."""
    with gzip.open(GSM8K, "rt") as file:
        truths = [json.loads(line)["answer"].split("####")[-1].strip() for line in file]
    pairs = []
    for truth in truths[:: max(1, len(truths) // 300)]:
        number = int(truth.replace(",", ""))
        same = (truth, f"{number:,}", f"${number}.00", f"The answer is {number} apples.", rf"\boxed{{{number}}}")
        others = (str(number + 1), f"{number}.5", str(-number - 1), f"{number}0001")
        pairs += [("right", found, truth, True) for found in same] + [("wrong", found, truth, False) for found in others]
    compare(pairs)


def hostile() -> None:
    """Each in a process of its own, which is ended after ten seconds."""
    for name in HOSTILE:
        for grader in ("ours", "theirs"):
            program = (
                "import sys, time; sys.path.insert(0, sys.argv[1]); import graders\n"
                "import math_verify\n"
                f"graders.{grader}('x+x', '2x')\n"
                f"begun = time.perf_counter(); verdict = graders.{grader}(graders.HOSTILE[sys.argv[2]], 'x^2+7')\n"
                "print(verdict, f'{time.perf_counter() - begun:.3f} s')"
            )
            command = [sys.executable, "-c", program, str(Path(__file__).parent), name]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=13)
                said = done.stdout.strip() or f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
            except subprocess.TimeoutExpired:
                said = "did not return within ten seconds"
            print(f"{name:28} {grader:6} {said}", flush=True)


if __name__ == "__main__":
    logging.disable()
    for part in sys.argv[1:] or ("tests", "gsm8k", "math", "hostile"):
        print(f"== {part}")
        {"tests": tests, "gsm8k": gsm8k, "math": math, "hostile": hostile}[part]()
