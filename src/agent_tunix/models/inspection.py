"""What is looked at while the tensors of a checkpoint are read: that they are numbers, and the same for all processes."""

from __future__ import annotations

import zlib
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from agent_tunix.errors import UserError

LOOKED_AT = 1000  # values of a tensor by which it is told from another


class Inspection:
    """Of one checkpoint. `seen` is told of every tensor, `check` of it where it lies, `agree` when all are read."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._sum = 0

    def seen(self, tensor: np.ndarray) -> np.ndarray:
        self._sum = zlib.crc32(tensor.reshape(-1)[:: max(1, tensor.size // LOOKED_AT)].tobytes(), self._sum)
        return tensor

    def check(self, name: str, finite: jax.Array) -> None:
        """Refuses a tensor of which nothing could be learnt; a quantised one would hide it by the scale of its block."""
        if not finite:
            raise UserError(f"{self.checkpoint} is damaged: {name} has NaN or infinity among its numbers. Get it anew.")

    def agree(self) -> None:
        """Refuses what is not the same for all processes: each would lay down its part of another model."""
        if jax.process_count() > 1 and np.ptp(multihost_utils.process_allgather(np.uint32(self._sum))):
            raise UserError(f"The processes differ in the weights of {self.checkpoint}.\nGive the same to all of them.")
