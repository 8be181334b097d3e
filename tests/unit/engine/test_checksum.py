from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agent_tunix.engine.checksum import _sum, digest, summed
from agent_tunix.models.sharding import mesh_of_sizes


def random(shape: tuple[int, ...], dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def test_an_array_is_named_by_its_path_with_its_type_and_shape():
    found = summed({"a": [jnp.zeros((2, 3)), jnp.int32(7)]})
    assert found == {"a.0": ["float32", [2, 3], "0" * 16], "a.1": ["int32", [], f"{7:016x}"]}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.int8, np.float16, bool])
def test_any_change_of_a_number_is_seen(dtype):
    array = random((3, 5, 7), dtype)
    seen = {summed([array])["0"][2]}
    for place in range(array.size):
        changed = array.copy()
        changed.reshape(-1).view(np.uint8)[place * array.itemsize] ^= 1
        seen.add(summed([changed])["0"][2])
    assert len(seen) == 1 + array.size


def test_the_sign_of_zero_and_the_order_of_numbers_count():
    array = random((4, 6))
    others = (np.flip(array, 0), np.flip(array, 1), array.T, array.reshape(6, 4), -array, array * 0, array * -0.0)
    assert len({summed([other])["0"][2] for other in (array, *others)}) == 8


def test_parts_add_up_to_the_whole_however_an_array_is_cut():
    array = random((4, 6, 8))
    whole = _sum(array, [0, 0, 0])
    for axis, count in ((0, 2), (1, 3), (2, 4)):
        step = array.shape[axis] // count
        starts = [[step * part if axis == n else 0 for n in range(3)] for part in range(count)]
        parts = [_sum(part, start) for part, start in zip(np.split(array, count, axis), starts, strict=True)]
        assert sum(parts) % 2**64 == whole
        assert parts[0] != parts[1]


def test_it_is_the_same_on_the_host_on_a_device_and_on_a_mesh():
    array = random((4, 6))
    placed = jax.device_put(array, NamedSharding(mesh_of_sizes(), PartitionSpec("fsdp")))
    assert summed([array]) == summed([jnp.asarray(array)]) == summed([placed])


def test_arrays_without_numbers_have_a_checksum():
    assert summed([np.zeros((0, 3), np.float32)]) == {"0": ["float32", [0, 3], "0" * 16]}


def test_a_digest_tells_records_apart_and_heeds_no_order():
    assert digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1})
    assert len({digest(record) for record in ({"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1]}, {"b": 1})}) == 6
