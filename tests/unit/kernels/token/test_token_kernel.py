"""Layouts are held against what matrix units make of them. The kernel compiles where NVRTC is, and runs on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learnt_adapters import learnt

from agent_tunix.engine import compile_cache
from agent_tunix.environments.stream import left_pad
from agent_tunix.kernels import device, nvrtc
from agent_tunix.kernels.token import token_kernel
from agent_tunix.models import decoding, lora, transformer
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.loading import init_weights
from agent_tunix.models.decoding import token_shapes

WARPS = token_kernel.WARPS
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


@pytest.fixture(scope="module")
def shipped_270m(shipped) -> Architecture:
    return shipped("270m")


@pytest.fixture(scope="module")
def small(shipped_270m) -> Architecture:
    """The 270M model with a local and a global layer; completions outgrow its window."""
    return dataclasses.replace(shipped_270m, num_layers=6, sliding_window=24, vocab_size=1000)


def multiplied(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Sixteen rows by eight columns of sixteen inputs, as a warp's lanes hold them (PTX ISA, mma.m16n8k16).

    left [32, 4, 2]: rows g and g + 8 of inputs 2t and 2t + 1, then the same of inputs eight later; right [32, 2, 2].
    """
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    for j, half in np.ndindex(2, 2):
        for later in range(2):
            a[G + 8 * half, 2 * T + j + 8 * later] = left[:, half + 2 * later, j]
        b[2 * T + j + 8 * half, G] = right[:, half, j]
    return a @ b


def as_left(x: np.ndarray) -> np.ndarray:
    """Sixteen rows as left operands [inputs / 16, 32, 4, 2]."""
    places = [(G + 8 * half, 2 * T + 8 * later) for later in range(2) for half in range(2)]
    operands = [[[x[row, 16 * n + k + j] for j in range(2)] for row, k in places] for n in range(x.shape[1] // 16)]
    return np.array(operands).transpose(0, 3, 1, 2)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 512)), rng.normal(size=(512, 48))


def test_wide_fragments_are_right_operands_of_each_warps_inputs(operands):
    x, w = operands
    steps = 512 // (16 * WARPS)
    fragments = np.asarray(token_kernel.wide_fragments(jnp.asarray(w))).reshape(3, WARPS, steps, 32, 2, 2, 2)
    left, got = as_left(x).reshape(WARPS, steps, 32, 4, 2), np.zeros((16, 48))
    for n, warp, step, eight in np.ndindex(3, WARPS, steps, 2):
        got[:, n * 16 + eight * 8 :][:, :8] += multiplied(left[warp, step], fragments[n, warp, step, :, eight])
    np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shares", [1, 2])
def test_tall_fragments_are_right_operands_of_shares_of_the_inputs(operands, shares):
    x, w = operands
    shape = (shares, 6, WARPS, 512 // (32 * WARPS * shares), 32, 2, 2, 2)
    fragments = np.asarray(token_kernel.tall_fragments(jnp.asarray(w), shares, WARPS)).reshape(shape)
    left, got = as_left(x).reshape(shares, *shape[2:4], 2, 32, 4, 2), np.zeros((16, 48))
    for share, n, warp, piece, k in np.ndindex(*shape[:4], 2):
        got[:, n * 8 :][:, :8] += multiplied(left[share, warp, piece, k], fragments[share, n, warp, piece, :, k])
    np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-4)


def test_prompts_end_a_tile_and_leave_room_for_completions(small):
    """Prompts are padded on their left; what a row writes begins a tile of its own."""
    L, P, S, K, N = small.num_layers, 3, 20, small.num_kv_heads, small.head_dim
    keys = jnp.arange(1, 1 + L * P * S * K * N, dtype=jnp.float32).reshape(L, P, S, K, N)
    prompt = transformer.Segment(keys, -keys, jnp.zeros((P, S), jnp.int32))
    for tiles, x in zip(
        token_kernel._tiles(prompt.keys_LBSKN, prompt.values_LBSKN, rows=16, slots=17), (keys, -keys), strict=True
    ):
        assert tiles.shape == (L, P * 2 + 16 * 2, K, 16 * N)
        found = np.asarray(tiles[:, : P * 2]).reshape(L, P, 2, K, -1)
        for half, slots in enumerate((slice(0, 4), slice(4, 20))):  # of each prompt twelve slots are padding
            want = np.asarray(x[:, :, slots]).transpose(0, 1, 3, 2, 4).reshape(L, P, K, -1)
            got = np.sort(found[:, :, half], axis=-1)
            got = got[..., got.shape[-1] - want.shape[-1] :] if x[0, 0, 0, 0, 0] > 0 else got[..., : want.shape[-1]]
            np.testing.assert_array_equal(got, np.sort(want, axis=-1))
        assert not np.asarray(tiles[:, P * 2 :]).any()


