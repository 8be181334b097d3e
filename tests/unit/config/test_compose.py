from __future__ import annotations

from hydra import compose, initialize_config_dir

from agent_tunix.config.compose import compose_config
from agent_tunix.config.load import config_folder


def test_hydra_at_work_is_left_as_it_was():
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        assert compose_config("evaluate", ["seed=7"], [config_folder()]).seed == 7
        assert compose("config", ["seed=8"]).seed == 8


def test_a_folder_that_comes_first_wins(tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "adamw.yaml").write_text("learning_rate: 0.5\n")
    assert compose_config("config", [], [tmp_path, config_folder()]).optimizer == {"learning_rate": 0.5}


def test_hydras_own_section_says_where_a_run_goes():
    composed = compose_config("config", ["hydra.run.dir=here"], [config_folder()], hydra=True)
    assert composed.hydra.run.dir == "here"
    assert "hydra" not in compose_config("config", [], [config_folder()])
