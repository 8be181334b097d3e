"""Compiler options of all programs of the engine. Only GPUs heed most of them.

XLA would build dozens of candidates for every matrix product and time them all. cuBLAS, the alternative, is as fast for
ours and needs no building: without the candidates reference and update compile in 11 seconds rather than 30. Nor are
cuBLAS's own algorithms timed against each other: its first choice is as fast, and the same in every process.

cuDNN would add up gradients of attention in whatever order they come. Held to one order it is as fast, and a repeated update
gives the same bits.

LLVM's last level of optimization, which is XLA's default, makes a first run on a CPU a tenth longer, and its programs no
faster. Who asks for a level by XLA_FLAGS gets that one, which options given here would overrule.

A loop whose body is small kernels is given to the device as a whole, as a graph that has the loop in it, so that the host
is not asked before each round whether there is another. All was measured in benchmarks/2026-11-15-decode.md.
"""

import os

LEVEL = "xla_backend_optimization_level"

OPTIONS: dict[str, bool | int | str] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": 0,
    "xla_gpu_exclude_nondeterministic_ops": True,
}
if LEVEL not in os.environ.get("XLA_FLAGS", ""):
    OPTIONS[LEVEL] = 2
# This list replaces XLA's own, which lacks loops, so it must name everything that may be in a graph.
LOOP_OPTIONS = OPTIONS | {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
}
