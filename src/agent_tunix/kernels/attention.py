"""Softmax attention of many tokens over segments of keys and values, with gradients.

A segment with fewer rows than the queries is shared by neighbouring rows. Positions decide who sees whom: -1 marks padding,
which no one attends to. There are two ways. On any device or mesh: scores against each segment, and one softmax over all of
them. On one NVIDIA Hopper GPU, where most of that time goes into moving scores through memory: cuDNN's attention, which
never writes them down (Dao et al., 2022, arXiv:2205.14135). cuDNN is given whole sequences, turned (rolled along T) so that
padding comes last: a token that sees only what is before it needs no mask, and what no one sees is not computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from agent_tunix.kernels import device, matmul, sequence_layout
from agent_tunix.kernels.norm_rope import Placing
from agent_tunix.kernels.sequence_layout import Turning
from agent_tunix.types import pytree, static

LEAST_HEAD, CUDNN_HEAD = 32, 256  # the least whose half the turning kernels take, and the largest that cuDNN takes
UNBOUNDED = jnp.iinfo(jnp.int32).max

Past = tuple[jax.Array, jax.Array, jax.Array]  # keys and values [rows, S, K, N], and positions [rows, S]


@pytree
class Reach:
    """How far back the tokens of a layer see: to the beginning where it is global, else as far as the window reaches."""

    is_global: jax.Array
    window: int = static()


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How a row is made up: tokens of its prompt, and the number of completions that follow, which are of equal length."""

    prompt: int
    group: int

    def completion(self, x: jax.Array) -> int:
        """Tokens of a completion."""
        return (x.shape[1] - self.prompt) // self.group

    def apart(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The prompts' tokens [P, S, ...], and the completions' [B, C, ...]."""
        return x[:, : self.prompt], x[:, self.prompt :].reshape(len(x) * self.group, -1, *x.shape[2:])


def attend(q_BTHN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, positions_BT: jax.Array, reach: Reach) -> jax.Array:
    """Attention of every token of a sequence to those that it sees: [B, T, H * N]. Padding is left, right, or both."""
    if not cudnn_serves(q_BTHN):
        return attend_to(q_BTHN, positions_BT, [(k_BTKN, v_BTKN, positions_BT)], reach)
    first_B = _first(positions_BT)
    q, k, v = (_turned(x, first_B) for x in (q_BTHN, k_BTKN, v_BTKN))
    return _flat(_turned(_by_cudnn(q, k, v, reach), -first_B))


def _first(positions_BT: jax.Array) -> jax.Array:
    return jnp.argmax(positions_BT >= 0, axis=1)


def places_of_groups(positions_PT: jax.Array, lengths: Lengths, turned: bool) -> jax.Array:
    """The positions by which `attend_groups` rotates: the tokens' own or, of turned sequences, 0, 1, 2 ... for all."""
    return jnp.arange(lengths.prompt + lengths.completion(positions_PT))[None] if turned else positions_PT


def attend_groups(q, k, v, positions_PT: jax.Array, lengths: Lengths, placing: Placing, reach: Reach, turned: bool):
    """As `attend`, of rows that are a prompt and then its group of completions, each of which sees the prompt and itself.

    Queries and keys come before their norm and RoPE, which `placing` adds: by `places_of_groups`. With `turned`
    sequences are given to cuDNN, and their heads normed on the way, as Gemma 3 norms them.
    """

    def joined(of_prompts, of_completions):
        return jnp.concatenate([of_prompts, of_completions.reshape(len(positions_PT), -1, of_prompts.shape[-1])], axis=1)

    if turned:
        first_P = _first(positions_PT)
        q, k, v = _turned_groups(q, k, v, first_P, lengths, placing)
        h_BTE = _flat(_turned(_by_cudnn(q, k, v, reach), -jnp.repeat(first_P, lengths.group)))
        return joined(h_BTE[:: lengths.group, : lengths.prompt], h_BTE[:, lengths.prompt :])
    q, k = placing(q, k)
    (q_prompt, q_own), (k_prompt, k_own), (v_prompt, v_own) = map(lengths.apart, (q, k, v))
    positions_PS, positions_BC = lengths.apart(positions_PT)
    prompt, own = (k_prompt, v_prompt, positions_PS), (k_own, v_own, positions_BC)
    return joined(attend_to(q_prompt, positions_PS, [prompt], reach), attend_to(q_own, positions_BC, [prompt, own], reach))


def attend_to(q_BTHN: jax.Array, q_positions_BT: jax.Array, segments: Sequence[Past], reach: Reach) -> jax.Array:
    """Attention of every token to all that it sees of some segments: [B, T, H * N]."""
    window = jnp.where(reach.is_global, UNBOUNDED, reach.window)
    return _flat(_by_scores(q_BTHN, q_positions_BT, segments, window))


def _flat(x_BTHN: jax.Array) -> jax.Array:
    return x_BTHN.reshape(*x_BTHN.shape[:2], -1)


def cudnn_serves(q_BTHN: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether cuDNN attends for such queries; `attend_groups` may then turn sequences."""
    if not device.one_hopper(q_BTHN.dtype):
        return False
    _, T, _, N = q_BTHN.shape
    return T > 1 and LEAST_HEAD <= N <= CUDNN_HEAD and matmul.power_of_two(N) == N


def _turned_groups(q, k, v, first_P, lengths: Lengths, placing: Placing) -> tuple[jax.Array, ...]:
    """For every completion its whole sequence, turned: queries and keys after norm and RoPE, and values."""
    sizes, interpret = (lengths.prompt, lengths.completion(q), lengths.group), device.capability() < device.AMPERE
    angles = placing.cos[0, :, 0], placing.sin[0, :, 0]

    def turned(x, factor, *scale_and_angles):
        return sequence_layout.turned(Turning(*sizes, placing.eps, factor, interpret), x, first_P, *scale_and_angles)

    queries, keys = turned(q, placing.query_scale, placing.q_norm, *angles), turned(k, 1.0, placing.k_norm, *angles)
    return queries, keys, turned(v, 1.0)


def _by_cudnn(q_BTHN, k_BTKN, v_BTKN, reach: Reach) -> jax.Array:
    """cuDNN takes no odd lengths, so these are padded by one token that no one sees."""
    T = q_BTHN.shape[1]

    def far(q, k, v, local=None):
        attention = jax.nn.dot_product_attention
        return attention(q, k, v, scale=1.0, is_causal=True, local_window_size=local, implementation="cudnn")

    near = functools.partial(far, local=(reach.window - 1, 0))
    q, k, v = (jnp.pad(x, [(0, 0), (0, T % 2), (0, 0), (0, 0)]) for x in (q_BTHN, k_BTKN, v_BTKN))
    read = far(q, k, v) if reach.window >= T else jax.lax.cond(reach.is_global, far, near, q, k, v)
    return read[:, :T]


@jax.custom_vjp
def _turned(x_BTHN: jax.Array, by_B: jax.Array) -> jax.Array:
    """Every row rolled so that it begins with token `by`. The gradient rolls back; left to JAX, it would be a scatter."""
    T = x_BTHN.shape[1]
    return jax.vmap(lambda row, by: row[(jnp.arange(T) + by) % T])(x_BTHN, by_B)


def _turn(x_BTHN, by_B):
    return _turned(x_BTHN, by_B), by_B


def _turn_back(by_B, d_BTHN):
    return _turned(d_BTHN, -by_B), None


_turned.defvjp(_turn, _turn_back)


def _by_scores(q_BTHN, q_positions_BT, segments, window) -> jax.Array:
    """One softmax over all segments, whose scores are never laid side by side; divided by its sum at the end."""
    scores = [_scores(q_BTHN, q_positions_BT, keys, positions, window) for keys, _, positions in segments]
    top_BTH = functools.reduce(jnp.maximum, (_by_query(s.max(axis=-1), q_BTHN) for s in scores))
    top_BTH = jax.lax.stop_gradient(top_BTH)
    shares = [jnp.exp(s - _by_key(top_BTH, keys)[..., None]) for s, (keys, _, _) in zip(scores, segments, strict=True)]
    total_BTH = functools.reduce(jnp.add, (_by_query(share.sum(axis=-1), q_BTHN) for share in shares))
    read = [
        jnp.einsum("bktrs,bskn->bktrn", share.astype(q_BTHN.dtype), values)
        for share, (_, values, _) in zip(shares, segments, strict=True)
    ]
    out_BTHN = functools.reduce(jnp.add, (_by_query(part, q_BTHN) for part in read))
    return (out_BTHN / total_BTH[..., None]).astype(q_BTHN.dtype)


def _scores(q_BTHN, q_positions_BT, keys, positions, window) -> jax.Array:
    """Masked float32 scores against one segment: [its rows, K, queries of a row, queries of a key, S]."""
    scores = jnp.einsum("bktrn,bskn->bktrs", _by_key(q_BTHN, keys), keys, preferred_element_type=jnp.float32)
    seen = _seen(q_positions_BT.reshape(len(keys), -1), positions, window)
    return jnp.where(seen[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)


def _by_key(of_queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[B, T, H, ...] as [rows of the keys, K, queries of a row, queries of a key, ...]."""
    rows, _, heads, _ = keys.shape
    H, *rest = of_queries.shape[2:]
    return of_queries.reshape(rows, -1, heads, H // heads, *rest).swapaxes(1, 2)


def _by_query(by_key: jax.Array, q_BTHN: jax.Array) -> jax.Array:
    """Back to [B, T, H, ...]."""
    return by_key.swapaxes(1, 2).reshape(*q_BTHN.shape[:3], *by_key.shape[4:])


def _seen(q_positions_BT, positions_BS, window) -> jax.Array:
    """Which slots each query sees: [B, T, S]."""
    distance = q_positions_BT[:, :, None] - positions_BS[:, None, :]
    return (positions_BS[:, None, :] >= 0) & (distance >= 0) & (distance < window)
