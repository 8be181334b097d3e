"""What is looked at while the tensors of a checkpoint are read: that they are numbers, and the same for all processes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from agent_tunix.errors import UserError
from agent_tunix.models.gemma3 import Weights
from agent_tunix.models.quantisation import Matrix, Quantised

LOOKED_AT = 1000  # values of a tensor by which it is told from another


class Inspection:
    """Of one checkpoint. `seen` is told of every tensor, the others when all are read."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._sum = 0

    def seen(self, tensor: np.ndarray) -> np.ndarray:
        self._sum = zlib.crc32(tensor.reshape(-1)[:: max(1, tensor.size // LOOKED_AT)].tobytes(), self._sum)
        return tensor

    def refuse(self, damaged: Sequence[str]) -> None:
        """Refuses tensors that are no numbers: nothing could be learnt of them."""
        if damaged:
            more = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise UserError(
                f"{self.checkpoint} is damaged: {damaged[0]} has NaN or infinity among its numbers{more}. Get it anew."
            )

    def agree(self) -> None:
        """Refuses what is not the same for all processes: each would lay down its part of another model."""
        if jax.process_count() > 1 and np.ptp(multihost_utils.process_allgather(np.uint32(self._sum))):
            raise UserError(f"The processes differ in the weights of {self.checkpoint}.\nGive the same to all of them.")


@jax.jit
def finite(weights: Weights) -> Weights:
    """The same tree of whether all numbers are finite: of every layer, and of what is not stacked."""

    def by_layer(stack: Matrix) -> jax.Array:
        numbers = stack.scales if isinstance(stack, Quantised) else stack  # NaN where a block has any
        return jnp.isfinite(numbers).all(axis=tuple(range(1, numbers.ndim)))

    layers = jax.tree.map(by_layer, weights.layers, is_leaf=lambda x: isinstance(x, Quantised))
    return Weights(jnp.isfinite(weights.embed_VD).all(), layers, jnp.isfinite(weights.final_norm_D).all())
