"""Where weights and adapters come from: what `model.weights` means, how an adapter is had from the hub, and what to do when
they cannot be found or downloaded.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from agent_tunix.errors import UserError, calling, named, said
from agent_tunix.models.checkpoints.orbax import find_orbax
from agent_tunix.models.tokenizer import COPIED

PACKAGED, KAGGLE = "package:", "kaggle:"
REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")  # and a branch, a tag or a commit of it
# All that a checkpoint needs to be loaded, and what an export copies along with it.
WANTED = ("config.json", "*.safetensors", "*.safetensors.index.json", *COPIED)
LOCAL = "model.weights=<folder> or <file.gguf> takes weights that were downloaded before."
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
QUICK = "No weights are needed for the quick test, which runs on any CPU:\n  agent-tunix train +experiment=quick_test"


def find_checkpoint(source: str) -> Path:
    """The local folder or .gguf file that `model.weights` means; raises UserError where there is none within reach."""
    if source == "???":  # as Hydra says that a value is missing
        raise UserError(f"model.weights is missing: model=auto is whatever the weights are. {LOCAL}")
    if source.startswith(PACKAGED):
        return Path(__file__).parents[1] / source.removeprefix(PACKAGED)
    if source.startswith(KAGGLE):
        return _from_kaggle(source)
    path = Path(os.path.expanduser(source))  # as it is, where there is no such user
    if path.is_dir():
        _refuse_run(path, source)
        return find_orbax(path) or path
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise UserError(f"model.weights={source} is a file; give the folder it lies in, or a .gguf file.")
    if not is_remote(source):
        raise UserError(
            f"model.weights={source}: there is no such folder or .gguf file ({path.absolute()}), and it is not a repository "
            "id (owner/name)."
        )
    return _from_hub(source)


def _refuse_run(folder: Path, source: str) -> None:
    """Says what to do with the folder of a run, or of its checkpoints, which are no base model."""
    path = folder.resolve()
    for run in (path, *(above.parent for above in (path, *path.parents) if above.name == "checkpoints")):
        if (run / "metrics.jsonl").exists():
            raise UserError(
                f"model.weights={source} is what a run has learnt, not a base model: training.init_from={run} goes on from\n"
                f"it, and `agent-tunix export run={run} format=merged` makes a model of it."
            )


def is_remote(source: str) -> bool:
    """Whether it names weights to be downloaded, from Kaggle or from a repository of the hub."""
    path = Path(os.path.expanduser(source))
    named = REPOSITORY.fullmatch(source) is not None and path.suffix != ".gguf"
    return source.startswith(KAGGLE) or (named and not path.exists())


def repository_of(source: str) -> tuple[str, str | None]:
    """The repository that weights or an adapter name, as owner/name or owner/name@revision, and its revision."""
    found = REPOSITORY.fullmatch(source)
    return (found[1], found[2]) if found else (source, None)


def _from_hub(source: str) -> Path:
    return _snapshot("model.weights", source, WANTED, f"{LOCAL}\n{QUICK}")


def adapter_of_hub(source: str) -> Path:
    """The folder of an adapter that a repository of the hub holds; it is named after the commit that was found."""
    folder = _snapshot("model.adapter", source, ADAPTER, "A folder that PEFT, or agent-tunix export, has saved will do too.")
    for name in ADAPTER:
        if not (folder / name).exists():
            raise UserError(f"model.adapter={source} holds no {name}, so it is no adapter in PEFT's layout.")
    return folder


def _snapshot(key: str, source: str, wanted: Sequence[str], otherwise: str) -> Path:
    """What is wanted of a repository, from the hub or from its cache, in which HF_HUB_OFFLINE=1 looks alone."""
    from huggingface_hub import snapshot_download

    repository, revision = repository_of(source)
    here = f"There is no folder {Path(source).absolute()} either."  # for which a relative path was perhaps meant
    with calling(lambda fault: UserError(f"{key}={source}: {_hub_advice(repository, fault)}\n{here} {otherwise}")):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(wanted), etag_timeout=5))


def _hub_advice(repository: str, fault: BaseException) -> str:
    """What went wrong on the Hugging Face hub and what to do about it, most telling fault first."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repository}"
    if isinstance(fault, errors.GatedRepoError):
        return f"the repository is gated. Accept its licence at {page}, then `hf auth login` and run again."
    if isinstance(fault, errors.RevisionNotFoundError):
        return f"the repository has no such branch, tag or commit; {page}/tree/main lists them."
    if isinstance(fault, errors.RepositoryNotFoundError):
        return "the Hugging Face hub has no such repository, or it is private: check the name, or `hf auth login`."
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full. Free some space, or set HF_HOME to a folder on a larger disk."
    if isinstance(fault, PermissionError):
        return f"the download folder cannot be written ({said(fault)}). Set HF_HOME to a folder of yours."
    unreachable = errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled
    if isinstance(fault, unreachable) or is_of_network(fault):
        return (
            "it has not been downloaded before, and the Hugging Face hub cannot be reached from here.\n"
            f"Where there is a network: accept the licence at {page}, then `hf auth login` and run again."
        )
    return f"the download failed ({named(fault)}). Run again: it goes on where it stopped."


def is_of_network(fault: BaseException) -> bool:
    """Whether a network is to blame; huggingface_hub asks through httpx or, before version 1, through requests."""
    kinds = {kind.__name__ for kind in type(fault).__mro__}
    return bool(kinds & {"ConnectionError", "TimeoutError", "TransportError", "Timeout"})


def _from_kaggle(source: str) -> Path:
    handle = source.removeprefix(KAGGLE)
    try:
        import kagglehub
    except ImportError as fault:
        raise UserError(f"model.weights={source} needs kagglehub: pip install 'agent-tunix[kaggle]'.") from fault
    with calling(
        lambda fault: UserError(
            f"model.weights={source}: Kaggle did not provide it ({named(fault)}).\n"
            f"Accept the licence at https://www.kaggle.com/models/{handle} and put your API token where kagglehub looks.\n"
            f"{LOCAL}\n{QUICK}"
        )
    ):
        folder = Path(kagglehub.model_download(handle))
    return find_orbax(folder) or folder
