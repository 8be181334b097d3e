from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from agent_tunix.types import Batch, Prompts, pytree, static


@pytree
class Record:
    values: jax.Array
    name: str = static()


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Record(jnp.ones(2), "a").values = jnp.zeros(2)


def test_mapping_reaches_arrays_and_leaves_static_fields_alone():
    doubled = jax.tree.map(lambda x: 2 * x, Record(jnp.ones(2), "a"))
    assert doubled.values.tolist() == [2, 2]
    assert doubled.name == "a"


def test_a_static_field_is_a_compile_time_constant():
    traced = []

    @jax.jit
    def f(record):
        traced.append(record.name)
        return record.values * len(record.name)

    assert [f(Record(jnp.ones(()), name)).item() for name in ("a", "a", "bb")] == [1, 1, 2]
    assert traced == ["a", "bb"]


def test_absent_parts_of_a_batch_are_no_leaves():
    prompts = Prompts(jnp.zeros((1, 2)), jnp.zeros((1, 2)))
    batch = Batch(prompts, jnp.zeros((1, 3)), jnp.zeros((1, 3)), None, None, jnp.zeros(1))
    assert len(jax.tree.leaves(batch)) == 5
