"""Sending files to a stand-in of the hub by huggingface_hub itself, and what is said where it does not take them."""

from __future__ import annotations

from functools import partial

import pytest
from huggingface_hub import constants
from local_hub import local_hub, point_to

from agent_tunix.errors import UserError
from agent_tunix.training.hub_push import push, refuse_name, refuse_stranger, shown

FILES = {"README.md": "---\ntags: [a]\n---\n# card\n", "adapter_config.json": "{}", "adapter_model.safetensors": "weights"}


@pytest.fixture(scope="module")
def server():
    with local_hub() as hub:
        yield hub


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    point_to(server, monkeypatch, tmp_path / "cache")
    server.repositories.clear()
    server.large.clear()
    server.asked.clear()
    server.failing.clear()
    return server


@pytest.fixture
def folder(tmp_path):
    (made := tmp_path / "peft-2").mkdir()
    for name, text in {**FILES, ".export.json": "{}"}.items():
        (made / name).write_text(text)
    return made


def test_all_that_is_shown_is_sent_and_nothing_else(hub, folder):
    told = shown(folder, "me/demo", private=False)
    assert hub.asked == []
    for name, text in FILES.items():
        assert f"{len(text)} bytes" in next(line for line in told.splitlines() if line.strip().startswith(f"{name} "))
    assert "  # card" in told
    assert ".export.json" not in told
    address = push(folder, "me/demo", False, "Step 2", print)
    repository = hub.repositories["me/demo"]
    assert address == f"{hub.url}/me/demo/commit/{repository.commits[-1][0]}"
    sent = {name: data.decode() for name, data in repository.commits[-1][1].items() if name != ".gitattributes"}
    assert (sent, repository.message, repository.private) == (FILES, "Step 2", False)
    assert len(repository.commits) == 2, "one commit, so that none sees the half of it"


def test_a_second_call_goes_on_where_an_upload_was_cut_short(hub, folder):
    hub.failing = {"/commit/main": 500}
    with pytest.raises(
        UserError, match=r"the hub did not take it .*\nThe export lies in .*, and the same command sends it\."
    ):
        push(folder, "me/demo", False, "Step 2", print)
    assert len(hub.repositories["me/demo"].commits) == 1
    hub.failing, said = {}, []
    hub.asked.clear()
    push(folder, "me/demo", False, "Step 2", said.append)
    assert set(FILES) <= hub.repositories["me/demo"].commits[-1][1].keys()
    assert not [call for call in hub.asked if call.startswith("PUT")], "what was sent is not sent again"
    assert said == ["me/demo is there already: this is a new commit, and files of the same names are replaced."]


def test_a_private_repository_is_private_and_a_public_one_is_no_private_one(hub, folder):
    push(folder, "me/closed", True, "Step 2", print)
    assert hub.repositories["me/closed"].private
    push(folder, "me/closed", False, "Step 2", lambda _: None)
    assert hub.repositories["me/closed"].private
    push(folder, "me/open", False, "Step 2", print)
    before = len(hub.repositories["me/open"].commits)
    with pytest.raises(UserError, match="me/open is there already and public; private=true is for a new repository"):
        push(folder, "me/open", True, "Step 2", print)
    assert len(hub.repositories["me/open"].commits) == before


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("/api/repos/create", 403, "the token may not write there. It needs the role write, and me must be you"),
        ("/api/repos/create", 404, "the hub has no such owner as me"),
        ("/lfs/objects/batch", 413, "the hub finds a file too large"),
        ("/api/whoami-v2", 401, "the hub does not take the token"),
        ("/api/whoami-v2", 0, "the hub cannot be reached, or the connection broke"),
    ],
)
def test_each_fault_has_its_own_advice(hub, folder, end, status, said):
    hub.failing = {end: status}
    call = (
        partial(refuse_stranger, "me/demo") if "whoami" in end else partial(push, folder, "me/demo", False, "Step 2", print)
    )
    with pytest.raises(UserError) as refused:
        call()
    assert str(refused.value).startswith(f"push_to=me/demo: {said}")


def test_without_a_token_or_a_network_nothing_is_asked(hub, folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"there is no token\. Make one that may write"):
        refuse_stranger("me/demo")
    monkeypatch.setenv("HF_TOKEN", "other")
    with pytest.raises(UserError, match="the hub does not take the token"):
        refuse_stranger("me/demo")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="the hub cannot be reached"):
        refuse_stranger("me/demo")


@pytest.mark.parametrize("name", ["me/de mo", "me/a--b", "a/b/c", "me/demo.git", "-me/demo", "demo", ""])
def test_what_is_no_name_is_refused(hub, name):
    with pytest.raises(UserError, match=f"push_to={name}"):
        refuse_name(name)
    assert hub.asked == []
