"""Each way in which weights cannot be had has its own message."""

import errno
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from agent_tunix.errors import UserError
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.tokenizer import COPIED

REPOSITORY = "google/gemma-3-270m-it"


class Response:
    """As much of an HTTP response as the hub's exceptions look at."""

    headers: dict = {}  # noqa: RUF012
    status_code, text, request = 403, "", None


def http(kind):
    fault = kind.__new__(kind)
    Exception.__init__(fault, "refused")
    fault.response, fault.server_message, fault.request_id = Response(), None, None
    return fault


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (http(errors.GatedRepoError), "gated. Accept its licence at https://huggingface.co/google/gemma-3-270m-it"),
        (http(errors.RepositoryNotFoundError), "no such repository"),
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (ConnectionResetError("reset"), "cannot be reached"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        (PermissionError(errno.EACCES, "denied"), "cannot be written"),
        (RuntimeError("half of it"), "RuntimeError: half of it"),
    ],
)
def test_each_fault_of_the_hub_has_its_own_advice(monkeypatch, fault, message):
    def fail(*_, **__):
        raise fault

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError) as shown:
        find_checkpoint(REPOSITORY)
    assert message in str(shown.value)
    assert f"There is no folder {Path.cwd() / REPOSITORY} either" in str(shown.value), "it may be one of another folder"
    assert "agent-tunix train +experiment=quick_test" in str(shown.value)


def test_weights_beside_an_orbax_folder_are_those_that_are_meant(tmp_path):
    (tmp_path / "flax").mkdir()
    (tmp_path / "flax" / "_METADATA").touch()
    assert find_checkpoint(str(tmp_path)) == tmp_path / "flax"
    (tmp_path / "config.json").touch()
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_what_a_run_has_learnt_is_no_base_model(tmp_path):
    (tmp_path / "checkpoints" / "3" / "state").mkdir(parents=True)
    (tmp_path / "exports" / "merged-3").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    for folder in (tmp_path, *(tmp_path / "checkpoints").rglob("*")):
        with pytest.raises(UserError, match=rf"not a base model: training.init_from={tmp_path} goes on"):
            find_checkpoint(str(folder))
    assert find_checkpoint(str(tmp_path / "exports" / "merged-3"))


def test_the_hub_is_asked_for_weights_and_tokenizer_only(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.update(name=name, **options) or str(tmp_path)
    )
    assert find_checkpoint(REPOSITORY) == tmp_path
    assert asked["name"] == REPOSITORY
    assert {"config.json", "*.safetensors", *COPIED} <= set(asked["allow_patterns"])


@pytest.mark.parametrize("source", ["no/such/folder", "./nowhere", "owner/model.gguf", "gemma", "~/nowhere/at/all"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(monkeypatch, tmp_path, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match="no such folder"):
        find_checkpoint(source)


def test_a_file_that_is_not_gguf_is_explained(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="folder it lies in"):
        find_checkpoint(str(tmp_path / "model.safetensors"))


def test_kaggle_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "kagglehub", None)
    with pytest.raises(UserError, match=r"agent-tunix\[kaggle\]"):
        find_checkpoint("kaggle:google/gemma-3/flax/gemma-3-270m-it")


def test_gguf_names_its_extra(monkeypatch, tmp_path):
    from agent_tunix.models.checkpoints.gguf import GgufFile

    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "agent_tunix.models.checkpoints.gguf_header", raising=False)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"agent-tunix\[gguf\]"):
        GgufFile(tmp_path / "model.gguf")
