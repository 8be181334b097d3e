"""Curve files, read by the protocol buffers and the checksum of tensorboardX."""

from __future__ import annotations

import pytest
from curve_files import events_in
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import SessionLog

from agent_tunix.training.loggers import tensorboard as module
from agent_tunix.training.loggers.tensorboard import TensorBoard


@given(st.integers(0, 2**62), st.dictionaries(st.text(max_size=300), st.floats(width=32, allow_nan=False), max_size=40))
def test_what_is_written_is_read(tmp_path_factory, step, values):
    folder = tmp_path_factory.mktemp("curves")
    curves = TensorBoard(folder, {})
    curves.scalars(step, values)
    curves.close()
    (path,) = (folder / "tensorboard").iterdir()
    version, event = events_in(path)
    assert version.file_version == "brain.Event:2"
    assert (event.step, {value.tag: value.simple_value for value in event.summary.value}) == (step, values)


def test_a_number_that_is_none_and_one_too_large(tmp_path):
    curves = TensorBoard(tmp_path, {})
    curves.scalars(1, {"none": float("nan"), "infinite": -float("inf"), "large": 1e300})
    curves.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    none, infinite, large = (value.simple_value for value in events_in(path)[1].summary.value)
    assert none != none
    assert (infinite, large) == (-float("inf"), float("inf"))


def test_every_record_is_on_disk_at_once_and_the_newest_file_comes_last(tmp_path):
    first = TensorBoard(tmp_path, {})
    first.scalars(3, {"train/loss": 0.5})
    second = TensorBoard(tmp_path, {})
    second.rewind(2)
    second.scalars(3, {"train/loss": 0.25})
    older, newer = (events_in(path) for path in sorted((tmp_path / "tensorboard").iterdir()))
    assert [event.step for event in older] == [0, 3]
    assert [(event.step, event.session_log.status) for event in newer[1:2]] == [(3, SessionLog.START)]
    assert newer[2].summary.value[0].simple_value == 0.25
    assert older[1].wall_time == pytest.approx(newer[2].wall_time, abs=60)
    first.close()
    second.close()


def test_the_newest_file_comes_last_also_where_the_clock_was_set_back(tmp_path, monkeypatch):
    """TensorBoard would read it before the older ones, whose steps it is to replace."""
    for step, now in enumerate((2000.0, 1000.0, 1000.0, 3000.0)):
        monkeypatch.setattr(module.time, "time", lambda now=now: now)
        TensorBoard(tmp_path, {}).rewind(step)
    assert [events_in(path)[1].step for path in sorted((tmp_path / "tensorboard").iterdir())] == [1, 2, 3, 4]
