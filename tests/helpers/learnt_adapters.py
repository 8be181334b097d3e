"""Adapters as training leaves them: of which no part is zero."""

from __future__ import annotations

import dataclasses

import jax

from agent_tunix.models import lora
from agent_tunix.models.architecture import Architecture


def learnt(arch: Architecture, seed: int) -> lora.Adapters:
    fresh = lora.init_adapters(jax.random.key(seed), arch, lora.select_modules("_proj", arch.num_layers), 8, 16.0)
    b = {name: 0.02 * jax.random.normal(jax.random.key(seed), leaf.shape) for name, leaf in fresh.b.items()}
    return dataclasses.replace(fresh, b=b)
