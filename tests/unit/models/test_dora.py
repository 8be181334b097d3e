"""DoRA: W' = m (W + s A B) / ||W + s A B||, the norm over the inputs of each output, and no gradient through it."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.algorithm import optimizers
from agent_tunix.algorithm.objectives import Coefficients, LossForm
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine.sampler import Draw, Sampling, logits, sample
from agent_tunix.engine.update import completion_logprobs, gradients_together
from agent_tunix.kernels import device
from agent_tunix.lab.plan import plan
from agent_tunix.lab.plan.memory import adapter_parameters
from agent_tunix.models import decoding, lora, sharding
from agent_tunix.models.checkpoints.loading import init_weights, quantised
from agent_tunix.models.lora import Adapters, DoraAdapters, init_adapters
from agent_tunix.models.quantization import dequantise
from agent_tunix.training import loading
from agent_tunix.types import Batch

MODULES = ("q_proj", "down_proj")
step = jax.jit(optimizers.step, static_argnames="name")
PLAIN = Sampling(top_k=None, top_p=1.0, max_steps=6, num_generations=2, end_ids=(1, 2, 3, 4), pad_id=0)


def matrix(weights, module):
    return weights.layers[module]


def with_matrices(weights, **matrices):
    return dataclasses.replace(weights, layers=weights.layers | matrices)


@pytest.fixture(scope="module")
def dora(weights, adapters, arch) -> DoraAdapters:
    """Magnitudes that have left the norms they began as; of two modules, as fewer are compiled faster."""
    fresh = init_adapters(jax.random.key(0), arch, MODULES, 3, 6.0, dora_over=weights)
    rng = np.random.default_rng(3)
    magnitudes = {name: m * jnp.asarray(rng.uniform(0.7, 1.3, m.shape), jnp.float32) for name, m in fresh.magnitudes.items()}
    a, b = ({name: matrices[name] for name in MODULES} for matrices in (adapters.a, adapters.b))
    return DoraAdapters(a, b, adapters.scale, magnitudes=magnitudes)


@pytest.fixture(scope="module")
def spelt_out(weights, dora):
    """The base with every matrix replaced by the formula, in NumPy's float64."""
    matrices = {}
    for module, m in dora.magnitudes.items():
        w, a, b = (np.asarray(x, np.float64) for x in (matrix(weights, module), dora.a[module], dora.b[module]))
        whole = w + dora.scale * a @ b
        matrices[module] = jnp.asarray(
            np.asarray(m)[:, None] * whole / np.linalg.norm(whole, axis=1, keepdims=True), jnp.float32
        )
    return with_matrices(weights, **matrices)


def test_fresh_adapters_have_the_norms_of_columns_and_change_nothing(weights, arch, prompts):
    fresh = init_adapters(jax.random.key(2), arch, MODULES, 3, 6.0, dora_over=weights)
    for module, m in fresh.magnitudes.items():
        np.testing.assert_allclose(m, np.linalg.norm(matrix(weights, module), axis=1), rtol=1e-6)
    plain = init_adapters(jax.random.key(2), arch, MODULES, 3, 6.0)
    jax.tree.map(np.testing.assert_array_equal, (fresh.a, fresh.b), (plain.a, plain.b))
    base, ours = (logits(weights, a, prompts, arch=arch) for a in (None, fresh))
    np.testing.assert_allclose(ours, base, rtol=1e-4, atol=2e-5)


def test_it_is_the_formula_read_apart_or_merged(weights, dora, spelt_out, arch, prompts):
    seen = np.asarray(prompts.positions_PS) >= 0
    want = np.asarray(logits(spelt_out, None, prompts, arch=arch))[seen]
    np.testing.assert_allclose(logits(weights, dora, prompts, arch=arch)[seen], want, rtol=1e-3, atol=5e-5)
    np.testing.assert_allclose(logits(lora.merge(weights, dora), None, prompts, arch=arch)[seen], want, rtol=1e-3, atol=5e-5)
    assert np.abs(logits(weights, Adapters(dora.a, dora.b, dora.scale), prompts, arch=arch)[seen] - want).max() > 0.01


def test_a_column_without_length_stays_without_one_and_is_a_number(weights, arch, prompts):
    empty = with_matrices(weights, q_proj=matrix(weights, "q_proj").at[:, :, 0].set(0))
    fresh = init_adapters(jax.random.key(2), arch, ("q_proj",), 3, 6.0, dora_over=empty)
    np.testing.assert_allclose(logits(empty, fresh, prompts, arch=arch), logits(empty, None, prompts, arch=arch), atol=2e-5)


@pytest.mark.parametrize("rows", [2, 40], ids=["few rows, apart", "many rows, merged"])
def test_the_sampler_reports_the_log_probabilities_the_trainer_finds(weights, dora, arch, prompts, rows):
    sampling = dataclasses.replace(PLAIN, num_generations=rows)
    (drawn,) = sample(weights, (Draw(dora, prompts, jax.random.key(0)),), arch=arch, sampling=sampling)
    score = jax.jit(partial(completion_logprobs, arch=arch, temperature=1.0))
    want, _ = score(weights, dora, prompts, drawn.tokens_BC, drawn.mask_BC)
    mask = np.asarray(drawn.mask_BC)
    np.testing.assert_allclose(np.asarray(drawn.logprobs_BC)[mask], np.asarray(want)[mask], rtol=1e-4, atol=1e-4)


