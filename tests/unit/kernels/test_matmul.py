"""Kernels by themselves, in Pallas's interpreter: a product is the same however it is cut among programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.kernels import matmul
from agent_tunix.kernels.matmul import Product

M, TILE, D, F, RANK = 2, 16, 64, 256, 32  # two policies


@pytest.fixture
def given():
    """Rows of both policies, and the columns of gate and up with both policies' adapters."""
    rng = np.random.default_rng(0)
    h, w, a, b = (rng.normal(size=shape) for shape in ((M * TILE, D), (2 * F, D), (M, 2, RANK, D), (M, 2 * F, RANK)))
    return h, w / 8, a / 8, b / 32


@pytest.mark.parametrize("columns", [128, 64, 32])
def test_gate_and_up_are_the_same_however_many_columns_a_program_takes(columns, given, monkeypatch):
    h, w, a, b = given
    monkeypatch.setattr(matmul, "MULTIPROCESSORS", 2 * M * F // columns)
    assert matmul._gated_columns(F, RANK, TILE, M) == columns
    product = Product(*(jnp.asarray(x, jnp.float32) for x in (np.concatenate([w, a.reshape(-1, D)]), b)), (F, F), 1)
    matmul.gated_product.clear_cache()
    got = matmul.gated_product(jnp.asarray(h, jnp.float32), product, TILE, True)
    rows = h.reshape(M, TILE, D)
    low = np.einsum("mtd,mprd->mptr", rows, a)
    gate, up = (
        rows @ w[n * F : (n + 1) * F].T + np.einsum("mtr,mfr->mtf", low[:, n], b[:, n * F : (n + 1) * F]) for n in (0, 1)
    )
    want = np.asarray(jax.nn.gelu(jnp.asarray(gate), approximate=True)) * up
    np.testing.assert_allclose(got, want.reshape(M * TILE, F), atol=1e-5)


@pytest.mark.parametrize(
    ("F", "rank", "tile", "tiles", "columns"),
    [(2048, 32, 16, 1, 32), (6912, 32, 16, 1, 64), (10240, 32, 16, 1, 128), (2048, 64, 32, 4, 64), (2048, 128, 16, 1, 32)],
)
def test_a_program_takes_more_columns_where_programs_are_many_and_its_registers_hold_them(F, rank, tile, tiles, columns):
    """Of 270M, 1B and 4B, of eight policies of 270M, and of a large rank."""
    assert matmul._gated_columns(F, rank, tile, tiles) == columns
