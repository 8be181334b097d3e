"""CUDA C++, compiled by the library that comes with JAX for NVIDIA GPUs, and called by XLA."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

CALL = "__gpu$xla.gpu.ptx"  # XLA's own, for kernels given as PTX
ARCHITECTURE = "compute_90a"  # Hopper's
NOTHING = 'extern "C" __global__ void nothing(const int* in, int* out) { *out = *in; }'


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC, of the packages that JAX installs or of the system; None where there is neither."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else found.submodule_search_locations or []
    names = [str(path) for folder in folders for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))]
    for name in [*names, "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def serves() -> bool:
    """Whether kernels can be compiled here and XLA will call them: one that does next to nothing is tried."""
    if library() is None:
        return False
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    try:
        ptx = compiled(NOTHING, {})
        copy = jax.jit(lambda x: call("nothing", ptx, (x,), (one,), {}, grid=1, threads=1, shared_bytes=0))
        (copied,) = copy.lower(one).compile()(np.ones(1, np.int32))
        return np.asarray(copied).tolist() == [1]  # by NumPy, as a program may be being traced
    except RuntimeError:  # NVRTC's, as raised below, or XLA's
        return False


def compiled(source: str, macros: Mapping[str, object], folder: Path | None = None) -> str:
    """The PTX of a source, which may include files of the folder; the same is compiled once."""
    options = ["-std=c++17", f"-arch={ARCHITECTURE}", "-default-device", *([f"-I{folder}"] if folder else [])]
    return _compiled(source, (*options, *(f"-D{name}={value}" for name, value in macros.items())))


@functools.cache
def _compiled(source: str, options: tuple[str, ...]) -> str:
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc is not None
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), given):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC did not compile a kernel:\n{log.value.decode()}")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


def call(
    name: str,
    ptx: str,
    given: Sequence[jax.Array],
    made: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    *,
    grid: int,
    threads: int,
    shared_bytes: int,
) -> Sequence[jax.Array]:
    """Calls a kernel with pointers to the arrays given and then to those it makes, which are returned."""
    kernel = jax.ffi.ffi_call(CALL, list(made), input_output_aliases=dict(aliases))
    sizes = {"grid_x": grid, "block_x": threads, "shared_mem_bytes": shared_bytes}
    sizes |= dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), 1)
    numbers = {size: np.int32(value) for size, value in sizes.items()}
    places = tuple(np.int32(len(given) + n) for n in range(len(made)))
    return kernel(*given, name=name, kernel_type="ptx", kernel_data=ptx, output_indices=places, **numbers)
