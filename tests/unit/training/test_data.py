from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, config_text, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine import distributed
from agent_tunix.environments.arithmetic import how_many
from agent_tunix.errors import UserError
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.training.data import load_examples, load_splits, load_task, warn_of_trained_on


def test_processes_are_asked_whether_they_have_read_the_same(monkeypatch):
    asked = []
    monkeypatch.setattr(distributed, "refuse_differences", lambda own: asked.append(own()))
    for seed in (1, 1, 2):
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            cfg = validate(compose("config", ["+experiment=quick_test", f"seed={seed}"]), Config)
        load_examples(cfg, "train", 8, load_tokenizer(find_checkpoint(cfg.model.weights)), print)
    assert asked[0].keys() == {"the rows of their train split"}
    assert asked[0] == asked[1] != asked[2]


def test_a_question_that_is_trained_on_and_validated_with_is_told(tmp_path):
    """Of ten rows one is for validation; where all ask the same, it is held out from nothing."""
    for name, same in (("all", True), ("none", False)):
        rows = [{"question": "How many?" if same else f"How many {n}?", "answer": n} for n in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            path = f"data.path={tmp_path / name}.jsonl"
            cfg = validate(compose("config", ["data=jsonl", path, "data.num_examples=5"]), Config)
        said: list[str] = []
        splits = load_splits(cfg, said.append)
        assert {split: len(own) for split, own in splits.items()} == {"train": 5, "validation": 1}
        assert [line.startswith("warning: 1 of 1 validation questions are trained on too") for line in said] == [True] * same


def of_folder(folder, **splits: list[str]) -> Config:
    """A run on a folder that has these questions in its splits."""
    for split, questions in splits.items():
        rows = [{"question": question, "answer": 1} for question in questions]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose("config", ["data=jsonl", f"data.path={folder}"]), Config)


def test_a_split_that_is_not_read_is_named(tmp_path):
    """Held-out problems are cut from the train split."""
    said: list[str] = []
    load_splits(
        of_folder(tmp_path, train=[f"How many {n}?" for n in range(10)], validation=["What?"], test=["Why?"]), said.append
    )
    assert said == [
        f"validation.jsonl of {tmp_path} is not read: held-out problems are cut from the train split "
        "(training.train_fraction=0.9)."
    ]


def test_held_out_questions_that_an_earlier_run_was_trained_on_are_told_of(tmp_path):
    """As those of a warm start are that held out fewer."""
    (tmp_path / "warm").mkdir()
    earlier = of_folder(tmp_path, train=[f"How many {n}?" for n in range(100)])
    kept = earlier.training.model_copy(update={"train_fraction": 0.97})
    (tmp_path / "warm" / "config.yaml").write_text(config_text(earlier.model_copy(update={"training": kept})))
    following = earlier.training.model_copy(update={"init_from": str(tmp_path / "warm")})
    said: list[str] = []
    rows = load_splits(cfg := earlier.model_copy(update={"training": following}), said.append)["validation"]
    assert [
        line.startswith("warning: 7 of 10 validation questions are among those that training.init_from=") for line in said
    ]
    assert len(said) == 1
    warn_of_trained_on(cfg, rows, said.append)
    assert said[1] == "warning: 7 of 10 questions are among those that the run was trained on."


def test_no_more_problems_are_held_out_than_there_are():
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = validate(compose("config", ["+experiment=quick_test", "evaluation.num_examples=1000000"]), Config)
    assert len(load_splits(cfg, print)["validation"]) == how_many("validation")


def questions(folder, name: str, asked: list[str]) -> str:
    (folder / name).write_text("".join(f"{json.dumps({'question': one, 'answer': '#7'})}\n" for one in asked))
    return str(folder / name)


def with_sets(*overrides: str) -> Config:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose("config", ["+experiment=quick_test", "data.num_examples=50", *overrides]), Config)


def test_a_further_set_is_its_test_split_or_all_of_it_read_by_its_own_keys(tmp_path):
    """A path alone makes a table of it, also where the run's own problems are generated."""
    tokenizer, said = load_tokenizer(find_checkpoint("package:tiny")), list[str]()
    own = [example.question for example in load_task(with_sets(), tokenizer, print).validation[:6]]
    whole = questions(tmp_path, "rows.jsonl", own)
    (tmp_path / "split").mkdir()
    questions(tmp_path / "split", "train.jsonl", own)
    questions(tmp_path / "split", "test.jsonl", own[:2])
    sets = {
        "whole.path": whole,
        "whole.answer_pattern": "'#(.)'",
        "split.path": tmp_path / "split",
        "made.source": "arithmetic",
    }
    cfg = with_sets(*(f"+evaluation.sets.{key}={value}" for key, value in sets.items()), "evaluation.num_examples=5")
    task = load_task(cfg, tokenizer, said.append)
    assert {name: len(examples) for name, examples in task.sets.items()} == {"whole": 5, "split": 2, "made": 5}
    assert {example.answer for example in task.sets["whole"]} == {"7"}
    assert [example.answer for example in task.sets["split"]] == ["#7", "#7"]
    assert not set(task.sets["made"]) & set(task.validation), "generated problems have a test split"
    alone = load_task(with_sets("evaluation.num_examples=5"), tokenizer, said.append)
    assert (task.train, task.validation, task.prompt_width) == (alone.train, alone.validation, alone.prompt_width)
    assert said == []


