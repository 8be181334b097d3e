"""What is asked of the compiler, for all programs of the engine.

On a GPU, XLA would build dozens of candidates for every matrix product and time them all. cuBLAS, the alternative, is as
fast for ours and needs no building: without the candidates reference and update compile in 11 seconds rather than 30
(benchmarks/2026-11-15-decode.md). Other devices take no notice.
"""

OPTIONS = {"xla_gpu_enable_triton_gemm": False}
