"""Adapters that PEFT made on transformers' Gemma 3: its logits and gradients are ours (scripts/make_goldens.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from agent_tunix.models import transformer
from agent_tunix.models.checkpoints.loading import load_weights
from agent_tunix.models.checkpoints.peft import TENSORS, read_adapters, write_adapters
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.lora import over

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_logits_and_gradients_are_pefts(goldens, kind, tmp_path):
    arch = read_architecture(goldens / "gemma3")
    weights, adapters = load_weights(goldens / "gemma3", arch, jnp.float32), read_adapters(goldens / kind, arch)
    given, golden = np.load(goldens / "logits.npz"), np.load(goldens / kind / "golden.npz")
    seen = given["mask"]
    positions = np.where(seen, np.cumsum(seen, axis=1) - 1, -1)

    @jax.jit
    def product(adapters):
        hidden, _ = transformer.forward(weights, over(weights, adapters), arch, given["tokens"], positions)
        logits = transformer.unembed(weights, hidden)
        return jnp.where(seen[..., None], logits * golden["cotangent"], 0).sum(), logits

    gradients, logits = jax.grad(product, has_aux=True)(adapters)
    np.testing.assert_allclose(logits[seen], golden["logits"][seen], atol=1e-4, rtol=0)
    assert np.abs(golden["logits"] - given["logits"])[seen].max() > 0.1, "adapters that do something"
    write_adapters(tmp_path, gradients, 1.0, "the base", multimodal=False, dtype="float32")  # by PEFT's names
    ours = load_file(tmp_path / TENSORS)
    assert ours.keys() == golden.keys() - {"logits", "cotangent"}
    for name, gradient in ours.items():
        theirs = golden[name]
        np.testing.assert_allclose(gradient, theirs, atol=1e-4 * np.abs(theirs).max(), rtol=0, err_msg=name)
