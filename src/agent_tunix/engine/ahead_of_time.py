"""Programs that a run will need before long, compiled by threads while it does something else.

A step of training needs three programs, and each takes longer to compile than the first evaluation takes to run. The host of
a GPU or TPU has cores to spare for that. Where the device is the processor itself, compiling would take it from the run.
"""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from agent_tunix.engine import compile_cache
from agent_tunix.kernels.device import import_mosaic

HANDOVER = 0.0005  # seconds for which a thread may hold the interpreter lock, a tenth of Python's default

_under_way: dict[Hashable, concurrent.futures.Future] = {}
_ready: dict[Hashable, jax.stages.Compiled] = {}
_tracer = concurrent.futures.ThreadPoolExecutor(1)  # tracing holds the interpreter lock: several at once would all be late


class Program(NamedTuple):
    """A jitted function and the arguments of a call; shapes may stand in for arrays where it is only compiled."""

    function: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any]
    beforehand: Callable[..., None] | None = None  # does, of the same arguments, what tracing would wait for

    def signature(self) -> tuple[Hashable, ...]:
        """Equal for calls that the same compiled program serves."""
        leaves, structure = jax.tree.flatten(self.arguments)
        kinds = tuple((getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)
        return self.function, structure, kinds, tuple(sorted(self.static.items(), key=lambda item: item[0]))

    def kept(self) -> jax.stages.Compiled | None:
        """The executable that an earlier process kept, if there is one."""
        return compile_cache.load(self._place(), self.arguments)

    def prepare(self) -> None:
        if self.beforehand:
            self.beforehand(*self.arguments, **self.static)

    def lower(self) -> jax.stages.Lowered:
        return self.function.lower(*self.arguments, **self.static)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles it, and keeps the executable for later processes."""
        return compile_cache.make(self._place(), lowered)

    def _place(self) -> Path | None:
        return compile_cache.place(self.function, repr(self.signature()[1:]))


def serves() -> bool:
    """Whether programs are compiled ahead: not where the device is the CPU."""
    return jax.default_backend() != "cpu"


def begin(program: Program, context: Callable[[], AbstractContextManager]) -> None:
    """Prepares a program in a thread of its own. Those that no earlier process kept are traced in `context`, one by one."""
    if not serves() or (signature := program.signature()) in _under_way or signature in _ready:
        return
    import_mosaic()
    sys.setswitchinterval(HANDOVER)  # the run reads weights meanwhile, and asks for the lock hundreds of times

    def kept_or_prepared() -> Any:
        if found := program.kept():
            return found
        with context():
            return program.prepare()

    def traced_unless_kept() -> Any:
        if kept.result():
            return None
        with context():
            return program.lower()

    def finish() -> None:
        _ready[signature] = kept.result() or program.compile(traced.result())

    own = concurrent.futures.ThreadPoolExecutor(1)
    kept = own.submit(kept_or_prepared)
    traced = _tracer.submit(traced_unless_kept)
    _under_way[signature] = soon = own.submit(finish)
    soon.add_done_callback(lambda _: _under_way.pop(signature, None))
    own.shutdown(wait=False)


def run(program: Program) -> Any:
    """Calls a program, once it is ready if it is being prepared; a fault of its preparation is raised again by the call."""
    if not serves():
        return program.function(*program.arguments, **program.static)
    signature = program.signature()
    if soon := _under_way.get(signature):
        concurrent.futures.wait([soon])
    if not compile_cache.serve():  # on several devices JAX's own call puts arguments in their place
        return program.function(*program.arguments, **program.static)
    if signature not in _ready:
        import_mosaic()
        _ready[signature] = program.kept() or program.compile(program.lower())
    return _ready[signature](*program.arguments)