@given(
    blocks=st.integers(8, 144),
    heads=st.sampled_from([(4, 1), (4, 2), (8, 4), (2, 2)]),
    hidden=st.sampled_from([2048, 6912, 768, 3072]),
    width=st.sampled_from([512, 640, 1152]),
)
def test_every_column_is_some_blocks_and_fits_its_memory(shipped_270m, blocks, heads, hidden, width):
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "hidden_dim": hidden, "embed_dim": width}
    arch = dataclasses.replace(shipped_270m, **sizes)
    cut = token_kernel.cuts(token_shapes(arch), blocks)
    steps = arch.embed_dim // (16 * WARPS)
    assert 2 * max(cut["QKV_SUB"], cut["GATED_SUB"]) <= WARPS  # each sees to a tile
    assert 16 % cut["QKV_C"] == 0  # a unit is of one module
    assert max(cut["OUT_N"], cut["DOWN_N"]) <= WARPS
    assert hidden % (32 * WARPS * cut["DOWN_Z"]) == 0
    assert token_kernel.ROWS * heads[1] * cut["SHARES"] <= max(blocks, token_kernel.ROWS * heads[1])
    assert cut["RING"] >= 4
    assert cut["RING"] * WARPS * (steps * token_kernel.PIECE + 16) < token_kernel.SHARED_BYTES


@pytest.mark.parametrize(
    ("size", "rank", "policies", "sequences", "served"),
    [
        ("270m", 32, 1, 16, True),
        ("270m", 0, 1, 3, True),
        ("270m", 32, 8, 16, True),
        ("270m", 32, 1, 128, True),
        ("270m", 33, 1, 16, False),
        ("270m", 32, 9, 16, False),
        ("270m", 32, 5, 17, False),
        ("1b", 32, 1, 16, True),
        ("1b", 32, 1, 32, True),
        ("1b", 32, 1, 64, False),
        ("4b", 32, 1, 16, False),
        ("27b", 32, 1, 16, False),
    ],
)
def test_it_serves_where_it_is_faster(size, rank, policies, sequences, served, shipped, monkeypatch):
    monkeypatch.setattr(nvrtc, "serves", lambda: True)
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    assert token_kernel.serves(token_shapes(shipped(size)), rank, policies, sequences) is served


@pytest.mark.parametrize(
    "odd", [{"num_layers": 65}, {"num_heads": 11, "num_kv_heads": 11}, {"num_heads": 8}, {"head_dim": 128}]
)
def test_it_leaves_models_alone_that_it_has_no_room_for(odd, shipped_270m, monkeypatch):
    monkeypatch.setattr(nvrtc, "serves", lambda: True)
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    assert not token_kernel.serves(token_shapes(dataclasses.replace(shipped_270m, **odd)), 32, 1, 16)


