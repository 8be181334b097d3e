"""Optimizer, schedule and loss against torch, transformers and TRL (goldens by scripts/make_goldens.py)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm import optimizers, schedules
from agent_tunix.algorithm.objectives import OBJECTIVES, Coefficients, LossForm, per_sequence, policy_loss
from agent_tunix.engine.update import completion_logprobs
from agent_tunix.models.checkpoints.loading import load_weights
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.types import Batch, Prompts

pytestmark = pytest.mark.golden
FIELDS = {
    "model.layers.0.self_attn.q_proj.weight": ("q_proj", 0),
    "model.layers.2.mlp.down_proj.weight": ("down_proj", 2),
    "model.layers.1.input_layernorm.weight": ("input_norm", 1),
}


def test_adamw_follows_torch_over_a_hundred_steps(goldens):
    golden = np.load(goldens / "optimizer.npz")
    step = jax.jit(optimizers.step)
    for (rate, beta1, beta2, eps, decay, largest), expected in zip(golden["settings"], golden["trajectories"], strict=True):
        h = hyperparameters(rate, decay, beta1, beta2, eps, largest)
        params = {"a": jnp.asarray(golden["start"][:10]), "b": jnp.asarray(golden["start"][10:])}
        state, seen = optimizers.init(params), []
        for number, gradient in enumerate(golden["gradients"], 1):
            params, state, _ = step({"a": gradient[:10], "b": gradient[10:]}, state, params, h)
            if number in golden["recorded"]:
                seen.append(np.concatenate([params["a"], params["b"]]))
        np.testing.assert_allclose(seen, expected, rtol=2e-5, atol=2e-6)


def hyperparameters(rate, decay, beta1, beta2, eps, largest):
    return optimizers.Hyperparameters(
        learning_rate=rate, weight_decay=decay, beta1=beta1, beta2=beta2, eps=eps, max_grad_norm=largest
    )


def test_warmup_cosine_is_transformers_with_updates_counted_from_one(goldens):
    golden = np.load(goldens / "schedule.npz")
    for index, (peak, warmup, total, smallest) in enumerate(golden["settings"]):
        schedule = schedules.warmup_cosine(peak, int(warmup), int(total), smallest)
        rates = [schedule(t) for t in range(1, int(total) + 1)]
        np.testing.assert_allclose(rates, golden[f"rates_{index}"][1:], rtol=1e-9, atol=peak * 1e-12)


def test_loss_and_gradient_are_trls(goldens):
    golden = np.load(goldens / "objective.npz")
    arch = read_architecture(goldens / "gemma3")
    weights = load_weights(goldens / "gemma3", arch, jnp.float32)
    prompt_mask = golden["prompt_mask"][::2]
    prompts = Prompts(golden["prompt_ids"][::2], np.where(prompt_mask, np.cumsum(prompt_mask, axis=1) - 1, -1))
    mask = golden["completion_mask"].astype(bool)

    @jax.jit
    @jax.value_and_grad
    def loss(weights, epsilon, beta, temperature):
        logprobs, entropy = completion_logprobs(
            weights, None, prompts, golden["completion_ids"], mask, arch=arch, temperature=temperature
        )
        old, reference = golden["old_per_token_logps"], golden["ref_per_token_logps"]
        learnt = {"weights_BC": per_sequence(mask, mask.shape[1]), "advantages_B": golden["advantages"]}
        batch = Batch(prompts, golden["completion_ids"], mask, mask, old, None, reference, **learnt)
        return policy_loss(logprobs, entropy, batch, Coefficients(temperature, beta, epsilon, epsilon), LossForm())[0]

    for index, settings in enumerate(golden["settings"]):
        value, gradient = loss(weights, *settings)
        np.testing.assert_allclose(value, golden["losses"][index], rtol=1e-5)
        for name, (field, layer) in FIELDS.items():
            expected = golden[name][index]
            assert np.abs(expected).max() > 1e-4
            np.testing.assert_allclose(gradient.layers[field][layer].T, expected, rtol=1e-3, atol=1e-6)


def test_every_objective_of_trl_has_its_loss_and_its_gradient(goldens):
    """By the log-probabilities of tokens. RLOO's divergence is in its reward there, so beta is 0 for it."""
    golden = np.load(goldens / "losses.npz")
    mask, old, drift = golden["mask"], golden["old"], golden["drift"]
    prompts, seen = Prompts(np.zeros((4, 1), np.int32), np.zeros((4, 1), np.int32)), set()
    for settings, loss, gradient in zip(
        map(json.loads, golden["settings"]), golden["losses"], golden["gradients"], strict=True
    ):
        objective, corrected = settings["objective"], settings["correction"]
        c = Coefficients(
            temperature=1.0,
            beta=settings["beta"],
            epsilon=settings["epsilon"],
            epsilon_high=settings["epsilon_high"],
            delta=np.inf if settings["delta"] is None else settings["delta"],
            importance_cap=1.1,
        )
        form = LossForm(objective, "k3", settings["kl_correction"], "truncate" if corrected else "none")
        batch = Batch(
            prompts,
            np.zeros(mask.shape, np.int32),
            mask,
            mask,
            old,
            old + drift if corrected else None,
            golden["reference"],
            OBJECTIVES[objective].weights(mask, int(golden["longest"])),
            golden["advantages"],
        )

        def ours(new, batch=batch, c=c, form=form):
            return policy_loss(new, jnp.ones_like(new), jax.tree.map(jnp.asarray, batch), c, form)[0]

        value, found = jax.jit(jax.value_and_grad(ours))(jnp.asarray(golden["new"]))
        np.testing.assert_allclose(value, loss, rtol=2e-5)
        np.testing.assert_allclose(found, gradient, rtol=2e-5, atol=2e-7)
        seen.add(objective)
    assert seen == set(OBJECTIVES) - {"gspo_token"}, "which TRL does not have"
