from __future__ import annotations

import importlib.util
import threading

import pytest

from agent_tunix.environments import answers, rewards, symbolic

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify comes with the extra `math`"
)
EQUAL = [
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\{3,2,1\}", r"\{1,2,3\}"),
    (r"(1,\infty)\cup(-\infty,0)", r"(-\infty,0)\cup(1,\infty)"),
    ("1024", "2^{10}"),
    (r"so it is \boxed{c+ab}", "ab+c"),
    (r"That makes $\pi \cdot 2$.", r"2\pi"),
]
DIFFERENT = [
    ("x^2+1", "x^2+2x+1"),
    (r"\sqrt{6}", r"2\sqrt{3}"),
    ("(2,5]", "[2,5)"),
    ("(3,2)", r"\left(2,3\right)"),
    ("101", "101_2"),
    ("12 cm^2", r"12\text{ m}^2"),
    ("-2", "5-7"),
    ("$x+1$ or $x+2$", "1+x"),
    (r"\frac{", "3x"),
    ("", "3x"),
]
HOSTILE = [
    *("9**9**9", "9^{9^{9^9}}", "(" * 10_000 + "1" + ")" * 10_000, r"\frac{1}{" * 10_000, "10000000!", "(x+y+z)^{3000}"),
    "(9^{9})^{(9^{9})}",  # begins to be computed
]


@needs_math
@pytest.mark.parametrize(("found", "truth"), EQUAL)
def test_equal_expressions_are_the_same_answer(found, truth):
    assert answers.same_answer(found, truth)


@pytest.mark.parametrize(("found", "truth"), DIFFERENT)
def test_other_expressions_are_not(found, truth):
    assert not answers.same_answer(found, truth)


def test_without_the_library_only_what_is_written_alike_is_the_same(monkeypatch):
    monkeypatch.setattr(symbolic.importlib.util, "find_spec", lambda name: None)
    symbolic.same_expression.cache_clear()
    assert not answers.same_answer(r"\sqrt{12}", r"2\sqrt{3}")
    assert answers.same_answer(r"\sqrt3", r"\sqrt{3}")
    symbolic.same_expression.cache_clear()


def test_numbers_and_words_never_ask_the_library(monkeypatch):
    monkeypatch.setattr(symbolic, "_grader", lambda: pytest.fail("asked"))
    for truth in (
        "18",
        "-1,234.5",
        "3/4",
        r"\frac{3}{4}",
        "50%",
        r"45^\circ",
        "2 million",
        "9:45",
        "Paris",
        "Paris 2024",
        "5-7",
    ):
        assert not answers.same_answer("77", truth)
        assert not answers.same_answer("x+1", truth)


@needs_math
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_text_without_end_is_a_wrong_answer_and_the_next_is_read(hostile):
    assert not answers.same_answer(hostile, "x^2+7")
    assert answers.same_answer("7+x^2", "x^2+7")
    symbolic.same_expression.cache_clear()


@needs_math
def test_threads_take_turns():
    verdicts = {}

    def ask(n: int) -> None:
        verdicts[n] = [answers.same_answer(f"{n}+x^2+{m}", f"x^2+{n + 3}") for m in range(6)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {n: [m == 3 for m in range(6)] for n in range(4)}


@needs_math
def test_it_works_in_the_process_of_the_rewards():
    scorer = rewards.Scorer({"answer": "agent_tunix.environments.rewards.answer_correct"}, {}, timeout=60)
    completions = [f"<reasoning>x</reasoning><answer>{found}</answer>" for found in (r"\sqrt{12}", r"\sqrt{6}")]
    assert scorer(["", ""], completions, [r"2\sqrt{3}"] * 2)["answer"].tolist() == [1, 0]