def test_policies_sampled_together_draw_what_each_draws_alone(weights, dora, arch, prompts):
    draws = tuple(
        Draw(jax.tree.map(lambda x, by=by: by * x, dora), prompts, jax.random.key(key)) for key, by in enumerate((1.0, 1.2))
    )
    for got, draw in zip(sample(weights, draws, arch=arch, sampling=PLAIN), draws, strict=True):
        (alone,) = sample(weights, (draw,), arch=arch, sampling=PLAIN)
        np.testing.assert_array_equal(got.tokens_BC, alone.tokens_BC)
        np.testing.assert_allclose(got.logprobs_BC, alone.logprobs_BC, atol=1e-5)


@pytest.fixture(scope="module")
def batch(prompts) -> Batch:
    rng = np.random.default_rng(4)
    tokens_BC, mask_BC = jnp.asarray(rng.integers(3, 40, (6, 5))), jnp.ones((6, 5), bool)
    logprobs_BC, advantages_B = jnp.full((6, 5), -3.0), jnp.asarray(rng.normal(size=6), jnp.float32)
    return Batch(prompts, tokens_BC, mask_BC, mask_BC, logprobs_BC, None, logprobs_BC, mask_BC / 30, advantages_B)


def test_gradients_of_policies_together_are_those_of_each(weights, dora, batch, arch):
    other, c = jax.tree.map(lambda x: 1.2 * x, dora), Coefficients(1.0, beta=0.1)
    static = {"arch": arch, "micro_batches": 1, "form": LossForm()}
    together, _ = gradients_together((dora, other), (batch, batch), weights, (c, c), **static)
    for index, own in enumerate((dora, other)):
        (alone, _) = gradients_together((own,), (batch,), weights, (c,), **static)
        of_one = jax.tree.map(lambda x, i=index: x[:, i], together)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), of_one, alone)
        assert all((np.abs(m) > 0).any() for m in alone.magnitudes.values())


def test_a_quantised_base_counts_as_what_its_codes_stand_for(prompts, arch):
    wide = dataclasses.replace(arch, embed_dim=64, head_dim=32, hidden_dim=128, num_layers=2)
    held = quantised(init_weights(jax.random.key(0), wide), "nf4")
    plain = with_matrices(
        held, **{name: dequantise(matrix(held, name), jnp.float32) for name in lora.ATTENTION + lora.FEED_FORWARD}
    )
    fresh = init_adapters(jax.random.key(1), wide, ("q_proj", "up_proj"), 2, 4.0, dora_over=held)
    learnt = jax.tree.map(lambda x: x + 0.05, fresh)
    np.testing.assert_allclose(
        logits(held, learnt, prompts, arch=wide), logits(plain, learnt, prompts, arch=wide), atol=1e-4
    )


def test_magnitudes_do_not_decay(dora):
    still = jax.tree.map(jnp.zeros_like, dora)
    h = Hyperparameters(0.1, 0.5, 0.9, 0.999, 1e-8, 1.0)
    moved, *_ = step(still, optimizers.init(dora), dora, h, name="adamw")
    jax.tree.map(np.testing.assert_array_equal, moved.magnitudes, dora.magnitudes)
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, 0.95 * old, rtol=1e-6), (moved.a, moved.b), (dora.a, dora.b)
    )


@pytest.mark.parametrize("optimizer", optimizers.ALGORITHMS)
def test_every_optimizer_trains_magnitudes_too(dora, optimizer):
    h, gradient = Hyperparameters(1e-3, 0.0, 0.9, 0.999, 1e-8, 1.0), jax.tree.map(jnp.ones_like, dora)
    moved, *_ = step(gradient, optimizers.init(dora, optimizer), dora, h, name=optimizer)
    for module, m in moved.magnitudes.items():
        assert (np.abs(m - dora.magnitudes[module]) > 0).all()


def test_magnitudes_lie_where_the_outputs_of_their_matrices_lie(dora, arch):
    sizes = {"fsdp": 2, "tp": 2}
    for module, axis in {"q_proj": "tp", "down_proj": "fsdp"}.items():
        shape = dora.magnitudes[module].shape
        assert sharding.spec(("magnitudes", module), shape, arch, sizes) == jax.sharding.PartitionSpec(None, axis)


def test_kernels_leave_factors_alone_and_the_plan_says_so(weights, dora, arch, monkeypatch):
    monkeypatch.setattr(decoding, "_takes_kernels", lambda weights: True)
    monkeypatch.setattr(decoding, "_kernels_serve", lambda weights, rank: True)
    monkeypatch.setattr(decoding.token_kernel, "serves", lambda *_: False)
    assert decoding._way(weights, Adapters(dora.a, dora.b, dora.scale), arch, 8) is decoding._by_kernels
    for adapters in (dora, lora.over(weights, dora)):
        assert decoding._way(weights, adapters, arch, 8) is decoding._by_forward
    monkeypatch.setattr(device, "capability", lambda: device.HOPPER)
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = loading.described(validate(compose("config", ["model.use_dora=true"]), Config))
    shapes = plan.shapes(cfg, 64)
    (note,) = plan._notes_on_kernels(cfg, shapes)
    assert "rollouts take longer" in note
    assert plan._notes_on_kernels(cfg, dataclasses.replace(shapes, use_dora=False)) == []
    other = dataclasses.replace(shapes, arch=dataclasses.replace(shapes.arch, family="qwen3"))
    assert "are none for qwen3" in plan._notes_on_kernels(cfg, other)[0]


def test_magnitudes_are_counted_as_they_are_made():
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = loading.described(validate(compose("config", ["model=gemma3_tiny", "model.use_dora=true"]), Config))
    s = plan.shapes(cfg, 64)

    def made():
        weights = init_weights(jax.random.key(0), s.arch)
        return init_adapters(jax.random.key(0), s.arch, s.modules, 16, 1.0, dora_over=weights)

    assert adapter_parameters(s) == sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(made)))
