"""Peak device memory of one GRPO step with random weights, against the plan's estimate.

    PYTHONPATH=src python benchmarks/memory.py 270m 4 4 256 512 4 32
                                               size P G prompt completion micro_batch lora_rank
                                               [base_dtype [optimizer [dora]]]

One process a shape, since a device's peak is never reset. Run with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
from shipped import architecture

from agent_tunix.algorithm.objectives import Coefficients, per_sequence
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.engine.update import batch_logprobs, init_state, update
from agent_tunix.environments.stream import left_pad
from agent_tunix.kernels import device
from agent_tunix.kernels.vocabulary_odds import kernel_is_known
from agent_tunix.lab.plan.memory import Shapes, estimate
from agent_tunix.models import lora
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.checkpoints.loading import weight_shapes
from agent_tunix.models.families.table import family_of
from agent_tunix.models.sharding import mesh_of_sizes
from agent_tunix.types import Batch

TEMPERATURE = 0.9


def peak_gb() -> float:
    return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 1e9


def random_weights(arch: Architecture, base_dtype: str | None) -> Weights:
    """Weights that never take more of the device than they will hold: one block of numbers, again and again."""
    rng = np.random.default_rng(0)

    def filled(like: jax.ShapeDtypeStruct) -> jax.Array:
        floating = jnp.issubdtype(like.dtype, jnp.floating)
        block = rng.normal(0, 0.02, 2**20) if floating else rng.integers(0, 127, 2**20)
        return jax.device_put(np.resize(block.astype(like.dtype), like.shape), like.sharding)

    return jax.tree.map(filled, weight_shapes(arch, jnp.bfloat16, mesh_of_sizes(), base_dtype))


def main() -> None:
    size = sys.argv[1]
    P, G, S, C, micro, rank = map(int, sys.argv[2:8])
    base_dtype = sys.argv[8] if len(sys.argv) > 8 and sys.argv[8] != "bf16" else None
    optimizer = sys.argv[9] if len(sys.argv) > 9 else "adamw"
    arch, rng = architecture(size), np.random.default_rng(0)
    weights = random_weights(arch, base_dtype)
    modules = lora.select_modules("_proj", arch.num_layers)
    use_dora, fresh = sys.argv[10:] == ["dora"], jax.jit(lora.init_adapters, static_argnums=(1, 2, 3, 4, 5))
    of = jax.random.key(1), arch, modules, rank, float(rank), False, weights if use_dora else None
    trainable = fresh(*of) if rank else lora.masters(weights)
    state = init_state(trainable, optimizer)
    prompts = left_pad([list(rng.integers(6, 1000, S)) for _ in range(P)], S, 0)
    sampling = Sampling(50, 1.0, C, G, (arch.vocab_size,), 0)
    policy, apart = lora.policy_of(weights, trainable)
    (drawn,) = sample(policy, (Draw(apart, prompts, jax.random.key(3), TEMPERATURE),), arch=arch, sampling=sampling)
    after_rollout = (jax.block_until_ready(drawn), peak_gb())[1]
    del policy, trainable
    slices = P // micro
    advantages_B = jnp.asarray(rng.normal(size=P * G), jnp.float32)
    weights_BC = jnp.asarray(per_sequence(np.asarray(drawn.mask_BC), C), jnp.float32)
    batch = Batch(prompts, drawn.tokens_BC, drawn.mask_BC, drawn.mask_BC, drawn.logprobs_BC)
    batch = dataclasses.replace(batch, weights_BC=weights_BC, advantages_B=advantages_B)
    (reference,) = batch_logprobs((batch,), weights, None, (TEMPERATURE,), arch=arch, micro_batches=slices)
    after_reference = (jax.block_until_ready(reference), peak_gb())[1]
    batch = dataclasses.replace(batch, reference_logprobs_BC=reference)
    h, c = Hyperparameters(1e-5, 0.01, 0.9, 0.999, 1e-8, 0.1), Coefficients(TEMPERATURE, beta=0.08)
    state, _ = update(state, batch, weights, h, c, jnp.inf, arch=arch, micro_batches=slices, optimizer=optimizer)
    jax.block_until_ready(state)
    hopper = device.capability() == device.HOPPER
    kernels = {"kernels": hopper and family_of(arch).kernels, "odds_kernel": kernel_is_known()}
    held = {"base_dtype": base_dtype, **kernels, "limit": device.memory_limit(), "optimizer": optimizer}
    held["use_dora"] = use_dora
    planned = estimate(Shapes(arch, rank, modules if rank else (), 2, P, micro, G, 1, S, C, **held))["peak"]
    shape = f"{size} {P}x{G} {S}+{C} micro {micro} rank {rank} base {base_dtype} {optimizer}{' dora' if use_dora else ''}"
    found = f"rollout {after_rollout:.2f} GB, reference {after_reference:.2f}, step {peak_gb():.2f}"
    print(f"{shape}: {found}, planned {planned:.2f} ({planned / peak_gb() - 1:+.1%})")


if __name__ == "__main__":
    main()
