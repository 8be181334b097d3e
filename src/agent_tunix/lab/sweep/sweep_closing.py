"""The close of a sweep, whatever has launched its jobs: its index, what the doctor says of it, and its page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from agent_tunix.errors import DivergenceError
from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.report.page import report_on
from agent_tunix.lab.sweep import sweep_folder
from agent_tunix.training.progress import say


def close(folder: Path, console: Console) -> None:
    """Sums up the jobs that have begun; raises DivergenceError where all of them diverged."""
    if not folder.is_dir() or not (jobs := sweep_folder.job_folders(folder)):
        return
    index = sweep_folder.write_index(folder)
    if not any(doctor.is_ramp(job) for job in jobs):  # a ramp ends in collapse, and has said what it suggests
        doctor.show(folder, doctor.diagnose(folder), console)
    report_on(folder, console.print)
    say(console, f"\nSweep folder: {folder}, with report.html")
    if all(job["status"] == "diverged" for job in index["jobs"]):
        raise DivergenceError("All jobs diverged: the sweep found no settings to train with.")
