"""What the device is that programs are made for: the one place that asks for it."""

from __future__ import annotations

import functools
import importlib
import math

import jax
import jax.numpy as jnp

from agent_tunix.kernels.mesh import several_devices

AMPERE = 8.0  # the least compute capability that Triton makes kernels for
HOPPER = 9.0  # that of H100 and H200, whose shared memory tiles are sized for
MOSAIC = "jax.experimental.pallas.mosaic_gpu"


def capability() -> float:
    """The compute capability of the NVIDIA GPU that programs are made for; 0 where that is another device."""
    number = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    return float(number) if number.replace(".", "").isdigit() else 0.0


def multiprocessors() -> int:
    """How many the device has that programs are made for; 0 where it does not say."""
    return getattr(jax.local_devices()[0], "core_count", 0)


def memory_limit() -> float:
    """Bytes of the device that programs may take; infinity where it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)


def one_hopper(dtype: jax.typing.DTypeLike) -> bool:
    """Whether programs are made for one Hopper GPU, and of bfloat16, for which its kernels are."""
    return not several_devices() and capability() == HOPPER and jnp.dtype(dtype) == jnp.bfloat16


@functools.cache
def import_mosaic() -> None:
    """Imports what makes kernels for Hopper GPUs, before any thread compiles or loads a program.

    Mosaic sets environment variables when it is imported. Should XLA start a compiler in another thread at that moment, the
    system would look for them where they no longer are, and refuse. They say where kept programs find Mosaic's library, too.
    """
    if capability() == HOPPER:
        importlib.import_module(MOSAIC)
