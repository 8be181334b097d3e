"""LoRA adapters (Hu et al., 2021, arXiv:2106.09685), kept apart from the base weights and in float32.

y = x W + s x A B. A starts random and B zero, so a fresh adapter changes nothing. The scale s is alpha / rank, or
alpha / sqrt(rank) (rsLoRA: Kalajdzievski, 2023, arXiv:2312.03732).

DoRA (Liu et al., 2024, arXiv:2402.09353) parts a matrix into the lengths of its columns, magnitudes m that are trained by
themselves, and their directions, which A B turns: y = x (W + s A B) m / ||W + s A B||. m starts as ||W||. As in the paper's
section 4.3 and in PEFT the norm is a constant to the gradient. Whoever reads such adapters has them made ready first, by
`over`: the norms are of the weights they are read over, and are taken once a pass rather than once a token.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agent_tunix.kernels.low_rank import adding_pays
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.quantization import Matrix, dequantise
from agent_tunix.types import pytree, static

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@pytree
class Adapters:
    """For each adapted module its A [L, in, R] and B [L, R, out], and the scale of their product."""

    a: dict[str, jax.Array]
    b: dict[str, jax.Array]
    scale: float = static()

    def by_module(self) -> dict[str, tuple[jax.Array, ...]]:
        """What `low_rank.adapted` takes of each module: A with the scale taken into it, and B."""
        return {name: (self.a[name] * self.scale, self.b[name]) for name in self.a}


@pytree
class DoraAdapters(Adapters):
    """Adapters with the magnitudes of each module, [L, out]."""

    magnitudes: dict[str, jax.Array] = dataclasses.field(kw_only=True)

    def by_module(self) -> dict[str, tuple[jax.Array, ...]]:
        raise TypeError("adapters with magnitudes are read `over` weights")


@pytree
class FactoredAdapters(Adapters):
    """Adapters with what each output is multiplied by, [L, out]: magnitudes over norms. They are read, and never trained."""

    factors: dict[str, jax.Array] = dataclasses.field(kw_only=True)

    def by_module(self) -> dict[str, tuple[jax.Array, ...]]:
        return {name: (self.a[name] * self.scale, self.b[name], self.factors[name]) for name in self.a}


def scale_of(rank: int, alpha: float, use_rslora: bool) -> float:
    """What A B is multiplied by: alpha / rank, or alpha / sqrt(rank), by which all ranks learn alike at one rate."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


Trainable = Adapters | Weights
Policy = tuple[Weights, Adapters | None]


def stack(members: Sequence[Adapters | None]) -> Adapters | None:
    """Adapters of several policies over one base, as [L, K, in, R]; those of a single policy as they are."""
    first, *others = members
    if first is None or not others:
        return first
    return jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=1), *members)


def policies_of(adapters: Adapters | None) -> int:
    """How many policies are stacked."""
    axes = () if adapters is None else next(iter(adapters.a.values())).shape
    return axes[1] if len(axes) > 3 else 1


def rank_of(adapters: Adapters | None) -> int:
    """The largest rank of any module; 0 without adapters."""
    return 0 if adapters is None else max(a.shape[-1] for a in adapters.a.values())


def filled_pair(adapters: Adapters | None, module: str, w_LEU: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """A [L, M, E, r] and B [L, M, r, U] of a module for all M policies, padded to `rank`; zeros for one without adapters."""
    (L, E, U), M = w_LEU.shape, policies_of(adapters)
    pairs = {} if adapters is None else adapters.by_module()
    a, b = pairs.get(module, (jnp.zeros((L, M, E, rank)), jnp.zeros((L, M, rank, U))))
    a, b = a.reshape(L, M, E, -1), b.reshape(L, M, -1, U)
    missing = rank - a.shape[-1]
    return jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, missing))), jnp.pad(b, ((0, 0), (0, 0), (0, missing), (0, 0)))


