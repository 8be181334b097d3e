"""From a composed Hydra configuration to a validated `Config`, with all faults reported together."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from agent_tunix.config import mesh_shape
from agent_tunix.config.schema import Config
from agent_tunix.errors import UserError

EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "optuna": "optuna"}
C = TypeVar("C", bound=BaseModel)
FOLDERS = ("run", "output", "training.resume", "training.init_from", "data.path", "model.weights")
WHY = {
    "grpo.num_generations": "GRPO compares the completions of one prompt with each other",
    "generation.temperature": "for greedy decoding evaluate with inference_config=greedy",
}


PARTS = (
    "Keys of a section are set one by one, as in reward.weights.answer=1;\n"
    "a list as a whole, as in 'optimizer.betas=[0.9,0.99]', or at one of its places, as in optimizer.betas.0=0.9."
)


def config_folder() -> Path:
    """The folder of shipped YAML files: in the repository, or inside the installed package."""
    package = Path(__file__).parents[1]
    checkout = package.parents[1] / "conf"
    return checkout if checkout.is_dir() else package / "conf"


def hydra_arguments(given: list[str]) -> list[str]:
    """The command line as Hydra takes it: options first, a user's own `conf` folder on the search path."""
    multirun = [argument for argument in given if argument in ("--multirun", "-m")]
    arguments = [_lenient(argument) for argument in given if argument not in multirun]
    arguments = multirun + sorted(arguments, key=lambda argument: "=" in argument and not argument.startswith("-"))
    own = Path("conf").resolve()
    if own.is_dir() and own != config_folder() and not any(a.startswith(("--config-dir", "-cd")) for a in given):
        arguments = ["--config-dir", str(own), *arguments]
    return arguments


def _lenient(argument: str) -> str:
    """Makes Hydra take any single value (`++key=value`), so that all unknown keys are reported by the schema, together.

    A folder may have a number for its name, which Hydra would take for one.
    """
    key, equals, value = argument.partition("=")
    if key in FOLDERS and re.fullmatch(r"[0-9][\w.+-]*", value):
        argument = f"{key}='{value}'"
    groups = [path.name for path in config_folder().iterdir() if path.is_dir()]
    plain = equals and key[:1].isalpha() and not key.startswith("hydra") and "@" not in key
    return f"++{argument}" if plain and key not in groups else argument


def of_overrides(mistake: Exception) -> str | None:
    """What to say of a mistake in overrides that Hydra or OmegaConf has found, or stumbled over; nothing of any other."""
    if isinstance(mistake, MissingConfigException):
        return missing_option(mistake)
    return unreadable(mistake) if isinstance(mistake, HydraException | OmegaConfBaseException) else misplaced(mistake)


def missing_option(mistake: MissingConfigException) -> str:
    """What to say of an option that its group does not have."""
    group, _, option = (mistake.missing_cfg_file or "").rpartition("/")
    if not group:
        return f"There is no configuration named '{option}'; leave --config-name out: each verb has its own."
    if option in EXTRAS and group in ("hydra/launcher", "hydra/sweeper"):
        return f"{group}={option} needs an extra: pip install 'agent-tunix[{EXTRAS[option]}]'"
    hint, known = did_you_mean(option, mistake.options or ()), ", ".join(mistake.options or ())
    return f"{group}={option}: there is no such option{hint}\nThe options of {group} are: {known}"


def unreadable(mistake: Exception) -> str:
    """What to say of a mistake that Hydra found; of an override that is no key=value it may show a part alone."""
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


def misplaced(fault: Exception) -> str | None:
    """What to say of an override that OmegaConf stumbles over: a name where a list has places."""
    *_, (frame, _) = traceback.walk_tb(fault.__traceback__)
    if not frame.f_globals["__name__"].startswith("omegaconf."):
        return None
    return f"An override does not fit the configuration ({fault}).\n{PARTS}"


def validate(composed: DictConfig | Mapping[str, Any], kind: type[C], source: str = "") -> C:
    """Resolves and checks a configuration; raises one UserError that lists every fault, and says where they are."""
    (config,) = validate_all([composed], kind, source)
    return config


def validate_all(jobs: Iterable[DictConfig | Mapping[str, Any]], kind: type[C], source: str = "") -> list[C]:
    """The same of several, whose faults are told together, and once where they have them in common."""
    configs, faults = list[C](), dict[str, None]()
    for composed in jobs:
        found = _checked(composed, kind)
        if isinstance(found, list):
            faults |= dict.fromkeys(found)
        else:
            configs.append(found)
    if faults:
        raise UserError(report(list(faults), source))
    return configs


def _checked(composed: DictConfig | Mapping[str, Any], kind: type[C]) -> C | list[str]:
    """A configuration, or its faults."""
    try:
        container = OmegaConf.to_container(composed, resolve=True) if OmegaConf.is_config(composed) else dict(composed)
    except OmegaConfBaseException as fault:
        raise UserError(f"The configuration does not resolve: {fault}") from fault
    impossible = [*_impossible(container), *_misfits(container, trains=kind is Config)]
    try:
        config = kind.model_validate(container)
    except ValidationError as faults:
        return [*_lines(faults, kind), *impossible]
    return impossible or config


