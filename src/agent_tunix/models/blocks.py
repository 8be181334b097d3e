"""The parts of a layer, from which each family makes its block (models/families)."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping

import jax

from agent_tunix.kernels.attention import Reach
from agent_tunix.kernels.gating import Activation, gated
from agent_tunix.kernels.low_rank import adapted
from agent_tunix.kernels.mesh import Cut, cut
from agent_tunix.kernels.norm_rope import Placing, rms_norm
from agent_tunix.models.architecture import Architecture, Layers
from agent_tunix.models.quantization import dequantise


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer as its tokens pass through: its weights by field, the adapters of its modules, and how its tokens see.

    `read(q_BTHN, k_BTKN, v_BTKN, placing, past, reach)` attends; it returns [B, T, H * N] and what is kept of the tokens.
    """

    weights: Layers
    adapters: Mapping[str, tuple[jax.Array, ...]]
    arch: Architecture
    norm_offset: float
    angles: tuple[jax.Array, jax.Array]
    past: typing.Any
    reach: Reach
    read: Callable[..., tuple[jax.Array, typing.Any]]
    cuts: tuple[Cut, ...]  # of the residual stream, where it lies on several devices

    def stream(self, x_BTD: jax.Array) -> jax.Array:
        """The residual stream, in its place on the mesh."""
        return cut(x_BTD, *self.cuts)

    def vector(self, field: str) -> jax.Array | None:
        """A norm or a bias, neither of which is ever quantised; None where the family has none."""
        return typing.cast(jax.Array | None, self.weights.get(field))

    def norm(self, field: str, x: jax.Array) -> jax.Array:
        scale = self.vector(field)
        assert scale is not None, field
        return rms_norm(x, scale, self.arch.norm_eps, self.norm_offset)

    def project(self, x: jax.Array, module: str) -> jax.Array:
        """x W, plus the low-rank x A B where the module has an adapter (Hu et al., 2021), plus its bias if it has one."""
        w, adapter = dequantise(self.weights[module], x.dtype), self.adapters.get(module)
        y = x @ w if adapter is None else adapted(x, w, *adapter)
        bias = self.vector(f"{module}_bias")
        return y if bias is None else y + bias

    def heads(self, x: jax.Array, count: int) -> jax.Array:
        """[B, T, heads, N]; a device has whole heads, all of them where there are too few to go round."""
        return cut(x.reshape(*x.shape[:-1], count, -1), "fsdp", None, "tp")

    def attention(self, h_BTD: jax.Array) -> tuple[jax.Array, typing.Any]:
        """Grouped-query attention with RoPE, and with normed queries and keys in families that have these norms."""
        q_BTHN = self.heads(self.project(h_BTD, "q_proj"), self.arch.num_heads)
        k_BTKN = self.heads(self.project(h_BTD, "k_proj"), self.arch.num_kv_heads)
        v_BTKN = self.heads(self.project(h_BTD, "v_proj"), self.arch.num_kv_heads)
        norms, (cos, sin) = (self.vector("q_norm"), self.vector("k_norm")), self.angles
        placing = Placing(*norms, cos, sin, self.arch.norm_eps, self.arch.query_scale, self.norm_offset)
        h_BTE, kept = self.read(q_BTHN, k_BTKN, v_BTKN, placing, self.past, self.reach)
        return self.project(h_BTE, "o_proj"), kept

    def feed_forward(self, h_BTD: jax.Array, activation: Activation) -> jax.Array:
        gate_BTF, up_BTF = self.project(h_BTD, "gate_proj"), self.project(h_BTD, "up_proj")
        return self.project(cut(gated(gate_BTF, up_BTF, activation), self.cuts[0], None, "tp"), "down_proj")
