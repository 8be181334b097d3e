"""What sweep.json says of jobs that wait, run, were killed or have ended."""

from __future__ import annotations

import json
import shutil

from agent_tunix.workflows.sweep_folder import write_index


def statuses(folder) -> list[str]:
    return [job["status"] for job in json.loads((folder / "sweep.json").read_text())["jobs"]]


def test_a_job_is_running_from_its_first_moment_and_interrupted_once_nobody_runs_it(tmp_path, write_run):
    overrides = {name: [f"seed={name}"] for name in "0123"}
    write_index(tmp_path, overrides, "fused", running={"0", "1"})
    assert statuses(tmp_path) == ["running", "running", "waiting", "waiting"], "no folder is made yet"
    write_run(tmp_path / "0", status=None)
    write_run(tmp_path / "1")
    write_run(tmp_path / "2", status="interrupted")
    write_index(tmp_path, overrides, running={"2"})
    assert statuses(tmp_path) == ["interrupted", "completed", "running", "waiting"]
    shutil.rmtree(tmp_path / "2")
    index = write_index(tmp_path)
    assert statuses(tmp_path) == ["interrupted", "completed", "waiting", "waiting"]
    assert [job["overrides"] for job in index["jobs"]] == list(overrides.values())


def test_a_job_that_was_gone_on_with_alone_keeps_the_overrides_of_its_sweep(tmp_path, write_run):
    given = ["+experiment=quick_test", "optimizer=conservative"]
    write_index(tmp_path, {"0": given}, "one after another", running={"0"})
    run = write_run(tmp_path / "0")
    (run / "summary.json").write_text(json.dumps({"status": "completed", "overrides": ["optimizer.weight_decay=0.05"]}))
    assert write_index(tmp_path)["jobs"][0]["overrides"] == given


def test_a_damaged_file_is_as_none(tmp_path, write_run):
    for name in "01":
        write_run(tmp_path / name)
    (tmp_path / "0" / "summary.json").write_text('{"status": "comp')
    for index in (
        '{"mode": "fus',
        '{"jobs": [{"job": 0}, {"job": 1}]}',
        '{"jobs": [{"job": "zz"}, 7, {"overrides": []}]}',
        '{"jobs": "none"}',
    ):
        (tmp_path / "sweep.json").write_text(index)
        write_index(tmp_path)
        assert statuses(tmp_path) == ["interrupted", "completed"], "the first is gone on with from its last checkpoint"
