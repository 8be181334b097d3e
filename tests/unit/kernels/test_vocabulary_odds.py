"""The kernel is read by Mosaic's interpreter where there is no GPU for it, and is lowered for one everywhere."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import export
from jax.experimental.pallas import mosaic_gpu

from agent_tunix.algorithm import logprobs
from agent_tunix.kernels import device, vocabulary_odds, vocabulary_odds_mosaic

MOST = 1.5
hopper = pytest.mark.skipif(device.capability() != device.HOPPER, reason="needs a GPU of the Hopper kind")


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel as three programs that take turns at its tiles, on the CPU."""
    if not hasattr(mosaic_gpu, "InterpretGPUParams"):
        pytest.skip("the interpreter of this version of JAX, older than 0.11, knows no operand that is turned")
    monkeypatch.setattr(device, "multiprocessors", lambda: 3)
    given = mosaic_gpu.InterpretGPUParams()
    monkeypatch.setattr(mosaic_gpu, "kernel", functools.partial(mosaic_gpu.kernel, interpret=given))


def states(n: int, V: int, D: int) -> tuple[jax.Array, ...]:
    """Hidden states, an embedding, and of each row a logit and a sharpness."""
    rng = np.random.default_rng(0)
    hidden_nD, embed_VD = (jnp.asarray(rng.normal(size=(rows, D)) / 2, jnp.bfloat16) for rows in (n, V))
    return hidden_nD, embed_VD / 2, jnp.asarray(rng.normal(size=n), jnp.float32), jnp.linspace(0.5, 2, n)


def expected(hidden_nD, embed_VD, own_n, sharpness_n) -> tuple[np.ndarray, np.ndarray]:
    """Log odds and odds, in float64."""
    hidden_nD, embed_VD, own_n, sharpness_n = (np.asarray(x, np.float64) for x in (hidden_nD, embed_VD, own_n, sharpness_n))
    z_nV = np.minimum(hidden_nD @ embed_VD.T * sharpness_n[:, None] - own_n[:, None], MOST)
    return z_nV, np.exp(z_nV)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "sums alone"])
@pytest.mark.parametrize(("n", "V", "D"), [(1, 8, 64), (130, 264, 128), (256, 512, 64)])
def test_sums_and_odds_are_those_of_the_logits(interpreted, n, V, D, kept):
    """Whether or not rows and vocabulary fill whole tiles, and with odds greater than they may be."""
    given = states(n, V, D)
    total_n, weighted_n, *odds_nV = vocabulary_odds_mosaic.odds(*given, most=MOST, kept=kept)
    z_nV, want_nV = expected(*given)
    assert n == 1 or (z_nV == MOST).any()
    np.testing.assert_allclose(total_n, want_nV.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(weighted_n, (want_nV * z_nV).sum(axis=1), rtol=1e-4, atol=1e-3)
    assert len(odds_nV) == kept
    for found_nV in odds_nV:
        assert found_nV.shape == (n, V)
        np.testing.assert_allclose(np.asarray(found_nV, np.float32), want_nV, rtol=2**-8)


def test_log_probabilities_and_gradients_are_those_of_written_logits(interpreted, monkeypatch):
    monkeypatch.setattr(logprobs, "LOGITS_BUDGET", 264 * 100)  # 130 rows in two chunks, where odds are kept
    by_kernel, by_xla = (scores(on, monkeypatch, 130, 264) for on in (True, False))
    assert all(np.abs(x).max() > 0.01 for x in by_xla)
    assert_near(by_kernel, by_xla)


@given(total=st.integers(1, 10**6), vocabulary=st.sampled_from([264, 262144, 262208]))
def test_odds_are_written_of_a_few_rows_at_a_time(total, vocabulary):
    """Of at most a sixteenth, in whole tiles, and never more than the budget holds."""
    rows = logprobs.odds_rows(total, vocabulary)
    assert 1 <= rows * vocabulary <= logprobs.LOGITS_BUDGET
    assert rows <= max(total / logprobs.FEWEST_CHUNKS + vocabulary_odds_mosaic.ROWS, vocabulary_odds_mosaic.ROWS)
    assert rows % vocabulary_odds_mosaic.ROWS == 0 or rows == logprobs.LOGITS_BUDGET // vocabulary


def assert_near(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """The gradient is of rounded odds, and rounded itself."""
    for x, want, rtol in zip(found, wanted, (1e-4, 1e-4, 2**-7, 1e-4), strict=True):
        np.testing.assert_allclose(x, want, rtol=rtol, atol=2e-3 * np.abs(want).max())


def scores(on: bool, monkeypatch, n: int, V: int, D: int = 64) -> list[np.ndarray]:
    """Log-probabilities, entropies and a gradient, and the first once more where there is no gradient."""
    monkeypatch.setattr(vocabulary_odds, "kernel_serves", lambda *_: on)
    hidden_nD, embed_VD, weight_n, _ = states(n, V, D)
    tokens_1n = jnp.arange(n)[None] % V

    def of(hidden_nD):
        logprobs_1n, entropy_1n = logprobs.token_logprobs(hidden_nD[None], tokens_1n, embed_VD, 0.7)
        return (logprobs_1n * weight_n).sum(), (logprobs_1n, entropy_1n)

    gradient_nD, of_rows = jax.grad(of, has_aux=True)(hidden_nD)
    return [np.asarray(x, np.float32) for x in (*of_rows, gradient_nD, of(hidden_nD)[1][0])]


@hopper
@pytest.mark.parametrize(("n", "V", "D"), [(1500, 262144, 640), (300, 262208, 2560), (1024, 262144, 1152)])
def test_on_a_gpu_it_finds_what_xla_finds_and_the_same_again(monkeypatch, n, V, D):
    first, again, by_xla = (scores(on, monkeypatch, n, V, D) for on in (True, True, False))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert_near(first, by_xla)


@pytest.mark.parametrize(
    ("V", "D", "kept"), [(262144, 640, True), (262144, 1152, False), (262208, 2560, False), (262208, 5376, True)]
)
def test_it_is_lowered_for_the_shapes_of_gemma_3(monkeypatch, V, D, kept):
    """Its shared memory suffices, among other things."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    of = (((1000, D), jnp.bfloat16), ((V, D), jnp.bfloat16), ((1000,), jnp.float32), ((1000,), jnp.float32))
    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_v2", "mosaic_gpu")]
    program = jax.jit(functools.partial(vocabulary_odds_mosaic.odds, most=MOST, kept=kept))
    lowered = export.export(program, platforms=["cuda"], disabled_checks=unchecked)(*(jax.ShapeDtypeStruct(*x) for x in of))
    assert "mosaic_gpu" in lowered.mlir_module()


def test_it_serves_bfloat16_on_one_hopper_gpu(monkeypatch):
    def serves(V=264, D=128, dtype=jnp.bfloat16):
        return vocabulary_odds.kernel_serves(jnp.zeros((1, D), dtype), jnp.zeros((V, D), dtype))

    monkeypatch.setattr(jax, "__version_info__", vocabulary_odds.OLDEST_JAX)
    assert serves() == (device.capability() == device.HOPPER)
    monkeypatch.setattr(device, "capability", lambda: device.HOPPER)
    assert serves()
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert not serves()
    monkeypatch.setattr(jax, "__version_info__", vocabulary_odds.OLDEST_JAX)
    assert not serves(dtype=jnp.float32)
    assert not serves(D=96)
    assert not serves(V=47)
    monkeypatch.setattr(vocabulary_odds, "several_devices", lambda: True)
    assert not serves()