@pytest.mark.parametrize(("policies", "served"), [(7, True), (8, False)])
def test_every_share_of_a_sum_has_a_block_of_its_own(policies, served, shipped_270m, monkeypatch):
    """Of seventeen shares two would else be one block's, and the first wait for the second without end."""
    monkeypatch.setattr(nvrtc, "serves", lambda: True)
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    arch = dataclasses.replace(shipped_270m, embed_dim=512, hidden_dim=17 * 256)
    assert token_kernel.cuts(token_shapes(arch), 132 // policies)["DOWN_Z"] == 17
    assert token_kernel.serves(token_shapes(arch), 32, policies, 16) is served


def test_it_leaves_a_gpu_that_others_share_alone(shipped_270m, monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "serves", lambda: True)
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert token_kernel.serves(token_shapes(shipped_270m), 32, 1, 16)
    (tmp_path / "control").touch()
    assert not token_kernel.serves(token_shapes(shipped_270m), 32, 1, 16)


def test_without_nvrtc_it_does_not_serve(monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    assert not nvrtc.serves.__wrapped__()


def test_an_nvrtc_that_compiles_nothing_does_not_serve(monkeypatch):
    def compiled(source, macros):
        raise RuntimeError("NVRTC did not compile a kernel: it lacks its builtins")

    monkeypatch.setattr(nvrtc, "library", object)
    monkeypatch.setattr(nvrtc, "compiled", compiled)
    assert not nvrtc.serves.__wrapped__()


def test_an_executable_is_as_old_as_the_kernels_files():
    known = {path for kind in compile_cache.SOURCES for path in token_kernel.FOLDER.glob(kind)}
    assert set(token_kernel.FOLDER.iterdir()) == known
    assert token_kernel.FOLDER.is_relative_to(compile_cache.PACKAGE)


@pytest.mark.parametrize(("made", "served"), [(1, True), (2, False)])
def test_a_trial_decides_even_while_a_program_is_traced(made, served, monkeypatch):
    monkeypatch.setattr(nvrtc, "library", object)
    monkeypatch.setattr(nvrtc, "compiled", lambda source, macros: source)
    monkeypatch.setattr(nvrtc, "call", lambda name, ptx, given, *_, **sizes: [given[0] * made])
    found = []
    jax.make_jaxpr(lambda x: found.append(nvrtc.serves.__wrapped__()) or x)(1.0)
    assert found == [served]


needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="no NVRTC here to compile the kernel with")


@needs_nvrtc
@pytest.mark.parametrize(
    ("size", "policies", "changes"),
    [("270m", 1, {}), ("270m", 8, {}), ("270m", 1, {"num_kv_heads": 2}), ("1b", 1, {}), ("1b", 2, {})],
)
def test_a_gpu_can_be_given_the_kernel(size, policies, changes, shipped, reading_for_gpu, monkeypatch):
    """It compiles, and all that it asserts of its sizes holds."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    assert nvrtc.CALL in reading_for_gpu(decoding.by_token_kernel, dataclasses.replace(shipped(size), **changes), policies)


@needs_nvrtc
def test_a_slot_is_given_back_after_its_last_word_has_come(shipped, reading_for_gpu, monkeypatch):
    """In the kernel's instructions: else a copy may overwrite what is still being read, as was seen at 1B."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    compiled, found = nvrtc.compiled, []
    monkeypatch.setattr(nvrtc, "compiled", lambda *given: found.append(compiled(*given)) or found[-1])
    reading_for_gpu(decoding.by_token_kernel, shipped("1b"), 1)
    sources: dict[str, set[str]] = {}
    for what, made, rest in re.findall(r"^\s*(?:@\S+ )?([a-z][\w.:]*)\s+({[^}]*}|%\w+), (.*);$", found[0], re.M):
        word = {"a word"} if what.startswith("ld.volatile.shared") else set()
        for register in re.findall(r"%\w+", made):
            sources.setdefault(register, set()).update(re.findall(r"%\w+", rest), word)
    given_back = re.findall(r"mbarrier\.arrive\.shared::cta\.b64 _, \[(%\w+)\]", found[0])
    assert len(given_back) > 5
    for register in given_back:
        known, new = set(), {register}
        while new:
            known |= new
            new = set().union(*(sources.get(x, set()) for x in new)) - known
        assert "a word" in known


@needs_nvrtc
def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(RuntimeError, match="nowhere"):
        nvrtc.compiled("__global__ void f() { nowhere(); }", {})


@pytest.mark.skipif(device.capability() != device.HOPPER, reason="no Hopper GPU here to run the kernel on")
@pytest.mark.parametrize(
    ("policies", "prompts", "group", "sizes"),
    [(1, 3, 5, {}), (1, 9, 4, {}), (3, 2, 4, {}), (1, 4, 4, {"embed_dim": 1152, "hidden_dim": 6912})],
)
def test_hidden_states_are_those_of_the_forward_pass(small, policies, prompts, group, sizes):
    """Token by token, past the window and the edges of tiles; run again it gives the same bits."""
    small = dataclasses.replace(small, **sizes)
    assert token_kernel.serves(token_shapes(small), 8, policies, prompts * group)
    weights = jax.jit(init_weights, static_argnums=(1, 2))(jax.random.key(0), small, jnp.bfloat16)
    adapters = lora.stack([learnt(small, seed) for seed in range(policies)])
    rng, steps, rows = np.random.default_rng(0), 40, policies * prompts * group
    given = left_pad([list(rng.integers(6, 1000, 30 - 4 * (n % 5))) for n in range(policies * prompts)], 30, 0)
    tokens_CB = jnp.asarray(rng.integers(6, 1000, (steps, rows)))

    @partial(jax.jit, static_argnums=0)
    def read_all(way, weights, adapters):
        _, prompt = transformer.forward(weights, adapters, small, given.tokens_PS, given.positions_PS)
        cache, read, *_ = way(weights, adapters, small, prompt, group, steps)

        def next_token(cache, of_slot):
            hidden_BD, cache = read(cache, *of_slot, jnp.zeros(rows, bool))
            return cache, hidden_BD.astype(jnp.float32)

        return jax.lax.scan(next_token, cache, (tokens_CB, jnp.arange(steps)))[1]

    ways = (decoding.by_token_kernel, decoding.by_token_kernel, decoding._by_forward)
    got_CBD, again_CBD, want_CBD = (np.asarray(read_all(way, weights, adapters)) for way in ways)
    np.testing.assert_array_equal(got_CBD, again_CBD)
    apart_CB = np.linalg.norm(got_CBD - want_CBD, axis=-1) / np.linalg.norm(want_CBD, axis=-1)
    assert apart_CB.max() < 0.03
