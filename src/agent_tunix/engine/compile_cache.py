"""Compiled programs kept whole in the user's cache folder, so that a later process need not even trace them.

JAX's own cache finds an executable by its program, which takes seconds of tracing to make. Here it is found by what
the program follows from: the call's signature, the sources of this package, the versions of JAX, its compiler and CUDA. An
executable that cannot be read is made anew. On several devices JAX's own cache has to do.

Only what was compiled here is kept. What JAX found in its own cache was read from a file, and XLA may not be able to write
it out a second time: for a CPU, under jax 0.12, it leaves parts out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

PACKAGE = Path(__file__).parent.parent
SOURCES = ("*.py", "*.cu", "*.cuh")
ROOM = 2 * 2**30  # bytes that the cache folder may take
FLAGS = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")  # memory too decides what is compiled
FOUND = "/jax/compilation_cache/cache_hits"
UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '(\w+)'")
_this_thread = threading.local()
_one_at_a_time = threading.Lock()


def _notice(event: str, **_: Any) -> None:
    if event == FOUND:
        _this_thread.found = True


jax.monitoring.register_event_listener(_notice)


def serve() -> bool:
    """Whether executables are kept: on a single device only."""
    return len(jax.devices()) == 1


def place(function: Any, signature: str) -> Path | None:
    """Where the executable of such a call is kept; None without a cache folder, for local functions or if not `serve`."""
    folder, name = jax.config.values["jax_compilation_cache_dir"], f"{function.__module__}.{function.__qualname__}"
    if folder is None or "<locals>" in name or not serve():
        return None
    with _one_at_a_time:  # many programs are asked for at once, and follow from the same
        origin = _origin()
    return Path(folder) / f"{hashlib.sha256((name + signature + origin).encode()).hexdigest()}.executable"


@functools.cache
def _origin() -> str:
    """All that a program follows from, except the call."""
    files = sorted(path for kind in SOURCES for path in PACKAGE.rglob(kind))
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    settings = [jax.config.values[name] for name in ("jax_enable_x64", "jax_default_matmul_precision")]
    device, flags = jax.devices()[0], [os.environ.get(name) for name in FLAGS]
    versions = jax.__version__, jaxlib.__version__, device.client.platform_version  # on a GPU the last is CUDA's
    return repr((sources, versions, device.device_kind, settings, flags))


def load(path: Path | None, arguments: tuple[Any, ...]) -> jax.stages.Compiled | None:
    """The executable kept there, to be called with such arguments; None if there is none that can be read."""
    if path is None or not path.exists():
        return None
    try:
        payload, result = pickle.loads(path.read_bytes())
        path.touch()  # the least recently used are deleted first
        trees = jax.tree.structure((arguments, {})), jax.tree.structure(result)
        return serialize_executable.deserialize_and_load(payload, *trees)
    except Exception:  # damaged, or of a kind that this JAX does not know: whatever it is, another is soon made
        return None


def make(path: Path | None, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program, and keeps it there."""
    _this_thread.found = False
    compiled = lowered.compile()
    if path is not None and not _this_thread.found:
        _save(path, compiled)
    return compiled


def _save(path: Path, compiled: jax.stages.Compiled) -> None:
    """Writes it atomically. If that fails, a later process starts more slowly, and nothing else is lost."""
    half = path.with_suffix(f".{os.getpid()}")
    try:
        payload, _, tree = serialize_executable.serialize(compiled)
        result = jax.tree.unflatten(tree, [0] * tree.num_leaves)  # the tree itself cannot be written
        path.parent.mkdir(mode=0o700, exist_ok=True)
        half.write_bytes(pickle.dumps((payload, result)))
        half.replace(path)
    except Exception:  # a full disk, or a device whose executables cannot be written, which each says in its own way
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)


def mend_cache() -> None:
    """Has entries of JAX's own cache deleted that it cannot read, so that it writes them again.

    It writes them in place. A kill or a full disk leaves half of one, which JAX would keep and warn of at every start.
    """
    if getattr(warnings.showwarning, "func", None) is not _mended:
        warnings.showwarning = functools.partial(_mended, warnings.showwarning)


def _mended(show: Callable[..., None], message: Any, *more: Any) -> None:
    folder, found = jax.config.values["jax_compilation_cache_dir"], UNREADABLE.match(str(message))
    if folder is None or found is None:
        return show(message, *more)
    with contextlib.suppress(OSError):  # another process deletes as well, or nobody may
        for path in Path(folder).glob(f"{found[1]}-*-cache"):
            path.unlink()


def make_room(folder: Path) -> None:
    """Deletes the least recently used files, JAX's and ours, until the rest takes no more than ROOM."""
    with contextlib.suppress(OSError):  # there is no folder, or another process deletes as well
        used = sorted((max(stat.st_atime, stat.st_mtime), stat.st_size, path) for path, stat in _files(folder))
        excess = sum(size for _, size, _ in used) - ROOM
        for _, size, path in used:
            if excess <= 0:
                break
            path.unlink()
            excess -= size


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    with os.scandir(folder) as entries:
        return [(Path(entry), entry.stat()) for entry in entries]
