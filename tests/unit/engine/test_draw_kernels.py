"""The kernels run here in Pallas's interpreter, against the draw that XLA makes of the same logits and the same numbers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.engine import draw_kernels, rollout
from agent_tunix.engine.rollout import Sampling

ROWS, PAD = 4, 7


def assert_same_draw(logits_BV, k, top_p=1.0, greedy=False):
    key = jax.random.key(k)
    uniform_B1 = jax.random.uniform(key, (ROWS, 1))
    temperature_B1 = jnp.asarray([[0.5], [0.9], [1.0], [1.7]])
    cuts = {"k": k, "top_p": top_p, "pad_id": PAD, "interpret": True}
    got = jax.jit(partial(draw_kernels.draw, **cuts))(logits_BV, temperature_B1, uniform_B1)
    sampling = Sampling(top_k=k, top_p=top_p, max_steps=1, num_generations=1, end_ids=(1,), pad_id=PAD, greedy=greedy)
    want = jax.jit(partial(rollout._draw_rows, sampling=sampling))(logits_BV, temperature_B1, uniform_B1)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], atol=1e-4)
    return np.asarray(got[0])


@pytest.mark.parametrize(("width", "k", "top_p"), [(40_960, 50, 1.0), (33_001, 50, 0.9), (16_384, 1, 1), (70_000, 112, 0.5)])
def test_the_token_and_its_probability_are_those_of_sorting(width, k, top_p):
    """Also where the width is no multiple of the blocks; padding is the likeliest of all and is never drawn."""
    logits_BV = 3 * jax.random.normal(jax.random.key(k), (ROWS, width)).at[:, PAD].set(9.0)
    assert PAD not in assert_same_draw(logits_BV, k, top_p)


@pytest.mark.parametrize("values", [2, 40])
def test_of_equal_values_the_lower_index_comes_first(values):
    """With two or forty different values in a row, the k-th and thousands more are equal."""
    rows = jax.random.randint(jax.random.key(0), (ROWS, 40_960), 0, values).astype(jnp.float32)
    assert_same_draw(rows, 50)


@pytest.mark.parametrize("values", [2, 100])
def test_one_of_one_is_the_greedy_choice(values):
    """Which is how a greedy token is drawn; also where thousands are as likely, and padding is among them."""
    rows = jax.random.randint(jax.random.key(1), (ROWS, 40_960), 0, values).at[:, PAD].set(values).astype(jnp.float32)
    assert PAD not in assert_same_draw(rows, 1, greedy=True)


@pytest.mark.parametrize(("shift", "spread"), [(-1000.0, 3.0), (1000.0, 3.0), (0.0, 1e20)])
def test_a_threshold_is_found_wherever_values_lie(shift, spread):
    """On one side of zero; and on both, so far apart that the distance of their bits is no 32-bit integer."""
    logits_BV = shift + spread * jax.random.normal(jax.random.key(1), (ROWS, 40_960))
    assert_same_draw(logits_BV, 50)


@pytest.mark.parametrize("k", [1, 50])
def test_a_gpu_can_be_given_the_kernels(lowered_for_gpu, k):
    one_B1 = jax.ShapeDtypeStruct((ROWS, 1), jnp.float32)
    logits_BV = jax.ShapeDtypeStruct((ROWS, 262_144), jnp.float32)
    text = lowered_for_gpu(partial(draw_kernels.draw, k=k, top_p=0.9, pad_id=PAD), logits_BV, one_B1, one_B1)
    assert text.count("xla.gpu.triton") == 2


def test_the_likeliest_may_all_lie_in_one_block_or_be_fewer_than_k():
    logits = np.full((ROWS, 40_960), -np.inf, np.float32)
    logits[:2, 512:562] = np.arange(50)
    logits[2:, ::1000] = 1.0  # 41 finite values: the rest of the 50 is minus infinity
    assert_same_draw(jnp.asarray(logits), 50)


@pytest.mark.parametrize("k", [1, 50])
def test_a_row_that_is_not_of_numbers_gives_a_token_of_the_vocabulary_without_a_probability(k):
    logits_BV = jnp.zeros((ROWS, 16_384)).at[0].set(jnp.nan).at[1, ::2].set(jnp.nan)
    one_B1 = jnp.full((ROWS, 1), 0.5)
    tokens_B, logprobs_B = draw_kernels.draw(logits_BV, one_B1, one_B1, k=k, top_p=1.0, pad_id=PAD, interpret=True)
    assert ((tokens_B >= 0) & (tokens_B < 16_384)).all()
    assert jnp.isnan(logprobs_B).tolist() == [True, True, False, False]


def test_a_row_too_short_or_a_k_too_great_is_left_to_sorting():
    assert draw_kernels.serve(50, draw_kernels.SMALLEST_ROW)
    assert not draw_kernels.serve(50, draw_kernels.SMALLEST_ROW - 1)
    assert not draw_kernels.serve(draw_kernels.LARGEST_K + 1, 262_144)
