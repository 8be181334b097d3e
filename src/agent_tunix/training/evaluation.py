"""`evaluate.py`: how many problems of its test split, or of other sets, a run or a base model solves."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_tunix.config.imports import OWN, Origin
from agent_tunix.config.load import validate
from agent_tunix.config.resumed import made_of
from agent_tunix.config.schema import Config, EvaluateConfig, InferenceSection, data_of_set
from agent_tunix.engine.engine import Inference
from agent_tunix.engine.random_keys import Purpose, step_key
from agent_tunix.environments.rewards import SCORER, Judge
from agent_tunix.environments.stream import Example
from agent_tunix.environments.world import NAME, TOOLS, load_world
from agent_tunix.errors import UserError
from agent_tunix.models.base import Model
from agent_tunix.models.lora import Trainable
from agent_tunix.training import loading
from agent_tunix.training.answering import Asking, answers_to
from agent_tunix.training.data import (
    Notice,
    load_examples,
    load_set,
    of_set,
    prompt_width,
    reading_other,
    refuse_unknown_tokens,
    same_set,
    set_name,
    warn_of_trained_on,
)
from agent_tunix.training.grading import grade_each, table_of
from agent_tunix.training.intervals import interval_text
from agent_tunix.training.loggers.base import LOGGERS, PACKAGES, is_installed, logger_class
from agent_tunix.training.play import Playing
from agent_tunix.training.progress import counted, say
from agent_tunix.training.run_folder import RunFolder, run_folder
from agent_tunix.training.setup import open_each
from agent_tunix.types import Record

GREEDILY = {"inference": "greedy", "num_passes": 1}  # how answers were drawn, in answers.jsonl
ASKED = ("run", "step", "inference_config", "num_passes", "evaluation", "seed", "data")  # what can be chosen for a run
LENGTH = "generation.max_prompt_length"  # and for its problems, which training did not read
TRUSTED = (SCORER, NAME, TOOLS)  # code that a run's folder names, which its user may name too, so that it is imported
NOT_OF_SET = {
    "data.num_examples": "counts what is trained on; evaluation.num_examples counts what is evaluated",
    **dict.fromkeys(("data.solve_rate", "data.solve_attempts"), "chooses what is trained on; a run is evaluated on all"),
    **dict.fromkeys(("data.system_prompt", "data.enable_thinking"), "a run is asked as it was trained, also on another set"),
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A test set: its name, which the run's own has not, its problems, and who says which of them are solved."""

    name: str
    examples: list[Example]
    judge: Judge