def test_a_longer_prompt_of_a_further_set_widens_no_other(tmp_path):
    tokenizer = load_tokenizer(find_checkpoint("package:tiny"))
    own = load_task(with_sets(), tokenizer, print)
    long = questions(tmp_path, "long.jsonl", [f"{own.validation[0].question} {own.validation[1].question}"])
    short = questions(tmp_path, "short.jsonl", [min((e.question for e in own.train), key=len)])
    sets = [f"+evaluation.sets.long.path={long}", f"+evaluation.sets.short.path={short}"]
    task = load_task(with_sets(*sets, "generation.max_prompt_length=64"), tokenizer, print)
    assert task.prompt_width == own.prompt_width == task.width_of("short") < task.width_of("long")


def test_questions_of_a_further_set_that_are_trained_on_are_told_of_and_its_faults_name_it(tmp_path):
    tokenizer, said = load_tokenizer(find_checkpoint("package:tiny")), list[str]()
    own = load_task(with_sets(), tokenizer, print)
    path = questions(tmp_path, "rows.jsonl", [own.train[0].question, own.validation[0].question])
    load_task(with_sets(f"+evaluation.sets.seen.path={path}"), tokenizer, said.append)
    assert said == ["warning: 1 of 2 questions of evaluation.sets.seen are trained on."]
    for given, fault in {"gone.jsonl": "there is no such file or folder", path: "no field 'q'"}.items():
        cfg = with_sets(f"+evaluation.sets.bad.path={given}", "+evaluation.sets.bad.question_field=q")
        with pytest.raises(UserError, match=f"evaluation.sets.bad: .*{fault}"):
            load_task(cfg, tokenizer, print)


def test_questions_of_the_test_split_that_were_trained_on_are_told_of(tmp_path):
    cfg = of_folder(tmp_path, train=["How many?"] * 10, test=["How many?", "What?"])
    said: list[str] = []
    asked = [SimpleNamespace(question=question) for question in ("How many?", "What?")]
    warn_of_trained_on(cfg, asked, said.append)
    assert said == ["warning: 1 of 2 questions are among those that the run was trained on."]
    (tmp_path / "train.jsonl").unlink()
    warn_of_trained_on(cfg, asked, said.append)
    assert said[1].startswith("warning: what the run was trained on cannot be read here")


def test_a_long_text_is_not_shown_whole(tmp_path):
    tokenizer = load_tokenizer(find_checkpoint("package:tiny"))
    with pytest.raises(UserError) as refused:
        load_examples(of_folder(tmp_path, train=["blah " * 20_000] * 10), "train", None, tokenizer, print)
    assert len(str(refused.value)) < 600


def asked_of(folder, *overrides: str) -> tuple[str, list[str]]:
    """The first prompt of the demo's data, and what is said, with the tokenizer of a folder."""
    said: list[str] = []
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = validate(compose("config", ["+experiment=quick_test", "evaluation.num_examples=2", *overrides]), Config)
    tokenizer = load_tokenizer(folder)
    task = load_task(cfg, tokenizer, said.append)
    return tokenizer._backend.decode(task.train[0].prompt_ids), said


def test_the_checkpoints_own_template_is_told_whether_to_think(tmp_path):
    for file in find_checkpoint("package:tiny").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    template = "{{ messages[0].content }}{% if enable_thinking is defined %}{{ '=' if enable_thinking else '-' }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    (plain, said), (thinking, _), (not_thinking, _) = (
        asked_of(tmp_path, f"data.enable_thinking={switch}") for switch in ("null", "true", "false")
    )
    assert (thinking, not_thinking, said) == (plain + "=", plain + "-", [])


def test_a_model_without_turns_is_asked_in_plain_text_and_that_is_said_once(tmp_path):
    content = (find_checkpoint("package:tiny") / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content.replace("_of_turn>", "_of_words>"))
    prompt, said = asked_of(tmp_path)
    assert not prompt.startswith("<")
    assert len(said) == 1
    assert "without a chat template" in said[0]
