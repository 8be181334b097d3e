from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.engine import sampler
from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.engine.update import completion_logprobs
from agent_tunix.kernels import attention, device, nvrtc
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.loading import init_weights
from agent_tunix.models.lora import init_adapters
from agent_tunix.types import Prompts

ENDS = (1, 2, 3, 4)
PLAIN = Sampling(top_k=None, top_p=1.0, max_steps=6, num_generations=4, end_ids=ENDS, pad_id=0)


def with_(**changes) -> Sampling:
    return dataclasses.replace(PLAIN, **changes)


@pytest.fixture(scope="module")
def draw(weights, adapters, prompts, arch):
    def draw(key=0, prompts=prompts, adapters=adapters, weights=weights, temperature=1.0, **changes):
        draws = (Draw(adapters, prompts, jax.random.key(key), temperature),)
        return sample(weights, draws, arch=arch, sampling=with_(**changes))[0]

    return draw


@pytest.fixture(scope="module")
def reread(weights, adapters, prompts, arch):
    """The trainer's log-probabilities of a rollout."""
    score = jax.jit(partial(completion_logprobs, arch=arch), static_argnames="temperature")

    def reread(rollouts, temperature):
        return score(weights, adapters, prompts, rollouts.tokens_BC, rollouts.mask_BC, temperature=temperature)[0]

    return reread


def test_same_key_same_tokens_and_another_key_other_tokens(draw):
    first, again, other = (np.asarray(draw(key).tokens_BC) for key in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5


def test_noise_differs_between_the_steps_of_a_rollout_and_the_members_of_a_group(draw, weights):
    """A model whose logits are all equal has nothing but noise to choose by."""
    flat = dataclasses.replace(weights, embed_VD=jnp.zeros_like(weights.embed_VD))
    rollouts = draw(weights=flat)
    rows = [
        row[covered].tolist() for row, covered in zip(*map(np.asarray, (rollouts.tokens_BC, rollouts.mask_BC)), strict=True)
    ]
    assert len({token for row in rows for token in row}) > 20, "of 39"
    assert all(len(set(row)) > len(row) / 2 for row in rows)
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, {"greedy": True}], ids=str)
def test_the_sampler_reports_the_log_probabilities_the_trainer_finds(draw, reread, changes):
    """At the temperature, over the whole vocabulary; with a cached decode against one forward pass."""
    rollouts = draw(**changes)
    mask = np.asarray(rollouts.mask_BC)
    want = np.asarray(reread(rollouts, changes.get("temperature", 1.0)))
    np.testing.assert_allclose(np.asarray(rollouts.logprobs_BC)[mask], want[mask], rtol=1e-4, atol=1e-4)
    assert (np.asarray(rollouts.logprobs_BC)[~mask] == 0).all()


def test_the_mask_covers_everything_up_to_the_end_token_and_nothing_after(draw):
    rollouts = draw()
    tokens, mask, ended = (np.asarray(x) for x in (rollouts.tokens_BC, rollouts.mask_BC, rollouts.ended_B))
    assert 0 < ended.sum() < len(ended), "the test has both kinds"
    for row, covered, done in zip(tokens, mask, ended, strict=True):
        ends = np.flatnonzero(np.isin(row, ENDS))
        assert done == (len(ends) > 0)
        length = ends[0] + 1 if done else len(row)
        assert covered.tolist() == [True] * length + [False] * (len(row) - length)
        assert (row[length:] == 0).all()
        assert (row[:length] != 0).all()


def test_greedy_decoding_follows_the_argmax_of_the_full_forward_pass(draw, weights, adapters, prompts, arch):
    rollouts = draw(greedy=True)
    shared = jax.tree.map(lambda x: np.repeat(x, 4, axis=0), prompts)
    at = np.where(rollouts.mask_BC, shared.positions_PS[:, -1:] + 1 + np.arange(6), -1)
    tokens_BT, positions_BT = np.hstack([shared.tokens_PS, rollouts.tokens_BC]), np.hstack([shared.positions_PS, at])

    @jax.jit
    def logits(tokens_BT, positions_BT):
        hidden_BTD, _ = sampler.transformer.forward(weights, adapters, arch, tokens_BT, positions_BT)
        return sampler.transformer.unembed(weights, hidden_BTD)

    best = np.asarray(logits(tokens_BT, positions_BT))[:, 7:-1, 1:].argmax(axis=-1) + 1
    mask = np.asarray(rollouts.mask_BC)
    np.testing.assert_array_equal(np.asarray(rollouts.tokens_BC)[mask], best[mask])
    assert mask.sum(axis=1).max() > 2, "the test follows several tokens"


@pytest.mark.parametrize("greedy", [True, False])
def test_the_group_of_a_prompt_does_not_depend_on_its_neighbours(draw, prompts, greedy):
    other = Prompts(prompts.tokens_PS.at[::2, 4:].set(11), prompts.positions_PS)
    ours, theirs = (np.asarray(draw(prompts=p, greedy=greedy).tokens_BC) for p in (prompts, other))
    np.testing.assert_array_equal(ours[4:8], theirs[4:8])
    assert (ours[:4] != theirs[:4]).any()


def test_the_loop_stops_when_all_have_ended(weights, prompts, arch, monkeypatch):
    """A pass over the model counts itself; when the first token ends every sequence, no pass follows the prompt's."""
    passes = []
    forward = sampler.transformer.forward

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: passes.append(1))
        return forward(*args, **kwargs)

    monkeypatch.setattr(sampler.transformer, "forward", counted)
    greedy = jax.jit(partial(sample.__wrapped__, arch=arch, sampling=with_(greedy=True, end_ids=(1,))))

    def count(weights) -> tuple[int, bool]:
        passes.clear()
        (rollouts,) = greedy(weights, (Draw(None, prompts, jax.random.key(0)),))
        ended_B = np.asarray(rollouts.ended_B)
        jax.effects_barrier()
        return len(passes), bool(ended_B.all())

    flat = dataclasses.replace(weights, embed_VD=jnp.zeros_like(weights.embed_VD))  # greedy takes token 1, the first
    assert count(flat) == (1, True)
    assert count(weights) == (PLAIN.max_steps, False)


