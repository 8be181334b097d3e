"""The table of places, without devices; what programs make of it is tested on eight, in tests/integration."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest
from jax.sharding import PartitionSpec as P

from agent_tunix.algorithm.optimizers import ALGORITHMS
from agent_tunix.engine.update import init_state
from agent_tunix.kernels import mesh as kernel_mesh
from agent_tunix.models import sharding
from agent_tunix.models.lora import masters

SIZES = [{"fsdp": fsdp, "tp": tp} for fsdp in (1, 2, 3, 4, 8) for tp in (1, 2, 4)]


def specs(tree, arch, sizes) -> dict[str, tuple[tuple[int, ...], P]]:
    """Shape and spec of every array, by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): (leaf.shape, sharding.spec(sharding._names(path), leaf.shape, arch, sizes))
        for path, leaf in leaves
    }


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_cut_divides_its_axis_and_heads_stay_whole(sizes, arch, weights, adapters):
    for path, (shape, spec) in specs((weights, adapters), arch, sizes).items():
        for length, wanted in zip(shape, spec, strict=False):
            parts = math.prod(sizes[axis] for axis in kernel_mesh._axes(wanted))
            assert length % parts == 0, path
            if "k_proj" in path or "v_proj" in path:
                assert "tp" not in kernel_mesh._axes(wanted) or arch.num_kv_heads % sizes["tp"] == 0, path


def test_the_table(arch, weights, adapters):
    found = specs(weights, arch, {"fsdp": 2, "tp": 2}) | specs(adapters, arch, {"fsdp": 2, "tp": 2})
    cuts = {
        path: tuple("+".join(kernel_mesh._axes(wanted)) for wanted in (*spec, *[None] * (len(shape) - len(spec))))
        for path, (shape, spec) in found.items()
    }
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert cuts[f".layers['{name}']"] == ("", "fsdp", "tp")
        assert cuts[f".a['{name}']"] == ("", "fsdp", "")
        assert cuts[f".b['{name}']"] == ("", "", "tp")
    for name in ("o_proj", "down_proj"):
        assert cuts[f".layers['{name}']"] == ("", "tp", "fsdp")
        assert cuts[f".a['{name}']"] == ("", "tp", "")
        assert cuts[f".b['{name}']"] == ("", "", "fsdp")
    assert cuts[".embed_VD"] == ("tp+fsdp", "")
    assert not any(any(cut) for path, cut in cuts.items() if "norm" in path)


def test_blocks_of_a_quantised_matrix_are_cut_as_its_inputs_are(arch):
    sizes = {"fsdp": 2, "tp": 2}
    for name in ("codes", "scales"):
        assert sharding.spec(("layers", "gate_proj", name), (4, 6, 32, 256), arch, sizes) == P(None, "fsdp", None, "tp")
        assert sharding.spec(("layers", "down_proj", name), (4, 6, 1, 256), arch, sizes) == P(None, "tp", None, "fsdp")
    assert sharding.spec(("layers", "gate_proj", "codes"), (4, 5, 32, 256), arch, sizes) == P(None, None, None, "tp")
    single = dataclasses.replace(arch, num_kv_heads=1)
    assert sharding.spec(("layers", "k_proj", "codes"), (4, 6, 32, 256), single, sizes) == P(None, "fsdp")


def test_a_vocabulary_that_is_not_divided_is_cut_by_what_divides_it(arch):
    def embedding(vocabulary: int) -> P:
        return sharding.spec(("embed_VD",), (vocabulary, 16), arch, {"fsdp": 4, "tp": 2})

    assert embedding(48) == P(("tp", "fsdp"))
    assert embedding(46) == P("tp")
    assert embedding(47) == P()


def test_one_key_head_is_kept_whole_by_all(arch):
    single = dataclasses.replace(arch, num_kv_heads=1)
    assert sharding.spec(("k_proj",), (4, 16, 8), single, {"fsdp": 2, "tp": 2}) == P(None, "fsdp")
    assert sharding.spec(("q_proj",), (4, 16, 32), single, {"fsdp": 2, "tp": 2}) == P(None, "fsdp", "tp")


@pytest.mark.parametrize("optimizer", ALGORITHMS)
@pytest.mark.parametrize("trained", ["adapters", "weights"])
def test_moments_lie_where_their_parameters_lie(optimizer, trained, arch, weights, adapters):
    trainable = adapters if trained == "adapters" else masters(weights)
    state = jax.eval_shape(lambda: init_state(trainable, optimizer))
    found = specs(state, arch, {"fsdp": 2, "tp": 2})
    parameters = {path.removeprefix(".trainable"): where for path, where in found.items() if path.startswith(".trainable")}
    moments = 0
    for path, (shape, spec) in found.items():
        for name, (parameter_shape, parameter_spec) in parameters.items():
            if path.startswith(".optimizer") and path.endswith(name):
                assert spec == (parameter_spec if len(shape) == len(parameter_shape) else P()), path
                moments += 1
    assert moments >= len(parameters)


def test_on_one_device_and_outside_of_a_mesh_nothing_is_cut(weights):
    with sharding.on_mesh_of(weights):
        assert kernel_mesh.cut(weights.embed_VD, "fsdp") is weights.embed_VD
    with jax.set_mesh(sharding.mesh_of_sizes()):
        assert kernel_mesh.cut(weights.embed_VD, "fsdp") is weights.embed_VD
        assert kernel_mesh.by_rows(lambda x: x, weights.embed_VD) is weights.embed_VD
