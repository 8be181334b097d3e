"""How far a run has come in its data: what a checkpoint holds beside the arrays."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

RATE_CUT = 10.0  # by which a rollback divides the learning rate


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come in its data, and what the guard has done; it is saved with every checkpoint.

    `data` is a digest of the training examples in their order, `base` the checksum of the weights it began with. `midway`
    says that it was saved because the run was interrupted or came to rest, and not because it was due or at its end.
    """

    position: int = 0
    rate_scale: float = 1.0
    skipped: tuple[int, ...] = ()
    rollbacks: tuple[dict[str, Any], ...] = ()
    data: str = ""
    midway: bool = False
    base: int = 0

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Progress:
        """What `dataclasses.asdict` wrote; JSON knows lists only. Raises a TypeError or KeyError for anything else."""
        position, rate_scale = operator.index(saved["position"]), saved["rate_scale"] * 1.0
        # which earlier versions did not save
        later = str(saved.get("data", "")), saved.get("midway") is True, operator.index(saved.get("base", 0))
        return cls(position, rate_scale, tuple(saved["skipped"]), tuple(saved["rollbacks"]), *later)

    def advanced(self) -> Progress:
        return dataclasses.replace(self, position=self.position + 1)

    def rolled_back(self, saved: Progress, step: int, reason: str) -> Progress:
        """Back at a checkpoint's position, at a lower rate, and without the batch that went wrong."""
        scale = self.rate_scale / RATE_CUT
        event = {"step": step, "batch": self.position, "reason": reason, "rate_scale": scale}
        skipped, rollbacks = (*self.skipped, self.position), (*self.rollbacks, event)
        return dataclasses.replace(self, position=saved.position, rate_scale=scale, skipped=skipped, rollbacks=rollbacks)
