"""What to say where Hydra cannot compose a configuration: of options that are not there, overrides and files of YAML."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import ListConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agent_tunix.config.load import config_folder, did_you_mean

EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "optuna": "optuna"}
BROKEN = ("Invalid defaults list", "Expected header format")  # how Hydra begins what it has no exception of its own for
PARTS = (
    "Keys of a section are set one by one, as in reward.weights.answer=1;\n"
    "a list as a whole, as in 'optimizer.betas=[0.9,0.99]', or at one of its places, as in optimizer.betas.0=0.9."
)


def answer(mistake: Exception, arguments: Sequence[str] = ()) -> str | None:
    """What to say of a mistake in what Hydra was given to compose by these arguments; nothing of any other."""
    if isinstance(mistake, MissingConfigException):
        return missing_option(mistake)
    if said := without_end(mistake) or list_for_keys(mistake):
        return said
    if isinstance(mistake, HydraException | OmegaConfBaseException):
        return unreadable(mistake)
    return broken_file(mistake, arguments) or misplaced(mistake)


def missing_option(mistake: MissingConfigException) -> str:
    """Of an option that its group does not have; of one in a list Hydra does not say which there are."""
    group, _, option = (mistake.missing_cfg_file or "").rpartition("/")
    if not group:
        return f"There is no configuration named '{option}'; leave --config-name out: each verb has its own."
    if option in EXTRAS and group in ("hydra/launcher", "hydra/sweeper"):
        return f"{group}={option} needs an extra: pip install 'agent-tunix[{EXTRAS[option]}]'"
    known = mistake.options or sorted(file.stem for file in (config_folder() / group).glob("*.yaml"))
    hint = did_you_mean(option, known)
    return f"{group}={option}: there is no such option{hint}\nThe options of {group} are: {', '.join(known)}"


def unreadable(mistake: Exception) -> str:
    """Of a mistake that Hydra found; of an override that is no key=value it may show a part alone."""
    given = str(getattr(mistake, "override", None) or "").removeprefix("++")
    said = str(mistake).replace(f"++{given}", given)
    key, equals, value = given.partition("=")
    if (what := said.removeprefix("Error merging override ")) != said:
        return f"{what} does not fit what is there.\n{PARTS}"
    if re.search(r"\[-?\d+\]|\.-\d", key):
        said += f"\n{PARTS}"
    elif "," in (value[:1], value[-1:]) or ",," in value:
        said += f"\nA value is missing beside a comma; values to sweep over are written without spaces: {key}=1,2"
    elif equals and not value.startswith(("[", "{")) and not {"'", '"'} & set(value):
        said += f"\nA text with marks such as ( takes quotes of its own: '{key}=\"{value}\"'"
    return said if given in said else f"{given}: {said}"


def without_end(mistake: Exception) -> str | None:
    """Of files whose defaults lead back to themselves, which Hydra follows until Python stops it."""
    paths = [found["path"] for found in _inside("_create_defaults_tree_impl", mistake) if "path" in found]
    if not isinstance(mistake, RecursionError) or not paths:
        return None
    start = next(i for i, path in enumerate(paths) if path in paths[i + 1 :])
    end = paths.index(paths[start], start + 1)
    ring = " > ".join(paths[start : end + 1])
    return f"The defaults of a file lead back to itself: {ring}\nTake the last out of the defaults of the one before it."


def list_for_keys(mistake: Exception) -> str | None:
    """Of a file that is a list as a whole, where Hydra names what came to be laid over it: another file, or an override."""
    for found in _inside("_load_configuration_impl", mistake):
        for default in found["defaults_list"].defaults if "defaults_list" in found else ():
            loaded = found["caching_repo"].load_config(default.config_path)
            if isinstance(loaded.config, ListConfig):
                return f"{loaded.path.removeprefix('file://')}/{default.config_path}.yaml holds a list, not keys and values."
    return None


def _inside(function: str, mistake: Exception) -> list[dict[str, Any]]:
    """What the calls of one of Hydra's functions knew when a mistake ended them; the mistake itself may not say."""
    frames = (frame for frame, _ in traceback.walk_tb(mistake.__traceback__))
    return [frame.f_locals for frame in frames if frame.f_code.co_name == function]


def misplaced(fault: Exception) -> str | None:
    """Of an override that OmegaConf stumbles over: a name where a list has places."""
    *_, (frame, _) = traceback.walk_tb(fault.__traceback__)
    if not isinstance(fault, TypeError | ValueError) or not frame.f_globals["__name__"].startswith("omegaconf."):
        return None
    return f"An override does not fit the configuration ({fault}).\n{PARTS}"


def broken_file(mistake: Exception, arguments: Sequence[str]) -> str | None:
    """Of a YAML file that could not be read; of one in another encoding than UTF-8 Hydra does not say which it was."""
    if isinstance(mistake, YAMLError) or str(mistake).startswith(BROKEN):
        return f"A configuration file cannot be read: {mistake}"
    if not isinstance(mistake, UnicodeDecodeError):
        return None
    own = [Path(value) for option, value in itertools.pairwise(arguments) if option in ("--config-dir", "-cd")]
    for file in (file for folder in own for file in sorted(folder.rglob("*.yaml")) if file.is_file()):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError as fault:
            return f"{file} cannot be read: {fault}.\nSave it in UTF-8."
    return None
