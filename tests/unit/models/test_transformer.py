from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.models import transformer
from agent_tunix.models.architecture import Segment
from agent_tunix.models.transformer import forward, unembed, write_segment

TOKENS = np.random.default_rng(1).integers(0, 40, (2, 9))


@pytest.fixture(scope="module")
def read(arch):
    """The forward pass, compiled once a shape."""
    return jax.jit(
        lambda weights, adapters, tokens, positions, past=(): forward(weights, adapters, arch, tokens, positions, past)
    )


def positions(tokens) -> jnp.ndarray:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


# The architecture once more, one sequence and one head at a time, in float64, as the paper and Hugging Face's code have it.


def norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1 + scale)


def rope(x, position, base, factor):
    """Rotates the pairs (i, i + N/2) of one head by position / factor * base^(-2i/N)."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position / factor * base ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def logits_by_hand(weights, arch, tokens):
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
    x = w.embed_VD[tokens] * np.sqrt(arch.embed_dim)
    for i in range(arch.num_layers):
        layer = {k: v[i] for k, v in w.layers.items()}
        far = (i + 1) % arch.global_every == 0
        turn = (arch.rope_global_base, arch.rope_global_factor) if far else (arch.rope_local_base, 1.0)
        h = norm(x, layer["input_norm"], arch.norm_eps)
        heads = {}
        for name, count in (("q", arch.num_heads), ("k", arch.num_kv_heads), ("v", arch.num_kv_heads)):
            heads[name] = (h @ layer[f"{name}_proj"]).reshape(len(tokens), count, arch.head_dim)
            if name != "v":
                normed = norm(heads[name], layer[f"{name}_norm"], arch.norm_eps)
                heads[name] = np.array([[rope(head, t, *turn) for head in row] for t, row in enumerate(normed)])
        out = np.zeros((len(tokens), arch.num_heads, arch.head_dim))
        for t in range(len(tokens)):
            start = 0 if far else max(0, t - arch.sliding_window + 1)
            for head in range(arch.num_heads):
                shared = head // (arch.num_heads // arch.num_kv_heads)
                scores = heads["k"][start : t + 1, shared] @ heads["q"][t, head] * arch.query_scale
                probs = np.exp(scores - scores.max())
                out[t, head] = probs @ heads["v"][start : t + 1, shared] / probs.sum()
        attended = out.reshape(len(tokens), -1) @ layer["o_proj"]
        x = x + norm(attended, layer["post_attention_norm"], arch.norm_eps)
        h = norm(x, layer["pre_feedforward_norm"], arch.norm_eps)
        h = (gelu(h @ layer["gate_proj"]) * (h @ layer["up_proj"])) @ layer["down_proj"]
        x = x + norm(h, layer["post_feedforward_norm"], arch.norm_eps)
    return norm(x, w.final_norm_D, arch.norm_eps) @ w.embed_VD.T


def test_logits_equal_a_naive_reading_of_the_paper(weights, arch, read):
    hidden, _ = read(weights, None, TOKENS, positions(TOKENS))
    want = np.stack([logits_by_hand(weights, arch, row) for row in TOKENS])
    np.testing.assert_allclose(unembed(weights, hidden), want, rtol=1e-4, atol=3e-5)


def test_local_layers_see_a_window_and_global_layers_everything(weights, arch):
    """With local layers alone a token is felt 4 layers x (window - 1) later at most; a global layer carries it on."""
    tokens = np.random.default_rng(2).integers(0, 40, (1, 16))
    other = tokens.copy()
    other[0, 0] = (tokens[0, 0] + 1) % 40

    def reach(arch):
        read = jax.jit(lambda tokens: forward(weights, None, arch, tokens, positions(tokens))[0])
        a, b = read(tokens), read(other)
        return np.flatnonzero(np.asarray(a != b).any(axis=(0, 2))).tolist()

    assert reach(dataclasses.replace(arch, global_every=99)) == list(range(4 * 3 + 1))
    assert reach(arch) == list(range(16))


def test_a_token_does_not_see_those_after_it(weights, read):
    other = TOKENS.copy()
    other[:, 5:] = (other[:, 5:] + 7) % 40
    a, b = (read(weights, None, t, positions(t))[0] for t in (TOKENS, other))
    np.testing.assert_array_equal(a[:, :5], b[:, :5])
    assert (a[:, 5:] != b[:, 5:]).any(axis=-1).all()


def test_left_padding_changes_nothing_whatever_tokens_it_has(weights, adapters, read):
    plain, _ = read(weights, adapters, TOKENS, positions(TOKENS))
    for trash in (0, 39):
        padded = np.concatenate([np.full((2, 4), trash), TOKENS], axis=1)
        at = np.concatenate([np.full((2, 4), -1), positions(TOKENS)], axis=1)
        got, _ = read(weights, adapters, padded, at)
        np.testing.assert_allclose(got[:, 4:], plain, rtol=1e-4, atol=1e-5)
        assert np.isfinite(got).all()


def test_decoding_token_by_token_into_slots_equals_reading_at_once(weights, adapters, arch, read):
    at = positions(TOKENS)
    whole, _ = read(weights, adapters, TOKENS, at)
    _, prompt = read(weights, adapters, TOKENS[:, :3], at[:, :3])
    written = transformer.empty_segment(arch, 2, 8, jnp.float32)
    for t in range(3, 9):
        hidden, new = read(weights, adapters, TOKENS[:, t : t + 1], at[:, t : t + 1], (prompt, written))
        written = write_segment(written, new, t - 3)
        np.testing.assert_allclose(hidden[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)


def test_a_group_reads_its_own_prompt_and_no_other(weights, prompts, read):
    tokens, at = jnp.full((6, 1), 5), jnp.repeat(prompts.positions_PS[:, -1:] + 1, 2, axis=0)

    def completions(prompts):
        _, past = read(weights, None, prompts.tokens_PS, prompts.positions_PS)
        return read(weights, None, tokens, at, (past,))[0]

    other = dataclasses.replace(prompts, tokens_PS=prompts.tokens_PS.at[1, -1].set(7))
    changed = (completions(prompts) != completions(other)).any(axis=(1, 2))
    assert changed.tolist() == [False, False, True, True, False, False]


def test_writing_a_segment_puts_it_into_its_slot_and_nowhere_else(arch):
    empty = transformer.empty_segment(arch, 2, 5, jnp.float32)
    assert (empty.positions_BS == -1).all()
    one = jnp.ones((4, 2, 1, 2, 8))
    written = write_segment(empty, Segment(one, 2 * one, jnp.array([[7], [3]])), 2)
    assert written.positions_BS.tolist() == [[-1, -1, 7, -1, -1], [-1, -1, 3, -1, -1]]
    np.testing.assert_array_equal(written.keys_LBSKN[0, 0, :, 0, 0], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(written.values_LBSKN[0, 0, :, 0, 0], [0, 0, 2, 0, 0])


def test_every_sixth_layer_of_a_real_model_is_global(arch):
    real = dataclasses.replace(arch, num_layers=18, global_every=6)
    assert np.flatnonzero(real.is_global()).tolist() == [5, 11, 17]


def test_norms_and_logits_of_a_bfloat16_model_are_made_in_float32(weights, read):
    small = jnp.full((1, 4), 1e-3, jnp.bfloat16)
    normed = transformer.rms_norm(small, jnp.zeros(4, jnp.bfloat16), 1e-12, 1.0)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(normed.astype(jnp.float32), 1.0, rtol=1e-2)
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    hidden, past = jax.eval_shape(read, weights, None, TOKENS, positions(TOKENS))
    assert hidden.dtype == past.keys_LBSKN.dtype == jnp.bfloat16
    assert jax.eval_shape(unembed, weights, hidden).dtype == jnp.float32
