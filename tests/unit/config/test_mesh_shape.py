from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.config.mesh_shape import faults, fitting_shapes, shown, sizes_of

PARTED = {"num_heads": 8, "hidden_dim": 12}


@given(st.tuples(st.integers(1, 64), st.integers(1, 64)))
def test_a_shape_is_read_as_it_is_shown(sizes):
    assert shown(sizes) == f"[[{sizes[0]},{sizes[1]}],[fsdp,tp]]"
    assert sizes_of([list(sizes), ["fsdp", "tp"]]) == sizes


def test_an_axis_that_is_left_out_has_one_device():
    assert (sizes_of([[4], ["fsdp"]]), sizes_of([[2], ["tp"]])) == ((4, 1), (1, 2))


@pytest.mark.parametrize(
    "shape",
    [
        None,
        4,
        [],
        [[1, 1]],
        [[], []],
        [[1, 1], ["fsdp"]],
        [[1, 1], ["fsdp", "fsdp"]],
        [[True], ["tp"]],
        [[1, 1.5], ["fsdp", "tp"]],
        [["a", 1], ["fsdp", "tp"]],
        [[10**9, 1], ["fsdp", "tp"]],
        [[1, 2**100], ["fsdp", "tp"]],
    ],
)
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ValueError, match="as in"):
        sizes_of(shape)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_a_fault_is_a_number_that_is_not_divided_and_the_shapes_named_have_none(fsdp, tp, micro_batch):
    found = list(faults((fsdp, tp), PARTED, micro_batch))
    assert len(found) == bool(8 % tp or 12 % tp) + bool(micro_batch % fsdp)
    for fault in found:
        named = fault.replace(shown((fsdp, tp)), "", 1).split("[[")[1:]
        assert named
        for shape in named:
            other = tuple(int(number) for number in shape.split("]")[0].split(","))
            assert len(list(faults(other, PARTED, micro_batch))) == len(found) - 1


def test_without_a_micro_batch_rows_are_padded_and_any_fsdp_serves():
    assert not list(faults((5, 2), PARTED, None))


def test_the_shapes_that_fit_come_with_those_of_most_devices_first():
    assert fitting_shapes(2, PARTED, 4) == "[[1,2],[fsdp,tp]], [[2,1],[fsdp,tp]], [[1,1],[fsdp,tp]]"
    assert fitting_shapes(3, PARTED, 4).startswith("[[1,2]"), "3 divides neither 8 heads nor 4 prompts"
    assert fitting_shapes(64, {"num_heads": 64, "hidden_dim": 64}, 64).endswith(" ...")


def test_several_processes_are_shown_the_shapes_that_take_all_their_devices():
    assert fitting_shapes(4, PARTED, 4, least=4) == "[[1,4],[fsdp,tp]], [[2,2],[fsdp,tp]], [[4,1],[fsdp,tp]]"
    assert fitting_shapes(5, PARTED, 4, least=5) == "none"
