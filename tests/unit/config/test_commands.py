from __future__ import annotations

import os
import shutil

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from agent_tunix.config import commands, load
from agent_tunix.config.commands import own_overrides, value_text
from agent_tunix.config.load import config_folder


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=4,
    )
)
def test_a_value_of_any_kind_is_written_as_hydra_reads_it(value):
    assert OverridesParser.create().parse_override(f"key={value_text(value)}").value() == value


TEXTS = ["plain", "a b,c", "it's", "", "null", "1e-3", "(q|k)_proj", "back\\slash", "back\\\n", "runs/größe"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_as_it_was(text, config):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose("config", [f"++data.system_prompt={value_text(text)}"])
    assert composed.data.system_prompt == text


def test_a_name_that_is_a_path_names_no_file_of_a_group(config, tmp_path, monkeypatch):
    """A run's configuration may be a stranger's, and so may the file, which would be composed and looked up for."""
    (tmp_path / "theirs.yaml").write_text("learning_rate: ${oc.env:HF_TOKEN}\n")
    place = os.path.relpath(tmp_path / "theirs", config_folder() / "optimizer")
    assert (config_folder() / "optimizer" / f"{place}.yaml").is_file()
    found = own_overrides(config | {"optimizer": config["optimizer"] | {"optimizer_name": place}})
    assert f"optimizer.optimizer_name={value_text(place)}" in found
    assert not any(override.startswith("optimizer=") for override in found)


def test_overrides_are_found_inside_a_job_of_hydra_too(config):
    commands._composed.cache_clear()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        assert own_overrides(config) == ["+experiment=quick_test"]
        assert compose("config", ["+experiment=quick_test"]).seed == config["seed"]


GIVEN = (
    [],
    ["+experiment=control", "seed=7"],
    ["data=reasoning_gym", "data.task=gcd"],
    ["data=verifiers", "data.task=pears"],
    ["reward=environment", "environment.name=my_module.MyWorld"],
    ["+experiment=small_gpu", "optimizer=lion"],
    ["optimizer.learning_rate=1e-5", "training.micro_batch_size=8"],
    ["+experiment=quick_test", "grpo.beta=0.08", "grpo.num_generations=4", "training.num_batches=null", "model=gemma3_1b"],
)


@pytest.mark.parametrize("given", GIVEN, ids=" ".join)
def test_no_experiment_leads_there_in_fewer_words(given):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", given), resolve=True)
    found = own_overrides(config)
    names = [path.stem for path in (config_folder() / "experiment").glob("*.yaml")]
    ways = [commands._overrides_from(start, config) for start in ([], *([f"+experiment={name}"] for name in names))]
    assert len(found) == min(map(len, ways))
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        assert OmegaConf.to_container(compose("config", found), resolve=True) == config


@pytest.mark.parametrize(
    "broken", [b"a: [", b"\xff", b"defaults: [/nowhere: x]\nseed: 7"], ids=["YAML", "encoding", "defaults"]
)
def test_an_experiment_that_cannot_be_read_is_no_way(broken, config, tmp_path, monkeypatch):
    shutil.copytree(config_folder(), tmp_path / "conf")
    (tmp_path / "conf/experiment/quick_test.yaml").write_bytes(broken)
    for module in (commands, load):
        monkeypatch.setattr(module, "config_folder", lambda: tmp_path / "conf")
    commands._composed.cache_clear()
    found = own_overrides(config)
    commands._composed.cache_clear()
    assert "model=gemma3_tiny" in found
    assert "+experiment=quick_test" not in found


def test_a_file_of_the_users_own_that_comes_first_is_counted_in(config, tmp_path, monkeypatch):
    """Pasted where it was printed, the command gives the run's configuration and not that of the user's file."""
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    shipped = (config_folder() / "optimizer" / "adamw.yaml").read_text()
    decay = f"weight_decay: {config['optimizer']['weight_decay']}"
    assert decay in shipped
    (tmp_path / "conf" / "optimizer" / "adamw.yaml").write_text(shipped.replace(decay, "weight_decay: 0.05"))
    assert not any("weight_decay" in override for override in own_overrides(config))
    monkeypatch.chdir(tmp_path)
    assert f"optimizer.weight_decay={config['optimizer']['weight_decay']}" in own_overrides(config)


def test_a_file_of_the_users_own_that_cannot_be_read_is_passed_over(config, tmp_path, monkeypatch):
    """Rather than all of the run's own overrides."""
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer" / "adamw.yaml").write_text("x: [broken")
    monkeypatch.chdir(tmp_path)
    assert own_overrides(config) == ["+experiment=quick_test"]


@pytest.mark.parametrize("text", ["${x}", "a \\${oc.env:HOME}", "it's ${x} \\\\${y}\\", "~", "\\"])
def test_a_text_is_what_hydra_makes_of_it(text):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose("config", [f"data.system_prompt={value_text(text)}"])
        assert OmegaConf.to_container(composed, resolve=True)["data"]["system_prompt"] == text
