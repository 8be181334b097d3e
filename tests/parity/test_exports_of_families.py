"""transformers and PEFT read what is exported of every family, and give our logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agent_tunix.models import transformer
from agent_tunix.models.checkpoints.loading import load_weights, save_weights
from agent_tunix.models.checkpoints.peft import write_adapters
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, init_adapters, merge

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_exports_give_our_logits(name, goldens, tmp_path):
    golden = goldens / "families" / name
    arch = read_architecture(golden)
    weights = load_weights(golden, arch, jnp.float32)
    adapters = init_adapters(jax.random.key(0), arch, ATTENTION + FEED_FORWARD, 4, 8.0)
    adapters = jax.tree.map(lambda x: x + 0.05, adapters)
    tokens = np.random.default_rng(0).integers(3, 60, (2, 12))
    hidden, _ = transformer.forward(weights, adapters, arch, tokens, np.tile(np.arange(12), (2, 1)))
    ours = np.asarray(transformer.unembed(weights, hidden))
    save_weights(tmp_path / "merged", merge(weights, adapters), arch, jnp.dtype("float32"))
    (tmp_path / "adapter").mkdir()
    write_adapters(tmp_path / "adapter", adapters, 8.0, str(golden), multimodal=False, dtype="float32")
    base = AutoModelForCausalLM.from_pretrained(golden, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for theirs in (merged, PeftModel.from_pretrained(base, tmp_path / "adapter")):
        with torch.no_grad():
            found = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
        np.testing.assert_allclose(found, ours, atol=1e-4)
