from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.engine.update import completion_logprobs
from agent_tunix.errors import UserError
from agent_tunix.kernels import device
from agent_tunix.models import decoding
from agent_tunix.models.checkpoints.loading import init_weights, quantised
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, init_adapters
from agent_tunix.models.quantization import BLOCK, BYTES, NF4, Quantised, dequantise, quantise, quantise_stack

KINDS = ("int8", "nf4")
# Appendix E of the paper.
PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
HALF_STEP = {"int8": 0.5 / 127, "nf4": (NF4[1] - NF4[0]) / 2}  # the greatest, as a share of a block's largest number
ROUNDED_SCALE = 2**-8


def matrix(seed: int = 0, inputs: int = 3 * BLOCK, outputs: int = 5, degrees: float = 3.0) -> jax.Array:
    """Heavy-tailed numbers, of another size in every column."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_t(degrees, (inputs, outputs)) * 10.0 ** rng.integers(-4, 4, outputs), jnp.float32)


def by_block(values) -> np.ndarray:
    return np.asarray(values, np.float64).reshape(-1, BLOCK, values.shape[-1])


def test_the_levels_are_the_papers():
    np.testing.assert_allclose(NF4, PUBLISHED, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), degrees=st.sampled_from([1.5, 3.0, 50.0]))
def test_no_number_moves_further_than_half_a_step_of_its_block(kind, seed, degrees):
    values = matrix(seed, degrees=degrees)
    back = dequantise(quantise(values, kind), jnp.float32)
    assert back.shape == values.shape
    blocks, moved = by_block(values), np.abs(by_block(back) - by_block(values))
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    assert (moved <= (HALF_STEP[kind] + ROUNDED_SCALE) * largest).all()


def test_each_number_takes_the_nearest_level():
    values = matrix()
    held = quantise(values, "nf4")
    scale = np.asarray(held.scales, np.float64)
    nearest = np.abs(by_block(values)[..., None] / scale[..., None] - np.array(NF4)).argmin(axis=-1)
    np.testing.assert_allclose(by_block(dequantise(held, jnp.float32)), np.array(NF4)[nearest] * scale, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_quantised_once_is_not_moved_again(kind):
    once = dequantise(quantise(matrix(), kind), jnp.float32)
    np.testing.assert_array_equal(dequantise(quantise(once, kind), jnp.float32), once)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_knows_nothing_of_its_neighbours_and_zeros_stay_zeros(kind):
    plain = matrix()
    other = plain.at[0, 0].set(1e6).at[BLOCK:, 1].set(0.0)
    before, after = (np.asarray(dequantise(quantise(x, kind), jnp.float32)) for x in (plain, other))
    np.testing.assert_array_equal(before[BLOCK:, 0], after[BLOCK:, 0])
    np.testing.assert_array_equal(before[:, 2:], after[:, 2:])
    assert (after[BLOCK:, 1] == 0).all()
    assert after[0, 0] == pytest.approx(1e6, rel=ROUNDED_SCALE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_its_matrices_and_takes_the_bytes_it_is_said_to(kind):
    stack = jnp.stack([matrix(1), matrix(2)])
    held = quantise_stack(stack, kind)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(held)) == BYTES[kind] * stack.size
    for layer in range(2):
        one, alone = jax.tree.map(lambda x, layer=layer: x[layer], held), quantise(stack[layer], kind)
        jax.tree.map(np.testing.assert_array_equal, one, alone)
        np.testing.assert_array_equal(dequantise(held, jnp.float32)[layer], dequantise(alone, jnp.float32))


def test_inputs_that_make_no_whole_blocks_are_refused():
    with pytest.raises(UserError, match=r"model\.base_dtype=nf4: 96 inputs of a matrix are no multiple of 64"):
        quantise(jnp.ones((96, 4)), "nf4")


@pytest.fixture(scope="module")
def wide(arch):
    return dataclasses.replace(arch, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=128, num_layers=2)


@pytest.fixture(scope="module")
def gradient(wide, prompts):
    """Of a loss of weights and adapters; compiled once for all weights that are not quantised."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 40, (6, 5)))

    def loss(adapters, weights):
        found = completion_logprobs(weights, adapters, prompts, tokens, tokens > 0, arch=wide, temperature=0.9)
        return found[0].sum()

    found = jax.jit(jax.value_and_grad(loss))
    return lambda weights, adapters: found(adapters, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_the_matrices_that_the_codes_stand_for(kind, wide, gradient):
    plain = init_weights(jax.random.key(0), wide)
    held = quantised(plain, kind)
    matrices = {m: dequantise(held.layers[m], jnp.float32) for m in ATTENTION + FEED_FORWARD}
    spelt_out = dataclasses.replace(plain, layers=plain.layers | matrices)
    adapters = init_adapters(jax.random.key(1), wide, ATTENTION + FEED_FORWARD, 2, 4.0)
    adapters = jax.tree.map(lambda x: x + 0.05, adapters)
    ours, theirs, unquantised = (gradient(weights, adapters) for weights in (held, spelt_out, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)
    assert abs(float(ours[0] - unquantised[0])) > 1e-3, "quantising changed too little for this test to mean anything"


def test_kernels_leave_a_quantised_base_alone(wide, monkeypatch):
    monkeypatch.setattr(device, "capability", lambda: device.HOPPER)
    plain = init_weights(jax.random.key(0), wide, jnp.bfloat16)
    assert decoding._takes_kernels(plain)
    assert isinstance(quantised(plain, "int8").layers["up_proj"], Quantised)
    assert not decoding._takes_kernels(quantised(plain, "int8"))
