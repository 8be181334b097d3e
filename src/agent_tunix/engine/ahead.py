"""Programs that a run will need before long, compiled by threads while it does something else.

A step of training needs three programs, and each takes longer to compile than the first evaluation takes to run. The host of
a GPU or TPU has cores to spare for that. Where the device is the processor itself, compiling would take it from the run.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from agent_tunix.engine import executables

_under_way: dict[Hashable, concurrent.futures.Future] = {}
_ready: dict[Hashable, jax.stages.Compiled] = {}
_tracing = threading.Lock()  # threads share one Python: several that trace at once would all be late


class Program(NamedTuple):
    """A jitted function and a call of it. What is only to be compiled may have shapes in place of arrays."""

    function: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any]

    def signature(self) -> tuple[Hashable, ...]:
        """Equal for calls that the same compiled program serves."""
        leaves, structure = jax.tree.flatten(self.arguments)
        kinds = tuple((getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)
        return self.function, structure, kinds, tuple(sorted(self.static.items(), key=lambda item: item[0]))

    def compile(self, context: Callable[[], AbstractContextManager]) -> None:
        """Makes it ready: as an earlier start kept it, or compiled within a context, and kept."""
        signature = self.signature()
        path = executables.place(self.function, repr(signature[1:]))
        compiled = executables.load(path, self.arguments)
        if compiled is None:
            with context():
                with _tracing:
                    lowered = self.function.lower(*self.arguments, **self.static)
                compiled = executables.make(path, lowered)
        _ready[signature] = compiled


def serves() -> bool:
    return jax.default_backend() != "cpu"


def begin(program: Program, context: Callable[[], AbstractContextManager]) -> None:
    """Has the program made ready, within a context, by a thread of its own."""
    if serves() and (signature := program.signature()) not in _under_way and signature not in _ready:
        pool = concurrent.futures.ThreadPoolExecutor(1)
        _under_way[signature] = soon = pool.submit(program.compile, context)
        soon.add_done_callback(lambda _: _under_way.pop(signature, None))
        pool.shutdown(wait=False)


def run(program: Program) -> Any:
    """Calls a program, when it is ready if that is under way; a fault of compiling comes up again in the call."""
    if not serves():
        return program.function(*program.arguments, **program.static)
    signature = program.signature()
    if soon := _under_way.get(signature):
        concurrent.futures.wait([soon])
    if not executables.serve():  # arrays may lie elsewhere than foreseen, which JAX's own call sees to
        return program.function(*program.arguments, **program.static)
    if signature not in _ready:
        program.compile(contextlib.nullcontext)
    return _ready[signature](*program.arguments)