def _impossible(container: Any) -> Iterable[str]:
    """Faults between sections. They are looked for in the raw values, so that a fault elsewhere does not hide them."""

    def value(section: str, key: str) -> Any:
        found = container.get(section)
        return found.get(key) if isinstance(found, dict) else None

    rate, lr_min = value("optimizer", "learning_rate"), value("scheduler", "lr_min")
    if _numbers(rate, lr_min) and lr_min > rate > 0:
        yield f"scheduler.lr_min={_shown(lr_min)} is above optimizer.learning_rate={_shown(rate)}; lower it"
    warmup, decay = value("optimizer", "warmup_ratio"), value("scheduler", "decay_ratio")
    if value("scheduler", "warmup_steps") is None and _numbers(warmup, decay) and warmup + decay > 1:
        yield f"optimizer.warmup_ratio={_shown(warmup)} and scheduler.decay_ratio={_shown(decay)} add up to more than 1"
    rank = value("model", "lora_rank")
    if value("optimizer", "decay_norms") is True and _numbers(rank) and rank > 0:
        yield f"optimizer.decay_norms=true: adapters have no norms to decay; it needs model.lora_rank=0, not {rank}"
    if (held := value("model", "base_dtype")) is not None and rank == 0:
        yield f"model.base_dtype={held}: model.lora_rank=0 trains all weights, so none is frozen; set it to null, or a rank"


def _misfits(container: Any, trains: bool) -> Iterable[str]:
    """Faults of the mesh, where the numbers that it must divide are in order."""
    model, training = container.get("model"), container.get("training")
    try:
        sizes = mesh_shape.sizes_of(model["mesh_shape"])
        parted = {key: int(model["architecture"][key]) for key in mesh_shape.PARTED_BY_TP}
        micro_batch = int(training["micro_batch_size"]) if trains else None
    except (KeyError, TypeError, ValueError):  # the schema says what is wrong with these
        return ()
    return mesh_shape.faults(sizes, parted, micro_batch)


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def report(lines: list[str], source: str = "") -> str:
    head = "There is a fault" if len(lines) == 1 else f"There are {len(lines)} faults"
    where = f"in the configuration of {source}:" if source else "in the configuration:"
    return "\n".join([f"{head} {where}", *(f"  {line}" for line in lines)])


def read_config(path: Path) -> DictConfig:
    """A YAML file as OmegaConf reads it; a missing or broken one is the user's to mend."""
    try:
        found = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as fault:
        raise UserError(f"{path} cannot be read: {fault}") from fault
    if not isinstance(found, DictConfig):
        raise UserError(f"{path} cannot be read: it holds a list, not keys and values")
    return found


def config_text(config: BaseModel) -> str:
    """As YAML that `read_config` reads, in which `${` stands for itself."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(config.model_dump(mode="json"))))


def _escaped(value: Any) -> Any:
    """Texts as OmegaConf takes them at their word: a backslash before `${`, and two for each that stood there."""
    if isinstance(value, dict):
        return {key: _escaped(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_escaped(part) for part in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """A hint at the candidate whose last name the word resembles or abbreviates (lr for learning_rate)."""
    names = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    last = word.rpartition(".")[2]
    abbreviated = [name for name in names if "".join(part[:1] for part in name.split("_")) == last]
    close = abbreviated or difflib.get_close_matches(last, names, n=1, cutoff=0.6)
    return f"; did you mean {names[close[0]]}?" if close else ""


def keys(kind: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a schema, with pydantic's record of it."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys(field.annotation, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


def _lines(faults: ValidationError, kind: type[BaseModel]) -> Iterable[str]:
    known = list(keys(kind))
    for fault in faults.errors():
        key = ".".join(str(part) for part in fault["loc"])
        message = re.sub(r"\b0\.0{4,}\d+", lambda tiny: f"{float(tiny[0]):g}", fault["msg"].removeprefix("Value error, "))
        if fault["type"] == "extra_forbidden":
            yield f"{key}: unknown key{_suggestion(key, known)}"
        elif fault["type"] == "missing":
            yield f"{key}: missing; every key of the group's YAML file must be given"
        elif fault["type"] == "value_error" and isinstance(fault["input"], dict | BaseModel):
            yield f"{key}: {message}" if key else message
        else:
            message = (
                message.removeprefix("Input ")
                .removeprefix("List ")
                .replace("should", "must")
                .replace(" after validation", "")
            )
            why = f" ({WHY[key]})" if key in WHY else ""
            yield f"{key}={_shown(fault['input'])}: {message}{why}"


def _suggestion(key: str, known: list[str]) -> str:
    """The closest key beside it, else the closest anywhere."""
    section = key.rpartition(".")[0]
    depth = key.count(".") + 1
    beside = {".".join(k.split(".")[:depth]) for k in known if k.startswith(f"{section}." if section else "")}
    return did_you_mean(key, sorted(beside)) or did_you_mean(key, known)


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
