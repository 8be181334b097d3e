"""The kernels run here in Pallas's interpreter, against the draw that XLA makes of the same logits and the same numbers."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.kernels import top_k
from agent_tunix.kernels.draw import draw_tokens

ROWS, PAD = 4, 7


@cache
def by_kernels(k: int, top_p: float):
    return jax.jit(partial(top_k.draw, k=k, top_p=top_p, pad_id=PAD, interpret=True))


@cache
def by_sorting(k: int, top_p: float):
    return jax.jit(partial(draw_tokens, k=k, top_p=top_p, pad_id=PAD))


def normal(seed: int, width: int, scale: float) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=(ROWS, width))).astype(np.float32)


def assert_same_draw(logits_BV, k, top_p=1.0):
    uniform_B1 = np.random.default_rng(k).uniform(size=(ROWS, 1)).astype(np.float32)
    temperature_B1 = np.float32([[0.5], [0.9], [1.0], [1.7]])
    got = by_kernels(k, top_p)(logits_BV, temperature_B1, uniform_B1)
    want = by_sorting(k, top_p)(logits_BV, temperature_B1, uniform_B1)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], atol=1e-4)
    return np.asarray(got[0])


@pytest.mark.parametrize(("width", "k", "top_p"), [(40_960, 50, 1.0), (33_001, 50, 0.9), (16_384, 1, 1), (70_000, 112, 0.5)])
def test_the_token_and_its_probability_are_those_of_sorting(width, k, top_p):
    """Also where the width is no multiple of the blocks; padding is the likeliest of all and is never drawn."""
    logits_BV = normal(k, width, 3.0)
    logits_BV[:, PAD] = 27.0
    assert PAD not in assert_same_draw(logits_BV, k, top_p)


@pytest.mark.parametrize("values", [2, 40])
def test_of_equal_values_the_lower_index_comes_first(values):
    """With two or forty different values in a row, the k-th and thousands more are equal."""
    assert_same_draw(np.random.default_rng(0).integers(0, values, (ROWS, 40_960)).astype(np.float32), 50)


@pytest.mark.parametrize("values", [2, 100])
def test_one_of_one_is_the_greedy_choice(values):
    """Which is how a greedy token is drawn; also where thousands are as likely, and padding is among them."""
    rows = np.random.default_rng(1).integers(0, values, (ROWS, 16_384)).astype(np.float32)
    rows[:, PAD] = values
    assert PAD not in assert_same_draw(rows, 1)


@pytest.mark.parametrize(("shift", "spread"), [(-1000.0, 3.0), (1000.0, 3.0), (0.0, 1e20)])
def test_a_threshold_is_found_wherever_values_lie(shift, spread):
    """On one side of zero; and on both, so far apart that the distance of their bits is no 32-bit integer."""
    assert_same_draw(np.float32(shift) + normal(1, 40_960, spread), 50)


@pytest.mark.parametrize("k", [1, 50])
def test_a_gpu_can_be_given_the_kernels(lowered_for_gpu, k):
    one_B1 = jax.ShapeDtypeStruct((ROWS, 1), jnp.float32)
    logits_BV = jax.ShapeDtypeStruct((ROWS, 262_144), jnp.float32)
    text = lowered_for_gpu(partial(top_k.draw, k=k, top_p=0.9, pad_id=PAD), logits_BV, one_B1, one_B1)
    assert text.count("xla.gpu.triton") == 2


def test_the_likeliest_may_all_lie_in_one_block_or_be_fewer_than_k():
    logits = np.full((ROWS, 40_960), -np.inf, np.float32)
    logits[:2, 512:562] = np.arange(50)
    logits[2:, ::1000] = 1.0  # 41 finite values: the rest of the 50 is minus infinity
    assert_same_draw(logits, 50)


@pytest.mark.parametrize(("width", "k"), [(16_384, 1), (40_960, 50)])
def test_a_row_that_is_not_of_numbers_gives_a_token_of_the_vocabulary_without_a_probability(width, k):
    logits_BV = np.zeros((ROWS, width), np.float32)
    logits_BV[0] = logits_BV[1, ::2] = np.nan
    one_B1 = np.full((ROWS, 1), 0.5, np.float32)
    tokens_B, logprobs_B = map(np.asarray, by_kernels(k, 1.0)(logits_BV, one_B1, one_B1))
    assert ((tokens_B >= 0) & (tokens_B < width)).all()
    assert np.isnan(logprobs_B).tolist() == [True, True, False, False]


def test_a_row_too_short_or_a_k_too_great_is_left_to_sorting():
    assert top_k.serve(50, top_k.SMALLEST_ROW)
    assert not top_k.serve(50, top_k.SMALLEST_ROW - 1)
    assert not top_k.serve(top_k.LARGEST_K + 1, 262_144)
