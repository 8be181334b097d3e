"""Programs compiled ahead of their call, as on a GPU; the device here is a CPU."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest

from agent_tunix.engine import ahead
from agent_tunix.engine.ahead import Program

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled(monkeypatch):
    """Counts how often programs were compiled, by the names of their functions, on a device that is not the host."""
    seen = Counter()

    def listen(event: str, seconds: float, **more: str) -> None:
        if event == COMPILED:
            seen[more["fun_name"]] += 1

    monkeypatch.setattr(ahead, "serves", lambda: True)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
    ahead._under_way.clear()


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_a_program_is_compiled_once_and_then_called(compiled):
    @jax.jit
    def doubled(x):
        return 2 * x

    ahead.begin(Program(doubled, (shape(7),), {}), nullcontext)
    assert ahead.run(Program(doubled, (jnp.ones(7),), {})).sum() == 14
    assert [count for name, count in compiled.items() if "doubled" in name] == [1]
    assert not ahead._under_way


def test_a_call_of_another_shape_does_not_wait(compiled):
    @jax.jit
    def tripled(x):
        return 3 * x

    ahead.begin(Program(tripled, (shape(7),), {}), nullcontext)
    assert ahead.run(Program(tripled, (jnp.ones(5),), {})).sum() == 15
    assert len(ahead._under_way) == 1


def test_a_fault_comes_up_in_the_call(compiled):
    @jax.jit
    def faulty(x):
        raise ValueError("no such product")

    ahead.begin(Program(faulty, (shape(7),), {}), nullcontext)
    with pytest.raises(ValueError, match="no such product"):
        ahead.run(Program(faulty, (jnp.ones(7),), {}))


def test_where_the_device_is_the_host_nothing_is_compiled_ahead():
    ahead.begin(Program(None, (), {}), nullcontext)
    assert not ahead._under_way
