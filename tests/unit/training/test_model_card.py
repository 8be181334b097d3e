"""The card of an exported model, read by huggingface_hub and compared with the records of the run."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import ModelCard

from agent_tunix.config.load import read_saved, validate
from agent_tunix.config.schema import Config, ExportConfig
from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.training.model_card import licence_of, model_card


def export_of(run, **given) -> ExportConfig:
    return ExportConfig(**{"run": str(run), "step": None, "format": "peft", "output": None, "dtype": "float32", **given})


def card_of(run, step: int, **given) -> ModelCard:
    return ModelCard(model_card(export_of(run, **given), validate(read_saved(run / "config.yaml"), Config), step))


@pytest.fixture
def run(write_run, tmp_path):
    of_hub = {"model__weights": "google/gemma-3-270m-it@main", "data__source": "table", "data__path": "openai/gsm8k"}
    folder = write_run(tmp_path / "demo", **of_hub, training__num_epochs=1)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"overrides": ["model=gemma3_270m", "data.path=a b"]}))
    test = {"step": 24, "split": "test", "n": 1319, "accuracy": 0.5, "num_passes": 1, "inference/temperature": 0.0}
    with open(folder / "evals.jsonl", "a") as file:
        file.write(json.dumps(test) + "\n" + json.dumps({**test, "step": 0, "accuracy": 0.25}) + "\n")
    return folder


def test_the_metadata_are_the_hubs(run):
    data = card_of(run, 24).data
    assert (data.base_model, data.license, data.library_name) == ("google/gemma-3-270m-it", "gemma", "peft")
    assert (data.datasets, data.pipeline_tag) == (["openai/gsm8k"], "text-generation")
    assert {"agent-tunix", "grpo", "lora"} <= set(data.tags)
    merged = card_of(run, 24, format="merged", push_to="me/maths")
    assert (merged.data.library_name, merged.data.to_dict()["base_model_relation"]) == ("transformers", "finetune")
    assert 'AutoModelForCausalLM.from_pretrained("me/maths")' in merged.text
    assert "# maths\n" in merged.text


def test_numbers_are_those_of_the_run_with_their_intervals(run):
    text = card_of(run, 24).text
    low, high = Accuracy(24, 0.8, 200).interval
    assert f"| 40.0 % (33.5 to 46.9) | 80.0 % ({100 * low:.1f} to {100 * high:.1f}) |" in text
    row = next(line for line in text.splitlines() if line.startswith("| test, openai/gsm8k") and "greedy" in line)
    assert "| 1319 | accuracy | 25.0 % (22.7 to 27.4) | 50.0 % (47.3 to 52.7) |" in row
    curve = [line for line in text.splitlines() if line.count("|") == 5 and line[2].isdigit()]
    assert [line.split(" | ")[:2] for line in curve] == [["| 0", "40.0 %"], ["| 12", "60.0 %"], ["| 24", "80.0 %"]]
    rewards = [0.4 + 0.6 * step / 24 for step in range(13, 25)]
    assert f"| {sum(rewards) / 12:.3g} |" in curve[-1]
    assert "agent-tunix train model=gemma3_270m 'data.path=a b'" in text
    assert "published under the licence `gemma`" in text


def test_a_step_that_was_not_evaluated_says_so_and_ends_the_curve(run):
    text = card_of(run, 13).text
    assert "The run was not evaluated at step 13." in text
    assert "| 24 |" not in text


def test_of_a_base_that_is_not_of_the_hub_nothing_is_claimed(write_run, tmp_path):
    run = write_run(tmp_path / "demo", data__path=None)
    (run / "summary.json").unlink()
    card = card_of(run, 24)
    assert not {"base_model", "license", "datasets", "base_model_relation"} & card.data.to_dict().keys()
    assert "Licence" not in card.text
    assert str(tmp_path) not in card.text
    assert "agent-tunix train +experiment=quick_test" in card.text, "the fewest overrides that lead to it"


@pytest.mark.parametrize(
    ("base", "licence"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "apache-2.0"),
        ("Qwen/Qwen2.5-3B-Instruct", None),  # which is under another than its siblings
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3.2"),
        ("someone/gemma-3-270m-it", None),
        (None, None),
    ],
)
def test_licences_are_those_of_the_publishers_own_repositories(base, licence):
    assert licence_of(base) == licence
