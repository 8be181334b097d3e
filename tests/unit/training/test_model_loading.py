from __future__ import annotations

import pwd
from pathlib import Path

import jax
import pytest

from agent_tunix.engine import cache_folder, compile_cache, device
from agent_tunix.errors import UserError
from agent_tunix.training import loading


@pytest.mark.parametrize("given", [None, "", "elsewhere"])
def test_programs_are_kept_in_the_users_cache_folder(monkeypatch, tmp_path, given):
    """A variable that is empty counts as one that is not set."""
    kept = {}
    monkeypatch.setattr(jax.config, "update", kept.__setitem__)
    monkeypatch.setattr(device, "wake", lambda: None)
    monkeypatch.setattr(compile_cache, "make_room", lambda cache: None)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    loading.start_device(pytest.fail)
    assert kept["jax_compilation_cache_dir"] == str(Path(given or "home/.cache") / "agent-tunix" / "compiled")


@pytest.mark.parametrize("home", ["open to all", "none"])
def test_a_run_goes_on_without_a_cache_that_is_not_its_users_alone_and_says_so_once(monkeypatch, tmp_path, home):
    """Not in the one that JAX finds in the environment either: our programs are kept beside JAX's."""
    kept, said = {"jax_compilation_cache_dir": "of the environment"}, list[str]()
    monkeypatch.setattr(jax.config, "update", kept.__setitem__)
    monkeypatch.setattr(device, "wake", lambda: None)
    if home == "none":
        for name in ("XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(cache_folder, "_others_may", lambda do, found: True)
    loading.start_device(said.append)
    assert kept["jax_compilation_cache_dir"] is None
    assert len(said) == 1
    assert "compiled programs are not kept" in said[0]
    assert "XDG_CACHE_HOME" in said[0]
    assert not any(tmp_path.iterdir())


KINDS = {"config.yaml": "a run", "sweep.json": "a sweep", "tune.json": "a search", "lr_find.json": "a ramp of lr-find"}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_kept_for_what_it_holds(tmp_path, name):
    (tmp_path / name).touch()
    loading.refuse_others(tmp_path, name)
    with pytest.raises(UserError, match=f"holds {KINDS[name]}; choose another folder"):
        loading.refuse_others(tmp_path, "something.else")
