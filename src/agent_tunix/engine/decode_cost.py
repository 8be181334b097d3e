"""A small call whose time shows what it costs a device to decode for several runs at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agent_tunix.engine import compiler_options
from agent_tunix.engine.ahead_of_time import Program
from agent_tunix.engine.calls import ProgramCall
from agent_tunix.models import lora, transformer
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.lora import Adapters, Trainable


@dataclasses.dataclass(frozen=True)
class ReadTokens(ProgramCall):
    """Reads `count` tokens of every row.

    With several, the device's time is seen, and not the call's, which threads that want the interpreter can make long.
    """

    weights: Weights
    trainable: Trainable
    tokens_B1: np.ndarray
    arch: Architecture
    count: int

    @property
    def kind(self) -> tuple:
        return (ReadTokens,)

    @staticmethod
    def program(calls: Sequence[ReadTokens]) -> Program:
        members, tokens = zip(*((r.trainable, r.tokens_B1) for r in calls), strict=True)
        static = {"arch": calls[0].arch, "count": calls[0].count}
        return Program(_read_tokens, (calls[0].weights, members, tokens), static)


@partial(jax.jit, static_argnames=("arch", "count"), compiler_options=compiler_options.OPTIONS)
def _read_tokens(
    weights: Weights, members: tuple[Adapters, ...], tokens: tuple[jax.Array, ...], *, arch: Architecture, count: int
) -> jax.Array:
    tokens_B1, adapters = jnp.concatenate(tokens), lora.over(weights, lora.stack(members))

    def read(position: jax.Array) -> jax.Array:
        return transformer.forward(weights, adapters, arch, tokens_B1, jnp.full_like(tokens_B1, position))[0]

    return jax.lax.map(read, jnp.arange(count))