def run(cfg: EvaluateConfig, output: Path, console: Console, overrides: Sequence[str] = ()) -> list[Record]:
    """`evaluate.py`: a run's checkpoint, or what a run of this configuration would begin with, on the test split and on all
    sets of `evaluation.sets`; returns a record of each.
    """
    _check_asked(cfg, overrides)
    loading.start_device(partial(say, console))
    trained = cfg if cfg.run is None else loading.saved_config(cfg.run, "run")
    read = cfg if cfg.run is None else _read_as_asked(trained, cfg, overrides)
    if cfg.run and not os.access(cfg.run, os.W_OK):  # refused before anything is computed
        raise UserError(f"run={cfg.run}: the results are written there, but it is read-only; evaluate a copy of it.")
    with made_of(cfg.run):
        model = loading.load_model(cfg) if cfg.run is None else loading.load_trained_model(trained, console.print)
    origin = _origin(cfg, overrides)
    world = load_world(read.environment, origin, console.print)  # before its rows are read, which those of verifiers ask for
    asked = _asked(cfg, trained, read, model, origin, console)
    trainable: Trainable | None
    if cfg.run is None:
        trainable, step = loading.earlier_adapters(trained, model), 0
    else:
        trainable, step = loading.learnt_by(cfg.run, trained, model, cfg.step)
    way = cfg.inference_config
    passes = cfg.num_passes if way.temperature else 1
    if passes < cfg.num_passes:
        say(console, f"num_passes={cfg.num_passes}: greedy decoding draws the same each time, so one pass is made.")
    sampling = dataclasses.replace(
        loading.training_sampling(trained, model.tokenizer),
        top_k=way.top_k,
        top_p=way.top_p,
        greedy=way.temperature == 0,
        num_generations=passes,
    )
    key = step_key(cfg.seed, step, Purpose.EVALUATION)
    engine = Inference(model)
    policy = engine.policy(trainable)
    playing = Playing.of(read, world, model.tokenizer) if world else None
    path = Path(cfg.run) if cfg.run else output
    notice = partial(say, console)
    loggers = [logger_class(name, OWN, notice) for name in _loggers(cfg, trained, notice)]
    folder: RunFolder | None = None
    records = []
    try:
        for one in asked:
            width = prompt_width(one.examples, read.generation.max_prompt_length)
            asking = Asking(width, cfg.evaluation.batch_size, key, sampling, way.temperature or 1.0)
            found = answers_to(engine, policy, playing, one.examples, asking)
            numbers, each = grade_each(one.examples, found.texts, one.judge, found.solved)
            head: Record = {"step": step, "split": "test"} | ({"set": one.name} if one.name else {})
            record = head | numbers | {"num_passes": passes} | found.record
            record |= {f"inference/{k}": v for k, v in way.model_dump().items()}
            say(console, _title(record, cfg, trained))
            console.print(_table(record))
            folder = folder or run_folder(path, open_loggers=partial(open_each, loggers, path, trained, notice))
            folder.answers(head | _drawn(way, passes) | each)
            folder.evaluation(record)
            folder.completions(record, table_of(step, one.examples, found, each["right"]))
            records.append(record)
    finally:
        if folder:
            folder.close()
    say(console, f"written to {path / 'evals.jsonl'}")
    return records


def _asked(
    cfg: EvaluateConfig, trained: Config, read: Config, model: Model, origin: Origin, console: Console
) -> list[Asked]:
    """The test split, or what was asked for in its place, and the further sets; says what of them is not held out."""
    other = None if same_set(read.data, trained.data) else set_name(read.data)
    with made_of(None if other else cfg.run):
        own = load_examples(read, "test", cfg.evaluation.num_examples, model.tokenizer, console.print)
    if other:
        of_run = set_name(trained.data)
        say(
            console,
            f"warning: {other} is not the run's own set, {of_run}; its record names it and is in none of its curves.",
        )
    asked = [Asked(other or "", own, Judge(read.data.scorer, origin, console.print))]
    for name, given in read.evaluation.sets.items():
        told = partial(of_set, console.print, name)
        examples = load_set(read, name, model.tokenizer, told)
        named_by = OWN if "scorer" in given else origin
        scorer = data_of_set(read.data.model_dump(), given).get("scorer")
        asked.append(Asked(name, examples, Judge(scorer, named_by, told)))
    for one in asked:
        if cfg.run is not None:
            notice = partial(of_set, console.print, one.name) if one.name in read.evaluation.sets else console.print
            warn_of_trained_on(trained, one.examples, notice)
        refuse_unknown_tokens([example.prompt_ids for example in one.examples], model.arch)
    return asked


def _drawn(way: InferenceSection, passes: int) -> Record:
    """How answers were drawn: those that are compared must have been drawn in one way."""
    if way.temperature == 0:
        return GREEDILY
    top_k, top_p = f", top-k {way.top_k}" if way.top_k else "", f", top-p {way.top_p:g}" if way.top_p < 1 else ""
    drawn = f"{counted(passes, 'completion')} at temperature {way.temperature:g}{top_k}{top_p}"
    return {"inference": drawn, "num_passes": passes}


def _loggers(cfg: EvaluateConfig, trained: Config, notice: Notice) -> list[str]:
    """Those that are told: of a saved run, the shipped ones, as far as they are installed here."""
    if cfg.run is None:
        return trained.training.loggers
    shipped = [name for name in trained.training.loggers if name in LOGGERS]
    for name in (missing := [name for name in shipped if name in PACKAGES and not is_installed(name)]):
        notice(f"warning: {name}, which the run has told of its training, is not installed: it lacks this evaluation.")
    return [name for name in shipped if name not in missing]


