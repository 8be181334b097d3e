"""The examples of CONTRIBUTING.md do what is said of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm import objectives
from agent_tunix.models import architecture
from agent_tunix.models.families import llama

REPOSITORY = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.DOTALL)


def run(name: str, around: dict) -> dict:
    """What a block of the page defines, in the module that it names."""
    (code,) = (block for block in BLOCKS if name in block.splitlines()[0])
    found = {**around, "__name__": "example"}
    exec(compile("from __future__ import annotations\n" + code, "CONTRIBUTING.md", "exec"), found)
    return found


def test_an_objective_is_a_row_of_the_table(monkeypatch):
    monkeypatch.setattr(objectives, "OBJECTIVES", dict(objectives.OBJECTIVES))
    run("objectives.py", vars(objectives))
    row, grpo = objectives.OBJECTIVES["unclipped"], objectives.OBJECTIVES["grpo"]
    ratio, advantage = jnp.array([[1.1, 5.0]]), jnp.array([[2.0]])
    ours, _ = row.surrogate(ratio, ratio, advantage, objectives.Coefficients(1.0))
    clipped, _ = grpo.surrogate(ratio, ratio, advantage, objectives.Coefficients(1.0))
    np.testing.assert_allclose(ours, [[2.2, 10.0]])
    np.testing.assert_allclose(clipped, [[2.2, 2.4]])
    learnt = np.ones((2, 3), bool)
    np.testing.assert_array_equal(row.weights(learnt, 3), grpo.weights(learnt, 3))


@pytest.mark.parametrize("window", [None, 16])
def test_a_family_is_a_record(window):
    modules = ("typing", "functools", "collections.abc", "agent_tunix.models.families.family")
    names = {name: value for module in modules for name, value in vars(importlib.import_module(module)).items()}
    family = run("mistral.py", names | vars(architecture))["FAMILY"]
    config = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "sliding_window": window,
    }
    arch = family.from_config(config)
    assert (arch.family, arch.num_kv_heads, arch.sliding_window == window) == ("mistral", 8, window is not None)
    assert family.from_config(family.to_config(arch)) == arch
    assert family.block is llama.FAMILY.block


def test_the_files_that_it_links_to_are_there():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (REPOSITORY / link).exists(), link
