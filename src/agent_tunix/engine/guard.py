"""What stops a run before its end without hurting it."""

from __future__ import annotations

import signal
from typing import Any


class Interruption:
    """Turns the first SIGINT or SIGTERM into a request to stop after the current batch; a second one acts as usual."""

    def __enter__(self) -> Interruption:
        self.requested = False
        self._previous: dict[int, Any] = {s: signal.signal(s, self._request) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        self.requested = True
        self.__exit__()
