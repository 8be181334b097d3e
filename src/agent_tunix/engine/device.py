"""The device, started before it is needed: a GPU takes seconds to start, and another to give its first memory."""

from __future__ import annotations

import contextlib
import threading

import jax


def wake() -> None:
    """Starts the device in a thread that Python waits for when it ends: a device must not be left half started."""
    threading.Thread(target=_touch).start()


def _touch() -> None:
    with contextlib.suppress(RuntimeError, AssertionError):  # will be raised again, and reported, where the device is used
        jax.device_put(0)  # a copy, which compiles nothing: the cache of programs may not be there yet
