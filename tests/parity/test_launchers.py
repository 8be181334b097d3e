"""Hydra's other launchers and sweepers run our sweeps, and the sweep folder is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.parity

SMALL = ["model=gemma3_tiny", "training.num_batches=2", "evaluation.num_examples=16", "evaluation.sampled=false"]
OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2", "hydra.sweeper.direction=maximize"]


def swept(folder: Path, *arguments: str) -> list[dict]:
    installed = str(Path(sys.executable).parent / "agent-tunix")
    command = [installed, "train", *SMALL, *arguments, "hydra.sweep.dir=sweep", "--multirun"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "sweep" / "sweep.json").read_text())["jobs"]


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_launchers(launcher, tmp_path):
    jobs = swept(tmp_path, f"hydra/launcher={launcher}", "optimizer.learning_rate=1e-6,1e-5")
    assert [job["status"] for job in jobs] == ["completed", "completed"]
    assert [job["overrides"][-1] for job in jobs] == ["optimizer.learning_rate=1e-06", "optimizer.learning_rate=1e-05"]


def test_optuna_searches_by_held_out_accuracy(tmp_path):
    jobs = swept(tmp_path, *OPTUNA, "optimizer.learning_rate=tag(log,interval(1e-6,1e-4))")
    assert [job["status"] for job in jobs] == ["completed"] * 4
    best = max(job["final_eval"]["accuracy"] for job in jobs)
    found = (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    assert f"best_value: {best}" in found
    assert "best_params:\n  optimizer.learning_rate: " in found
