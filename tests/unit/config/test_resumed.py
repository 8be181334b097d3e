from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.resumed import FIXED, anchored, resumed
from agent_tunix.config.schema import Config
from agent_tunix.errors import UserError
from agent_tunix.training.loading import saved_config

OTHER = {
    "seed": "43",
    "model.lora_alpha": "1",
    "model.use_rslora": "true",
    "model.use_dora": "true",
    "model.adapter": "adapters/other",
    "optimizer.optimizer_name": "schedule_free_adamw",
    "training.init_from": "runs/other",
    "training.init_step": "7",
    "training.method": "supervised",
    "training.train_fraction": "0.5",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("run")
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        OmegaConf.save(compose("config", ["+experiment=quick_test"]), folder / "config.yaml")
    return str(folder)


def test_single_values_are_changed_and_all_others_kept(run):
    cfg, origin = resumed(run, [f"training.resume={run}", "++training.num_epochs=2", "dry_run=true"])
    assert (cfg.training.num_epochs, cfg.training.resume, cfg.dry_run, origin.run) == (2, None, True, Path(run))


def test_what_is_given_anew_is_the_users_own_and_nothing_else(run):
    """A dictionary is merged into what is there, so it speaks for the functions that it has alone."""
    _, origin = resumed(run, ["++reward.functions.mine=my.reward", "reward.functions={number: my.number}"])
    given = {name: origin.saved_in(f"reward.functions.{name}", "my.f") is None for name in ("mine", "number", "answer")}
    assert given == {"mine": True, "number": True, "answer": False}
    assert origin.saved_in("reward.functions.answer", "my.f") == Path(run) / "config.yaml"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("Say: yes", "Say: yes"), ("", ""), (r"a\,b", "a,b"), (r'"(\d+)"', r"(\d+)"), ("'a, b'", "a, b"), ("@x", "@x")],
)
def test_a_value_is_read_as_hydra_reads_it(run, written, meant):
    assert resumed(run, [f"++data.system_prompt={written}"])[0].data.system_prompt == meant


def test_a_text_that_looks_like_a_reference_stays_one_and_a_users_own_reference_is_looked_up(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_PROMPT", "mine")
    config = OmegaConf.load(Path(run) / "config.yaml")
    config.data.system_prompt = r"\${oc.env:MY_PROMPT}"
    OmegaConf.save(config, tmp_path / "config.yaml")
    assert resumed(str(tmp_path), [])[0].data.system_prompt == "${oc.env:MY_PROMPT}"
    assert resumed(str(tmp_path), ["data.system_prompt='${oc.env:MY_PROMPT}'"])[0].data.system_prompt == "mine"


def test_a_reward_function_may_be_left_out_from_here_on(run):
    cfg, _ = resumed(run, ["~reward.functions.number", "~reward.weights.number"])
    assert set(cfg.reward.functions) == set(cfg.reward.weights) == {"format_exact", "format_approximate", "answer"}


@pytest.mark.parametrize("key", FIXED)
def test_what_would_make_another_run_of_it_is_refused(run, key):
    with pytest.raises(UserError, match=f"{key}={OTHER[key]}: a resumed run keeps {key}="):
        resumed(run, [f"++{key}={OTHER[key]}"])
    own = OmegaConf.select(OmegaConf.load(Path(run) / "config.yaml"), key)
    resumed(run, [f"{key}={'null' if own is None else own}"])


def test_the_folder_that_a_run_began_from_may_have_been_moved(run, tmp_path):
    config = OmegaConf.load(Path(run) / "config.yaml")
    OmegaConf.update(config, "training.init_from", "runs/first")
    OmegaConf.save(config, tmp_path / "config.yaml")
    assert resumed(str(tmp_path), ["training.init_from=kept/first"])[0].training.init_from == "kept/first"
    with pytest.raises(UserError, match=r"keeps training\.init_from=runs/first"):
        resumed(str(tmp_path), ["training.init_from=null"])


def test_what_an_earlier_version_did_not_know_of_was_off(run, tmp_path):
    config = OmegaConf.load(Path(run) / "config.yaml")
    del config.model["use_dora"]
    OmegaConf.save(config, tmp_path / "config.yaml")
    assert resumed(str(tmp_path), ["model.use_dora=false"])[0].model.use_dora is False
    with pytest.raises(UserError, match=r"model\.use_dora=true: a resumed run keeps"):
        resumed(str(tmp_path), ["model.use_dora=true"])


def test_groups_and_folders_without_a_run_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="keeps its own groups"):
        resumed(run, ["optimizer=lion"])
    with pytest.raises(UserError, match=r"this is not the folder of a run, there is no .*config\.yaml"):
        resumed(str(tmp_path), [])


def test_a_run_that_starts_from_another_says_from_which_step_and_over_what_base(run):
    cfg = resumed(run, [])[0]
    begun = cfg.model_copy(update={"training": cfg.training.model_copy(update={"init_from": run})})
    begun = begun.model_copy(update={"model": cfg.model.model_copy(update={"weights": "another/base"})})
    (Path(run) / "checkpoints" / "0").mkdir(parents=True)
    assert validate(anchored(begun).model_dump(mode="json"), Config).training.init_step == 0, "all that a rollback may leave"
    for step in ("9", "10", "10.orbax-checkpoint-tmp"):
        (Path(run) / "checkpoints" / step).mkdir()
    found = anchored(begun)
    assert (found.training.init_step, found.model.weights) == (10, cfg.model.weights)
    (Path(run) / "checkpoints" / "11").mkdir()
    assert anchored(found) == found
    assert anchored(cfg) == cfg
    with pytest.raises(UserError, match="a step of which run"):
        anchored(cfg.model_copy(update={"training": cfg.training.model_copy(update={"init_step": 3})}))


def test_a_configuration_that_was_cut_short_is_named_by_its_file(run, tmp_path):
    """Its faults are not in what was typed, and nobody looks for them in a folder of results."""
    text = (Path(run) / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text[: text.index("reward:")])
    file = re.escape(str(tmp_path / "config.yaml"))
    with pytest.raises(
        UserError, match=rf"faults in the configuration of {file} and the command line:\n(.*\n)*  reward: missing"
    ):
        resumed(str(tmp_path), [])
    with pytest.raises(UserError, match=rf"faults in the configuration of {file}:\n(.*\n)*  reward: missing"):
        saved_config(str(tmp_path), "run")


def test_a_relative_folder_that_is_not_there_is_told_in_full(tmp_path, monkeypatch):
    """A run keeps the folder that it began from as it was given, and may be evaluated from elsewhere."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(f"there is no {tmp_path / 'warm' / 'config.yaml'}")):
        saved_config("warm", "training.init_from")


@pytest.mark.parametrize(("index", "job"), [("sweep.json", "1"), ("tune.json", "5-finalists/0")])
def test_of_a_sweep_and_of_a_search_a_run_is_to_be_given(index, job, tmp_path):
    (tmp_path / index).touch()
    for name in ("0" if index == "sweep.json" else "1-coarse-rate/0", job):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    with pytest.raises(UserError, match=re.escape(f"holds many runs; give one of them, as in run={tmp_path / job}.")):
        saved_config(str(tmp_path), "run")
    with pytest.raises(UserError, match=r"holds many runs(.|\n)*a sweep or a search with the same command and folder"):
        resumed(str(tmp_path), [f"training.resume={tmp_path}"])
