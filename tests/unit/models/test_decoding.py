"""The kernels run here in Pallas's interpreter, in float32, against the plain forward pass; a GPU runs them in bfloat16."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.kernels import decode_attention, device
from agent_tunix.models import decoding, lora, transformer
from agent_tunix.models.checkpoints.loading import init_weights
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Prompts

POLICIES, GROUP, STEPS = 4, 3, 7
ROWS = 3 * GROUP  # of one policy


def random(rng: np.random.Generator, like) -> jax.Array:
    return jnp.asarray(rng.normal(0, 0.15, like.shape), like.dtype)


@pytest.fixture(scope="module")
def arch(arch):
    """A local and a global layer, wide enough for a rank's worth of columns of a module; completions outgrow the window.

    Three heads share a key, which is no power of two.
    """
    return dataclasses.replace(arch, num_layers=2, embed_dim=192, num_heads=6, num_kv_heads=2, head_dim=32, hidden_dim=320)


@pytest.fixture(scope="module")
def weights(arch):
    like = jax.eval_shape(lambda: init_weights(jax.random.key(0), arch, jnp.float32))
    return jax.tree.map(partial(random, np.random.default_rng(0)), like)


@pytest.fixture(scope="module")
def members(arch) -> list[Adapters]:
    """Adapters that have learnt something, on some modules only."""

    modules = lora.select_modules("(q|o|up|down)_proj", arch.num_layers)
    like = jax.eval_shape(lambda: lora.init_adapters(jax.random.key(0), arch, modules, 3, 6.0))
    return [jax.tree.map(partial(random, np.random.default_rng(seed)), like) for seed in range(POLICIES)]


@pytest.fixture(scope="module")
def everyones(prompts) -> Prompts:
    """Prompts of 7, 3 and 5 tokens for every policy."""
    return jax.tree.map(lambda x: jnp.asarray(np.tile(x, (POLICIES, 1))), prompts)


@pytest.fixture(scope="module")
def completions() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(3, 40, (POLICIES * ROWS, STEPS)))


@pytest.fixture(scope="module")
def token_by_token(weights, arch):
    """Hidden states [B, C, D] of completions that are read a token at a time; tiles of 4 slots put edges everywhere.

    With `few` of the sequences it goes on alone from half of the steps on, and returns only what these read.
    """

    def read_all(
        way, adapters, prompts: Prompts, tokens_BC: jax.Array, few: np.ndarray | None = None, **options
    ) -> np.ndarray:
        def read_on(reading, tokens_BC, first):
            def next_token(written, of_slot):
                hidden_BD, written = reading.read(written, *of_slot, jnp.zeros(len(tokens_BC), bool))
                return written, hidden_BD

            steps = jnp.arange(first, first + tokens_BC.shape[1])
            return jax.lax.scan(next_token, reading.cache, (tokens_BC.T, steps))

        @jax.jit
        def hidden(adapters, prompts, tokens_BC):
            _, prompt = transformer.forward(weights, adapters, arch, prompts.tokens_PS, prompts.positions_PS)
            reading = way(weights, adapters, arch, prompt, GROUP, STEPS, **options)
            if few is None:
                return read_on(reading, tokens_BC, 0)[1]
            half = STEPS // 2
            cache, _ = read_on(reading, tokens_BC[:, :half], 0)
            return read_on(reading.narrowed(cache, jnp.asarray(few), half), tokens_BC[few, half:], half)[1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_attention, "KEY_TILE", 4)
            return np.asarray(hidden(adapters, prompts, tokens_BC)).swapaxes(0, 1)

    return read_all


@pytest.fixture(scope="module")
def together(token_by_token, members, everyones, completions):
    """By kernels, all policies in one; computed by the first test that asks."""
    return cache(lambda: token_by_token(decoding._by_kernels, lora.stack(members), everyones, completions, interpret=True))


@pytest.fixture(scope="module")
def at_once(weights, arch, members, everyones, completions):
    """The same in one pass over whole completions."""

    @cache
    @jax.jit
    def read():
        adapters = lora.stack(members)
        _, prompt = transformer.forward(weights, adapters, arch, everyones.tokens_PS, everyones.positions_PS)
        positions_BC = jnp.repeat(everyones.positions_PS[:, -1:] + 1, GROUP, axis=0) + jnp.arange(STEPS)
        return transformer.forward(weights, adapters, arch, completions, positions_BC, (prompt,))[0]

    return read


def test_kernels_read_what_the_forward_pass_reads(together, at_once):
    np.testing.assert_allclose(together(), at_once(), atol=2e-5)


def test_the_plain_way_reads_a_token_at_a_time_what_it_reads_at_once(
    token_by_token, members, everyones, completions, at_once
):
    got = token_by_token(decoding._by_forward, lora.stack(members), everyones, completions)
    np.testing.assert_allclose(got, at_once(), atol=2e-5)


@pytest.mark.parametrize(
    "way", [decoding._by_forward, partial(decoding._by_kernels, interpret=True)], ids=["plain", "kernels"]
)
def test_few_sequences_go_on_with_what_all_have_read(way, token_by_token, members, everyones, completions, at_once):
    """Of each policy the first, one in the middle, and the last."""
    few = (np.array([0, ROWS // 2, ROWS - 1]) + ROWS * np.arange(POLICIES)[:, None]).reshape(-1)
    got = token_by_token(way, lora.stack(members), everyones, completions, few=few)
    np.testing.assert_allclose(got, at_once()[few, STEPS // 2 :], atol=2e-5)


def test_a_policy_reads_alone_what_it_reads_among_others(token_by_token, members, prompts, completions, together):
    own = slice(ROWS, 2 * ROWS)
    alone = token_by_token(decoding._by_kernels, members[1], prompts, completions[own], interpret=True)
    np.testing.assert_allclose(together()[own], alone, atol=1e-5)


@pytest.mark.parity
def test_policies_of_an_odd_number_share_no_tile_and_read_the_same(
    token_by_token, members, everyones, completions, together
):
    three = jax.tree.map(lambda x: x[: 3 * len(x) // POLICIES], everyones)
    got = token_by_token(decoding._by_kernels, lora.stack(members[:3]), three, completions[: 3 * ROWS], interpret=True)
    np.testing.assert_allclose(got, together()[: 3 * ROWS], atol=1e-5)


def test_an_adapter_that_rounding_would_swallow_is_kept(weights, members):
    """Added to a bfloat16 weight, an update a thousandth of it leaves no trace; the product carries it beside the weight."""
    assert jnp.bfloat16(0.02) + jnp.bfloat16(1e-5) == jnp.bfloat16(0.02)
    tiny = dataclasses.replace(members[0], b=jax.tree.map(lambda b: 1e-4 * b, members[0].b))
    base = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    product = decoding._product(base, tiny, ("q_proj",), sharing=1, rank=32)
    base_rows, a_rows = jnp.split(product.rows_UE, [product.parts[0]], axis=1)
    np.testing.assert_array_equal(base_rows, base.layers["q_proj"].swapaxes(1, 2))
    carried = product.b_MUr[:, 0].astype(jnp.float32) @ a_rows.astype(jnp.float32)
    want = jnp.matmul(*tiny.by_module()["q_proj"], precision="highest").swapaxes(1, 2)
    assert np.abs(carried - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.parametrize(("width", "served"), [(32, True), (48, False), (8, False)])
def test_kernels_are_given_heads_that_they_can_hold(width, served, arch):
    odd = dataclasses.replace(arch, head_dim=width, num_heads=8, num_kv_heads=4)
    weights = jax.eval_shape(lambda: init_weights(jax.random.key(0), odd, jnp.bfloat16))
    assert decoding._kernels_serve(weights, rank=32) is served


@pytest.mark.parametrize("missing", [0, 1])
def test_kernels_read_layers_for_which_a_device_has_room_twice(missing, monkeypatch, arch):
    weights = jax.eval_shape(lambda: init_weights(jax.random.key(0), arch, jnp.bfloat16))
    held = sum(2 * x.size for part in (weights, weights.layers) for x in jax.tree.leaves(part))
    monkeypatch.setattr(device, "capability", lambda: device.HOPPER)
    monkeypatch.setattr(device, "memory_limit", lambda: (held - missing) / decoding.ROOM)
    assert decoding._takes_kernels(weights) is not bool(missing)


ODD_HEADS = {"num_heads": 6, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("size", "policies", "changes"),
    [(size, 1, {}) for size in ("270m", "1b", "4b", "27b")] + [("270m", 8, {}), ("12b", 2, {}), ("270m", 1, ODD_HEADS)],
)
def test_a_gpu_can_be_given_the_kernels(size, policies, changes, shipped, reading_for_gpu):
    few_layers = dataclasses.replace(shipped(size), num_layers=6, **changes)
    assert "xla.gpu.triton" in reading_for_gpu(decoding._by_kernels, few_layers, policies)
