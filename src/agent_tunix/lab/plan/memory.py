"""How much device memory a run will need, by part, from its shapes alone.

Sizes that follow from shapes are counted. What the compiler keeps beside them (temporaries of the residual stream and of the
feed-forward block, copies of logits, adapters and their gradients) is counted by factors fitted to peaks that an H200
reported for 270M, 1B and 4B at several shapes, with its kernels and without; benchmarks/2026-11-16-memory.md sets
measurement against estimate.

On a mesh it is the memory of one device: weights, adapters and moments by the table that places them; the cache and what a
layer computes by the rows and heads that a device has; logits by its part of the vocabulary. A layer's weights are
counted as gathered over fsdp. Sums in flight between devices are not counted, and no mesh has been measured.

Quantised matrices are counted as they are held, and one layer of them as it is multiplied.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from agent_tunix.algorithm import optimizers
from agent_tunix.algorithm.logprobs import LOGITS_BUDGET, odds_rows
from agent_tunix.engine.sampler import narrower
from agent_tunix.kernels.mesh import EVERYWHERE, fitting, share
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.loading import parameters
from agent_tunix.models.decoding import layout_fits
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, module_shape
from agent_tunix.models.quantization import BLOCK, BYTES, BaseDtype
from agent_tunix.models.sharding import spec

FLOAT32 = 4
RESIDUAL_COPIES = 13.0  # float32 copies of the residual stream while a layer is differentiated
HIDDEN_COPIES = 3.9  # of what the feed-forward block holds between its matrices
QUERY_COPIES = 4.8  # of one layer's queries, where a kernel attends: it is given a prompt's once for each completion
SCORE_COPIES = 2.0  # of one layer's attention scores
LOSS_LOGITS_COPIES = 1.5  # of one chunk of logits, in the loss and its gradient: in float32, and as probabilities in bf16
LOSS_ODDS_COPIES = 0.55  # of such a chunk where a kernel turns logits into probabilities before it writes them
LOSS_RESIDUAL_COPIES = 2.7  # of the last hidden states, in float32, beside them
SAMPLER_LOGITS_COPIES = 1.7  # of the logits of one token a sequence, while it is drawn
SAMPLER_LAYERS = 1.13  # times the layers' weights, laid out for the kernels that read a token
SAMPLER_ADAPTERS = 0.6  # times the adapters, laid out for them
ADAPTER_TEMPORARIES = 1.8  # gradients, the change, and the casts of the adapters
DORA_RESIDUAL_COPIES = 1.0  # of outputs before they are multiplied by DoRA's factors: counted, where all else was measured
DORA_HIDDEN_COPIES = 2.0  # of gate and up, likewise
EMBEDDING_GRADIENTS = 1.5  # in float32, where all weights are trained
ORTHOGONALISED = 1.15  # float32 copies of all matrices, where Muon trains them
GIGABYTE = 1e9
LARGEST_MICRO_BATCH = 4096
Named = dict[tuple[str, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What memory depends on; lengths in tokens, `micro_batch` and `prompts` in prompts.

    `kernels`: on one GPU of the Hopper kind attention writes no scores, and the sampler holds the layers once more, if they
    are not quantised, its `limit`, in bytes, has room for them and adapters have no magnitudes. With `odds_kernel` the loss
    writes no logits there, whatever the family. `narrows`: on one device a rollout goes on with few sequences once most have
    ended, whose cache it then holds beside that of all.
    """

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
    fsdp: int = 1
    tp: int = 1
    base_dtype: BaseDtype | None = None
    kernels: bool = False
    odds_kernel: bool = False
    limit: float = math.inf
    optimizer: str = "adamw"
    use_dora: bool = False
    narrows: bool = True

    @property
    def mesh(self) -> dict[str, int]:
        return {"fsdp": self.fsdp, "tp": self.tp}

    @property
    def vocabulary_share(self) -> float:
        return share(fitting((EVERYWHERE,), (self.arch.vocab_size,), self.mesh), self.mesh)


def adapter_parameters(s: Shapes) -> int:
    return sum(math.prod(shape) for shape in _adapters(s).values())


def held_base(s: Shapes) -> float:
    """Of the base's parameters, those that one device holds."""
    arch = s.arch
    cut = sum(math.prod(shape) for shape in (_vocabulary(arch) | _matrices(s)).values())
    return parameters(arch) - cut + _held(s, _vocabulary(arch)) + _held(s, _matrices(s))


def _vocabulary(arch: Architecture) -> Named:
    """The embedding, and the head where it is another matrix."""
    names = ("embed_VD",) if arch.tied else ("embed_VD", "head_VD")
    return {(name,): (arch.vocab_size, arch.embed_dim) for name in names}