def policy_of(base: Weights, trainable: Trainable) -> Policy:
    """The weights and adapters that make the trained policy: adapters over the base, or all weights themselves."""
    if isinstance(trainable, Adapters):
        return base, trainable
    return jax.tree.map(lambda master, stored: master.astype(stored.dtype), trainable, base), None


def masters(weights: Weights) -> Weights:
    """A copy of all weights in float32, to be trained itself."""
    return jax.tree.map(lambda w: jnp.array(w, jnp.float32), weights)


def merge(weights: Weights, adapters: Adapters) -> Weights:
    """The weights with the adapters' products added, in float32, and rounded once."""
    merged: dict[str, Matrix] = {}
    for module in adapters.a:
        stored = weights.array(module)
        merged[module] = merged_matrix(adapters, module, stored).astype(stored.dtype)
    return dataclasses.replace(weights, layers=weights.layers | merged)


def merged_matrix(adapters: Adapters, module: str, stored: jax.Array, layer: int | None = None) -> jax.Array:
    """The matrices [L, in, out] of a module, or that of one layer, with its adapters, in float32."""
    at: Any = slice(None) if layer is None else layer
    whole = _sum(stored, adapters.scale * adapters.a[module][at], adapters.b[module][at])
    if isinstance(adapters, DoraAdapters):
        whole *= (adapters.magnitudes[module][at] / _norms(whole))[..., None, :]
    return whole


def over(weights: Weights, adapters: Adapters | None) -> Adapters | None:
    """Adapters as they are read over these weights: magnitudes become factors."""
    if not isinstance(adapters, DoraAdapters):
        return adapters
    factors = {}
    for module, magnitudes in adapters.magnitudes.items():
        pair = adapters.scale * adapters.a[module], adapters.b[module]
        factors[module] = magnitudes / _norms_of_sums(weights.layers[module], *jax.lax.stop_gradient(pair))
    return FactoredAdapters(adapters.a, adapters.b, adapters.scale, factors=factors)


