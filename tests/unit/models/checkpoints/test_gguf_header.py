"""Fields and tensors are those that the gguf library finds; what is cut short or of another format is refused."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.models.checkpoints.gguf_header import Header

NUMBERS = {"uint8": 200, "int8": -3, "uint16": 60_000, "int16": -300, "uint32": 4e9, "int32": -70_000, "float32": 0.1}
NUMBERS |= {"uint64": 2**60, "int64": -(2**60), "float64": 0.1, "bool": True}
ARRAYS = {"texts": ["a", "", "ä ▁"], "numbers": [1, -2, 3], "fractions": [0.5, -1e-3], "truths": [True, False]}


def write(path, **how):
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "gemma3", **how)
    for kind, value in NUMBERS.items():
        getattr(writer, f"add_{kind}")(f"of.{kind}", value if kind in ("float32", "float64", "bool") else int(value))
    for name, values in ARRAYS.items():
        writer.add_array(name, values)
    for number, kind in enumerate(("F32", "F16", "BF16", "Q8_0", "Q4_0")):
        kind = gguf.GGMLQuantizationType[kind]
        values = rng.normal(size=(3 + number, 64)).astype(np.float32)
        writer.add_tensor(f"tensor.{number}", gguf.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("norm", rng.normal(size=5).astype(np.float32))
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    return path


def decoded(value):
    if isinstance(value, list):
        return [decoded(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf")


def test_fields_are_those_that_the_library_reads(whole):
    found = gguf.GGUFReader(whole).fields
    theirs = {name: field.contents() for name, field in found.items() if not name.startswith("GGUF.")}
    assert {name: decoded(value) for name, value in Header(whole).fields.items()} == theirs
    assert set(ARRAYS) < set(theirs)


def test_tensors_are_those_that_the_library_reads(whole):
    ours, theirs = Header(whole).tensors, gguf.GGUFReader(whole).tensors
    assert [*ours] == [tensor.name for tensor in theirs]
    for tensor, (kind, shape, rows) in zip(theirs, ours.values(), strict=True):
        assert kind == tensor.tensor_type
        assert [*shape] == tensor.shape.tolist()[::-1]
        np.testing.assert_array_equal(gguf.dequantize(rows, kind).reshape(shape), gguf.dequantize(tensor.data, kind))


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_are_found_wherever_the_file_aligns_them(tmp_path, alignment):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_custom_alignment(alignment)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("first", values)
    writer.add_tensor("second", -values)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    tensors = Header(tmp_path / "model.gguf").tensors
    np.testing.assert_array_equal(tensors["first"].rows.view(np.float32), values)
    np.testing.assert_array_equal(tensors["second"].rows.view(np.float32), -values)


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(whole, share):
    data = whole.read_bytes().rstrip(b"\0")  # the last tensor is padded
    cut = whole.with_name("cut.gguf")
    cut.write_bytes(data[: int(share * len(data))])
    with pytest.raises((ValueError, struct.error)):
        Header(cut)


def test_a_file_of_other_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no GGUF of version 2 or 3"):
        Header(write(tmp_path / "other.gguf", endianess=gguf.GGUFEndian.BIG))


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (struct.pack("<QQ", 2**20, 0), "it says that it has 1048576 tensors"),
        (struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 0, 2**30), "arrays have 1073741824 elements"),
        (struct.pack("<QQQ1sI", 1, 0, 1, b"a", 2**20), "a tensor has 1048576 axes"),
    ],
    ids=["tensors", "elements", "axes"],
)
def test_numbers_beyond_any_model_are_refused_before_they_are_believed(tmp_path, counts, said):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + counts + bytes(1000))
    with pytest.raises(ValueError, match=said):
        Header(tmp_path / "bad.gguf")
