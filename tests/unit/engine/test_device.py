"""A device that is woken is touched by a thread; one that cannot be had is no fault of that thread's."""

from __future__ import annotations

import threading

import jax
import pytest

from agent_tunix.engine import device


@pytest.mark.parametrize("fault", [None, RuntimeError("no CUDA devices found"), AssertionError()], ids=type)
def test_waking_a_device(monkeypatch, fault):
    touched, faults = threading.Event(), []

    def copy(value):
        touched.set()
        if fault is not None:
            raise fault

    monkeypatch.setattr(jax, "device_put", copy)
    monkeypatch.setattr(threading, "excepthook", faults.append)
    before = set(threading.enumerate())
    device.wake()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert touched.wait(60)
    assert not faults
