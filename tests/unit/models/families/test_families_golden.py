"""Every family against transformers' model of it (goldens by scripts/make_goldens.py): padding, windows, scaled RoPE."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.models import transformer
from agent_tunix.models.checkpoints.loading import load_weights, save_weights
from agent_tunix.models.checkpoints.safetensors import read_architecture, read_config
from agent_tunix.models.families.table import FAMILIES
from agent_tunix.types import Prompts

pytestmark = pytest.mark.golden
TOLERANCE = 1e-4
MODELS = ("gemma3", "llama", "llama3", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=MODELS)
def folder(request, goldens):
    """The checkpoint, and beside it or in it the logits."""
    return goldens / "gemma3" if request.param == "gemma3" else goldens / "families" / request.param


@pytest.fixture(scope="module")
def golden(folder):
    return np.load((folder.parent if folder.name == "gemma3" else folder) / "logits.npz")


@pytest.fixture(scope="module")
def model(folder):
    arch = read_architecture(folder)
    return load_weights(folder, arch, jnp.float32), arch


@pytest.fixture(scope="module")
def positions(golden):
    return np.where(golden["mask"], np.cumsum(golden["mask"], axis=1) - 1, -1)


def test_logits_with_padding_beyond_the_window(model, golden, positions):
    weights, arch = model
    if arch.family == "gemma3":
        assert golden["mask"].sum(axis=1).max() > 2 * arch.sliding_window
    hidden, _ = transformer.forward(weights, None, arch, golden["tokens"], positions)
    logits = transformer.unembed(weights, hidden)
    np.testing.assert_allclose(logits[golden["mask"]], golden["logits"][golden["mask"]], atol=TOLERANCE, rtol=0)


def test_logits_with_a_cache_one_token_at_a_time(model, golden, positions):
    weights, arch = model
    tokens, mask = golden["tokens"], golden["mask"]
    split = tokens.shape[1] // 2
    _, prompt = transformer.forward(weights, None, arch, tokens[:, :split], positions[:, :split])
    written = transformer.empty_segment(arch, len(tokens), tokens.shape[1] - split, jnp.float32)
    step = jax.jit(lambda token, position, past: transformer.forward(weights, None, arch, token, position, past))
    for t in range(split, tokens.shape[1]):
        hidden, new = step(tokens[:, t : t + 1], positions[:, t : t + 1], (prompt, written))
        written = transformer.write_segment(written, new, t - split)
        seen = mask[:, t]
        logits = transformer.unembed(weights, hidden[:, 0])
        np.testing.assert_allclose(logits[seen], golden["logits"][seen, t], atol=TOLERANCE, rtol=0)


def test_greedy_continuations(model, golden, positions):
    weights, arch = model
    expected = golden["greedy"]
    never = (arch.vocab_size,)
    sampling = Sampling(None, 1.0, expected.shape[1], 1, never, 0, greedy=True)
    prompts = Prompts(golden["tokens"], positions)
    (drawn,) = sample(weights, (Draw(None, prompts, jax.random.key(0)),), arch=arch, sampling=sampling)
    np.testing.assert_array_equal(drawn.tokens_BC, expected)


def test_every_number_of_the_config_is_read(goldens):
    gemma3 = read_architecture(goldens / "gemma3")
    assert (gemma3.rope_global_factor, gemma3.rope_global_base, gemma3.rope_local_base) == (8.0, 1e6, 1e4)
    assert (gemma3.global_every, gemma3.sliding_window, gemma3.query_scale) == (2, 6, 12**-0.5)
    of_families = {name: read_architecture(goldens / "families" / name) for name in MODELS[1:]}
    assert {name: arch.tied for name, arch in of_families.items()} == {
        "llama": False,
        "llama3": True,
        "qwen2": False,
        "qwen3": True,
    }
    assert {name: len(arch.biases) for name, arch in of_families.items()} == {
        "llama": 7,
        "llama3": 0,
        "qwen2": 3,
        "qwen3": 0,
    }
    assert {name for name, arch in of_families.items() if arch.rope_factors} == {"llama3"}


def test_what_is_saved_is_read_back(model, tmp_path):
    weights, arch = model
    if arch.rope_factors:  # a config.json describes the published ones alone
        arch = dataclasses.replace(arch, rope_factors=())
    save_weights(tmp_path, weights, arch, jnp.dtype("float32"))
    assert read_architecture(tmp_path) == arch
    jax.tree.map(np.testing.assert_array_equal, load_weights(tmp_path, arch, jnp.float32), weights)


def test_there_is_a_golden_of_every_family(goldens):
    folders = [goldens / "gemma3", *(goldens / "families" / name for name in MODELS[1:])]
    kinds = {read_config(folder)["model_type"].removesuffix("_text") for folder in folders}
    assert kinds == set(FAMILIES)
