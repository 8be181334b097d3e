"""A base model: its shapes first, its weights when they are asked for, and what may be put on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property

from jax.sharding import Mesh

from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.sharding import mesh_of
from agent_tunix.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model:
    """A base model. Its weights are read when they are first asked for; their shapes are known before."""

    arch: Architecture
    tokenizer: Tokenizer
    shapes: Weights
    read: Callable[[], tuple[Weights, int]]  # with their checksum
    # Runs, and the checksum of the base they began with: of this one and, as copies share it, of those it was made of.
    learnt_by: dict[str, int] = dataclasses.field(default_factory=dict)

    @cached_property
    def _read(self) -> tuple[Weights, int]:
        weights, checksum = self.read()
        for run, theirs in self.learnt_by.items():
            _refuse_other_base(run, theirs, checksum)
        return weights, checksum

    @property
    def weights(self) -> Weights:
        return self._read[0]

    @property
    def checksum(self) -> int:
        return self._read[1]

    def serve(self, run: str, checksum: int) -> None:
        """Refuses to have the policy of a run put on it that has learnt on another base; at the latest when it is read."""
        self.learnt_by[run] = checksum
        if "_read" in vars(self):
            _refuse_other_base(run, checksum, self.checksum)

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.shapes)

    def outline(self) -> Model:
        """The same with shapes in the place of weights, for programs that are only to be compiled."""
        return dataclasses.replace(self, read=lambda: (self.shapes, 0))


def _refuse_other_base(run: str, theirs: int, checksum: int) -> None:
    """`theirs` is 0 where the checkpoint is of an earlier version, and `checksum` where there are only shapes."""
    if 0 not in (theirs, checksum) and theirs != checksum:
        raise UserError(
            f"{run} has learnt on another base: what its model.weights names holds other weights now.\n"
            "Put the weights back that it began with, or start another run."
        )