def test_policies_sampled_together_draw_what_each_draws_alone(weights, adapters, prompts, arch):
    """Other adapters, other prompts, another key and another temperature: only the base is shared."""
    other = Prompts(prompts.tokens_PS.at[:, 5:].set(11), prompts.positions_PS)
    scaled = jax.tree.map(lambda x: 1.5 * x, adapters)
    draws = (
        Draw(adapters, prompts, jax.random.key(0), 1.0),
        Draw(scaled, prompts, jax.random.key(0), 0.7),
        Draw(adapters, other, jax.random.key(1), 1.0),
    )
    together = sample(weights, draws, arch=arch, sampling=PLAIN)
    for got, draw in zip(together, draws, strict=True):
        (alone,) = sample(weights, (draw,), arch=arch, sampling=PLAIN)
        np.testing.assert_array_equal(got.tokens_BC, alone.tokens_BC)
        np.testing.assert_array_equal(got.mask_BC, alone.mask_BC)
        np.testing.assert_allclose(got.logprobs_BC, alone.logprobs_BC, atol=1e-5)
    assert (np.asarray(together[0].tokens_BC) != np.asarray(together[1].tokens_BC)).any()


@pytest.mark.parametrize("policies", [1, 3])
def test_what_is_prepared_is_what_tracing_asks_for(policies, monkeypatch):
    """Kernels of a Hopper GPU, told by what NVRTC is given; here it is only asked."""
    asked, shape = [], jax.ShapeDtypeStruct
    numbers = {"vocab_size": 96, "num_layers": 2, "embed_dim": 512, "num_heads": 2, "num_kv_heads": 1, "head_dim": 256}
    numbers |= {"hidden_dim": 256, "sliding_window": 24, "global_every": 2, "query_scale": 1 / 16, "norm_eps": 1e-6}
    arch = Architecture(rope_local_base=1e4, rope_global_base=1e6, rope_global_factor=1.0, **numbers)
    monkeypatch.setattr(device, "capability", lambda: device.HOPPER)
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    monkeypatch.setattr(attention, "cudnn_serves", lambda _: False)
    monkeypatch.setattr(nvrtc, "serves", lambda: True)
    monkeypatch.setattr(nvrtc, "compiled", lambda source, macros, folder: asked.append(macros) or "")
    monkeypatch.setattr(nvrtc, "call", lambda name, ptx, given, made, *_, **__: [jnp.zeros(x.shape, x.dtype) for x in made])
    weights = jax.eval_shape(partial(init_weights, arch=arch, dtype=jnp.bfloat16), jax.random.key(0))
    own = jax.eval_shape(partial(init_adapters, arch=arch, modules=("q_proj",), rank=8, alpha=16.0), jax.random.key(0))
    prompts = Prompts(shape((2, 40), jnp.int32), shape((2, 40), jnp.int32))
    draws = (Draw(own, prompts, jax.eval_shape(partial(jax.random.key, 0)), 0.9),) * policies
    long = with_(max_steps=64, num_generations=16)
    sampler.prepare(weights, draws, arch=arch, sampling=long)
    sample.eval_shape(weights, draws, arch=arch, sampling=long)
    first, second = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    assert first == second
    assert [(one["PROMPTS"], one["GROUP"]) for one in first] == [(2, 16), (8, 1)]
    assert {(one["POLICIES"], one["PROMPT_TILES"]) for one in first} == {(policies, 3)}


def test_a_rollout_that_goes_on_with_few_draws_what_one_of_all_draws(weights, adapters, prompts, arch, monkeypatch):
    """Most end soon, as four tokens of forty are ends; some go on to the limit, as a policy's temperature is low."""
    many = with_(max_steps=80, num_generations=48)
    scaled = jax.tree.map(lambda x: 1.5 * x, adapters)
    draws = (Draw(adapters, prompts, jax.random.key(0), 1.0), Draw(scaled, prompts, jax.random.key(1), 0.5))
    rows: list[int] = []
    read = sampler.transformer.forward

    def seen(weights, adapters, arch, tokens, positions, past=()):
        if past:
            jax.debug.callback(lambda: rows.append(len(tokens)))
        return read(weights, adapters, arch, tokens, positions, past)

    def drawn(least: int):
        monkeypatch.setattr(sampler, "LEAST_STEPS", least)
        rows.clear()
        found = jax.block_until_ready(jax.jit(partial(sample.__wrapped__, arch=arch, sampling=many))(weights, draws))
        jax.effects_barrier()
        return found, list(rows)

    whole, _ = drawn(81)
    monkeypatch.setattr(sampler.transformer, "forward", seen)
    narrowed, now = drawn(64)
    assert set(now) == {2 * 144, 2 * 36, 2 * 9}
    assert now == sorted(now, reverse=True)
    lengths = np.sort(np.concatenate([np.asarray(r.mask_BC).sum(axis=1) for r in whole]))
    assert len(now) + 1 == lengths[-1]
    for ours, theirs in zip(narrowed, whole, strict=True):
        np.testing.assert_array_equal(ours.tokens_BC, theirs.tokens_BC)
        np.testing.assert_array_equal(ours.ended_B, theirs.ended_B)
        np.testing.assert_allclose(ours.logprobs_BC, theirs.logprobs_BC, atol=1e-5)
