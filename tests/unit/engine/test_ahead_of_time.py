"""Programs compiled ahead of their call, as on a GPU; the device here is a CPU."""

from __future__ import annotations

import concurrent.futures
import importlib
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import pytest

from agent_tunix.engine import ahead_of_time
from agent_tunix.engine.ahead_of_time import Program
from agent_tunix.kernels import device

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled(monkeypatch):
    """Counts how often programs were compiled, by the names of their functions, on a device that is not the host."""
    seen = Counter()

    def listen(event: str, seconds: float, **more: str) -> None:
        if event == COMPILED:
            seen[more["fun_name"]] += 1

    monkeypatch.setattr(ahead_of_time, "serves", lambda: True)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
    ahead_of_time._under_way.clear()
    ahead_of_time._ready.clear()


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def times(factor: int):
    """A program of its own for every test."""

    @jax.jit
    def scaled(x):
        return factor * x

    return scaled


def test_a_program_is_compiled_once_and_then_called(compiled):
    doubled = times(2)
    ahead_of_time.begin(Program(doubled, (shape(7),), {}), nullcontext)
    assert ahead_of_time.run(Program(doubled, (jnp.ones(7),), {})).sum() == 14
    assert [count for name, count in compiled.items() if "scaled" in name] == [1]


def test_a_call_waits_for_its_own_program_and_for_no_other(compiled):
    tripled, may_compile = times(3), threading.Event()

    @contextmanager
    def held_up():
        assert may_compile.wait(60)
        yield

    ahead_of_time.begin(Program(tripled, (shape(7),), {}), held_up)
    assert ahead_of_time.run(Program(tripled, (jnp.ones(5),), {})).sum() == 15
    ahead_of_time.begin(Program(tripled, (shape(7),), {}), held_up)
    assert len(ahead_of_time._under_way) == 1, "what is under way is not begun again"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(ahead_of_time.run, Program(tripled, (jnp.ones(7),), {}))
        assert not concurrent.futures.wait([call], timeout=0.5).done
        may_compile.set()
        assert call.result().sum() == 21
    assert [count for name, count in compiled.items() if "scaled" in name] == [2]
    deadline = time.monotonic() + 60
    while ahead_of_time._under_way:  # what is compiled is forgotten, a moment after its call
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_programs_are_traced_in_the_order_they_were_begun(compiled, monkeypatch):
    """Of the first, it takes longest to know that no earlier start has kept it."""
    traced, may_look = [], threading.Event()

    def noting(name: int):
        @jax.jit
        def noted(x):
            traced.append(name)
            return x

        return noted

    def look(path, arguments) -> None:
        if arguments[0].shape == (1,):
            assert may_look.wait(60)

    monkeypatch.setattr(ahead_of_time.compile_cache, "load", look)
    programs = [Program(noting(n), (shape(n),), {}) for n in (1, 2, 3)]
    for program in programs:
        ahead_of_time.begin(program, nullcontext)
    assert not traced
    may_look.set()
    for n, program in enumerate(programs, start=1):
        ahead_of_time.run(Program(program.function, (jnp.ones(n),), {}))
    assert traced == [1, 2, 3]


def test_what_tracing_would_wait_for_is_done_meanwhile_unless_the_program_was_kept(compiled, monkeypatch):
    """The first of two is being traced when the second is prepared; of a third there is nothing to do."""
    doubled, tripled, kept, prepared = times(2), times(3), times(4), threading.Event()
    found = kept.lower(shape(5)).compile()
    monkeypatch.setattr(
        ahead_of_time.compile_cache, "load", lambda _, arguments: found if arguments[0].shape == (5,) else None
    )
    seen = []

    @jax.jit
    def waits(x):
        assert prepared.wait(60)
        return doubled(x)

    def beforehand(x, *, by: int = 1) -> None:
        seen.append((x.shape, by))
        prepared.set()

    ahead_of_time.begin(Program(waits, (shape(7),), {}), nullcontext)
    ahead_of_time.begin(Program(kept, (shape(5),), {}, beforehand), nullcontext)
    ahead_of_time.begin(Program(tripled, (shape(3),), {}, beforehand), nullcontext)
    assert ahead_of_time.run(Program(waits, (jnp.ones(7),), {})).sum() == 14
    assert ahead_of_time.run(Program(tripled, (jnp.ones(3),), {}, beforehand)).sum() == 9
    assert ahead_of_time.run(Program(kept, (jnp.ones(5),), {}, beforehand)).sum() == 20
    assert seen == [((3,), 1)]


def test_a_program_that_was_kept_does_not_wait_for_one_that_is_traced(compiled, monkeypatch):
    doubled, tripled, may_trace = times(2), times(3), threading.Event()
    found = doubled.lower(shape(5)).compile()
    monkeypatch.setattr(
        ahead_of_time.compile_cache, "load", lambda _, arguments: found if arguments[0].shape == (5,) else None
    )

    @contextmanager
    def held_up():
        assert may_trace.wait(60)
        yield

    ahead_of_time.begin(Program(tripled, (shape(7),), {}), held_up)
    ahead_of_time.begin(Program(doubled, (shape(5),), {}), held_up)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(ahead_of_time.run, Program(doubled, (jnp.ones(5),), {}))
        ready = concurrent.futures.wait([call], timeout=20).done
        may_trace.set()
    assert ready
    assert call.result().sum() == 10
    assert ahead_of_time.run(Program(tripled, (jnp.ones(7),), {})).sum() == 21


def test_a_fault_comes_up_in_the_call(compiled):
    @jax.jit
    def faulty(x):
        raise ValueError("no such product")

    ahead_of_time.begin(Program(faulty, (shape(7),), {}), nullcontext)
    with pytest.raises(ValueError, match="no such product"):
        ahead_of_time.run(Program(faulty, (jnp.ones(7),), {}))


def test_where_the_device_is_the_host_nothing_is_compiled_ahead():
    ahead_of_time.begin(Program(None, (), {}), nullcontext)
    assert not ahead_of_time._under_way


def test_mosaic_is_imported_before_any_thread_has_work(compiled, monkeypatch):
    """It changes the environment, which a compiler that another thread starts at that moment could not read."""
    seen = []
    monkeypatch.setattr(device, "capability", lambda: device.HOPPER)
    monkeypatch.setattr(importlib, "import_module", lambda name: seen.append((name, threading.current_thread())))
    device.import_mosaic.cache_clear()
    monkeypatch.setattr(Program, "kept", lambda self: seen.append("kept"))
    for size in (3, 4):
        ahead_of_time.begin(Program(times(2), (shape(size),), {}), nullcontext)
    concurrent.futures.wait(list(ahead_of_time._under_way.values()))
    device.import_mosaic.cache_clear()
    assert seen == [(device.MOSAIC, threading.main_thread()), "kept", "kept"]
