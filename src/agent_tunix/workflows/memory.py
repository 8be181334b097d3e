"""How much device memory a run will need, by part, from its shapes alone.

Sizes that follow from shapes are counted. What the compiler keeps beside them (float32 temporaries of the residual stream,
copies of logits, adapters and their gradients) is counted by factors fitted to peaks that an H200 reported for 270M, 1B
and 4B at several shapes; benchmarks/2026-11-15-memory.md sets measurement against estimate.
"""

from __future__ import annotations

import bisect
import dataclasses

from agent_tunix.algorithm.loss import LOGITS_BUDGET
from agent_tunix.models.gemma3 import Architecture
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, module_shape

FLOAT32 = 4
RESIDUAL_COPIES = 16.5  # float32 copies of the residual stream while a layer is differentiated
SCORE_COPIES = 1.5  # of one layer's attention scores
LAYER_COPIES = 11.5  # of one layer's weights, cut out of the stack and turned for the backward pass
LOSS_LOGITS_COPIES = 1.2  # of one chunk of logits, in the loss and its gradient
SAMPLER_LOGITS_COPIES = 8  # of the logits of one token a sequence, while it is drawn
STORED_COPIES = 3  # parameters and two moments
ADAPTER_TEMPORARIES = 3.5  # gradients, their sum, the change, and the casts of the adapters
GIGABYTE = 1e9
LARGEST_MICRO_BATCH = 4096


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What memory depends on; lengths in tokens, `micro_batch` and `prompts` in prompts."""

    arch: Architecture
    lora_rank: int
    modules: tuple[str, ...]
    bytes_per_weight: int
    prompts: int
    micro_batch: int
    generations: int
    evaluated: int
    prompt_length: int
    completion_length: int


def base_parameters(arch: Architecture) -> int:
    matrices = sum(a * b for a, b in (module_shape(arch, module) for module in ATTENTION + FEED_FORWARD))
    norms = 4 * arch.embed_dim + 2 * arch.head_dim
    return arch.vocab_size * arch.embed_dim + arch.num_layers * (matrices + norms) + arch.embed_dim


def adapter_parameters(arch: Architecture, modules: tuple[str, ...], rank: int) -> int:
    return arch.num_layers * rank * sum(sum(module_shape(arch, module)) for module in modules)


def estimate(s: Shapes) -> dict[str, float]:
    """Gigabytes by part, and the `peak`: what is always held, and the greatest of what the phases hold beside it."""
    weights = base_parameters(s.arch) * s.bytes_per_weight
    trainable = adapter_parameters(s.arch, s.modules, s.lora_rank) * FLOAT32
    temporaries = ADAPTER_TEMPORARIES * trainable
    held = weights + STORED_COPIES * trainable
    if s.lora_rank == 0:  # the base, the policy cast from the masters, and the masters with their moments
        trainable = base_parameters(s.arch) * FLOAT32
        temporaries, held = 0.0, 2 * weights + STORED_COPIES * trainable
    sequences = s.prompts * s.generations
    phases = {
        "rollout": _sampling(s, s.prompts, sequences),
        "evaluation": _sampling(s, s.evaluated, s.evaluated),
        "update": temporaries + max(_update(s), trainable if s.lora_rank == 0 else 0.0),
    }
    parts = {
        "weights": weights,
        "adapters" if s.lora_rank else "masters": trainable,
        "optimizer": (STORED_COPIES - 1) * trainable,
        "KV cache": _cache(s, s.prompts, sequences),
        "activations": _kept(s) + _differentiation(s),
        "logits chunk": LOSS_LOGITS_COPIES * _chunk(s),
        "peak": held + max(phases.values()),
    }
    return {name: size / GIGABYTE for name, size in parts.items()}


def _sampling(s: Shapes, prompts: int, sequences: int) -> float:
    """The cache, the layers once more as the kernels read them, and logits."""
    logits = SAMPLER_LOGITS_COPIES * sequences * s.arch.vocab_size * FLOAT32
    return _cache(s, prompts, sequences) + _layers(s) + logits


def _layers(s: Shapes) -> float:
    return (base_parameters(s.arch) - s.arch.vocab_size * s.arch.embed_dim) * s.bytes_per_weight


def _cache(s: Shapes, prompts: int, sequences: int) -> float:
    """Keys and values: a prompt's once, a completion's each."""
    tokens = prompts * s.prompt_length + sequences * s.completion_length
    return 2 * s.arch.num_layers * tokens * s.arch.num_kv_heads * s.arch.head_dim * s.bytes_per_weight


def _update(s: Shapes) -> float:
    """Logits are gone before the first layer is differentiated, so the greater of the two counts."""
    return _kept(s) + max(_differentiation(s), LOSS_LOGITS_COPIES * _chunk(s))


def _kept(s: Shapes) -> float:
    """What every layer leaves for the backward pass."""
    arch = s.arch
    tokens = s.micro_batch * (s.generations * s.completion_length + s.prompt_length)
    return arch.num_layers * tokens * (arch.embed_dim + 2 * arch.num_kv_heads * arch.head_dim) * s.bytes_per_weight


def _differentiation(s: Shapes) -> float:
    """What one layer takes while it is gone through again."""
    arch, completion = s.arch, s.micro_batch * s.generations * s.completion_length
    scores = completion * arch.num_heads * (s.prompt_length + s.completion_length) * FLOAT32
    residual = completion * arch.embed_dim * FLOAT32
    layer = _layers(s) / arch.num_layers
    return SCORE_COPIES * scores + RESIDUAL_COPIES * residual + LAYER_COPIES * layer


def _chunk(s: Shapes) -> float:
    """The float32 logits that are alive at once while log-probabilities are taken."""
    tokens = s.micro_batch * s.generations * s.completion_length
    return min(LOGITS_BUDGET, tokens * s.arch.vocab_size) * FLOAT32


def largest_micro_batch(s: Shapes, limit_gb: float) -> int:
    """The most prompts a micro-batch may hold for the peak to stay under the limit; 0 where none fits."""

    def fits(size: int) -> bool:
        shapes = dataclasses.replace(s, micro_batch=size, prompts=max(size, s.prompts))
        return estimate(shapes)["peak"] <= limit_gb

    return bisect.bisect_left(range(1, LARGEST_MICRO_BATCH + 1), True, key=lambda size: not fits(size))
