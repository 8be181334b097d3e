"""The completions shown go from early to late, and stay on one prompt where it came again."""

from __future__ import annotations

import json

from agent_tunix.lab.report.samples import COLUMNS, columns, shortened


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
