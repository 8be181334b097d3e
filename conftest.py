"""Fixtures for tests of all folders: the goldens, and data that lies outside of the repository."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent


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
