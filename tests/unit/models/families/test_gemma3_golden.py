"""Our Gemma 3 against transformers' Gemma3ForCausalLM (goldens by scripts/make_goldens.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.models.checkpoints.loading import load_weights
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.families import gemma3
from agent_tunix.types import Prompts

pytestmark = pytest.mark.golden
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden(goldens):
    return np.load(goldens / "logits.npz")


@pytest.fixture(scope="module")
def model(goldens):
    arch = read_architecture(goldens / "gemma3")
    return load_weights(goldens / "gemma3", arch, jnp.float32), arch


@pytest.fixture(scope="module")
def positions(golden):
    return np.where(golden["mask"], np.cumsum(golden["mask"], axis=1) - 1, -1)


def test_logits_with_padding_beyond_the_window(model, golden, positions):
    weights, arch = model
    assert golden["mask"].sum(axis=1).max() > 2 * arch.sliding_window
    hidden, _ = gemma3.forward(weights, None, arch, golden["tokens"], positions)
    logits = gemma3.unembed(weights, hidden)
    np.testing.assert_allclose(logits[golden["mask"]], golden["logits"][golden["mask"]], atol=TOLERANCE, rtol=0)


def test_logits_with_a_cache_one_token_at_a_time(model, golden, positions):
    weights, arch = model
    tokens, mask = golden["tokens"], golden["mask"]
    split = tokens.shape[1] // 2
    _, prompt = gemma3.forward(weights, None, arch, tokens[:, :split], positions[:, :split])
    written = gemma3.empty_segment(arch, len(tokens), tokens.shape[1] - split, jnp.float32)
    step = jax.jit(lambda token, position, past: gemma3.forward(weights, None, arch, token, position, past))
    for t in range(split, tokens.shape[1]):
        hidden, new = step(tokens[:, t : t + 1], positions[:, t : t + 1], (prompt, written))
        written = gemma3.write_segment(written, new, t - split)
        seen = mask[:, t]
        logits = gemma3.unembed(weights, hidden[:, 0])
        np.testing.assert_allclose(logits[seen], golden["logits"][seen, t], atol=TOLERANCE, rtol=0)


def test_greedy_continuations(model, golden, positions):
    weights, arch = model
    expected = golden["greedy"]
    never = (arch.vocab_size,)
    sampling = Sampling(None, 1.0, expected.shape[1], 1, never, 0, greedy=True)
    prompts = Prompts(golden["tokens"], positions)
    (drawn,) = sample(weights, (Draw(None, prompts, jax.random.key(0)),), arch=arch, sampling=sampling)
    np.testing.assert_array_equal(drawn.tokens_BC, expected)


def test_every_number_of_the_config_is_read(model):
    _, arch = model
    assert (arch.rope_global_factor, arch.rope_global_base, arch.rope_local_base) == (8.0, 1e6, 1e4)
    assert (arch.global_every, arch.sliding_window, arch.query_scale) == (2, 6, 12**-0.5)
