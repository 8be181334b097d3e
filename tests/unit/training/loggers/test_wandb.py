"""What Weights & Biases itself has written of a run, in its offline mode, read by its own protocol buffers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from told_runs import CONFIG, tell

from agent_tunix.training.loggers.base import kept

wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")

BLOCK, HEAD = 2**15, 7  # of LevelDB's logs, which W&B's files are


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()  # it reads the environment once


def records(path: Path) -> list:
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes the last of them a moment after a run is finished
    data, place, found, part = path.read_bytes(), HEAD, [], b""
    while place + HEAD <= len(data):
        if BLOCK - place % BLOCK < HEAD:
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + HEAD])
        part += data[place + HEAD : place + HEAD + length]
        place += HEAD + length
        if kind in (1, 4):  # a whole record, or the last part of one
            (record := Record()).ParseFromString(part)
            found.append(record)
            part = b""
    return found


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_a_run_is_told_whole_and_goes_on_as_the_same_run(tmp_path):
    folder = tmp_path / "demo"
    said = tell(folder, "wandb", CONFIG | {"experiment_name": "named", "project_name": "mine"})
    first, second = sorted((folder / "wandb").glob("offline-run-*"))
    parts = [records(next(path.glob("*.wandb"))) for path in (first, second)]
    begun, resumed = (next(record.run for record in part if record.HasField("run")) for part in parts)
    assert begun.run_id == resumed.run_id == kept(folder, "wandb")["id"]
    assert (begun.project, begun.display_name, begun.notes) == ("mine", "named", "what it is for")
    assert list(begun.tags) == ["first", "second"]
    assert said == [f"WandB: `wandb sync {path}` uploads it" for path in (first, second)]

    config = {k: v for part in parts for r in part if r.HasField("config") for k, v in values(r.config.update).items()}
    assert (config["seed"], config["model"]["weights"]) == (7, "owner/name")
    history = [values(record.history.item) for part in parts for record in part if record.HasField("history")]
    losses = [(row["step"], row["train/loss"]) for row in history if "train/loss" in row]
    assert losses == [(1, 0.5), (2, 0.6), (2, 0.4)], "what is said again is not dropped"
    assert [(r["step"], r["validation/pass@8"]) for r in history if "validation/accuracy" in r] == [(0, 1.0), (2, 1.0)]
    metrics = [record.metric for part in parts for record in part if record.HasField("metric")]
    assert any(metric.step_metric == "step" and metric.glob_name == "*" for metric in metrics)

    paths = [f"{name}/path" for name in ("validation/completions", "train/samples")]
    tables = [(r["step"], r[path]) for path in paths for r in history if path in r]
    assert [step for step, _ in tables] == [0, 2, 2, 2]
    places = [first, second, first, second]
    read = [json.loads((at / "files" / path).read_text()) for at, (_, path) in zip(places, tables, strict=True)]
    rows = [[dict(zip(table["columns"], row, strict=True)) for row in table["data"]] for table in read]
    assert [[row["completion"] for row in table] for table in rows] == [
        ["two, at 0"],
        ["two, at 2"],
        ["four, at 1", "four, at 2"],
        ["four, at 2"],
    ]
    assert (rows[2][0]["rewards/answer"], rows[2][0]["transcript"]) == (1.0, '[{"role": "user"}]')


def test_jobs_of_a_sweep_are_runs_of_their_own_at_the_same_time(tmp_path):
    from agent_tunix.training.loggers.wandb import WandB

    jobs = [tmp_path / "sweep" / number for number in "01"]
    for job in jobs:
        job.mkdir(parents=True)
    together = [WandB(job, {"seed": 1}) for job in jobs]
    for number, logger in enumerate(together):
        logger.scalars(1, {"train/loss": number})
    for logger in together:
        logger.close()
    for number, job in enumerate(jobs):
        (path,) = job.glob("wandb/offline-run-*/*.wandb")
        (run,) = [record.run for record in records(path) if record.HasField("run")]
        assert (run.display_name, run.run_group, run.project) == (f"sweep/{number}", "sweep", "agent-tunix")
        assert [values(r.history.item)["train/loss"] for r in records(path) if r.HasField("history")] == [number]


def test_without_a_key_it_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    first, second = tell(tmp_path / "demo", "wandb")
    assert "there is no API key. Give one by `wandb login`" in first
    assert first == second, "once in each of its two processes"
    assert (tmp_path / "demo" / "summary.json").exists()


def test_disabled_it_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tell(tmp_path / "demo", "wandb") == []
