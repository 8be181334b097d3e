"""Commands to be copied: how a verb is called from the user's shell, and the fewest overrides that lead somewhere."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_tunix.config.compose import compose_config
from agent_tunix.config.load import AUTO, config_folder, escaped, leaves, search_path
from agent_tunix.config.output_folders import of_the_shell

# Groups with one file for each name a configuration can give: the group, the key of the name, how the file's name may begin.
NAMED_GROUPS = (
    ("model", "model.model_size", ("gemma3_", "")),
    ("optimizer", "optimizer.optimizer_name", ("",)),
    ("scheduler", "scheduler.scheduler_name", ("",)),
)
# What a run takes from its checkpoint, where files of configuration leave it out.
OF_CHECKPOINT = ("model.model_family", "model.model_size", "model.guidance", "model.architecture")
RESUME = "training.resume"  # how a run was continued is no part of how it was set up
PLAIN = re.compile(r"[A-Za-z_/][\w./:-]*", re.ASCII)  # a text that Hydra takes for one without quotes
NOT_TEXT = ("null", "true", "false", "nan", "inf")
# What comes of files of configuration that someone has changed since; the last is of their encoding.
UNREADABLE = (HydraException, OmegaConfBaseException, OSError, yaml.YAMLError, UnicodeDecodeError)


def join(overrides: Sequence[str], verb: str = "train") -> str:
    return " ".join([shell_command(verb), *map(shlex.quote, [*searched_too(), *overrides])])


def shell_command(verb: str) -> str:
    """How to call a verb from the user's shell: by its script in a checkout, else by the installed command."""
    here = of_the_shell()
    script = {"train": "run_training.py", "evaluate": "evaluate.py"}.get(verb)
    if script is None or not (here / script).exists():
        beside = os.path.join(os.path.dirname(sys.executable), "agent-tunix")
        installed = shutil.which("agent-tunix") is None and os.path.exists(beside)
        return f"{os.path.relpath(beside, here) if installed else 'agent-tunix'} {verb}"
    found = shutil.which("python")
    named = found is not None and _same_python(found, sys.executable)
    return f"{'python' if named else os.path.relpath(sys.executable, here)} {script}"


def searched_too() -> list[str]:
    """The `--config-dir` that the user gave, as an option for commands like this one; ./conf and ours are found without."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    given = [Path(source.path).resolve() for source in sources if source.provider == "command-line"]
    found = (config_folder(), of_the_shell().resolve() / "conf")
    return [f"--config-dir={folder}" for folder in given if folder not in found]


def _same_python(one: str, other: str) -> bool:
    """Whether two paths are one interpreter. Two environments may link to one file, but do so from different folders."""
    return os.path.samefile(one, other) and os.path.samefile(os.path.dirname(one), os.path.dirname(other))


def less(overrides: Sequence[str], *beginnings: str) -> list[str]:
    """The overrides, less those whose keys begin with one of these."""
    return [override for override in overrides if not key_of(override).startswith(beginnings)]


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def value_text(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT else _quoted(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(text: str) -> str:
    """In Hydra's quotes a backslash is itself, except before a quote, and before `${`, which would be looked up."""
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", re.sub(r"(\\*)'", r"\1\1\'", escaped(text))) + "'"


def own_overrides(config: Mapping[str, Any]) -> list[str]:
    """The fewest overrides of the shipped configuration that lead to `config`: an experiment, groups, single values.

    Composing takes a tenth of a second, so an experiment that cannot be the shortest way is not composed: whatever it sets
    to another value must be set back.
    """
    wanted, experiments = leaves(config), (config_folder() / "experiment").glob("*.yaml")
    best: list[str] = []
    with contextlib.suppress(*UNREADABLE):
        best = _overrides_from([], config)
        for least, name in sorted((1 + _set_otherwise(path, wanted), path.stem) for path in experiments):
            if least < len(best):
                best = min(best, _overrides_from([f"+experiment={name}"], config), key=len)
    return best


def overrides_without_experiment(config: Mapping[str, Any]) -> list[str]:
    """As `own_overrides`, by groups and single values alone: an experiment chooses a model, and how it learns as well."""
    try:
        return _overrides_from([], config)
    except UNREADABLE:
        return []


def _set_otherwise(experiment: Path, wanted: Mapping[str, Any]) -> int:
    """How many values an experiment's own file sets that are not those wanted."""
    return sum(wanted.get(key) != value for key, value in _set_by(experiment).items())


@functools.cache
def _set_by(experiment: Path) -> dict[str, Any]:
    own = {key: value for key, value in OmegaConf.load(experiment).items() if key != "defaults"}
    return leaves(OmegaConf.to_container(OmegaConf.create(own)))


def _overrides_from(start: list[str], config: Mapping[str, Any]) -> list[str]:
    wanted, shipped = leaves(config), composed_leaves(*start)
    groups = []
    for group, key, beginnings in NAMED_GROUPS:
        name, files = wanted.get(key), {path.stem for path in (config_folder() / group).glob("*.yaml")}
        named = [f"{beginning}{name}" for beginning in beginnings if f"{beginning}{name}" in files]  # it may be a path
        if name != shipped.get(key) and (named or group == "model"):
            groups.append(f"{group}={named[0] if named else AUTO}")
    if groups:
        shipped = composed_leaves(*start, *groups)
    if more := list(_of_data_and_reward(config, shipped)):  # which a model's file may have chosen
        groups += more
        shipped = composed_leaves(*start, *groups)
    left_out = tuple(key for key in OF_CHECKPOINT if shipped.get(key, "") is None)
    changed = [
        f"{k}={value_text(v)}" for k, v in wanted.items() if k != RESUME and shipped.get(k) != v and not _in(k, left_out)
    ]
    return [*start, *groups, *changed, *(f"~{k}" for k in shipped if k not in wanted and _optional(k))]


def _of_data_and_reward(config: Mapping[str, Any], shipped: Mapping[str, Any]) -> Iterator[str]:
    source = config.get("data", {}).get("source")
    files = {path.stem for path in (config_folder() / "data").glob("*.yaml")}  # a source may be a stranger's path
    if source != shipped.get("data.source") and source in files:
        yield f"data={source}"
    if config.get("reward", {}).get("functions") == {}:
        yield "reward=environment"


def _in(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def composed_leaves(*overrides: str) -> dict[str, Any]:
    """The leaves of the configuration that some overrides lead to here, where a user's own `conf` may come first."""
    with contextlib.suppress(*UNREADABLE):
        return _composed(tuple(search_path([])), overrides)
    return _composed((config_folder(),), overrides)  # as a user's file cannot be read


@functools.lru_cache(maxsize=32)
def _composed(folders: tuple[Path, ...], overrides: tuple[str, ...]) -> dict[str, Any]:
    return leaves(OmegaConf.to_container(compose_config("config", overrides, folders), resolve=True))


def _optional(key: str) -> bool:
    """Reward functions and their weights may be left out of a configuration; any other key is only newer than the run."""
    return key.startswith("reward.")
