"""Checks of a checkpoint's tensors as they are read: that they are finite, and the same for all processes.

The checksum of its matrices tells a checkpoint from others of the same shapes, whatever its format and the type asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Weights
from agent_tunix.models.quantization import Matrix, Quantised

LOOKED_AT = 1000  # values of a matrix that the checksum covers, about


class Inspection:
    """The checks of one checkpoint. `seen` is called with every tensor, `refuse` and `agree` when all are read."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.checksum = 0

    def seen(self, tensor: np.ndarray) -> np.ndarray:
        if tensor.ndim > 1:  # GGUF has one added to norms, which rounds them
            looked_at = tensor.reshape(-1)[:: max(1, tensor.size // LOOKED_AT)].astype(jnp.bfloat16)
            self.checksum = zlib.crc32(looked_at.tobytes(), self.checksum)
        return tensor

    def refuse(self, damaged: Sequence[str]) -> None:
        """Refuses a checkpoint with tensors that are not finite: nothing could be learnt from it."""
        if damaged:
            more = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise UserError(
                f"{self.checkpoint} is damaged: {damaged[0]} has NaN or infinity among its numbers{more}. Download it again."
            )

    def agree(self) -> None:
        """Refuses tensors that differ between processes: each would hold a part of another model."""
        if jax.process_count() > 1 and np.ptp(multihost_utils.process_allgather(np.uint32(self.checksum))):
            raise UserError(f"The processes differ in the weights of {self.checkpoint}.\nGive the same to all of them.")


@jax.jit
def finite(weights: Weights) -> Weights:
    """Whether all numbers of each array are finite, layer by layer where layers are stacked; in the same tree."""

    def by_layer(stack: Matrix) -> jax.Array:
        numbers = stack.scales if isinstance(stack, Quantised) else stack  # NaN where a block has any
        return jnp.isfinite(numbers).all(axis=tuple(range(1, numbers.ndim)))

    layers = jax.tree.map(by_layer, weights.layers, is_leaf=lambda x: isinstance(x, Quantised))
    embed, norm, head = (
        None if x is None else jnp.isfinite(x).all() for x in (weights.embed_VD, weights.final_norm_D, weights.head_VD)
    )
    return Weights(embed, layers, norm, head)  # type: ignore[arg-type]  # only a head may be none
