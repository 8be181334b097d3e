"""The completions shown go from early to late, and stay on one prompt where it came again."""

from __future__ import annotations

import json

import pytest

from agent_tunix.lab.report.samples import COLUMNS, Turn, columns, shortened


def write(folder, records) -> None:
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_from_the_first_step_to_the_last(tmp_path):
    write(tmp_path, [{"step": i, "prompt": f"p{i}", "completion": f"c{i}"} for i in range(1, 101)])
    steps = [column.step for column in columns(tmp_path)]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) == COLUMNS
    assert steps == sorted(steps)


def test_a_prompt_that_comes_again_is_followed(tmp_path):
    prompts = ["a", "same", "b", "same", "c", "same", "d"]
    write(tmp_path, [{"step": i, "prompt": p, "completion": "x"} for i, p in enumerate(prompts, start=1)])
    assert [(column.step, column.prompt) for column in columns(tmp_path)] == [(2, "same"), (4, "same"), (6, "same")]


def test_all_completions_of_a_step_stand_together_with_their_rewards(tmp_path):
    write(
        tmp_path,
        [
            {"step": 1, "prompt": "p", "answer": 5, "completion": "good", "reward": 1.5, "rewards": {"answer": 1}},
            {"step": 1, "prompt": "p", "answer": 5, "completion": "bad", "reward": None, "rewards": {"answer": None}},
        ],
    )
    (column,) = columns(tmp_path)
    assert column.answer == "5"
    assert [one.text for one in column.completions] == ["good", "bad"]
    assert [one.reward for one in column.completions] == [1.5, None]
    assert [one.rewards for one in column.completions] == [{"answer": 1.0}, {}]


TRANSCRIPT = [
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": "<calculator>1+1</calculator>",
        "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}],
    },
    {"role": "tool", "name": "calculator", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


def test_an_episode_is_told_turn_by_turn(tmp_path):
    episode = {"step": 1, "prompt": "1+1?", "completion": "It is 2.", "transcript": TRANSCRIPT}
    write(tmp_path, [episode, episode | {"ending": "cut", "fault": "it was too long"}])
    one, other = columns(tmp_path)[0].completions
    assert one.turns == [
        Turn("assistant", "<calculator>1+1</calculator>", ["calculator(expression='1+1')"]),
        Turn("calculator", "2", []),
        Turn("assistant", "It is 2.", []),
    ]
    assert (one.ending, other.ending) == ("", "cut: it was too long")
    (short,) = shortened(columns(tmp_path), 40)
    assert short.completions[0].turns[0].text == "<calculato ... (18 more characters)"


@pytest.mark.parametrize(
    "transcript",
    [1, {}, [1], [{"role": "assistant"}], [{"role": "assistant", "tool_calls": 1}]]
    + [[{"role": "assistant", "content": 1, "tool_calls": [call]}] for call in (1, {}, {"function": 1}, {"function": {}})],
)
def test_a_transcript_of_any_shape_is_read(tmp_path, transcript):
    write(tmp_path, [{"step": 1, "completion": "x", "transcript": transcript}])
    assert len(columns(tmp_path)[0].completions[0].turns) <= 1


def test_a_call_that_could_not_be_read_says_so(tmp_path):
    wrong = {"type": "function", "function": {"name": "", "arguments": {}, "error": "error: no JSON"}}
    write(tmp_path, [{"step": 1, "completion": "x", "transcript": [TRANSCRIPT[1] | {"tool_calls": [wrong]}]}])
    assert columns(tmp_path)[0].completions[0].turns[0].calls == ["error: no JSON"]


def test_line_separators_of_unicode_do_not_cut_a_completion(tmp_path):
    text = "one\u2028two\x85three"
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 1, "completion": text}, ensure_ascii=False) + "\n")
    assert columns(tmp_path)[0].completions[0].text == text


def test_no_file_or_an_empty_one_gives_nothing(tmp_path):
    assert columns(tmp_path) == []
    write(tmp_path, [{"step": None, "completion": "x"}, {"step": 1}, {"step": 2, "completion": 3}])
    assert columns(tmp_path) == []


def test_long_texts_are_cut_and_say_so(tmp_path):
    write(tmp_path, [{"step": 1, "prompt": "p", "completion": "x" * 500}])
    (short,) = shortened(columns(tmp_path), 100)
    assert short.completions[0].text == "x" * 100 + " ... (400 more characters)"
    assert short.prompt == "p"
