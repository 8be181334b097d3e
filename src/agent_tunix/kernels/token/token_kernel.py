"""Reading a token of every sequence by one kernel for all layers (token/token.cu), on one NVIDIA Hopper GPU.

It is CUDA C++, as Pallas cannot express some of it, and is compiled for the shapes at hand. This module makes what it is
given: how much a block takes at a time, and weights and caches in the order in which they are read. The blocks that read
the same 16 sequences are a team. They pass results to each other as words: 32 bits in global memory, `MISSING` until
another block has written them.

Axes as in types.py, and: E inputs and U outputs of a product; r rank, filled up; M policies; R rows, which are sequences,
those of each policy filled up to whole teams; T positions in a sequence; n any number.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from agent_tunix.kernels import device, matmul, nvrtc
from agent_tunix.kernels.reading import Held, Reading, filled_place

FOLDER = Path(__file__).parent
ROWS, HEAD, KEYS = 16, 256, 16  # sequences of a team, size of a head, keys of a tile
WARPS = 8  # that compute, and as many that feed them
RANK = 32  # what ranks are filled up to
WIDTHS = range(512, 1153, 16 * WARPS)  # of models; wider ones leave too few slots
MOST_TEAMS, MOST_LAYERS = 8, 64
MOST_BYTES = 2**27  # read of a layer by all teams together: each reads all of it, where other kernels read it once
MOST_PIECES = 10  # of 32 inputs, that a warp multiplies with at a time: more would not fit its registers
PIECE = 512  # bytes of a piece
PASSES = 2  # over the dimensions of a head, to add up what warps have seen
SHARED_BYTES = 227 * 2**10
COUNTERS, APART = 4, 8  # counters of a team, and numbers from one to the next: each is in a memory sector of its own
MISSING = np.uint32(2**32 - 1)  # a word that has not been written yet


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes of a model that the kernel is compiled for, and how its layers see and scale."""

    num_layers: int
    embed_dim: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int
    is_global: tuple[bool, ...]  # for each layer, whether it sees beyond the window
    query_scale: float
    norm_eps: float


@dataclasses.dataclass(frozen=True)
class Norms:
    """Scales of the norms of all layers, [L, D] around their halves and [L, N] of heads; and of the last one."""

    before_attention: jax.Array
    after_attention: jax.Array
    before_feedforward: jax.Array
    after_feedforward: jax.Array
    queries: jax.Array
    keys: jax.Array
    final_D: jax.Array


Module = tuple[jax.Array, jax.Array, jax.Array]  # W [L, E, U], and A [L, M, E, RANK] and B [L, M, RANK, U] of all policies


def serves(shapes: Shapes, rank: int, policies: int, sequences: int) -> bool:
    """Whether the kernel serves such a model and so many sequences of each policy, and is faster than others there."""
    if rank > RANK or shapes.embed_dim not in WIDTHS or shapes.hidden_dim % (32 * WARPS) or shapes.head_dim != HEAD:
        return False
    if (
        shapes.num_heads > MOST_PIECES
        or shapes.num_heads // shapes.num_kv_heads > WARPS - 2
        or shapes.num_layers > MOST_LAYERS
    ):
        return False
    teams, most = policies * _teams(sequences), device.multiprocessors()
    if teams > MOST_TEAMS or teams * _layer_bytes(shapes) > MOST_BYTES or teams * _down_shares(shapes) > most:
        return False
    return not _shared() and nvrtc.serves()


