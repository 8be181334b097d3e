from __future__ import annotations

from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine import processes
from agent_tunix.models.sources import find_checkpoint
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.workflows.examples import load_examples


def test_processes_are_asked_whether_they_have_read_the_same(monkeypatch):
    asked = []
    monkeypatch.setattr(processes, "refuse_differences", lambda own: asked.append(own()))
    for seed in (1, 1, 2):
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            cfg = validate(compose("config", ["+experiment=quick_test", f"seed={seed}"]), Config)
        load_examples(cfg, "train", 8, load_tokenizer(find_checkpoint(cfg.model.weights)), print)
    assert asked[0].keys() == {"the rows of their train split"}
    assert asked[0] == asked[1] != asked[2]
