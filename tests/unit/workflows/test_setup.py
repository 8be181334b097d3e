from __future__ import annotations

from pathlib import Path

import jax
import pytest

from agent_tunix.engine import device, executables
from agent_tunix.errors import UserError
from agent_tunix.workflows import setup


@pytest.mark.parametrize("given", [None, "", "elsewhere"])
def test_programs_are_kept_in_the_users_cache_folder(monkeypatch, given):
    """A variable that is empty counts as one that is not set."""
    kept = {}
    monkeypatch.setattr(jax.config, "update", kept.__setitem__)
    monkeypatch.setattr(device, "wake", lambda: None)
    monkeypatch.setattr(executables, "make_room", lambda cache: None)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    setup.start_device()
    assert kept["jax_compilation_cache_dir"] == str(Path(given or "home/.cache") / "agent-tunix" / "compiled")


KINDS = {"config.yaml": "a run", "sweep.json": "a sweep", "tune.json": "a search", "lr_find.json": "a ramp of lr-find"}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_kept_for_what_it_holds(tmp_path, name):
    (tmp_path / name).touch()
    setup.refuse_others(tmp_path, name)
    with pytest.raises(UserError, match=f"holds {KINDS[name]}; choose another folder"):
        setup.refuse_others(tmp_path, "something.else")