def start(
    shapes: Shapes,
    embed_VD: jax.Array,
    norms: Norms,
    modules: Mapping[str, Module],
    angles_TAN: jax.Array,
    prompt: tuple[jax.Array, jax.Array, jax.Array],
    group: int,
    slots: int,
) -> Reading:
    """As `decoding.start`: the cache is keys and values, counters, and the words that blocks leave for each other.

    `prompt` are keys and values, [L, P, S, K, N], and lengths of the prompts of all policies, of which each has a `group`.
    """
    keys_LPSKN, values_LPSKN, lengths_P = prompt
    policies, S = modules["q_proj"][1].shape[1], keys_LPSKN.shape[2]
    constants = [angles_TAN, *_norms(norms), *_matrices(modules, _down_shares(shapes))]

    def reading(lengths_P: jax.Array, group: int, kv: tuple[jax.Array, jax.Array], first: ArrayLike) -> Reading:
        """From slot `first` on."""
        sequences = len(lengths_P) * group // policies
        ptx, cut = compiled(shapes, policies, sequences // group, group, S, slots)
        teams, rows = cut["TEAMS"], cut["TEAMS_EACH"] * ROWS
        launch = {"grid": teams * cut["BLOCKS"], "threads": 2 * 32 * WARPS, "shared_bytes": SHARED_BYTES}

        def read(cache, tokens_B, slot, done_B):
            del done_B  # what a finished sequence reads is of no use, and no one else sees it
            tokens_R = matmul.filled(tokens_B, policies, rows)
            places = jnp.stack([slot, slot - first]).astype(jnp.int32), lengths_P.astype(jnp.int32)
            given = (embed_VD, tokens_R.astype(jnp.int32), *places, *constants, *cache)
            made = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache]
            made.append(jax.ShapeDtypeStruct((policies * rows, shapes.embed_dim), embed_VD.dtype))
            kept = {len(given) - len(cache) + n: n for n in range(len(cache))}
            *cache, hidden_RD = nvrtc.call("token", ptx, given, made, kept, **launch)
            return hidden_RD.reshape(policies, rows, -1)[:, :sequences].reshape(len(tokens_B), -1), tuple(cache)

        def narrowed(cache: tuple[jax.Array, ...], rows_B: jax.Array, slot: ArrayLike) -> Reading:
            few, prompt_B = len(rows_B) // policies, rows_B // group
            row_R = matmul.filled(filled_place(rows_B, sequences, rows), policies, _teams(few) * ROWS)
            held = Held(len(lengths_P), cut["PROMPT_TILES"], policies * rows)
            keys, values = (jax.vmap(lambda x_n: held.of_rows(x_n, prompt_B, row_R))(x_Ln) for x_Ln in cache[:2])
            return reading(lengths_P[prompt_B], 1, (keys, values), slot)

        counters = jnp.zeros((teams, COUNTERS, APART), jnp.int32)
        words = jnp.full((2, teams, shapes.num_layers, cut["LAYER_WORDS"]), MISSING)
        return Reading((*kv, counters, words), read, narrowed)

    rows = policies * _teams(len(lengths_P) * group // policies) * ROWS
    return reading(lengths_P, group, _tiles(keys_LPSKN, values_LPSKN, rows, slots), 0)


def compiled(
    shapes: Shapes, policies: int, prompts: int, group: int, longest: int, slots: int
) -> tuple[str, dict[str, int]]:
    """The kernel for so many policies, prompts of each and sequences of a prompt, and how it cuts its work."""
    each = _teams(prompts * group)
    blocks = device.multiprocessors() // (policies * each)
    cut = {"POLICIES": policies, "PROMPTS": prompts, "GROUP": group, "TEAMS": policies * each, "TEAMS_EACH": each}
    cut |= {"PROMPT_TILES": -(-longest // KEYS), "OWN_TILES": -(-slots // KEYS), "BLOCKS": blocks, **cuts(shapes, blocks)}
    return nvrtc.compiled((FOLDER / "token.cu").read_text(), {**_macros(shapes), **cut}, FOLDER), cut


def _teams(sequences: int) -> int:
    return -(-sequences // ROWS)


def _layer_bytes(shapes: Shapes) -> int:
    heads = (2 * shapes.num_heads + 2 * shapes.num_kv_heads) * HEAD
    return 2 * shapes.embed_dim * (heads + 3 * shapes.hidden_dim)


def _shared() -> bool:
    """Whether processes share the GPU by NVIDIA's MPS: blocks of two kernels could then wait for each other for ever."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def _macros(shapes: Shapes) -> dict[str, int | str]:
    return {
        "LAYERS": shapes.num_layers,
        "WIDTH": shapes.embed_dim,
        "HIDDEN": shapes.hidden_dim,
        "HEADS": shapes.num_heads,
        "KV_HEADS": shapes.num_kv_heads,
        "WINDOW": shapes.sliding_window,
        "GLOBALS": f"{sum(1 << int(n) for n in np.flatnonzero(shapes.is_global))}ull",
        "SCALE": f"{shapes.query_scale}f",
        "EPS": f"{shapes.norm_eps}f",
        "EMBEDDED": f"{float(np.asarray(math.sqrt(shapes.embed_dim), jnp.bfloat16))}f",
        "ROWS": ROWS,
        "HEAD": HEAD,
        "KEYS": KEYS,
        "COUNTERS": COUNTERS,
        "APART": APART,
        "RANK": RANK,
        "WARPS": WARPS,
        "PASSES": PASSES,
        "SHARED_BYTES": SHARED_BYTES,
    }


def cuts(shapes: Shapes, blocks: int) -> dict[str, int]:
    """How much of every product a block takes at a time: such that it has the fewest columns, then the fewest rounds."""
    low = RANK // 8

    def sixteens_of_heads() -> int:
        """Sixteens of columns to a unit, which is of one head."""

        def cost(c: int) -> tuple[int, int]:
            rounds = -(-(shapes.num_heads + 2 * shapes.num_kv_heads) * (HEAD // 16) // (c * blocks))
            return rounds * c, rounds

        return min(_divisors(HEAD // 16), key=cost)

    def tiles(shares: int) -> int:
        """Eights of columns to a unit."""

        def cost(n: int) -> tuple[int, int]:
            rounds = -(-(-(-(shapes.embed_dim // 8 + low) // n) * shares) // blocks)
            return rounds * n, rounds

        return min(range(1, WARPS + 1), key=cost)

    qkv, down = sixteens_of_heads(), _down_shares(shapes)
    shares = max(n for n in (1, 2, 4, 8) if n == 1 or ROWS * shapes.num_kv_heads * n <= blocks)
    cut = {"QKV_C": qkv, "QKV_SUB": min(qkv, WARPS // 2), "GATED_SUB": 1 + (shapes.hidden_dim // 16 > blocks)}
    cut |= {"OUT_N": tiles(1), "DOWN_N": tiles(down), "DOWN_Z": down, "SHARES": shares}
    stage = _stage_bytes(shapes, cut)
    return cut | {"STAGE": stage, "RING": _ring_slots(shapes, stage), "LAYER_WORDS": _layer_words(shapes, cut)}


def _down_shares(shapes: Shapes) -> int:
    """Shares of the sum of "down". They wait for each other, so each has a block of its own."""
    pieces = shapes.hidden_dim // (32 * WARPS)
    return next(shares for shares in _divisors(pieces) if pieces // shares <= MOST_PIECES)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _layer_words(shapes: Shapes, cut: dict[str, int]) -> int:
    """Words that the blocks of a team leave in a layer: pairs of bfloat16, or numbers where sums are cut into shares."""
    H, K, tiles = shapes.num_heads, shapes.num_kv_heads, shapes.embed_dim // 8 + RANK // 8
    pairs = ROWS * ((2 * H + 2 * K) * HEAD + shapes.hidden_dim) // 2 + (2 * tiles + 5 * RANK // 8) * 64
    shares, down = cut["SHARES"], cut["DOWN_Z"]
    return pairs + (shares > 1) * ROWS * shares * H * (HEAD // 2 + 1) + (down > 1) * down * tiles * 128


def _stage_bytes(shapes: Shapes, cut: dict[str, int]) -> int:
    """Shared memory that a stage has for itself: for sums of tiles over the warps, or for attention."""
    sums = max(2 * cut["QKV_SUB"], 4 * cut["GATED_SUB"], cut["OUT_N"], cut["DOWN_N"])
    heads = shapes.num_heads // shapes.num_kv_heads
    attended = heads * (WARPS * (HEAD // PASSES + 4 + 2) + 1)
    return -(-max(sums * WARPS * PIECE, (heads + 1) * (HEAD + 32) * 2 + (HEAD + attended) * 4) // 16) * 16


def _ring_slots(shapes: Shapes, stage: int) -> int:
    """How many slots each warp gets of the shared memory that is left beside norms, angles and a stage's own."""
    beside = stage + 4 * HEAD * 4 + 2 * shapes.embed_dim * 2 + 4 * ROWS * WARPS * 4
    return (SHARED_BYTES - beside - 128) // (WARPS * (shapes.embed_dim // (16 * WARPS) * PIECE + 16))


def _norms(norms: Norms) -> tuple[jax.Array, jax.Array]:
    """Scales of norms, by warp: of the one after each half of a layer and of the one before the next half; and of heads.

    Nothing comes before the first half: the final norm fills that place, and is not used.
    """
    last_1D = norms.final_D[None]
    halves = norms.before_attention, norms.after_attention, norms.before_feedforward, norms.after_feedforward
    around_nD = jnp.stack(halves, axis=1).reshape(-1, last_1D.shape[1])
    norms_nD = jnp.concatenate([last_1D, around_nD, last_1D]).astype(jnp.bfloat16)
    scales = norms_nD.reshape(-1, 2, WARPS, last_1D.shape[1] // WARPS).swapaxes(1, 2)
    return scales, jnp.stack([norms.queries, norms.keys], axis=1).astype(jnp.float32)


def _matrices(modules: Mapping[str, Module], down_shares: int) -> list[jax.Array]:
    """W, A and B of every product, A and B of every layer and policy."""

    def joined(*names: str) -> list[jax.Array]:
        w_LEU, a_LMEr, b_LMrU = zip(*map(in_one_type, names), strict=True)
        wide = [wide_fragments(jnp.concatenate(x, axis=-1)) for x in (w_LEU, a_LMEr)]
        return [*wide, tall_fragments(jnp.concatenate(b_LMrU, axis=-1), RANK // 32, 1)]

    def tall(name: str, shares: int) -> list[jax.Array]:
        w_LEU, a_LMEr, b_LMrU = in_one_type(name)
        return [*(tall_fragments(x, shares, WARPS) for x in (w_LEU, a_LMEr)), tall_fragments(b_LMrU, 1, 1)]

    def in_one_type(name: str) -> list[jax.Array]:
        return [x.astype(modules[name][0].dtype) for x in modules[name]]

    qkv, gated = joined("q_proj", "k_proj", "v_proj"), joined("gate_proj", "up_proj")
    return [*qkv, *tall("o_proj", 1), *gated, *tall("down_proj", down_shares)]


def wide_fragments(w: jax.Array) -> jax.Array:
    """[..., E, U] with sixteen columns at a time, each warp's inputs together, sixteen at a time.

    Of these a lane has a column of either eight, and four inputs of it, as the matrix units take them.
    """
    *lead, E, U = w.shape
    x = w.reshape(-1, WARPS, E // (16 * WARPS), 2, 4, 2, U // 16, 2, 8)
    return x.transpose(0, 6, 1, 2, 8, 4, 7, 3, 5).reshape(*lead, -1)


def tall_fragments(w: jax.Array, shares: int, warps: int) -> jax.Array:
    """[..., E, U] with a share of the inputs and then eight columns at a time, each warp's inputs together, 32 at a time.

    Of these a lane has a column and eight inputs of it.
    """
    *lead, E, U = w.shape
    x = w.reshape(-1, shares, warps, E // (32 * warps * shares), 2, 2, 4, 2, U // 8, 8)
    return x.transpose(0, 1, 8, 2, 3, 9, 6, 4, 5, 7).reshape(*lead, -1)


def _tiles(keys_LPSKN: jax.Array, values_LPSKN: jax.Array, rows: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values in tiles of sixteen keys, as lanes hold them: the prompts', then room for every row's own."""

    def tiles(x_LPSKN: jax.Array, split: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
        L, _, S, K, _ = x_LPSKN.shape
        x_LPSKN = jnp.pad(x_LPSKN, ((0, 0), (0, 0), (-S % KEYS, 0), (0, 0), (0, 0)))
        x_LnKkN = x_LPSKN.reshape(L, -1, KEYS, K, HEAD).swapaxes(2, 3)
        lead = x_LnKkN.shape[:3]
        x = x_LnKkN.reshape(*lead, *split).transpose(0, 1, 2, *order).reshape(*lead, KEYS * HEAD)
        return jnp.pad(x, ((0, 0), (0, rows * -(-slots // KEYS)), (0, 0), (0, 0)))

    keys = tiles(keys_LPSKN, (2, 8, 8, 4, 2, 2, 2), (5, 7, 4, 6, 8, 3, 9))
    return keys, tiles(values_LPSKN, (2, 4, 2, 16, 2, 8), (6, 8, 4, 3, 7, 5))
