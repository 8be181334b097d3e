"""Executables kept on disk: the next start finds them without tracing, and takes no other program's for its own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from agent_tunix.algorithm.objectives import Coefficients, LossForm
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine import ahead_of_time, compile_cache
from agent_tunix.engine.ahead_of_time import Program
from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.engine.update import init_state, update
from agent_tunix.types import Batch

SAMPLING = Sampling(top_k=5, top_p=1.0, max_steps=4, num_generations=2, end_ids=(1,), pad_id=0)
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


def settle(settings: dict) -> None:
    """Has JAX's cache look at its settings, which it does only once, and forgets what is ready."""
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    ahead_of_time._ready.clear()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of its own, on a device that is not the host, where JAX itself finds nothing."""
    monkeypatch.setattr(ahead_of_time, "serves", lambda: True)
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_enable_compilation_cache": False}
    before = {name: jax.config.values[name] for name in settings}
    settle(settings)
    yield tmp_path
    settle(before)


@pytest.fixture
def lowered():
    """The names of the functions that were traced and lowered."""
    seen = []

    def listen(event: str, seconds: float, **more: str) -> None:
        if event == LOWERED:
            seen.append(more["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def start_anew() -> None:
    """What a new process knows: nothing but the files."""
    ahead_of_time._ready.clear()
    jax.clear_caches()


@pytest.fixture
def sampled(arch, weights, adapters, prompts):
    def program() -> Program:
        draw = Draw(adapters, prompts, jax.random.key(0), 0.9)
        return Program(sample, (weights, (draw,)), {"arch": arch, "sampling": SAMPLING})

    return program


@partial(jax.jit, static_argnames="factor")
def scaled(x: jax.Array, *, factor: int) -> jax.Array:
    return factor * x


def small(x: float = 1.0, factor: int = 2) -> Program:
    """A program that is soon compiled."""
    return Program(scaled, (jnp.full(3, x),), {"factor": factor})


@pytest.fixture
def learnt(arch, weights, adapters, prompts):
    def program() -> Program:
        """A fresh one for each call, which uses up its state."""
        rng, shape = np.random.default_rng(0), (len(prompts.tokens_PS) * 2, 4)
        tokens = jnp.asarray(rng.integers(4, arch.vocab_size, shape), jnp.int32)
        logprobs = jnp.asarray(rng.normal(-3, 0.1, shape), jnp.float32)
        advantages = jnp.asarray(rng.normal(size=shape[0]), jnp.float32)
        mask = jnp.ones(shape, bool)
        batch = Batch(prompts, tokens, mask, mask, logprobs, None, logprobs, mask / mask.size, advantages)
        h, c = Hyperparameters(1e-3, 0.01, 0.9, 0.999, 1e-8, 0.1), Coefficients(0.9, beta=0.08)
        state = init_state(jax.tree.map(jnp.copy, adapters))
        static = {"arch": arch, "micro_batches": 1, "form": LossForm(), "optimizer": "adamw"}
        return Program(update, (state, batch, weights, h, c, jnp.inf), static)

    return program


@pytest.mark.parametrize("kind", ["sampled", "learnt"])
def test_the_next_start_calls_what_was_kept_without_tracing_it(kind, request, cache, lowered):
    program = request.getfixturevalue(kind)
    first = ahead_of_time.run(program())
    assert len(list(cache.glob("*.executable"))) == 1
    start_anew()
    again = program()
    lowered.clear()
    second = ahead_of_time.run(again)
    assert not [name for name in lowered if program().function.__name__ in name]
    same = jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), first, second)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert all(jax.tree.leaves(same))


def test_an_argument_of_another_value_is_not_the_same_result(cache):
    """It is an input of the executable, and no part of its name."""
    ahead_of_time.run(small(1.0))
    start_anew()
    assert [ahead_of_time.run(small(x))[0] for x in (1.0, 3.0)] == [2.0, 6.0]
    assert len(list(cache.glob("*.executable"))) == 1


def test_another_setting_or_other_sources_are_another_executable(cache, monkeypatch):
    ahead_of_time.run(small())
    ahead_of_time.run(small(factor=3))
    assert len(list(cache.glob("*.executable"))) == 2
    monkeypatch.setattr(compile_cache, "_origin", lambda: "changed")
    start_anew()
    ahead_of_time.run(small())
    assert len(list(cache.glob("*.executable"))) == 3


CHANGES = {
    "jax": lambda patch: patch.setattr(jax, "__version__", "0.0.1"),
    "its compiler": lambda patch: patch.setattr(jaxlib, "__version__", "0.0.1"),
    "a share of memory": lambda patch: patch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_version_or_setting_is_another_origin(change, monkeypatch):
    before = compile_cache._origin()
    compile_cache._origin.cache_clear()
    change(monkeypatch)
    assert compile_cache._origin() != before
    compile_cache._origin.cache_clear()


@pytest.mark.parametrize("damage", [lambda kept: kept[: len(kept) // 2], lambda kept: b"", lambda kept: b"no executable"])
def test_one_that_is_damaged_is_made_anew(damage, cache):
    ahead_of_time.run(small())
    (path,) = cache.glob("*.executable")
    kept = path.read_bytes()
    path.write_bytes(damage(kept))
    start_anew()
    assert (ahead_of_time.run(small()) == 2).all()
    assert len(path.read_bytes()) > len(kept) // 2


def test_a_cache_that_cannot_be_written_stops_nothing(cache):
    jax.config.update("jax_compilation_cache_dir", str(cache / "file" / "folder"))
    (cache / "file").write_text("in the way")
    assert (ahead_of_time.run(small()) == 2).all()


def test_what_was_not_used_for_longest_makes_room(cache, monkeypatch):
    """JAX's own files too; one that was called again is of use."""
    (cache / "of-jax-cache").write_bytes(bytes(500))
    os.utime(cache / "of-jax-cache", (2, 2))
    for age, factor in enumerate((2, 3)):
        ahead_of_time.run(small(factor=factor))
        (new,) = (path for path in cache.glob("*.executable") if path.stat().st_mtime > 10)
        os.utime(new, (age, age))
    first = min(cache.glob("*.executable"), key=lambda path: path.stat().st_mtime)
    start_anew()
    ahead_of_time.run(small(factor=2))
    monkeypatch.setattr(compile_cache, "ROOM", first.stat().st_size)
    compile_cache.make_room(cache)
    assert list(cache.iterdir()) == [first]
    compile_cache.make_room(cache / "nowhere")