def _norms_of_sums(matrix: Matrix, a: jax.Array, b: jax.Array) -> jax.Array:
    """||W + A B|| of every layer, and of every policy where several are stacked: one matrix at a time."""

    def of_layer(part: tuple[Matrix, jax.Array, jax.Array]) -> jax.Array:
        stored, a, b = part

        def of_policy(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            return _norms(_sum(dequantise(stored, jnp.float32), *pair))

        return of_policy((a, b)) if a.ndim == 2 else jax.lax.map(of_policy, (a, b))

    return jax.lax.map(of_layer, (matrix, a, b))


def _sum(stored: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return stored.astype(jnp.float32) + jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _norms(matrix: jax.Array) -> jax.Array:
    """The length of each column, over inputs; that of an empty one is not divided by zero."""
    return jnp.maximum(jnp.sqrt(jnp.square(matrix).sum(axis=-2)), jnp.finfo(jnp.float32).tiny)


def merged_if_it_pays(weights: Weights, adapters: Adapters | None, rows: int) -> tuple[Weights, Adapters | None]:
    """The policy of a rollout that reads so many rows at every step: merged, where `adding_pays` for all its matrices; else
    ready to be read.

    Matrices for which it pays are small beside the cache of so many rows, so the copy is no burden.
    """
    if adapters is None or policies_of(adapters) > 1:
        return weights, over(weights, adapters)
    matrices = [weights.layers[module] for module in adapters.a]
    if all(isinstance(matrix, jax.Array) and adding_pays(rows, matrix) for matrix in matrices):
        return merge(weights, adapters), None
    return weights, over(weights, adapters)


def huggingface_name(layer: int, module: str) -> str:
    block = "self_attn" if module in ATTENTION else "mlp"
    return f"model.layers.{layer}.{block}.{module}"


def select_modules(pattern: str, num_layers: int) -> tuple[str, ...]:
    """The modules whose Hugging Face names the pattern finds; raises ValueError where it fits none or part of the layers."""
    regex = re.compile(pattern)
    chosen = []
    for module in ATTENTION + FEED_FORWARD:
        hits = sum(bool(regex.search(huggingface_name(layer, module))) for layer in range(num_layers))
        if 0 < hits < num_layers:
            raise ValueError(f"fits {module} in {hits} of {num_layers} layers; adapters go on all layers of a module")
        if hits:
            chosen.append(module)
    if not chosen:
        raise ValueError(f"fits no module; the modules are {', '.join(ATTENTION + FEED_FORWARD)}")
    return tuple(chosen)


def strange_words(pattern: str) -> list[str]:
    """The words of a pattern that are in no module's name, as `q_einsum` of other tools: they choose nothing, in silence.

    Those of a look-around may say what is not to be chosen, and are not meant.
    """
    spelt = re.sub(r"\\.|\[[^]]*\]|\(\?(?:[=!]|<[=!])[^)]*\)|\(\?(?:P<\w+>|[a-zA-Z-]+)", " ", pattern)
    names = [huggingface_name(0, module) for module in ATTENTION + FEED_FORWARD]
    words = dict.fromkeys(re.findall(r"[A-Za-z_]+", spelt))
    return [word for word in words if not any(word in name for name in names)]


def unadapted(chosen: Sequence[str]) -> dict[str, list[str]]:
    """For each block of a layer, by its Hugging Face name, the modules that are not among the chosen ones."""
    blocks = {"self_attn": ATTENTION, "mlp": FEED_FORWARD}
    left = {block: [module for module in modules if module not in chosen] for block, modules in blocks.items()}
    return {block: modules for block, modules in left.items() if modules}


def module_shape(arch: Architecture, module: str) -> tuple[int, int]:
    """(in, out) of a module's matrix."""
    query, key_value = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return {
        "q_proj": (arch.embed_dim, query),
        "k_proj": (arch.embed_dim, key_value),
        "v_proj": (arch.embed_dim, key_value),
        "o_proj": (query, arch.embed_dim),
        "gate_proj": (arch.embed_dim, arch.hidden_dim),
        "up_proj": (arch.embed_dim, arch.hidden_dim),
        "down_proj": (arch.hidden_dim, arch.embed_dim),
    }[module]


def init_adapters(
    key: jax.Array,
    arch: Architecture,
    modules: tuple[str, ...],
    rank: int,
    alpha: float,
    use_rslora: bool = False,
    dora_over: Weights | None = None,
) -> Adapters:
    """Fresh adapters: A uniform as in the authors' code (Kaiming, variance 1 / (3 in)), B zero.

    Those of DoRA have the lengths of the columns of the weights they are `dora_over`.

    All of A is drawn at once: each drawing by itself takes a CPU half a second to compile.
    """
    shapes = [module_shape(arch, module) for module in modules]
    bounds = jnp.array([1.0 / math.sqrt(fan_in) for fan_in, _ in shapes], jnp.float32)
    most = arch.num_layers * max(fan_in for fan_in, _ in shapes) * rank
    keys = jax.random.split(key, len(modules))
    drawn = jax.vmap(lambda key, bound: jax.random.uniform(key, (most,), jnp.float32, -bound, bound))(keys, bounds)
    a, b = {}, {}
    for module, own, (fan_in, fan_out) in zip(modules, drawn, shapes, strict=True):
        a[module] = own[: arch.num_layers * fan_in * rank].reshape(arch.num_layers, fan_in, rank)
        b[module] = jnp.zeros((arch.num_layers, rank, fan_out), jnp.float32)
    scale = scale_of(rank, alpha, use_rslora)
    if dora_over is None:
        return Adapters(a, b, scale)
    magnitudes = {name: _norms_of_sums(dora_over.layers[name], a[name], b[name]) for name in a}
    return DoraAdapters(a, b, scale, magnitudes=magnitudes)
