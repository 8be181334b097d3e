"""What a run works with while it trains: what it writes to, what its batches begin with, and what may stop or pause it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from agent_tunix.engine import processes
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.guard import Interruption, Progress
from agent_tunix.engine.metrics import Record, RunFolder
from agent_tunix.types import TrainState
from agent_tunix.workflows.display import Display
from agent_tunix.workflows.gather import Asked


@dataclasses.dataclass(frozen=True)
class Pause:
    """Whether a run is to rest after so many updates; `by_folder` says that this is read from what it has written."""

    due: Callable[[int], bool]
    by_folder: bool = False


NEVER = Pause(lambda step: False)


@dataclasses.dataclass(frozen=True)
class Desk:
    """What the host has to do for a run is put off until the device is busy, or until it is needed.

    `by_steps` is advanced once a step: it composes, and so keeps at hand, what the close of the run asks Hydra for.
    """

    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    interruption: Interruption
    pause: Pause
    asked_at: Callable[[int], Asked]
    rollbacks: list[Record]
    warned: set[str] = dataclasses.field(default_factory=set)
    put_off: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    by_steps: Iterator[object] = dataclasses.field(default_factory=lambda: iter(()))

    def interrupted(self) -> bool:
        return processes.any_of(self.interruption.requested)

    def rests(self, step: int) -> bool:
        if self.pause.by_folder:
            self.catch_up()
        return self.pause.due(step)

    def later(self, *work: Callable[[], object]) -> None:
        self.put_off.extend(work)

    def catch_up(self) -> None:
        while self.put_off:
            self.put_off.pop(0)()

    def write(self, record: Record) -> None:
        self.later(partial(self.folder.metrics, record), partial(self.display.step, record))
        self.later(partial(next, self.by_steps, None))

    def write_samples(self, records: Sequence[Record]) -> None:
        self.later(partial(self.folder.samples, records))

    def save(self, state: TrainState, progress: Progress) -> None:
        self.catch_up()
        self.checkpoints.save(state, progress)
