"""The device, started before it is needed: a GPU takes seconds to start, and another to give its first memory."""

from __future__ import annotations

import contextlib
import threading

import jax


def wake() -> None:
    """Has the device started by a thread. Python ends only after it: a device is not left half started."""
    threading.Thread(target=_touch).start()


def _touch() -> None:
    with contextlib.suppress(RuntimeError):  # is raised again, and answered for, where the device is used
        jax.device_put(0)  # a copy, which compiles nothing: the cache of programs may not be there yet
