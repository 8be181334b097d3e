from __future__ import annotations

import errno
import os

import pytest

from agent_tunix.errors import file_mistake


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "Free some space"), (errno.EFBIG, "Free some space"), (errno.EACCES, "hydra.run.dir=")],
)
def test_a_fault_of_files_says_where_and_what_to_do(number, remedy):
    message = str(file_mistake(OSError(number, os.strerror(number), "runs/metrics.jsonl")))
    assert message.startswith(f"runs/metrics.jsonl: {os.strerror(number)}. ")
    assert remedy in message


@pytest.mark.parametrize("fault", [FileNotFoundError(errno.ENOENT, "No such file", "x"), ConnectionError("refused")])
def test_any_other_fault_is_no_mistake_of_a_user(fault):
    assert file_mistake(fault) is None
