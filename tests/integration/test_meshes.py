"""Meshes, tested in a process that takes its two cores for eight devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("which", ["not parity", pytest.param("parity", marks=pytest.mark.parity)])
def test_on_eight_host_devices(tmp_path, which):
    tests = Path(__file__).with_name("on_eight_devices.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(tests),
        "-n0",
        "-m",
        which,
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'runs'}",
    ]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
