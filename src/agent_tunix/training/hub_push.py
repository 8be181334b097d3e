"""Sending an export to the Hugging Face hub: what would be sent is shown first, and sent as one commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_tunix.errors import UserError, calling, named
from agent_tunix.models.checkpoints.hub import is_of_network
from agent_tunix.training.data import Notice

CARD = "README.md"


def files_of(folder: Path) -> list[Path]:
    """What is sent of an export: all of its files but hidden ones."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def shown(folder: Path, repository: str, private: bool) -> str:
    """What would be sent: each file with its size, and the card."""
    files = files_of(folder)
    sizes = [path.stat().st_size for path in files]
    width = max(len(path.name) for path in files)
    who = "private: you, or your organization, alone can read it" if private else "public: everyone can read it"
    lines = [f"  {path.name:{width}}  {size:>15,} bytes" for path, size in zip(files, sizes, strict=True)]
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).exists() else ""
    return "\n".join(
        [
            f"Nothing is sent yet. To {_page(repository)} ({who}) this would be, as it lies in {folder}:",
            *lines,
            f"  {'in all':{width}}  {sum(sizes):>15,} bytes",
            "",
            f"{CARD}:",
            *(f"  {line}".rstrip() for line in card.splitlines()),
        ]
    )


def refuse_name(repository: str) -> None:
    """Refuses what is no name of a repository; asks no network."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as fault:
        raise UserError(f"push_to={repository} is no name of a repository: {fault}") from fault
    if "/" not in repository:
        raise UserError(f"push_to={repository}: give your name, or your organization's, too, as in push_to=me/{repository}.")


def refuse_stranger(repository: str) -> None:
    """Refuses to begin where the hub does not know who is asking, or is out of reach."""
    with _advising(repository, "Nothing is sent."):
        _api().whoami()


def push(folder: Path, repository: str, private: bool, message: str, notice: Notice) -> str:
    """Sends an export as one commit; returns its address. Of one that is cut short, nothing is there to be seen."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import HfHubHTTPError

    api = _api()
    with _advising(repository, f"The export lies in {folder}, and the same command sends it."):
        try:
            api.create_repo(repository, private=private)
        except HfHubHTTPError as fault:
            if _status(fault) != 409:
                raise
            if private and not api.repo_info(repository).private:
                raise UserError(
                    f"push_to={repository} is there already and public; private=true is for a new repository.\n"
                    f"Choose another name, or make it private at {_page(repository)}/settings. Nothing is sent."
                ) from fault
            notice(f"{repository} is there already: this is a new commit, and files of the same names are replaced.")
        operations = [CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path) for path in files_of(folder)]
        return str(api.create_commit(repository, operations, commit_message=message).commit_url)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _page(repository: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repository}"


def _advising(repository: str, otherwise: str) -> Any:
    """Around calls of the hub: what goes wrong becomes a message that says what to do, and what has come of the export."""

    def answer(fault: BaseException) -> BaseException:
        if isinstance(fault, UserError):
            return fault
        cause = fault.__cause__ if isinstance(fault, RuntimeError) and fault.__cause__ else fault  # of an upload's thread
        return UserError(f"push_to={repository}: {_advice(repository, cause)}\n{otherwise}")

    return calling(answer)


def _advice(repository: str, fault: BaseException) -> str:
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(fault, LocalTokenNotFoundError):
        return "there is no token. Make one that may write at https://huggingface.co/settings/tokens, then `hf auth login`."
    if isinstance(fault, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the hub is not asked."
    if is_of_network(fault):
        return f"the hub cannot be reached, or the connection broke ({named(fault)})."
    owner, status = repository.partition("/")[0], _status(fault)
    by_status: dict[int | None, str] = {
        401: "the hub does not take the token: it may have been revoked. `hf auth login` takes another.",
        403: f"the token may not write there. It needs the role write, and {owner} must be you or an organization of yours.",
        404: f"the hub has no such owner as {owner}, or does not show it to this token.",
        413: "the hub finds a file too large.",
        429: "the hub asks to wait, as there were too many calls. Try again later.",
    }
    return by_status.get(status) or f"the hub did not take it ({named(fault)})."


def _status(fault: BaseException) -> int | None:
    return getattr(getattr(fault, "response", None), "status_code", None)