def _matrices(s: Shapes) -> Named:
    return {(module,): (s.arch.num_layers, *module_shape(s.arch, module)) for module in ATTENTION + FEED_FORWARD}


def held_bytes(s: Shapes) -> float:
    """Bytes of the base on one device."""
    if s.base_dtype is None:
        return held_base(s) * s.bytes_per_weight
    blocks: Named = {(*names, "scales"): (L, i // BLOCK, 1, o) for names, (L, i, o) in _matrices(s).items()}
    rest = (held_base(s) - _held(s, _matrices(s))) * s.bytes_per_weight
    return rest + _held(s, blocks) * BLOCK * BYTES[s.base_dtype]


def held_adapters(s: Shapes) -> float:
    """Of the adapters' parameters, those that one device holds."""
    return _held(s, _adapters(s))


def _adapters(s: Shapes) -> Named:
    shapes: Named = {}
    for module in s.modules:
        fan_in, fan_out = module_shape(s.arch, module)
        shapes["a", module] = (s.arch.num_layers, fan_in, s.lora_rank)
        shapes["b", module] = (s.arch.num_layers, s.lora_rank, fan_out)
        if s.use_dora:
            shapes["magnitudes", module] = (s.arch.num_layers, fan_out)
    return shapes


def moments(s: Shapes) -> float:
    """Numbers that the optimizer keeps for each that it trains: two for AdamW, next to none for Adafactor's matrices."""
    trained = _adapters(s) if s.lora_rank else _vocabulary(s.arch) | _matrices(s)
    return _kept_by(s.optimizer, tuple(trained.values()))


@functools.lru_cache(maxsize=32)
def _kept_by(optimizer: str, shapes: tuple[tuple[int, ...], ...]) -> float:
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    state = jax.eval_shape(functools.partial(optimizers.init, name=optimizer), params)
    return sum(leaf.size for leaf in jax.tree.leaves(state)) / sum(leaf.size for leaf in params)


def _held(s: Shapes, shapes: Named) -> float:
    return sum(math.prod(shape) * share(spec(names, shape, s.arch, s.mesh), s.mesh) for names, shape in shapes.items())


def estimate(s: Shapes) -> dict[str, float]:
    """Gigabytes by part, and the `peak`: what is always held, and the greatest of what the phases hold beside it."""
    weights = held_bytes(s)
    trainable, stored = held_adapters(s) * FLOAT32, 1 + moments(s)
    temporaries = ADAPTER_TEMPORARIES * trainable
    held = weights + stored * trainable
    if s.lora_rank == 0:  # the base, the policy cast from the masters, and the masters with their moments
        trainable = held_base(s) * FLOAT32
        temporaries, held = _orthogonalised(s), 2 * weights + stored * trainable
    sequences = s.prompts * s.generations
    phases = {
        "rollout": _sampling(s, s.prompts, sequences),
        "evaluation": _sampling(s, s.evaluated, s.evaluated),
        "update": temporaries + (_update(s) if s.lora_rank else max(_update(s) + _embedding_gradients(s), trainable)),
    }
    parts = {
        "weights": weights,
        "adapters" if s.lora_rank else "masters": trainable,
        "optimizer": moments(s) * trainable,
        "KV cache": _cache(s, s.prompts, sequences),
        "activations": _kept(s) + _differentiation(s),
        "logits chunk": _chunk(s),
        "evaluation": phases["evaluation"],
        "peak": held + max(phases.values()),
    }
    return {name: size / GIGABYTE for name, size in parts.items()}


def peak_of_several(s: Shapes, members: int) -> float:
    """Gigabytes at the peak of several policies over one base: the rows of all at once, and adapters for each."""
    rows = {name: members * getattr(s, name) for name in ("prompts", "micro_batch", "evaluated")}
    adapters = (1 + moments(s) + ADAPTER_TEMPORARIES) * held_adapters(s) * FLOAT32
    return estimate(dataclasses.replace(s, **rows))["peak"] + (members - 1) * adapters / GIGABYTE


def _sampling(s: Shapes, prompts: int, sequences: int) -> float:
    """The cache, logits, and a layer's weights as they are read, or all layers and adapters as the kernels read them."""
    logits = SAMPLER_LOGITS_COPIES * sequences * s.arch.vocab_size * s.vocabulary_share * FLOAT32
    weights = _layers(s) / s.arch.num_layers
    if s.kernels and s.base_dtype is None and not s.use_dora and layout_fits(held_bytes(s), _layers(s), s.limit):
        weights = SAMPLER_LAYERS * _layers(s) + SAMPLER_ADAPTERS * held_adapters(s) * FLOAT32
    few = narrower(sequences, s.completion_length) if s.narrows and s.fsdp * s.tp == 1 else []
    return _cache(s, prompts, sequences) + sum(_cache(s, n, n) for n in few[:1]) + logits + weights


def _layers(s: Shapes) -> float:
    vocabulary = sum(math.prod(shape) for shape in _vocabulary(s.arch).values())
    return (parameters(s.arch) - vocabulary) * s.bytes_per_weight


def _cache(s: Shapes, prompts: int, sequences: int) -> float:
    """Keys and values: a prompt's once, a completion's each."""
    tokens = (prompts * s.prompt_length + sequences * s.completion_length) / s.fsdp
    return s.arch.num_layers * tokens * _key_and_value(s) * s.bytes_per_weight


def _key_and_value(s: Shapes) -> float:
    """Numbers a token, of the heads that a device has: all where tp does not divide them."""
    heads = s.arch.num_kv_heads
    return 2 * s.arch.head_dim * (heads / s.tp if heads % s.tp == 0 else heads)


def _update(s: Shapes) -> float:
    """Logits are gone before the first layer is differentiated, so the greater of the two counts."""
    loss = _chunk(s) + LOSS_RESIDUAL_COPIES * _tokens(s) * s.arch.embed_dim * FLOAT32
    return _kept(s) + max(_differentiation(s), loss)


def _tokens(s: Shapes) -> float:
    """Of a micro-batch, those that pass through a device's layers."""
    return s.micro_batch / s.fsdp * (s.generations * s.completion_length + s.prompt_length)


def _kept(s: Shapes) -> float:
    """What every layer leaves for the backward pass."""
    return s.arch.num_layers * _tokens(s) * s.arch.embed_dim * s.bytes_per_weight


def _differentiation(s: Shapes) -> float:
    """What one layer takes while it is differentiated, one copy of its weights among it; a kernel's attention is done before
    feed-forward begins."""
    arch = s.arch
    residual_copies = RESIDUAL_COPIES + s.use_dora * DORA_RESIDUAL_COPIES
    hidden_copies = HIDDEN_COPIES + s.use_dora * DORA_HIDDEN_COPIES
    residual = residual_copies * _tokens(s) * arch.embed_dim * FLOAT32
    hidden = hidden_copies * _tokens(s) * arch.hidden_dim / s.tp * s.bytes_per_weight
    blocks = max(hidden, _attention(s)) if s.kernels else hidden + _attention(s)
    return residual + blocks + _layers(s) / arch.num_layers / s.tp


def _attention(s: Shapes) -> float:
    """The attention scores of one layer, in float32; a kernel has them in its gradient only, in bfloat16."""
    length, heads = s.prompt_length + s.completion_length, s.arch.num_heads / s.tp
    sequences = s.micro_batch / s.fsdp * s.generations
    if not s.kernels:
        return SCORE_COPIES * sequences * s.completion_length * heads * length * FLOAT32
    return sequences * heads * length * (QUERY_COPIES * s.arch.head_dim + length) * s.bytes_per_weight


def _orthogonalised(s: Shapes) -> float:
    return ORTHOGONALISED * _held(s, _matrices(s)) * FLOAT32 if s.optimizer == "muon" else 0.0


def _embedding_gradients(s: Shapes) -> float:
    return EMBEDDING_GRADIENTS * _held(s, _vocabulary(s.arch)) * FLOAT32


def _chunk(s: Shapes) -> float:
    """The logits alive at once while log-probabilities are taken, and again in the gradient of a trained embedding."""
    tokens = s.micro_batch * s.generations * s.completion_length
    if s.odds_kernel and s.lora_rank:
        return LOSS_ODDS_COPIES * odds_rows(tokens, s.arch.vocab_size) * s.arch.vocab_size * FLOAT32
    return LOSS_LOGITS_COPIES * min(LOGITS_BUDGET, tokens * s.arch.vocab_size) * s.vocabulary_share * FLOAT32


def largest_micro_batch(s: Shapes, limit_gb: float, batch_size: int | None = None, there: int = LARGEST_MICRO_BATCH) -> int:
    """The most prompts a micro-batch may hold for the peak to stay under the limit; 0 where none fits.

    It divides `batch_size`, where that is given; else the batch is one micro-batch, of the prompts that are `there`.
    """

    def fits(size: int) -> bool:
        return estimate(dataclasses.replace(s, micro_batch=size, prompts=batch_size or size))["peak"] <= limit_gb

    multiples = range(s.fsdp, (batch_size or min(there, LARGEST_MICRO_BATCH)) + 1, s.fsdp)
    sizes = [size for size in multiples if batch_size is None or batch_size % size == 0]
    fitting = bisect.bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[fitting - 1] if fitting else 0