@pytest.mark.parametrize("fault", [jax.errors.JaxRuntimeError("UNIMPLEMENTED"), ValueError("of no kind"), OSError("full")])
def test_what_cannot_be_kept_stops_nothing_and_leaves_nothing(fault, cache, monkeypatch):
    def fail(*_: object) -> None:
        raise fault

    if isinstance(fault, OSError):
        monkeypatch.setattr(Path, "replace", fail)
    else:
        monkeypatch.setattr(compile_cache.serialize_executable, "serialize", fail)
    assert (ahead_of_time.run(small()) == 2).all()
    assert not list(cache.iterdir())


def test_what_jax_found_in_its_own_cache_is_not_kept(cache):
    class Lowered:
        def compile(self):
            jax.monitoring.record_event(compile_cache.FOUND)
            return jax.jit(jnp.sin).lower(1.0).compile()

    assert compile_cache.make(cache / "sine.executable", Lowered())(1.0) == jnp.sin(1.0)
    assert not list(cache.glob("*.executable"))


def test_jax_says_when_it_found_a_program_in_its_own_cache(tmp_path):
    """As `compile_cache.make` counts on; in a process of its own, since JAX looks for its cache only once."""
    program = """
import sys, jax
from agent_tunix.engine import compile_cache
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
for _ in range(2):
    compile_cache.make(None, jax.jit(jax.numpy.sin).lower(1.0))
    print(compile_cache._this_thread.found)
    jax.clear_caches()
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("size", [0, 100])
def test_what_jax_has_half_written_to_its_own_cache_is_written_again(tmp_path, size):
    """JAX alone would warn of it at every start, and never replace it."""
    program = """
import sys, jax
from pathlib import Path
from agent_tunix.engine import compile_cache
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
compile_cache.mend_cache()
compile_cache.mend_cache()
for _ in range(2):
    jax.jit(jax.numpy.sin).lower(1.0).compile()
    (path,) = Path(sys.argv[1]).glob("jit_sin-*-cache")
    print(path.stat().st_size)
    path.write_bytes(path.read_bytes()[: int(sys.argv[2])])
    jax.clear_caches()
import warnings; warnings.warn("of another kind")
"""
    asked = [sys.executable, "-c", program, str(tmp_path), str(size)]
    ran = subprocess.run(asked, capture_output=True, text=True, check=True)
    first, second = map(int, ran.stdout.split())
    assert second > first // 2 > size  # they differ by the digits of the seconds it took
    assert "of another kind" in ran.stderr
    assert "compilation cache" not in ran.stderr


def test_a_function_without_a_name_of_its_own_is_not_kept(cache):
    for factor in (2, 3):
        scaled = jax.jit(lambda x, factor=factor: factor * x)
        start_anew()
        assert ahead_of_time.run(Program(scaled, (jnp.ones(5),), {})).sum() == 5 * factor
    assert not list(cache.glob("*.executable"))
