from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent_tunix.environments import answers, rewards
from agent_tunix.models.chat import ANSWER, REASONING

pieces = st.sampled_from(
    [
        *REASONING,
        *ANSWER,
        "<end_of_turn>",
        "5",
        "-",
        "$",
        ",",
        ".",
        "1,000",
        "%",
        " ",
        "\n",
        "²",
        "٣",
        "9" * 400,
        "9" * 5000,
        "1e999",
        "/",
        "x",
        "^",
        r"\sqrt{",
        "(",
    ]
)
completions = st.text() | st.lists(pieces | st.text(max_size=3), max_size=20).map("".join)


@given(completions, st.text() | pieces)
def test_no_text_makes_the_parser_or_a_reward_raise(completion, truth):
    for read in (answers.tagged_answer, answers.first_number, answers.last_number, answers.well_formed):
        read(completion)
    for function in (rewards.format_exact, rewards.format_approximate, rewards.answer_correct, rewards.number_in_answer):
        assert 0 <= function("", completion, truth) <= 1


@given(st.text(alphabet="ab \n.,5<>/", min_size=1), st.integers(-(10**9), 10**9))
def test_a_well_formed_completion_is_recognised_and_its_answer_found(reasoning, number):
    for shown in (str(number), f"{number:,}", f" {number}.\n", f"{number}.00"):
        completion = f"{REASONING[0]}{reasoning}{REASONING[1]}\n{ANSWER[0]}{shown}{ANSWER[1]}"
        assert answers.well_formed(completion)
        assert rewards.answer_correct("", completion, str(number)) == 1
        assert rewards.answer_correct("", completion, str(number + 1)) == 0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "5",
        "<answer>5</answer>",
        "<reasoning></reasoning><answer>5</answer>",
        "<reasoning>x</reasoning><answer></answer>",
        "<reasoning>x</reasoning><answer>5</answer> and more",
        "Well: <reasoning>x</reasoning><answer>5</answer>",
        "<reasoning>x</reasoning> so <answer>5</answer>",
        "<answer>5</answer><reasoning>x</reasoning>",
        "<reasoning>x<answer>5</answer></reasoning>",
        "<reasoning>x</reasoning><answer>5</answer><answer>5</answer>",
        "<reasoning>x</reasoning><reasoning>y</reasoning><answer>5</answer>",
    ],
)
def test_malformed_completions(completion):
    assert not answers.well_formed(completion)


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("no number", None, None),
        ("7", 7, 7),
        ("7 and 8.5", 7, 8.5),
        ("-3", -3, -3),
        ("it is -$1,234.50!", -1234.5, -1234.5),
        ("$12", 12, 12),
        ("50%", 50, 50),
        ("The answer is 42.", 42, 42),
        (".5 of it", 0.5, 0.5),
        ("1,000,000", 1e6, 1e6),
        ("3,4", 3, 4),
        ("5-3", 5, 3),
        ("x2 y", None, None),
        ("12apples", 12, 12),
        ("a=-7", -7, -7),
        ("10 - 3", 10, 3),
        ("\u22127", -7, -7),
        ("$-5", -5, -5),
        ("€1,250.75 each", 1250.75, 1250.75),
        ("3/4", 0.75, 0.75),
        ("1 1/2 cups", 1.5, 1.5),
        (r"\frac{3}{4}", 0.75, 0.75),
        (r"so \boxed{\dfrac{1}{2}} of 9", 0.5, 0.5),
        (r"\boxed{1{,}234}", 1234, 1234),
        (r"\frac12 and 3\dfrac1{10}", 0.5, Fraction(31, 10)),
        ("½", 0.5, 0.5),
        ("-2¾ of it", -2.75, -2.75),
        ("1\u2009234\u202f567 of 1\u00a0000", 1234567, 1000),
        ("1 234", 1, 234),
        ("－１，２３４．５ of ３／４", -1234.5, 0.75),
        (r"\$18", 18, 18),
        (r"25\%", 25, 25),
        ("x = 3 + 4 = 7 apples", 7, 7),
        ("2.5e3", 2500, 2500),
        ("1e999", 10**999, 10**999),
        (r"2\frac{1}{2}", 2.5, 2.5),
        ("12 m^2", 12, 12),
        ("1/0", 1, 1),
    ],
)
def test_numbers(text, first, last):
    assert (answers.first_number(text), answers.last_number(text)) == (first, last)


