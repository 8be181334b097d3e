"""Messages for configurations that Hydra cannot compose: missing options, unreadable overrides, broken YAML files."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from agent_tunix.config import former_keys
from agent_tunix.config.load import config_folder, did_you_mean

EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "optuna": "optuna"}
BROKEN = ("Invalid defaults list", "Expected header format")  # how Hydra's messages without an exception of their own begin
EVALUATED = " while evaluating '"  # in what Hydra says of a function of its grammar, such as choice()
PARTS = (
    "Keys of a section are set one by one, as in reward.weights.answer=1;\n"
    "a list as a whole, as in 'optimizer.betas=[0.9,0.99]', or one element of it, as in optimizer.betas.0=0.9."
)


def answer(mistake: Exception, arguments: Sequence[str] = ()) -> str | None:
    """The message for a mistake in what Hydra was to compose from these arguments; None for any other fault."""
    if isinstance(mistake, MissingConfigException):
        return missing_option(mistake)
    if said := broken_file(mistake, arguments) or without_end(mistake) or unsweepable(mistake):
        return said
    said = unreadable(mistake) if isinstance(mistake, HydraException | OmegaConfBaseException) else misplaced(mistake)
    return said and (list_for_keys(arguments) or said)


def missing_option(mistake: MissingConfigException) -> str:
    """For an option that its group does not have. Hydra lists those there are, except for an option in a list."""
    group, _, option = (mistake.missing_cfg_file or "").rpartition("/")
    if not group:
        return f"There is no configuration named '{option}'; leave --config-name out: each verb has its own."
    if option in EXTRAS and group in ("hydra/launcher", "hydra/sweeper"):
        return f"{group}={option} needs an extra: pip install 'agent-tunix[{EXTRAS[option]}]'"
    if former := former_keys.OPTIONS.get((group, option)):
        return f"{group}={option} is {group}={former} here."
    known = mistake.options or sorted(file.stem for file in (config_folder() / group).glob("*.yaml"))
    hint = did_you_mean(option, known)
    return f"{group}={option}: there is no such option{hint}\nThe options of {group} are: {', '.join(known)}"


def unreadable(mistake: Exception) -> str:
    """For a mistake that Hydra found. It may quote only a part of an override that is not key=value."""
    given = str(getattr(mistake, "override", None) or "").removeprefix("++")
    said = str(mistake).replace(f"++{given}", given)
    key, equals, value = given.partition("=")
    if (what := said.removeprefix("Error merging override ")) != said:
        return f"{what} does not fit what is there.\n{PARTS}"
    if re.search(r"\[-?\d+\]|\.-\d", key):
        said += f"\n{PARTS}"
    elif "," in (value[:1], value[-1:]) or ",," in value:
        said += f"\nA value is missing beside a comma; values to sweep over are written without spaces: {key}=1,2"
    elif equals and EVALUATED not in said and not value.startswith(("[", "{")) and not {"'", '"'} & set(value):
        said += f"\nA text with special characters, such as (, needs quotes of its own: '{key}=\"{value}\"'"
    return said if given in said else f"{given}: {said}"


def unsweepable(mistake: Exception) -> str | None:
    """For what Hydra cannot run: a range without end, batches of no job, an interval, options that exclude each other."""
    made_in = (_passed_through(mistake) or [""])[-1]
    if "INTERVAL_SWEEP" in str(mistake):
        return "interval() is for a search, with hydra/sweeper=optuna. A sweep has its values listed, as in seed=1,2,3"
    if isinstance(mistake, AssertionError) and made_in.endswith(".basic_sweeper"):
        return "hydra.sweeper.max_batch_size must be at least 1; without it all jobs of a sweep run together."
    if isinstance(mistake, ValueError) and made_in.startswith("hydra.core.override_parser"):
        return f"The values of a sweep cannot be listed: {mistake}."
    if isinstance(mistake, ValueError) and made_in in ("hydra._internal.utils", "hydra.main"):  # of its options
        return str(mistake)
    return None


def without_end(mistake: Exception) -> str | None:
    """For files whose defaults lead back to themselves, which Hydra follows until Python stops it; and for deep nests."""
    through = _passed_through(mistake) if isinstance(mistake, RecursionError) else []
    if "hydra._internal.defaults_list" in through:
        return "The defaults of a configuration file lead back to itself, maybe by way of other files; break this loop."
    if any(module.startswith("hydra.core.override_parser") for module in through):
        return "An override is nested too deeply to be read."
    if any(module.startswith(("yaml", "omegaconf")) for module in through):
        return "A configuration file, or an override, is nested too deeply to be read."
    return None


def list_for_keys(arguments: Sequence[str]) -> str | None:
    """For a chosen file that holds a list. Hydra does not name the file, but what was to be merged into it."""
    chosen = {argument.lstrip("+") for argument in arguments}
    for file in _own_files(arguments):
        text = file.read_text(encoding="utf-8") if f"{file.parent.name}={file.stem}" in chosen else ""
        if isinstance(yaml.safe_load(text), list):
            return f"{file} holds a list, not keys and values."
    return None


def misplaced(mistake: Exception) -> str | None:
    """For an override that OmegaConf stumbles over: a name where a list has indices, a dictionary where nothing is."""
    made_in = _passed_through(mistake)[-1] if isinstance(mistake, TypeError | ValueError | AttributeError) else ""
    if made_in == "hydra._internal.defaults_list" and not isinstance(mistake, ValueError):  # which names the group
        return "A group, such as model or reward, takes the name of one of its files, or a flat list of such names."
    if not made_in.startswith("omegaconf."):
        return None
    if "hydra.sweeper.params" in str(mistake):
        return "hydra.sweeper.params is for a file of configuration; here values are swept as in optimizer.eps=1e-8,1e-6"
    return f"An override does not fit the configuration ({mistake}).\n{PARTS}"


def broken_file(mistake: Exception, arguments: Sequence[str]) -> str | None:
    """For a YAML file that cannot be read. If its encoding is not UTF-8, Hydra does not say which file it was."""
    if isinstance(mistake, yaml.YAMLError) or str(mistake).startswith(BROKEN):
        return f"A configuration file cannot be read: {mistake}"
    if not isinstance(mistake, UnicodeDecodeError):
        return None
    for file in _own_files(arguments):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError as fault:
            return f"{file} cannot be read: {fault}.\nSave it in UTF-8."
    return None


def _own_files(arguments: Sequence[str]) -> list[Path]:
    """The user's own files of configuration."""
    parts = [part for argument in arguments for part in (argument.split("=", 1) if argument[:1] == "-" else [argument])]
    given = (Path(value) for option, value in itertools.pairwise(parts) if option in ("--config-dir", "-cd"))
    folders = [folder for folder in (*given, Path("conf")) if folder.resolve() != config_folder()]
    return [file for folder in folders for file in sorted(folder.rglob("*.yaml")) if file.is_file()]


def _passed_through(mistake: Exception) -> list[str]:
    """The modules that a mistake came through, from the outermost to where it was made."""
    return [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(mistake.__traceback__)]