def _check_asked(cfg: EvaluateConfig, overrides: Sequence[str]) -> None:
    """Refuses overrides that would have no effect, rather than ignoring them."""
    if cfg.dry_run or cfg.training.resume is not None:
        given = "dry_run=true" if cfg.dry_run else f"training.resume={cfg.training.resume}"
        raise UserError(f"{given} has no meaning here; evaluate a run by run=<its folder>, or this configuration's model.")
    if cfg.run is None and cfg.step is not None:
        raise UserError(f"step={cfg.step}: the base model has no steps; give the folder of a run, as in run=runs/<time>.")
    for override in overrides if cfg.run else ():
        name = re.split(r"[.=@]", override.lstrip("+~"), maxsplit=1)[0]
        if name not in ASKED and _key(override) not in (LENGTH, *TRUSTED):
            given = ", ".join((*ASKED, LENGTH, *TRUSTED[1:]))
            raise UserError(
                f"{override.removeprefix('++')}: a run is evaluated as it was trained; only {given} can be given."
            )
        if _key(override) in NOT_OF_SET:
            raise UserError(f"{override.removeprefix('++')}: {NOT_OF_SET[_key(override)]}.")


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _origin(cfg: EvaluateConfig, overrides: Sequence[str]) -> Origin:
    """Who has named the code that an evaluation imports: the user, or the run's folder."""
    asked = {_key(override) for override in overrides}
    named = asked & {*TRUSTED, "data.task", "data.settings"} | ({SCORER} if "data" in asked else set())
    return OWN if cfg.run is None else Origin(Path(cfg.run), frozenset(named))


def _read_as_asked(trained: Config, cfg: EvaluateConfig, overrides: Sequence[str]) -> Config:
    """A run's configuration, with what was asked for the reading of problems: another group of data, single keys of it, or
    how long prompts may be.
    """
    asked = {_key(override) for override in overrides}
    whole = trained.model_dump()
    for key, value in cfg.data.model_dump().items():
        if ("data" in asked or f"data.{key}" in asked) and f"data.{key}" not in NOT_OF_SET:
            whole["data"][key] = value
    if whole["data"]["source"] == "verifiers":
        whole["environment"]["settings"] = {key: whole["data"][key] for key in ("task", "settings")}
    for key in asked & {NAME, TOOLS}:
        name = key.rpartition(".")[2]
        whole["environment"][name] = getattr(cfg.environment, name)
    whole["evaluation"] |= {"sets": cfg.evaluation.sets, "num_examples": cfg.evaluation.num_examples}
    if LENGTH in asked:
        whole["generation"]["max_prompt_length"] = cfg.generation.max_prompt_length
    read = validate(whole, Config, f"{cfg.run}/config.yaml and the command line")
    return reading_other(read.model_copy(update={"data": trained.data}), read.data)


def _title(record: Record, cfg: EvaluateConfig, trained: Config) -> str:
    sources = {"training.init_from": cfg.training.init_from, "model.adapter": cfg.model.adapter}
    begun = "".join(f", with {key}={folder}" for key, folder in sources.items() if folder)
    what = f"{cfg.run}, step {record['step']}" if cfg.run else f"base model {trained.model.model_size}{begun}"
    passes, temperature = record["num_passes"], cfg.inference_config.temperature
    of = f" of {record['set']}" if "set" in record else ""
    return f"{what}: {record['n']} problems{of}, {passes} pass(es), temperature {temperature:g}"


def _table(record: Record) -> Table:
    table = Table()
    for column in ("measure", "value", "95 % interval"):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for name, value in record.items():
        if name.endswith("accuracy") or name.startswith("pass@"):
            table.add_row(name.replace("_", " "), f"{value:.1%}", interval_text(value, record["n"]))
    return table
