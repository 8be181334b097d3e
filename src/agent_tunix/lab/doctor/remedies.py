"""The command to try next: the run's own, with the fewest overrides that give its configuration, and the remedy's values."""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_tunix.config.load import config_folder, escaped, leaves, search_path
from agent_tunix.lab.doctor.records import RunRecords
from agent_tunix.training.progress import searched_too, shell_command

# Groups with one file for each name a configuration can give: the group, the key of the name, how the file's name begins.
NAMED_GROUPS = (
    ("model", "model.model_size", "gemma3_"),
    ("optimizer", "optimizer.optimizer_name", ""),
    ("scheduler", "scheduler.scheduler_name", ""),
)
GUARD = "training.on_divergence"
RESUME = "training.resume"  # how a run was continued is no part of how it was set up
LEAST_RATE, GREATEST_RATE = 1e-7, 1e-4  # the reference's typical range of learning rates
PLAIN = re.compile(r"[A-Za-z_/][\w./:-]*", re.ASCII)  # a text that Hydra takes for one without quotes
NOT_TEXT = ("null", "true", "false", "nan", "inf")
# What comes of files of configuration that someone has changed since; the last is of their encoding.
UNREADABLE = (HydraException, OmegaConfBaseException, OSError, yaml.YAMLError, UnicodeDecodeError)


def rerun(run: RunRecords, changes: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """The run's command with some values changed, and without its overrides of keys that begin as one of `without`."""
    changed = {key: value_text(value) for key, value in possible(run, changes).items()}
    kept = [o for o in less(run.overrides, *without) if _key(o) not in changed]
    return join([*kept, *(f"{key}={value}" for key, value in changed.items())])


def less(overrides: Sequence[str], *beginnings: str) -> list[str]:
    """The overrides, less those whose keys begin with one of these."""
    return [override for override in overrides if not _key(override).startswith(beginnings)]


def join(overrides: Sequence[str], verb: str = "train") -> str:
    return " ".join([shell_command(verb), *map(shlex.quote, [*searched_too(), *overrides])])


def scaled_rate(run: RunRecords, factor: float) -> dict[str, Any]:
    """The run's own learning rate times a factor; nothing where the configuration has no rate."""
    rate = run.number("optimizer.learning_rate", 0.0)
    return {"optimizer.learning_rate": min(1.0, rounded(rate * factor))} if rate > 0 else {}


def lower_rate(run: RunRecords) -> dict[str, Any]:
    """A tenth of the rate, as the reference says, and never more than it calls typical."""
    rate = run.number("optimizer.learning_rate", 0.0)
    return scaled_rate(run, min(0.1, GREATEST_RATE / rate)) if rate > 0 else {}


def raised_rate(run: RunRecords) -> dict[str, Any]:
    """Ten times the rate, and never less than the reference calls typical."""
    rate = run.number("optimizer.learning_rate", 0.0)
    return scaled_rate(run, max(10.0, LEAST_RATE / rate)) if rate > 0 else {}


def past_bad_rewards(mode: Any) -> str:
    """What the guard should do about rewards that are not finite: drop their batches, or, where that left none, stop."""
    return "stop" if mode == "ignore" else "ignore"


def rounded(value: float) -> float:
    """Two digits are enough for a value to try."""
    return float(f"{value:.2g}")


def with_lr_min(changes: Mapping[str, Any], lr_min: float | None) -> dict[str, Any]:
    """A peak below lr_min is refused, so lr_min goes down with it."""
    rate = changes.get("optimizer.learning_rate")
    if not isinstance(rate, float) or lr_min is None or rate >= lr_min:
        return dict(changes)
    return {**changes, "scheduler.lr_min": rounded(rate / 10)}


def possible(run: RunRecords, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes with those that must follow: of lr_min, and of warmup_steps, which would overrule a ratio of warm-up."""
    followed = with_lr_min(changes, run.number("scheduler.lr_min", 0.0))
    if (warmup := changes.get("optimizer.warmup_ratio")) is not None:
        if run.setting("scheduler.warmup_steps") is not None:
            followed["scheduler.warmup_steps"] = None
        if run.number("scheduler.decay_ratio", 0.0) > 1 - warmup:
            followed["scheduler.decay_ratio"] = rounded(1 - warmup)
    return followed


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
    """The fewest overrides of the shipped configuration that lead to `config`: an experiment, groups, single values."""
    return [[], *ways_to(config)][-1]


def ways_to(config: Mapping[str, Any]) -> Iterator[list[str]]:
    """As `own_overrides`, the fewest that were found so far, after each that was looked at; what was composed is remembered.

    Composing takes a tenth of a second, so an experiment that cannot be the shortest way is not composed: whatever it sets
    to another value must be set back.
    """
    wanted, experiments = leaves(config), (config_folder() / "experiment").glob("*.yaml")
    with contextlib.suppress(*UNREADABLE):
        yield (best := _overrides_from([], config))
        for least, name in sorted((1 + _set_otherwise(path, wanted), path.stem) for path in experiments):
            if least < len(best):
                yield (best := min(best, _overrides_from([f"+experiment={name}"], config), key=len))


def overrides_without_experiment(config: Mapping[str, Any]) -> list[str]:
    """As `own_overrides`, by groups and single values alone: an experiment chooses a model, and how it learns as well."""
    try:
        return _overrides_from([], config)
    except UNREADABLE:
        return []


class OwnOverrides(Sequence[str]):
    """As `own_overrides`, computed only when asked for: a run with no findings need not wait for it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    @functools.cached_property
    def _found(self) -> list[str]:
        return own_overrides(self._config)

    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)


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
    for group, key, file in NAMED_GROUPS:
        name, shipped_files = wanted.get(key), (config_folder() / group).glob("*.yaml")
        if name != shipped.get(key) and f"{file}{name}" in (path.stem for path in shipped_files):  # it may be a path
            groups.append(f"{group}={file}{name}")
    if groups:
        shipped = composed_leaves(*start, *groups)
    changed = [f"{k}={value_text(v)}" for k, v in wanted.items() if k != RESUME and shipped.get(k) != v]
    return [*start, *groups, *changed, *(f"~{k}" for k in shipped if k not in wanted and _optional(k))]


def composed_leaves(*overrides: str) -> dict[str, Any]:
    """The leaves of the configuration that some overrides lead to here, where a user's own `conf` may come first."""
    with contextlib.suppress(*UNREADABLE):
        return _composed(tuple(search_path([])), overrides)
    return _composed((config_folder(),), overrides)  # as a user's file cannot be read


@functools.lru_cache(maxsize=32)
def _composed(folders: tuple[Path, ...], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Hydra, if it is at work, is left as it was."""
    at_work = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            searched = GlobalHydra.instance().config_loader().get_search_path()
            for folder in folders[1:]:
                searched.append("command-line", f"file://{folder}", SearchPathQuery("main"))
            GlobalHydra.instance().hydra.config_loader = ConfigLoaderImpl(searched)  # type: ignore[union-attr]
            return leaves(OmegaConf.to_container(compose("config", list(overrides)), resolve=True))
    finally:
        GlobalHydra.instance().hydra = at_work


def _optional(key: str) -> bool:
    """Reward functions and their weights may be left out of a configuration; any other key is only newer than the run."""
    return key.startswith("reward.")


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
