from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm import optimizers
from agent_tunix.algorithm.objectives import Coefficients, LossForm, per_sequence, policy_loss
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine import update as update_module
from agent_tunix.engine.update import batch_logprobs, completion_logprobs, init_state
from agent_tunix.models.lora import Adapters
from agent_tunix.training.guard import fault_of
from agent_tunix.types import Batch, Prompts

TEMPERATURE, EPSILON, BETA = 0.8, 0.2, 0.5
H = Hyperparameters(
    learning_rate=0.01,
    weight_decay=0.01,
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    max_grad_norm=1.0,
)
C = Coefficients(temperature=TEMPERATURE, beta=BETA, epsilon=EPSILON, epsilon_high=EPSILON)
LENGTHS = np.array([6, 2, 3, 6, 1, 4])


@pytest.fixture(scope="module")
def update(weights, arch):
    return partial(update_module.update, weights=weights, h=H, c=C, max_kl=np.inf, arch=arch, micro_batches=1)


@pytest.fixture(scope="module")
def adapters(adapters):
    """On three modules of seven, which compiles faster."""
    some = ("q_proj", "v_proj", "down_proj")
    return Adapters({m: adapters.a[m] for m in some}, {m: adapters.b[m] for m in some}, adapters.scale)


@pytest.fixture(scope="module")
def logprobs(weights, arch):
    return jax.jit(partial(completion_logprobs, weights, arch=arch), static_argnames="temperature")


@pytest.fixture(scope="module")
def tight(weights, adapters, prompts, arch, logprobs) -> Batch:
    """Two completions of each of three prompts, sampled by a policy a little beside the one that is trained."""
    rng = np.random.default_rng(0)
    mask = np.arange(6) < LENGTHS[:, None]
    tokens = jnp.asarray(np.where(mask, rng.integers(1, 40, (6, 6)), 0), jnp.int32)
    mask = jnp.asarray(mask)
    now, _ = logprobs(adapters, prompts, tokens, mask, temperature=TEMPERATURE)
    old = jnp.where(mask, now + jnp.asarray(rng.normal(0, 0.2, (6, 6)), jnp.float32), 0)
    shares = jnp.asarray(per_sequence(np.asarray(mask), 6), jnp.float32)
    advantages = jnp.asarray([1.0, -1.0, 0.5, -0.5, -2.0, 2.0])
    batch = Batch(prompts, tokens, mask, mask, old, weights_BC=shares, advantages_B=advantages)
    (reference,) = batch_logprobs((batch,), weights, None, (TEMPERATURE,), arch=arch, micro_batches=3)
    return dataclasses.replace(batch, reference_logprobs_BC=reference)


@pytest.fixture(scope="module")
def batch(tight) -> Batch:
    return widened(tight, trash=0)


@pytest.fixture(scope="module")
def loss_and_gradient(weights, arch):
    """Of a batch, before any optimizer."""

    def loss(adapters, batch):
        value, stats_K = update_module._loss(adapters, batch, weights, (C,), arch, LossForm())
        return value, jax.tree.map(lambda stat_K: stat_K[0], stats_K)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def widened(batch: Batch, trash: int, left: int = 3, right: int = 2) -> Batch:
    """The same batch with more padding on both sides, whose tokens and old values are rubbish."""
    prompts = Prompts(
        jnp.pad(batch.prompts.tokens_PS, ((0, 0), (left, 0)), constant_values=trash),
        jnp.pad(batch.prompts.positions_PS, ((0, 0), (left, 0)), constant_values=-1),
    )
    pad = partial(jnp.pad, pad_width=((0, 0), (0, right)))
    names = ("tokens_BC", "mask_BC", "learnt_BC", "old_logprobs_BC", "reference_logprobs_BC", "weights_BC")
    wide = {name: pad(getattr(batch, name)) for name in names}
    wide["tokens_BC"] = jnp.where(wide["mask_BC"], wide["tokens_BC"], trash)
    return dataclasses.replace(batch, prompts=prompts, **wide)


def fresh(trainable):
    """A state of its own buffers: `update` takes those it is given."""
    return jax.jit(init_state)(jax.tree.map(np.asarray, trainable))


def assert_close(got, want, rtol=1e-3, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def assert_same_learning(got, want):
    ((loss, stats), grads), ((want_loss, want_stats), want_grads) = got, want
    assert_close((loss, stats), (want_loss, want_stats))
    assert_close(grads, want_grads, atol=1e-4)


def test_groups_that_share_a_padded_prompt_learn_as_sequences_read_apart_in_one_pass(
    adapters, tight, loss_and_gradient, weights, arch
):
    """Prompt and completion side by side in one plain pass, log-softmax of the logits before each token.

    Ours has more padding on both sides, and rubbish in it, which changes neither loss nor gradient.
    """
    batch = tight
    shared = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), batch.prompts)
    at = np.where(batch.mask_BC, shared.positions_PS[:, -1:] + 1 + np.arange(6), -1)
    tokens_BT, positions_BT = np.hstack([shared.tokens_PS, batch.tokens_BC]), np.hstack([shared.positions_PS, at])

    def loss(adapters):
        hidden_BTD, _ = update_module.transformer.forward(weights, adapters, arch, tokens_BT, positions_BT)
        logprobs_BCV = jax.nn.log_softmax(hidden_BTD[:, 7:-1] @ weights.embed_VD.T / TEMPERATURE)
        logprobs_BC = jnp.take_along_axis(logprobs_BCV, batch.tokens_BC[..., None], axis=-1)[..., 0]
        entropy_BC = -(jnp.exp(logprobs_BCV) * logprobs_BCV).sum(axis=-1)
        return policy_loss(logprobs_BC, entropy_BC, batch, C, LossForm())

    want = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapters)
    for trash in (0, 23):
        assert_same_learning(loss_and_gradient(adapters, widened(batch, trash)), want)


