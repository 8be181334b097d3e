"""What is asked of the compiler, for all programs of the engine. Other devices than GPUs take no notice.

XLA would build dozens of candidates for every matrix product and time them all. cuBLAS, the alternative, is as fast for
ours and needs no building: without the candidates reference and update compile in 11 seconds rather than 30.

cuDNN would add up gradients of attention in whatever order they come. Made to keep to one order it is as fast, and an update
repeated gives the same bits. Both were measured in benchmarks/2026-11-15-decode.md.
"""

OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_exclude_nondeterministic_ops": True}
