"""Reading one more token of every sequence, after prompts that were read once each and are shared by their groups.

There are three ways. The first, for any device or mesh, is `transformer.forward` with sequences of one token. On one NVIDIA
Hopper GPU that is mostly the launching of hundreds of small kernels; there a narrow model with few sequences is read by one
kernel for all layers (kernels/token), and others by eight kernels a layer, with layers unrolled. These read weights and
adapters in a layout of their own, made once a rollout. All three compute what the update computes: what samples is what is
trained, for one policy and for several over the same base. The first way also reads a quantised base, as a layout of all its
weights would be as large as the base that was not to be held, a base whose layers the device cannot hold twice, and adapters
of DoRA, whose factors the kernels do not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from agent_tunix.kernels import decode_attention, device, matmul
from agent_tunix.kernels.decode_attention import Rows
from agent_tunix.kernels.matmul import LEAST_RANK, LEAST_TILE, Product
from agent_tunix.kernels.norm_rope import both_halves, rms_norm
from agent_tunix.kernels.reading import Held, Reading, filled_place
from agent_tunix.kernels.token import token_kernel
from agent_tunix.models import lora, transformer
from agent_tunix.models.architecture import Architecture, Segment, Weights
from agent_tunix.models.families.table import family_of
from agent_tunix.models.lora import Adapters, DoraAdapters, FactoredAdapters
from agent_tunix.models.quantization import Quantised
from agent_tunix.types import pytree

LARGEST_RANK = 128
ROOM = 0.85  # of a device's memory, for weights and their second layout; the rest is for all else that a rollout holds
EVERYTHING = 2**30  # a window that nothing lies outside of
PRODUCTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}

Way = Callable[..., Reading]


def start(
    weights: Weights, adapters: Adapters | None, arch: Architecture, prompt: Segment, group: int, slots: int
) -> Reading:
    """How tokens are read behind prompts, each of which so many sequences share: with an empty cache of so many slots."""
    way = _way(weights, adapters, arch, len(prompt.positions_BS) * group)
    return way(weights, adapters, arch, prompt, group, slots)


def prepare(
    weights: Weights,
    adapters: Adapters | None,
    arch: Architecture,
    prompts: tuple[int, int],
    group: int,
    slots: int,
    few: Sequence[int] = (),
) -> None:
    """Has what `start` will compile for prompts of that shape, [P, S], compiled beforehand; weights may be shapes.

    So too what will be compiled when it goes on with few sequences, first with so many, then with so many.
    """
    (P, S), policies = prompts, lora.policies_of(adapters)
    if _way(weights, adapters, arch, P * group) is by_token_kernel:
        for rows, of_each in ((P, group), *((n, 1) for n in few)):
            token_kernel.compiled(token_shapes(arch), policies, rows // policies, of_each, S, slots)


def _way(weights: Weights, adapters: Adapters | None, arch: Architecture, sequences: int) -> Way:
    without = not family_of(arch).kernels or isinstance(adapters, DoraAdapters | FactoredAdapters)
    if without or not _takes_kernels(weights):
        return _by_forward
    policies = lora.policies_of(adapters)
    if token_kernel.serves(token_shapes(arch), lora.rank_of(adapters), policies, sequences // policies):
        return by_token_kernel
    return _by_kernels if _kernels_serve(weights, _filled_rank(adapters)) else _by_forward


def _takes_kernels(weights: Weights) -> bool:
    """Whether the device has kernels for such weights, and room for their second layout."""
    if not device.one_hopper(weights.embed_VD.dtype):
        return False
    if isinstance(weights.layers["q_proj"], Quantised):
        return False
    held, layers = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in (weights, weights.layers))
    return layout_fits(held, layers, device.memory_limit())


def _kernels_serve(weights: Weights, rank: int) -> bool:
    head_dim = weights.array("q_norm").shape[-1]
    if head_dim < LEAST_TILE or head_dim != matmul.power_of_two(head_dim):
        return False
    return rank <= LARGEST_RANK and _fills_blocks(weights, rank)


def layout_fits(weights: float, layers: float, limit: float) -> bool:
    """Whether a device of so many bytes holds weights, and their layers once more."""
    return weights + layers <= ROOM * limit


def _fills_blocks(weights: Weights, columns: int) -> bool:
    """Whether the columns of every module are whole blocks of so many: a program's block must lie in one module."""
    modules = (module for modules in PRODUCTS.values() for module in modules)
    return all(weights.array(module).shape[2] % columns == 0 for module in modules)


def _by_forward(weights, adapters, arch, prompt, group, slots) -> Reading:
    rows = len(prompt.positions_BS) * group
    written = transformer.empty_segment(arch, rows, slots, weights.embed_VD.dtype)
    return _further_by_forward(weights, adapters, arch, prompt, group, written)


