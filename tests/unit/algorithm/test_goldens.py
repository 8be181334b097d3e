"""Optimizer, schedule and loss against torch, transformers and TRL (goldens by scripts/make_goldens.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm import optimizers, schedules
from agent_tunix.algorithm.loss import LossInputs, grpo_loss
from agent_tunix.engine.update import completion_logprobs
from agent_tunix.models.huggingface import read_architecture
from agent_tunix.models.weights import load_weights
from agent_tunix.types import Prompts

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
    unused = {"kl_beta": 0.0, "clip_epsilon": 0.2, "temperature": 1.0}
    return optimizers.Hyperparameters(
        learning_rate=rate, weight_decay=decay, beta1=beta1, beta2=beta2, eps=eps, max_grad_norm=largest, **unused
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
        inputs = LossInputs(logprobs, old, reference, entropy, mask, golden["advantages"])
        return grpo_loss(inputs, epsilon, beta)[0] / len(mask)

    for index, settings in enumerate(golden["settings"]):
        value, gradient = loss(weights, *settings)
        np.testing.assert_allclose(value, golden["losses"][index], rtol=1e-5)
        for name, (field, layer) in FIELDS.items():
            expected = golden[name][index]
            assert np.abs(expected).max() > 1e-4
            np.testing.assert_allclose(getattr(gradient.layers, field)[layer].T, expected, rtol=1e-3, atol=1e-6)
