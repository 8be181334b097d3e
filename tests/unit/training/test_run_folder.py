from __future__ import annotations

import errno
import fcntl
import json
import shutil
from pathlib import Path

import pytest
from curve_files import events_in

from agent_tunix import files
from agent_tunix.errors import UserError
from agent_tunix.training.loggers.tensorboard import TensorBoard
from agent_tunix.training.metrics import peak_memory_gb
from agent_tunix.training.run_folder import RunFolder, claimed, last_step, read_records, replace_text, validations


def opened(path, resumed_at: int | None = None) -> RunFolder:
    return RunFolder(path, resumed_at, lambda: [TensorBoard(path, {})])


def test_records_come_back_as_they_were_written(tmp_path):
    folder = opened(tmp_path / "deep" / "run")
    folder.metrics({"step": 1, "loss": 0.1, "reward/mean": 1e-30})
    folder.evaluation({"step": 0, "split": "validation", "n": 3, "accuracy": 0.5})
    folder.samples([{"step": 1, "completion": "zwölf\n\u2028 ≠ 13"}, {"step": 1, "completion": ""}])
    folder.close()
    assert read_records(folder.path / "metrics.jsonl") == [{"step": 1, "loss": 0.1, "reward/mean": 1e-30}]
    assert read_records(folder.path / "evals.jsonl")[0]["accuracy"] == 0.5
    assert [r["completion"] for r in read_records(folder.path / "samples.jsonl")] == ["zwölf\n\u2028 ≠ 13", ""]
    curves = {"train/loss": (1, 0.1), "train/reward/mean": (1, 1e-30)}
    curves |= {"validation/n": (0, 3), "validation/accuracy": (0, 0.5)}
    assert curves_in(folder.path / "tensorboard") == {
        tag: (step, pytest.approx(value, rel=1e-6)) for tag, (step, value) in curves.items()
    }


def curves_in(folder: Path) -> dict[str, tuple[int, float]]:
    """The last point of every curve, in the order in which the files were begun."""
    events = (event for path in sorted(folder.iterdir()) for event in events_in(path))
    return {value.tag: (event.step, value.simple_value) for event in events for value in event.summary.value}


def test_a_folder_is_claimed_by_one_at_a_time(tmp_path, monkeypatch):
    with claimed(tmp_path), pytest.raises(UserError, match="is being written by another process"), claimed(tmp_path):
        pytest.fail("two have it")
    with claimed(tmp_path):
        assert list(tmp_path.iterdir()) == []

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with claimed(tmp_path), claimed(tmp_path):
        pass


def test_a_text_that_cannot_be_written_leaves_nothing_and_is_named(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(IsADirectoryError) as fault:
        replace_text(tmp_path / "report.html", "text")
    assert fault.value.filename == str(tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_file_that_is_not_there_has_no_records(tmp_path):
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_a_line_too_long_for_a_record_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE", 20)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": "' + "x" * 50 + '"}\n{"step": 2}\n')
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_folder_removed_while_its_run_goes_on_is_named(tmp_path):
    folder = opened(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    for write in (lambda: folder.samples([{"step": 1}]), lambda: folder.summary({})):
        with pytest.raises(UserError, match="run was removed while its run went on"):
            write()
    folder.close()


def test_a_resumed_run_drops_later_steps_and_a_half_written_line(tmp_path):
    folder = opened(tmp_path)
    for step in (1, 2, 3):
        folder.metrics({"step": step, "text": "ü"})
        folder.evaluation({"step": step, "split": "validation"})
        folder.samples([{"step": step}])
    folder.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "te')
    (tmp_path / "summary.json").write_text('{"status": "diverged", "steps": 4}')
    resumed = opened(tmp_path, resumed_at=2)
    assert not (tmp_path / "summary.json").exists(), "the run has not ended"
    resumed.metrics({"step": 3, "text": "new"})
    resumed.close()
    *_, newest = sorted((tmp_path / "tensorboard").iterdir())
    starts = [event for event in events_in(newest) if event.HasField("session_log")]
    assert [event.step for event in starts] == [3], "TensorBoard drops this step and what follows"
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"step": 1, "text": "ü"},
        {"step": 2, "text": "ü"},
        {"step": 3, "text": "new"},
    ]
    assert [r["step"] for r in read_records(tmp_path / "evals.jsonl")] == [1, 2]
    assert [r["step"] for r in read_records(tmp_path / "samples.jsonl")] == [1, 2]


