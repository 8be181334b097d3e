"""From a composed Hydra configuration to a validated `Config`, with all faults reported together."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from agent_tunix.config import former_keys, mesh_shape
from agent_tunix.config.output_folders import of_a_run
from agent_tunix.config.schema import SET_KEYS, Config, DataSection, ModelSection, data_of_set
from agent_tunix.errors import UserError, reading
from agent_tunix.files import SETTINGS, read_text

C = TypeVar("C", bound=BaseModel)
FOLDERS = (
    *("run", "output", "training.resume", "training.init_from", "data.path", "model.weights", "model.adapter"),
    *("hydra.run.dir", "hydra.sweep.dir"),
)
FOLDER_TO_QUOTE = re.compile(r"""(["']?)([0-9][\w.+-]*|~[^"',]*)\1""")  # a comma may part the values of a sweep
# The first line of a saved configuration. Places may be written anew where something was moved, and are left out.
CHECKSUM = re.compile(r"# checksum of all values but places: (\w*)")
PLACES = ("model.weights", "model.adapter", "data.path", "training.init_from", "training.resume")
OF_SET = re.compile(r"evaluation\.sets\..+\.path")  # a place too, under a name of the user's
LIST = re.compile(r"\[([^\[\]{}]+)\]")
REFERENCE = re.compile(r"(\\*)\$\{")  # OmegaConf looks up what follows, unless a backslash of its own is before it
AUTO = "auto"  # the model that is whatever its weights are
SHOWN = 200  # characters of a value in a message
GYM = "reasoning_gym"
MOST_VALUES = 10_000  # of a saved configuration; it has some 150
WHY = {
    "grpo.num_generations": "GRPO compares the completions of one prompt with each other",
    "generation.temperature": "for greedy decoding evaluate with inference_config=greedy",
}


def config_folder() -> Path:
    """The folder of shipped YAML files: in the repository, or inside the installed package."""
    package = Path(__file__).parents[1]
    checkout = package.parents[1] / "conf"
    return checkout if checkout.is_dir() else package / "conf"


def shipped_models() -> list[ModelSection]:
    """The models that `conf/model` names."""
    paths = sorted((config_folder() / "model").glob("*.yaml"))
    files: list[Any] = [OmegaConf.to_container(OmegaConf.load(path)) for path in paths if path.stem != AUTO]
    return validate_all(({key: file[key] for key in ModelSection.model_fields} for file in files), ModelSection)


def search_path(given: list[str]) -> list[Path]:
    """Where YAML files are looked for, first to last: a user's own `conf` before the shipped files, so that it wins.

    A folder that has a config.yaml belongs to another program, and comes last. With --config-dir there is that one instead.
    """
    own, shipped = Path("conf").resolve(), config_folder()
    if not own.is_dir() or own == shipped or _in_a_run(own) or any(a.startswith(("--config-dir", "-cd")) for a in given):
        return [shipped]
    return [shipped, own] if (own / "config.yaml").exists() else [own, shipped]


def unsearched() -> str | None:
    """What to say where `./conf` is not searched."""
    if _in_a_run(Path("conf")):
        return "conf/ is not searched: it lies in a run's folder, where others may have put it."
    return None


def _in_a_run(folder: Path) -> bool:
    """Whether a folder is there and lies in that of a run, which may be a stranger's: its files can have any code called."""
    return folder.is_dir() and of_a_run(folder.resolve())


def hydra_arguments(given: list[str], *more: Path) -> list[str]:
    """The command line as Hydra takes it: options first, and a second folder to be searched."""
    multirun = [argument for argument in given if argument in ("--multirun", "-m")]
    arguments = [_lenient(argument) for argument in [*given, *_model_of_weights(given)] if argument not in multirun]
    arguments = multirun + sorted(arguments, key=lambda argument: "=" in argument and not argument.startswith("-"))
    return [*(part for folder in more for part in ("--config-dir", str(folder))), *arguments]


def _model_of_weights(given: list[str]) -> list[str]:
    """Weights that are given without a model say themselves what they are; an experiment may choose a model of its own."""
    keys = {argument.partition("=")[0].lstrip("+") for argument in given}
    chosen = {"model", "experiment", "training.resume", "training.init_from", "run"}
    return [f"model={AUTO}"] if "model.weights" in keys and not chosen & keys else []


def _lenient(argument: str) -> str:
    """Makes Hydra take any single value (`++key=value`), so that all unknown keys are reported by the schema, together.

    The name of a folder may look like a number, or begin with a tilde that the shell has left there, and is quoted.
    """
    key, equals, value = argument.partition("=")
    if (key in FOLDERS or OF_SET.fullmatch(key.lstrip("+"))) and (named := FOLDER_TO_QUOTE.fullmatch(value)):
        argument = f"{key}='{os.path.expanduser(named[2])}'"
    if key == "evaluation.sets" and (listed := LIST.fullmatch(value)):  # names alone: each is called after its last part
        argument = f"{key}={{{','.join(_as_entry(name.strip()) for name in listed[1].split(','))}}}"
    groups = [path.name for path in config_folder().iterdir() if path.is_dir()]
    plain = equals and key[:1].isalpha() and not key.startswith("hydra") and "@" not in key
    return f"++{argument}" if plain and key not in groups else argument


def _as_entry(name: str) -> str:
    """A test set that is only named, as an entry of `evaluation.sets`: reasoning_gym:gcd is called gcd, sets/a.jsonl a."""
    bare = name.strip("'\"")
    return f"{Path(bare.removeprefix(f'{GYM}:')).name.partition('.')[0]}:'{bare}'"


def as_given(overrides: Iterable[str]) -> tuple[str, ...]:
    """Overrides as they were written on the command line, without the `++` that `hydra_arguments` adds."""
    return tuple(override.removeprefix("++") for override in overrides)


def validate(composed: DictConfig | Mapping[str, Any], kind: type[C], source: str = "") -> C:
    """Resolves and checks a configuration; raises one UserError that lists every fault, and says where they are."""
    (config,) = validate_all([composed], kind, source)
    return config


def validate_all(jobs: Iterable[DictConfig | Mapping[str, Any]], kind: type[C], source: str = "") -> list[C]:
    """As `validate`, for several configurations; all faults are reported together, each of them once."""
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
    container, unnamed = _with_named_sets(container)
    of_sets = () if container.get("run") is not None else _faults_of_sets(container)  # of a run's own data, once it is read
    impossible = [*unnamed, *_impossible(container), *of_sets, *_misfits(container, trains=kind is Config)]
    try:
        config = kind.model_validate(container)
    except ValidationError as faults:
        return [*_lines(faults, kind, container), *impossible]
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
    buffer, longest = value("grpo", "overlong_buffer"), value("generation", "max_generation_steps")
    if _numbers(buffer, longest) and buffer > longest:
        yield f"grpo.overlong_buffer={buffer} is more than generation.max_generation_steps={longest}; lower it"
    if (held := value("model", "base_dtype")) is not None and rank == 0:
        yield f"model.base_dtype={held}: model.lora_rank=0 trains all weights, so none is frozen; set it to null, or a rank"
    for key in ("use_rslora", "use_dora"):
        if value("model", key) is True and rank == 0:
            yield f"model.{key}=true: model.lora_rank=0 trains all weights and has no adapters; set it to false, or a rank"
    if (adapter := value("model", "adapter")) is not None and rank == 0:
        yield f"model.adapter={adapter}: model.lora_rank=0 trains all weights and has no adapters; set that of the adapter"
    if value("training", "keep_best") == "sampled_accuracy" and value("evaluation", "sampled") is False:
        yield "training.keep_best=sampled_accuracy: no evaluation has it without evaluation.sampled=true; set that too"
    if value("data", "solve_rate") is not None and value("training", "method") == "supervised":
        yield "data.solve_rate: training.method=supervised learns from worked answers, however hard they are; set it to null"
    patience = value("training", "early_stopping")
    if patience is not None and value("training", "eval_every_n_steps") is None:
        yield f"training.early_stopping={patience} counts evaluations; set training.eval_every_n_steps, to have some"
    if adapter is not None and (begun := value("training", "init_from")) is not None:
        yield f"model.adapter={adapter}, training.init_from={begun}: a run starts from one of them; leave the other out"


def _with_named_sets(container: Any) -> tuple[Any, list[str]]:
    """With the keys of those further test sets that are only named: by a file of conf/data, by a path, or by a task of
    reasoning-gym, as reasoning_gym:gcd; and the faults of those that stand for nothing, which are left out.
    """
    evaluation = container.get("evaluation")
    sets = evaluation.get("sets") if isinstance(evaluation, dict) else None
    if not isinstance(sets, dict):
        return container, []
    named, faults = dict(sets), []
    for name, given in sets.items():
        if isinstance(given, str):
            try:
                named[name] = _named_set(given)
            except ValueError as fault:
                del named[name]
                faults.append(str(fault))
    return {**container, "evaluation": {**evaluation, "sets": named}}, faults


def _named_set(given: str) -> dict[str, Any]:
    if (found := _of_data_group(given)) is not None:
        return {key: value for key, value in found.items() if key in SET_KEYS}
    source, colon, task = given.partition(":")
    if colon and source == GYM:
        return {"source": GYM, "task": task, "scorer": "agent_tunix.environments.reasoning_gym.score"}
    if os.path.exists(os.path.expanduser(given)) or Path(given).suffix or "/" in given:
        return {"path": given}
    known = sorted({file.stem for folder in search_path([]) for file in (folder / "data").glob("*.yaml")})
    raise ValueError(
        f"evaluation.sets: there is no {given}{did_you_mean(given, known)}; a set is a file of conf/data "
        f"({', '.join(known)}), a path, or a task of reasoning-gym, as in {GYM}:gcd"
    )


def _of_data_group(name: str) -> dict[str, Any] | None:
    """What a file of conf/data says, with those that it begins with; None where there is no such file."""
    files = [folder / "data" / f"{name}.yaml" for folder in search_path([])]
    if (file := next((file for file in files if file.is_file()), None)) is None:
        return None
    with reading(file):
        own: Any = OmegaConf.to_container(OmegaConf.load(file))
        begun = [
            _of_data_group(other) or {} for other in own.pop("defaults", ()) if isinstance(other, str) and other != name
        ]
    return {key: value for part in (*begun, own) for key, value in part.items()}


def _faults_of_sets(container: Any) -> Iterable[str]:
    """Faults of the further test sets; those of the data section, which they have too, are its own."""
    data, evaluation = container.get("data"), container.get("evaluation")
    sets = evaluation.get("sets") if isinstance(evaluation, dict) else None
    if not isinstance(data, dict) or not isinstance(sets, dict):
        return
    own = _faults_of(data, DataSection)
    for name, given in sets.items():
        if not isinstance(given, dict):  # as the schema says
            continue
        for key in [key for key in given if key not in SET_KEYS]:
            hint = did_you_mean(str(key), SET_KEYS) or f"; it is one of {', '.join(SET_KEYS)}"
            yield f"evaluation.sets.{name}.{key}: unknown key{hint}"
        known = {key: value for key, value in given.items() if key in SET_KEYS}
        found = _faults_of(data_of_set(data, known), DataSection)
        yield from (f"evaluation.sets.{name}.{line}" for line in found if line not in own)


def _faults_of(values: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    try:
        kind.model_validate(values)
    except ValidationError as faults:
        return list(_lines(faults, kind))
    return []


def _misfits(container: Any, trains: bool) -> Iterable[str]:
    """Faults of the mesh; none where the numbers that it must divide are themselves at fault."""
    model, training = container.get("model"), container.get("training")
    try:
        sizes = mesh_shape.sizes_of(model["mesh_shape"])
        parted = {key: int(model["architecture"][key]) for key in mesh_shape.PARTED_BY_TP}
        micro_batch = int(training["micro_batch_size"]) if trains else None
    except (KeyError, TypeError, ValueError, OverflowError):  # the schema says what is wrong with these
        return ()
    return mesh_shape.faults(sizes, parted, micro_batch)


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def report(lines: list[str], source: str = "") -> str:
    head = "There is a fault" if len(lines) == 1 else f"There are {len(lines)} faults"
    where = f"in the configuration of {source}:" if source else "in the configuration:"
    return "\n".join([f"{head} {where}", *(f"  {line}" for line in lines)])


class _Plain(get_yaml_loader()):  # type: ignore[misc]
    """YAML as OmegaConf has it, for what was written as plain data: text that stands for more than itself is refused."""

    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, self.nodes = self.peek_event(), self.nodes + 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(None, None, "it refers to another place of the file", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(None, None, f"it has a tag, {event.tag:.80}", event.start_mark)
        if self.nodes > MOST_VALUES:
            raise yaml.MarkedYAMLError(None, None, f"it has more than {MOST_VALUES} values", event.start_mark)
        return super().compose_node(parent, index)


def read_saved(path: Path, kind: type[BaseModel] = Config) -> dict[str, Any]:
    """The configuration that a run or a search has written down; keys that came later have the values it was made by.

    It is plain data, and a stranger may have written it: references are refused, as one to the environment, where secrets
    are. Where it begins with a checksum, its values must agree with it: a disk that has changed a digit of a rate would
    otherwise go unnoticed.
    """
    with reading(path):
        text = read_text(path, SETTINGS)
        (loader := _Plain(text)).name = path.name
        saved = loader.get_single_data()
        if not isinstance(saved, dict):
            raise TypeError("it does not hold keys and values")
        found = list(_references(saved))
    checksum = CHECKSUM.match(text)
    if checksum and checksum[1] != _checksum(saved):
        raise UserError(
            f"{path} does not hold the values that were written: they do not agree with the checksum in its first line.\n"
            "The file is damaged, or was changed by hand. What a run is to change is given on its command line, as in\n"
            "training.resume=<run> training.num_epochs=2. If these values are right, delete that line."
        )
    if found:
        raise UserError(
            f"{path}: a saved configuration is plain data, and nothing is looked up for it, as would be for\n  "
            + "\n  ".join(found)
            + "\nWrite the values themselves; where a text has ${ in it, write \\${."
        )
    return _completed(_literal(saved), kind)


def _references(value: Any, key: str = "") -> Iterable[str]:
    """Each text that OmegaConf would not take literally, with its key."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from _references(part, f"{key}.{name}" if key else str(name))
    if isinstance(value, str) and any(len(found[1]) % 2 == 0 for found in REFERENCE.finditer(value)):
        yield f"{key}={value[:100]}"


def _completed(saved: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """With the schema's defaults of the keys that are lacking, as far as it has any; the rest is for `validate` to judge."""
    complete = dict(saved)
    for name, field in kind.model_fields.items():
        section = section_of(field)
        if isinstance(saved.get(name), Mapping) and section is not None:
            complete[name] = _completed(saved[name], section)
        elif name not in saved and not field.is_required():
            default = field.get_default(call_default_factory=True)
            complete[name] = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    return complete


def config_text(config: BaseModel) -> str:
    """As YAML that `read_saved` reads, in which `${` stands for itself, under a checksum."""
    values = OmegaConf.create(escaped(config.model_dump(mode="json")))
    written = OmegaConf.to_yaml(values)
    return f"# checksum of all values but places: {_checksum(OmegaConf.to_container(values))}\n{written}"


def _checksum(saved: Any) -> str:
    """Of the values that a saved configuration holds, in whatever order and style they are written."""
    kept = sorted((key, repr(v)) for key, v in leaves(saved).items() if key not in PLACES and not OF_SET.fullmatch(key))
    return hashlib.sha256(repr(kept).encode()).hexdigest()[:16]


def escaped(value: Any) -> Any:
    """Texts that OmegaConf takes literally: with a backslash before `${`, and two for each that stood there."""
    if isinstance(value, dict):
        return {key: escaped(part) for key, part in value.items()}
    if isinstance(value, list):
        return [escaped(part) for part in value]
    return REFERENCE.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _literal(value: Any) -> Any:
    """What was `escaped`."""
    if isinstance(value, dict):
        return {key: _literal(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_literal(part) for part in value]
    return REFERENCE.sub(lambda found: found[1][len(found[1]) // 2 + 1 :] + "${", value) if isinstance(value, str) else value


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """A hint at the candidate whose last name the word resembles or abbreviates (lr for learning_rate)."""
    names = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    last = word.rpartition(".")[2]
    abbreviated = [name for name in names if "".join(part[:1] for part in name.split("_")) == last]
    close = abbreviated or difflib.get_close_matches(last, names, n=1, cutoff=0.6)
    return f"; did you mean {names[close[0]]}?" if close else ""


def section_of(field: Any) -> type[BaseModel] | None:
    """The schema of a section, which may be one that can be left out; None for a field that holds a value."""
    kinds = typing.get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def keys(kind: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a schema, with pydantic's record of it."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if (section := section_of(field)) is not None:
            found |= keys(section, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Every value that is no mapping, by its dotted key."""
    if not isinstance(tree, Mapping):
        return {prefix.rstrip("."): tree}
    return {k: v for name, branch in tree.items() for k, v in leaves(branch, f"{prefix}{name}.").items()}


def _lines(faults: ValidationError, kind: type[BaseModel], container: Mapping[str, Any] | None = None) -> Iterable[str]:
    """One line for each fault; the container is that of all sections, where there is one."""
    known = list(keys(kind))
    for fault in faults.errors():
        key = ".".join(str(part) for part in fault["loc"])
        message = re.sub(r"\b0\.0{4,}\d+", lambda tiny: f"{float(tiny[0]):g}", fault["msg"].removeprefix("Value error, "))
        if fault["type"] == "extra_forbidden":
            former = former_keys.answer(key, fault["input"], container) if container is not None else None
            yield former or f"{key}: unknown key{_suggestion(key, known)}"
        elif key == "data.source" and fault["input"] in former_keys.DATA:
            yield f"data.source={fault['input']}: {former_keys.gsm8k_of(fault['input'])}"
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
    if key == "experiment":  # the group has no section: its files fill those of others
        return "; a file of conf/experiment begins with the line '# @package _global_'"
    section = key.rpartition(".")[0]
    depth = key.count(".") + 1
    beside = {".".join(k.split(".")[:depth]) for k in known if k.startswith(f"{section}." if section else "")}
    return did_you_mean(key, sorted(beside)) or did_you_mean(key, known)


def _shown(value: Any) -> str:
    text = "null" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