def test_the_tagged_answer_is_the_first_block_without_the_space_around_it():
    assert answers.tagged_answer("x<answer> 5 \n</answer><answer>6</answer>") == "5"
    assert answers.tagged_answer("<answer>5") is None
    assert answers.tagged_answer("<answer></answer>") is None
    assert answers.tagged_answer("<answer></answer> or <answer>6</answer>") is None, "tags are no part of an answer"
    assert answers.tagged_answer("<answer>" * 20_000) is None, "and that at once"


@pytest.mark.parametrize(
    ("found", "truth", "same", "near"),
    [
        (5, 5, True, True),
        (0.1 + 0.2, 0.3, True, True),
        (Fraction("0.083333"), Fraction(1, 12), True, True),
        (5.5, 5, False, True),
        (4.5, 5, False, True),
        (5.6, 5, False, False),
        (0, 0, True, True),
        (0.01, 0, False, False),
        (-100, -95, False, True),
        (100, -100, False, False),
        (999_999, 1_000_000, False, True),
        (10**999, 5, False, False),
        (None, 5, False, False),
        (5, None, False, False),
    ],
)
def test_same_and_near(found, truth, same, near):
    assert answers.same_number(found, truth) is same
    assert answers.near(found, truth) is near


@pytest.mark.parametrize(
    ("found", "truth", "same"),
    [
        ("18", "18", True),
        ("18 dollars", "18", True),
        ("$18.00", "18", True),
        ("18", "18 km", True),
        ("18 km.", "18 km", True),
        ("18 miles", "18 km", False),
        ("19", "18", False),
        ("Paris.", "paris", True),
        ("London", "Paris", False),
        ("London 2024", "Paris 2024", False),
        ("0.5", "1/2", True),
        ("no number", "18", False),
        (r"\boxed{18}", "18", True),
        ("(2,3)", "(2, 3)", True),
        ("(2, 5)", "(2, 3)", False),
        ("2", "(2, 3)", False),
        ("9:45 am", "9:45", True),
        ("9:50", "9:45", False),
        ("5 apples and 4 pears", "5 apples and 3 pears", False),
        ("18 of 20", "18", True),
        ("12", "12 m^2", True),
        ("10^5", "10^6", False),
        ("12,193,263,113,702,179,522,618", "12193263113702179522619", False),
        ("9" * 5000, "8" * 5000, False),
        ("9" * 5000 + "x", "8" * 5000 + "x", False),
        ("0", "1.6e-19", False),
        ("1.6000e-19", "1.6e-19", True),
        ("300000", r"3 \times 10^5", True),
        ("2,000,000", "2 million", True),
        ("2", "2 million", False),
        ("45 degrees", r"45^\circ", True),
        (r"5\,\text{cm}", "5 cm", True),
        ("**5**", "5", True),
        ("=> 5", "5", True),
        ("5 = 2+3", "5", True),
        ("18 (15+3)", "18", True),
        ("Answer - 5", "5", True),
        ("of kiln 5", "5", True),
        (r"x \geq 2", "x >= 2", True),
        ("3/4/5", "3/4", False),
        ("1/0", "1", False),
    ],
)
def test_an_answer_states_the_truth(found, truth, same):
    assert answers.same_answer(found, truth) is same


