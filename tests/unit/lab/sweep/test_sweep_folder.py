"""What sweep.json says of jobs that wait, run, were killed or have ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agent_tunix.errors import UserError
from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.sweep.sweep_folder import Group, groups_of, read_index, write_index


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


WHOLE = {"mode": "fused", "jobs": [{"job": "0"}, {"job": "1"}], "groups": []}
GROUP = {"jobs": ["0", "1"], "until": None, "at_once": 2, "prompt_width": 32}


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        '{"mode": "fus',
        "[" * 100_000,
        "[]",
        *(json.dumps({key: WHOLE[key] for key in WHOLE if key != lost}) for lost in ("mode", "jobs")),
        *(json.dumps(WHOLE | {"jobs": jobs}) for jobs in ("none", [{"job": "zz"}], [7], [{"overrides": []}])),
        *(json.dumps(WHOLE | {"groups": groups}) for groups in (None, 3, [7], [{}])),
        *(json.dumps(WHOLE | {"groups": [GROUP | {key: None}]}) for key in GROUP if key != "until"),
        *(json.dumps(WHOLE | {"groups": [GROUP | {"at_once": count}]}) for count in (0, -1, 2.0, True, "2")),
        json.dumps(WHOLE | {"groups": [GROUP | {"jobs": ["0", "a"]}]}),
    ],
)
def test_a_sweep_does_not_go_on_without_what_was_written_of_it_but_its_jobs_are_seen(damaged, tmp_path, write_run):
    write_run(tmp_path / "0")
    (tmp_path / "sweep.json").write_text(damaged)
    with pytest.raises(UserError, match=r"sweep\.json cannot be read, and a sweep cannot go on without it"):
        write_index(tmp_path)
    assert (tmp_path / "sweep.json").read_text() == damaged
    assert list(doctor.read_jobs(tmp_path)[0]) == ["0"]


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere")], ids=["folder", "link"])
def test_what_is_no_file_is_no_sweep_that_is_not_there(make, tmp_path):
    make(tmp_path / "sweep.json")
    with pytest.raises(UserError, match=r"sweep\.json cannot be read"):
        write_index(tmp_path)


def test_the_folder_of_an_earlier_version_is_read(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({key: WHOLE[key] for key in ("mode", "jobs")}))
    assert groups_of(read_index(tmp_path)) == []
    decided = Group(("0", "1"), None, 2, 32)
    write_index(tmp_path, groups=[decided])
    assert groups_of(write_index(tmp_path)) == groups_of(read_index(tmp_path)) == [decided]


def test_a_group_is_cut_into_programs_and_the_last_takes_what_is_left():
    assert Group(("0", "2", "3", "7", "8"), None, 2, 32).parts() == [("0", "2"), ("3", "7"), ("8",)]
