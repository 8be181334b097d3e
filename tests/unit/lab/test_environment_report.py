"""`agent-tunix env`: what a report of a bug needs, and no secret."""

from __future__ import annotations

import importlib.metadata
import json
import platform

import jax

import agent_tunix


def test_it_names_versions_devices_caches_and_the_system(command):
    found = json.loads(command("env", "--json").out)
    assert found["agent-tunix"]["version"] == agent_tunix.__version__
    assert platform.python_version() in found["agent-tunix"]["python"]
    assert found["libraries"]["jax"] == jax.__version__
    assert found["libraries"]["pytest"] == importlib.metadata.version("pytest")
    assert found["devices"][str(jax.devices()[0].id)].startswith(jax.devices()[0].platform)
    assert found["machine"]["system"] == platform.platform()
    assert "files" in found["caches"]["compiled"] or "not there" in found["caches"]["compiled"]


def test_it_tells_no_secret_and_not_who_one_is(command, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("HF_HOME", "/home/someone/models")
    said = command("env").out
    assert "secret" not in said
    assert "someone" not in said
    assert "~/models" in said


def test_a_device_that_does_not_start_is_what_it_is_for(command, monkeypatch):
    def devices():
        raise RuntimeError("no driver")

    monkeypatch.setattr(jax, "devices", devices)
    assert json.loads(command("env", "--json").out)["devices"] == {"fault": "no driver"}


def test_the_version(command):
    assert command("--version").out == f"agent-tunix {agent_tunix.__version__}\n"