@pytest.mark.parametrize(
    "minus_five",
    ["- 5", "–5", "-$5", "-$ 5", "-¥5", "-₹5", "-R$5", "-USD 5", "-(5)", "-{5}", "minus 5", "negative 5", "x = - 5", "(-5)"],
)
def test_a_minus_is_seen_however_it_is_written(minus_five):
    assert answers.first_number(minus_five) == -5
    assert answers.same_answer(minus_five, "-5")
    assert answers.same_answer("-5", minus_five)
    assert not answers.same_answer("5", minus_five)
    assert not answers.same_answer(minus_five, "5")


EXPRESSIONS = [
    r"\sqrt{3}",
    r"\frac{\pi}{4}",
    r"2\pi",
    "3x",
    "5k",
    "|-2|",
    "101_2",
    "x<2",
    "x >= 2",
    "(1,2]",
    "10^5",
    "3+4i",
    "5-1",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_number_in_an_expression_is_not_its_value(expression):
    for number in {answers.first_number(expression), answers.last_number(expression)}:
        assert not answers.same_answer(str(number), expression)
        assert not answers.same_answer(expression, str(number))
    assert answers.only_number(expression) is None
    assert [other for other in EXPRESSIONS if answers.same_answer(other, expression)] == [expression]


@pytest.mark.parametrize(
    ("found", "truth"),
    [
        (r"\pi/4", r"\frac{\pi}{4}"),
        ("2 pi", r"2\pi"),
        (r"2 \cdot\pi", r"2\pi"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x < 2.0", "x<2"),
        (r"$2\sqrt{3}$", r"2\sqrt{3}"),
        (r"\(3x+2\)", "3x+2"),
        ("The score was 10-3.", "10-3"),
        ("5-7 days", "5-7"),
        ("$[2, 5)$", "[2,5)"),
    ],
)
def test_an_expression_may_be_spelt_in_other_ways(found, truth):
    assert answers.same_answer(found, truth)


EIGHTEEN = [
    *("18\n\n- 9 eggs at $2", "18\n\n* eggs: 9", "18\n> check", "- 18 dollars", "Total:\n- 18", "Answer: – 18", "-\n18"),
    *("Total (in dollars) - 18", "Part a - 18", "Janet's - 18", "18 - a day", "18 + a tip", "$18/h", "18/day", "18 km/h"),
    *(
        "| 18 |",
        "| Total | $18 |",
        "<b>18</b>",
        "18<br/>",
        "> 18",
        "18 *apples*",
        "18 *(rounded)*",
        "18 <- answer",
        "___\n18",
    ),
    *("18x more", "18y/o", "18p", "18^{th}", "18!", "(a) 18 apples [total]", "≈ 18", "18+ apples", "18 = 9*2", r"\(18\)"),
    *("18 (eighteen)", "18-year-old", "18th", r"2+16 \rightarrow 18", "18 – that is all"),
]


@pytest.mark.parametrize("found", EIGHTEEN)
def test_what_stands_around_a_number_in_a_sentence_or_a_list_is_no_expression(found):
    assert answers.same_answer(found, "18")


@pytest.mark.parametrize("found", ["18 x 2", "$18 - $2", "18²", "18*2", "18 × 2", "- 18", "18-9"])
def test_a_number_that_is_reckoned_with_is_not_the_answer(found):
    assert not answers.same_answer(found, "18")


@pytest.mark.parametrize("hostile", ["-", "(", "- ", "5 ", "5-", "=5", "5+5=", "negative ", "sqrt(", "5 * ", "$"])
def test_reading_takes_no_longer_than_a_text_is_long(hostile):
    assert answers.same_answer(hostile * 20_000, "7") is False


@pytest.mark.parametrize(
    ("found", "truth"),
    [
        ("13x", "3x"),
        ("3x+1", "3x"),
        ("10-31", "10-3"),
        (r"\sqrt{3x}", r"\sqrt{3}x"),
        (r"\sqrt{2}+1", r"\sqrt{2+1}"),
        ("x+1/2", r"\frac{x+1}{2}"),
    ],
)
def test_an_expression_is_not_found_in_another(found, truth):
    assert not answers.same_answer(found, truth)