def _further_by_forward(weights, adapters, arch, prompt, group, written) -> Reading:
    first_B = jnp.repeat(prompt.positions_BS[:, -1] + 1, group)

    def read(written, tokens_B, slot, done_B):
        positions_B1 = jnp.where(done_B, -1, first_B + slot)[:, None]
        hidden_B1D, new = transformer.forward(weights, adapters, arch, tokens_B[:, None], positions_B1, (prompt, written))
        return hidden_B1D[:, 0], transformer.write_segment(written, new, slot)

    def narrowed(written, rows_B, slot):
        del slot
        kept = transformer.rows_of(prompt, rows_B // group), transformer.rows_of(written, rows_B)
        return _further_by_forward(weights, adapters, arch, kept[0], 1, kept[1])

    return Reading(written, read, narrowed)


def token_shapes(arch: Architecture) -> token_kernel.Shapes:
    """What the kernel for all layers has to know of a model."""
    of_arch = {f.name: getattr(arch, f.name) for f in dataclasses.fields(token_kernel.Shapes)}
    return token_kernel.Shapes(**of_arch | {"is_global": tuple(arch.is_global().tolist())})


def by_token_kernel(weights, adapters, arch, prompt, group, slots) -> Reading:
    rank = token_kernel.RANK
    norms = token_kernel.Norms(
        before_attention=weights.array("input_norm"),
        after_attention=weights.array("post_attention_norm"),
        before_feedforward=weights.array("pre_feedforward_norm"),
        after_feedforward=weights.array("post_feedforward_norm"),
        queries=weights.array("q_norm"),
        keys=weights.array("k_norm"),
        final_D=weights.final_norm_D,
    )
    names = (name for names in PRODUCTS.values() for name in names)
    matrices = {name: weights.array(name) for name in names}
    modules = {name: (w_LEU, *lora.filled_pair(adapters, name, w_LEU, rank)) for name, w_LEU in matrices.items()}
    angles_TAN = _angles(arch, prompt.keys_LBSKN.shape[2] + slots)
    read = prompt.keys_LBSKN, prompt.values_LBSKN, prompt.positions_BS[:, -1] + 1
    return token_kernel.start(token_shapes(arch), weights.embed_VD, norms, modules, angles_TAN, read, group, slots)


def _angles(arch: Architecture, places: int) -> jax.Array:
    """Cosines and sines of local and then of global layers: one array, so that looking up a token's is one kernel."""
    rotations = transformer.rotations(arch, jnp.arange(places))
    return jnp.stack([x_TN for pair in rotations for x_TN in both_halves(*pair)], axis=1)


@pytree
class _Layer:
    """What the kernels read of one layer."""

    products: dict[str, Product]
    norms: dict[str, jax.Array]


def _by_kernels(weights, adapters, arch, prompt, group, slots, interpret=False) -> Reading:
    policies, lengths_P = lora.policies_of(adapters), prompt.positions_BS[:, -1] + 1
    rank, sequences = _filled_rank(adapters), len(lengths_P) * group // policies
    few = policies % 2 == 0 and matmul.row_tile(sequences) == LEAST_TILE and rank == LEAST_RANK
    sharing = 2 if few and _fills_blocks(weights, 2 * rank) else 1
    products = {name: _product(weights, adapters, modules, sharing, rank) for name, modules in PRODUCTS.items()}
    layers = _layers(weights, products)
    one = jax.jit(_layer, static_argnames=("seen", "tile", "interpret"))
    prompt_slots = prompt.keys_LBSKN.shape[2]
    S = decode_attention.whole_tiles(prompt_slots)
    angles_TAN = _angles(arch, prompt_slots + slots)

    def rows_of(sequences: int) -> int:
        """Of a policy with so many sequences: whole tiles."""
        tile = matmul.row_tile(sequences)
        return -(-sequences // tile) * tile

    def reading(lengths_P, group, cache) -> Reading:
        B = len(lengths_P) * group
        rows = rows_of(B // policies)
        first_R = matmul.filled(jnp.repeat(lengths_P, group), policies, rows)
        static = {"tile": matmul.row_tile(B // policies) * sharing, "interpret": interpret}

        def read(cache, tokens_B, slot, done_B):
            del done_B  # what a finished sequence reads is of no use, and no one else sees it
            x_RD = transformer.embed(weights, arch, matmul.filled(tokens_B, policies, rows))
            h_RD = rms_norm(x_RD, layers[0].norms["input_norm"], arch.norm_eps, 1.0)
            places = angles_TAN[first_R + slot], jnp.asarray(slot, jnp.int32)[None], lengths_P
            norms = [*(layer.norms["input_norm"] for layer in layers[1:]), weights.final_norm_D]
            written = []
            for layer, kv, next_norm_D, is_global in zip(layers, cache, norms, arch.is_global().tolist(), strict=True):
                window = EVERYTHING if is_global else arch.sliding_window
                seen = Rows(group, rows, S, window, 2 * is_global, arch.query_scale, arch.norm_eps)
                x_RD, h_RD, kv = one(x_RD, h_RD, layer, kv, places, next_norm_D, seen=seen, **static)
                written.append(kv)
            return h_RD.reshape(policies, rows, -1)[:, : B // policies].reshape(B, -1), written

        def narrowed(cache, rows_B, slot) -> Reading:
            del slot
            row_R = matmul.filled(filled_place(rows_B, B // policies, rows), policies, rows_of(len(rows_B) // policies))
            prompt_B = rows_B // group
            held = Held(len(lengths_P), S, policies * rows)
            cache = jax.tree.map(lambda x_n: held.of_rows(x_n, prompt_B, row_R), cache)
            return reading(lengths_P[prompt_B], 1, cache)

        return Reading(cache, read, narrowed)

    kv = zip(prompt.keys_LBSKN, prompt.values_LBSKN, strict=True)
    rows = policies * rows_of(sequences)
    cache = [tuple(decode_attention.cache(x_PSKN, rows, slots) for x_PSKN in pair) for pair in kv]
    return reading(lengths_P, group, cache)


def _layer(x_RD, h_RD, layer, kv, places, next_norm_D, *, seen, tile, interpret):
    """The residual stream after a layer, and what the next reads of it; h is what this one reads."""
    (angles_RAN, slot_1, lengths_P), eps = places, seen.eps
    w, norms = layer.products, layer.norms
    qkv_RHN = matmul.product(h_RD, w["qkv"], tile, interpret).reshape(len(x_RD), -1, kv[0].shape[-1])
    heads = norms["q_norm"], norms["k_norm"]
    *shares, kv = decode_attention.attend(qkv_RHN, heads, angles_RAN, slot_1, lengths_P, kv, seen, interpret)
    h_RE = decode_attention.combine(*shares, interpret=interpret)
    delta_ZRD = matmul.split_product(h_RE, w["output"], tile, interpret)
    x_RD, h_RD = matmul.norm(x_RD, delta_ZRD, norms["post_attention_norm"], norms["pre_feedforward_norm"], eps, interpret)
    h_RF = matmul.gated_product(h_RD, w["gate_up"], tile, interpret)
    delta_ZRD = matmul.split_product(h_RF, w["down"], tile, interpret)
    x_RD, h_RD = matmul.norm(x_RD, delta_ZRD, norms["post_feedforward_norm"], next_norm_D, eps, interpret)
    return x_RD, h_RD, kv


def _filled_rank(adapters: Adapters | None) -> int:
    return max(LEAST_RANK, matmul.power_of_two(lora.rank_of(adapters)))


def _layers(weights: Weights, products: dict[str, Product]) -> list[_Layer]:
    names = ("input_norm", "q_norm", "k_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
    stacked, tree = jax.tree.flatten(_Layer(products, {name: weights.array(name) for name in names}))
    return [jax.tree.unflatten(tree, layer) for layer in zip(*map(jnp.unstack, stacked), strict=True)]


def _product(weights: Weights, adapters: Adapters | None, modules, sharing: int, rank: int) -> Product:
    """The matrices of modules side by side, and their adapters. Stacked over layers.

    A tenant is what a tile belongs to: one policy, or the several that share it.
    """
    dtype, tenants = weights.embed_VD.dtype, lora.policies_of(adapters) // sharing
    rows, a_rows, b_columns = [], [], []
    for module in modules:
        w_LEU = weights.array(module)
        L, E, U = w_LEU.shape
        a, b = lora.filled_pair(adapters, module, w_LEU, rank)
        rows.append(w_LEU.swapaxes(1, 2))
        a_rows.append(a.reshape(L, tenants, sharing, E, rank))
        b_columns.append(b.reshape(L, tenants, sharing * rank, U))
    a_LaE = jnp.stack(a_rows, axis=2).swapaxes(4, 5).reshape(L, -1, E)
    b_LMUr = jnp.concatenate(b_columns, axis=3).swapaxes(2, 3)
    parts = tuple(r.shape[1] for r in rows)
    return Product(jnp.concatenate([*rows, a_LaE.astype(dtype)], axis=1), b_LMUr.astype(dtype), parts, sharing)
