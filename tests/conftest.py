"""Shared by all tests: the command line, run in this process so that compiled programs are shared; goldens; outside data."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from absl import logging as absl_logging

from agent_tunix import cli

REPOSITORY = Path(__file__).parents[1]

# Hydra closes the log handlers it finds; absl's would close the stream under pytest's capture with it.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `agent-tunix <arguments>` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["agent-tunix", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Numbers by code we did not write: the committed ones, or fresh ones that `make parity` has just made."""
    return Path(os.environ.get("AGENT_TUNIX_GOLDENS", REPOSITORY / "tests" / "golden"))


@pytest.fixture(scope="session")
def data() -> Path:
    """Large files that are not part of the repository; tests that need them are skipped, visibly, where they are absent."""
    folder = Path(os.environ.get("AGENT_TUNIX_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set AGENT_TUNIX_DATA to the folder that holds gsm8k and gemma3_tokenizer")
    return folder
