"""Mistakes are made in earnest, by composing; what is advised is tried."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException

from agent_tunix.config.hydra_messages import PARTS, answer, missing_option, unreadable
from agent_tunix.config.load import config_folder, hydra_arguments


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "hydra/launcher/submitit_slurm",
            "hydra/launcher=submitit_slurm needs an extra: pip install 'agent-tunix[submitit]'",
        ),
        ("nope", "There is no configuration named 'nope'; leave --config-name out: each verb has its own."),
        (
            "optimizer/adamx",
            "optimizer=adamx: there is no such option; did you mean adamw?\nThe options of optimizer are: adamw",
        ),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_those_that_are_or_with_its_extra(file, said):
    assert missing_option(MissingConfigException("", file, ["adamw"])) == said


def test_of_several_options_at_once_too_it_is_said_which_there_are():
    with initialize_config_dir(str(config_folder()), version_base="1.3"), pytest.raises(MissingConfigException) as mistake:
        compose("config", ["optimizer=[adamx]"])
    assert "did you mean adamw?" in answer(mistake.value)
    assert "The options of optimizer are: adafactor, adamw, " in answer(mistake.value)


def test_an_override_that_cannot_be_parsed_is_named():
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        for given in ("optimizer.betas=[0.9", "seed", "seed=1,", "seed=,1", "seed=1,,2"):
            with pytest.raises(HydraException) as mistake:
                compose("config", hydra_arguments([given]))
            assert given in unreadable(mistake.value)
            assert "quotes" not in unreadable(mistake.value)
            assert ("without spaces: seed=1,2" in unreadable(mistake.value)) == ("," in given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("reward.functions=[mine]", "reward.functions=[mine] does not fit what is there.\n"),
        ("optimizer.betas.5=0.9", "optimizer.betas.5=0.9 does not fit what is there.\n"),
        ("optimizer.betas.x=1", "invalid literal for int() with base 10: 'x'"),
        ("~optimizer.betas.0", "list indices must be integers"),
        ("optimizer.betas[0]=0.9", "optimizer.betas[0]=0.9\n"),
        ("optimizer.betas.-1=0.9", "optimizer.betas.-1=0.9\n"),
    ],
)
def test_a_part_that_cannot_be_set_is_answered_with_how_parts_are_set(given, named):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        with pytest.raises((HydraException, ValueError, TypeError)) as mistake:
            compose("config", hydra_arguments([given]))
        said = answer(mistake.value)
        assert named in said
        assert "++" not in said
        assert said.endswith(PARTS)
        for advised in ("reward.weights.answer=1", "optimizer.betas=[0.9,0.99]", "optimizer.betas.0=0.9"):
            assert advised in PARTS
            compose("config", hydra_arguments([advised]))


@pytest.mark.parametrize("given", ["grpo=[1,2]", "grpo=[1,[2,[3]]]", "model=[[gemma3_tiny]]"])
def test_a_group_that_is_given_no_name_is_told_what_it_takes(given):
    with initialize_config_dir(str(config_folder()), version_base="1.3"), pytest.raises(Exception) as mistake:  # noqa: PT011  # Hydra's own
        compose("config", hydra_arguments([given]))
    assert answer(mistake.value).startswith("A group, such as model or reward, takes the name of one of its files")


def test_a_sweep_by_hydras_own_key_is_told_how_values_are_swept():
    with initialize_config_dir(str(config_folder()), version_base="1.3"), pytest.raises(AttributeError) as mistake:
        compose("config", hydra_arguments(['hydra.sweeper.params={optimizer.learning_rate:"1e-6,1e-5"}']), True)
    assert answer(mistake.value).startswith("hydra.sweeper.params is for a file of configuration; here values are swept")


def test_a_fault_that_is_not_of_an_override_is_not_taken_for_one():
    with pytest.raises(ValueError, match="literal") as fault:
        int("x")
    assert answer(fault.value) is None


def test_a_text_that_needs_quotes_is_answered_with_the_override_that_works():
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        with pytest.raises(HydraException) as mistake:
            compose("config", hydra_arguments(["model.lora_module_path=(q|v)_proj"]))
        said = unreadable(mistake.value)
        advised = said.partition(" its own: ")[2].strip("'")
        assert compose("config", hydra_arguments([advised])).model.lora_module_path == "(q|v)_proj"
    assert "++" not in said


@pytest.mark.parametrize(
    ("given", "max_batch_size", "kind", "said"),
    [
        ("seed=range(1,5,0)", None, ValueError, "cannot be listed: range() arg 3 must not be zero."),
        ("seed=1,2", 0, AssertionError, "hydra.sweeper.max_batch_size must be at least 1;"),
        ("seed=interval(1,2)", None, HydraException, "hydra/sweeper=optuna"),
    ],
)
def test_what_cannot_be_swept_over_is_told_of(given, max_batch_size, kind, said):
    overrides = OverridesParser.create().parse_overrides([given])
    with pytest.raises(kind) as mistake:
        BasicSweeper.split_arguments(overrides, max_batch_size)
    assert said in answer(mistake.value)


@pytest.mark.parametrize("given", ["seed=choice()", "seed=sort(1,a)"])
def test_a_function_of_the_grammar_is_not_taken_for_a_text_that_needs_quotes(given):
    with initialize_config_dir(str(config_folder()), version_base="1.3"), pytest.raises(HydraException) as mistake:
        compose("config", hydra_arguments([given]))
    assert given in unreadable(mistake.value)
    assert "quotes" not in unreadable(mistake.value)


@pytest.mark.parametrize("files", [{"mine": "mine"}, {"mine": "one", "one": "two", "two": "one"}])
def test_files_that_include_themselves_are_told_of(files, tmp_path):
    (tmp_path / "experiment").mkdir()
    for name, included in files.items():
        text = f"# @package _global_\ndefaults: [{included}, _self_]\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    with initialize_config_dir(str(config_folder()), version_base="1.3"), pytest.raises(RecursionError) as mistake:
        compose("config", [f"hydra.searchpath=[file://{tmp_path}]", "+experiment=mine"])
    assert "lead back to itself" in answer(mistake.value)
    assert answer(RecursionError().with_traceback(None)) is None


@pytest.mark.parametrize("laid_over_it", ["+experiment=quick_test", "++optimizer.learning_rate=1e-5"])
def test_a_file_that_is_a_list_is_named_and_not_what_is_laid_over_it(laid_over_it, tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("- learning_rate: 1e-5\n")
    given = [f"hydra.searchpath=[file://{tmp_path}]", "optimizer=mine", laid_over_it]
    faults = (HydraException, ValueError)
    with initialize_config_dir(str(config_folder()), version_base="1.3"), pytest.raises(faults) as mistake:
        compose("config", given)
    named = answer(mistake.value, ["--config-dir", str(tmp_path), "optimizer=mine"])
    assert named == f"{tmp_path}/optimizer/mine.yaml holds a list, not keys and values."
    assert named == answer(mistake.value, [f"--config-dir={tmp_path}", "optimizer=mine"])
    assert "mine.yaml" not in answer(mistake.value, ["--config-dir", str(tmp_path), "optimizer=adamw"])