def test_the_end_token_is_learnt(adapters, batch, loss_and_gradient):
    """The fifth completion is nothing but its end token, and its advantage makes a difference."""
    assert LENGTHS[4] == 1
    praise, blame = (dataclasses.replace(batch, advantages_B=jnp.asarray([0, 0, 0, 0, a, 0.0])) for a in (1.0, -1.0))
    (_, up), (_, down) = (loss_and_gradient(adapters, b) for b in (praise, blame))
    assert np.abs(up.b["q_proj"] - down.b["q_proj"]).max() > 1e-4


def test_the_reference_is_the_base_with_adapters_off_however_it_is_sliced(tight, logprobs):
    want, _ = logprobs(None, tight.prompts, tight.tokens_BC, tight.mask_BC, temperature=TEMPERATURE)
    assert_close(tight.reference_logprobs_BC, want)


def test_an_update_is_clipped_adamw_on_the_mean_gradient(adapters, batch, loss_and_gradient, update):
    state, stats = update(fresh(adapters), batch)
    (loss, _), grads = loss_and_gradient(adapters, batch)
    want, _, _ = jax.jit(optimizers.step)(grads, fresh(adapters).optimizer, adapters, H)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
    assert_close(state.trainable, want)
    assert state.step == 1
    np.testing.assert_allclose(stats.lr, 0.01, rtol=1e-6)
    np.testing.assert_allclose(stats.loss.loss, loss, rtol=1e-4)
    np.testing.assert_allclose(stats.grad_norm, norm, rtol=1e-3)
    change = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, state.trainable, adapters)
    moved = np.sqrt(sum((c**2).sum() for c in jax.tree.leaves(change)))
    np.testing.assert_allclose(stats.update_norm, moved, rtol=1e-3)
    assert stats.update_survival == 1
    second, _ = update(state, batch)
    assert second.step == 2


def test_slices_of_a_batch_give_the_update_of_the_whole(adapters, batch, update):
    whole = update(fresh(adapters), batch)
    sliced = update(fresh(adapters), batch, micro_batches=3)
    assert_close(sliced, whole, atol=5e-5)


def test_repeating_an_update_lowers_the_loss_and_raises_what_was_rewarded(adapters, batch, update, logprobs):
    state, losses = fresh(adapters), []
    for _ in range(8):
        state, stats = update(state, batch)
        losses.append(float(stats.loss.loss))
    assert losses[-1] < losses[0] - 0.05
    before, after = (
        np.asarray(
            logprobs(a, batch.prompts, batch.tokens_BC, batch.mask_BC, temperature=TEMPERATURE)[0] * batch.mask_BC
        ).sum(1)
        for a in (adapters, state.trainable)
    )
    assert after[5] > before[5]
    assert after[4] < before[4]


def test_survival_is_the_share_of_weights_that_changed():
    old = {"a": jnp.ones(6), "b": jnp.ones(2)}
    new = {"a": jnp.array([1, 1, 1, 1, 1, 2.0]), "b": jnp.array([1, 0.5])}
    assert update_module._share_changed(old, new) == 0.25


def test_survival_is_counted_where_there_are_more_weights_than_32_bits_count():
    """As all weights of 4B: only traced, not computed."""
    many = {name: jax.ShapeDtypeStruct((34, 2560, 30_000), jnp.float32) for name in "ab"}
    assert jax.eval_shape(update_module._share_changed, many, many).dtype == jnp.float32


def test_all_weights_can_be_trained_by_demonstrations(weights, batch, update):
    """The warm start: no sampler, no reference, advantage 1; the loss is the cross-entropy, and it falls."""
    shown = dataclasses.replace(batch, old_logprobs_BC=None, reference_logprobs_BC=None, advantages_B=jnp.ones(6))
    state, losses = fresh(weights), []
    for _ in range(4):
        state, stats = update(state, shown)
        losses.append(float(stats.loss.loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


def test_a_change_that_is_no_number_does_not_reach_the_weights(adapters, batch, update):
    """Where a gradient is zero and nothing is added to the denominator, AdamW divides zero by zero."""
    still = dataclasses.replace(batch, advantages_B=jnp.zeros(6))
    state, stats = update(fresh(adapters), still, h=dataclasses.replace(H, eps=0.0), c=dataclasses.replace(C, beta=0.0))
    assert np.isfinite(stats.loss.loss)
    assert not stats.applied
    assert fault_of(stats, np.inf) == "the norm of the update is nan"
    jax.tree.map(np.testing.assert_array_equal, state.trainable, adapters)


def test_the_kl_term_alone_pulls_the_policy_back_to_the_base(adapters, batch, update):
    """With no advantage, the trained policy comes nearer to the base on the tokens of the batch."""
    still = dataclasses.replace(batch, advantages_B=jnp.zeros(6))
    state, kls = fresh(adapters), []
    for _ in range(5):
        state, stats = update(state, still)
        kls.append(float(stats.loss.kl))
    assert kls[-1] < 0.7 * kls[0]