def contents(folder: Path) -> dict[str, bytes]:
    """What lies in a folder: the files and what they hold."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def begun(tmp_path):
    """The folder of a run of three steps that has ended."""
    folder = opened(tmp_path)
    for step in (1, 2, 3):
        folder.metrics({"step": step})
        folder.evaluation({"step": step, "split": "validation"})
        folder.samples([{"step": step}])
    folder.answers({"step": 1, "problems": ["a"], "right": [1]})
    folder.summary({"status": "interrupted"})
    folder.close()
    return tmp_path


@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl", "answers.jsonl", "samples.jsonl"])
def test_a_refused_resume_changes_nothing(begun, name):
    (begun / name).unlink()
    (begun / name).mkdir()
    before = contents(begun)
    with pytest.raises(UserError, match=f"{name} is not a file"):
        opened(begun, resumed_at=2)
    assert contents(begun) == before


def test_a_resume_refused_for_a_link_that_leads_to_itself_changes_nothing(begun):
    (begun / "metrics.jsonl").unlink()
    (begun / "metrics.jsonl").symlink_to("metrics.jsonl")
    before = contents(begun)
    with pytest.raises((UserError, OSError), match=r"metrics\.jsonl"):
        opened(begun, resumed_at=2)
    assert contents(begun) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_resume_that_cannot_be_written_changes_nothing(begun, name, monkeypatch):
    before, write = contents(begun), Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == f"{name}.tmp":
            write(path, content[:5])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as fault:
        opened(begun, resumed_at=2)
    assert fault.value.filename == str(begun / name)
    assert contents(begun) == before


def test_what_comes_between_is_done_before_any_record_is_dropped(begun):
    folder, before = opened(begun), contents(begun)
    with pytest.raises(OSError, match="gone"), folder.rewinding(1):
        raise OSError("gone")
    folder.close()
    assert contents(begun) == before


def test_lines_that_stay_are_left_as_they_are(tmp_path):
    """Others may have written them, in a way in which we do not."""
    kept = b'{"step":1, "x": [NaN], "text": "\\ud800"}\n{ "step": 2, "of": "\xff" }\n'
    (tmp_path / "metrics.jsonl").write_bytes(b'[1]\n{"step": "1"}\n' + kept + b'{"step": 3}\n')
    opened(tmp_path, resumed_at=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept


def test_a_line_after_one_that_was_cut_short_is_whole(tmp_path):
    (tmp_path / "evals.jsonl").write_text('{"step": 1, "split": "test"}\n{"step": 2, "sp')
    folder = opened(tmp_path)
    folder.evaluation({"step": 3, "split": "test"})
    folder.close()
    assert [r["step"] for r in read_records(tmp_path / "evals.jsonl")] == [1, 3]


def test_a_run_that_goes_back_has_its_curves_forgotten_too(tmp_path):
    folder = opened(tmp_path)
    for step in (1, 2, 3):
        folder.metrics({"step": step})
    folder.samples([{"step": "x"}, {"text": "of no step"}])
    with folder.rewinding(1):
        assert last_step(tmp_path) == 3, "nothing is dropped yet"
    folder.close()
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1]
    assert read_records(tmp_path / "samples.jsonl") == []
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert [event.step for event in events_in(path) if event.HasField("session_log")] == [2]


def test_opening_a_run_again_without_resuming_drops_nothing(tmp_path):
    for step in (1, 2):
        folder = opened(tmp_path)
        folder.metrics({"step": step})
        folder.close()
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_summary_replaces_the_one_before(tmp_path):
    folder = opened(tmp_path)
    for status in ("interrupted", "completed"):
        folder.summary({"status": status})
    folder.close()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "completed"}
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "tensorboard"}


def test_a_summary_that_cannot_be_written_leaves_the_one_before(tmp_path):
    folder = opened(tmp_path)
    folder.summary({"status": "completed"})
    with pytest.raises(TypeError):
        folder.summary({"status": object()})
    folder.close()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "completed"}


def test_peak_memory_is_that_of_a_process_that_holds_jax():
    assert 0.05 < peak_memory_gb() < 100


def test_evaluations_that_were_spoilt_are_left_out_and_those_made_again_stand_in_their_place(tmp_path):
    spoilt = [{"step": 0}, {"split": "validation", "accuracy": 0.5}, {"step": 2, "split": "validation", "accuracy": None}]
    test = {"step": 4, "split": "test", "accuracy": 0.9}
    later, again = ({"step": step, "split": "validation", "accuracy": 0.25} for step in (4, 0))
    (tmp_path / "evals.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in (*spoilt, test, later, again)))
    assert validations(tmp_path) == [again, later]
