"""Evaluation: how many held-out problems a policy solves.

    accuracy          well formed, and the answer block holds the truth; or what `data.scorer` gives a 1
    partial_accuracy  the answer block's number is within 10 % of the truth; or the mean of what `data.scorer` gives
    format_accuracy   reasoning and answer in their tags, nothing else
    lenient_accuracy  as accuracy, or the last number anywhere is the truth

With several passes, also the accuracy of the majority's answer and pass@k, the share of problems solved by at least one
of k completions (the unbiased estimate of Chen et al., 2021, arXiv:2107.03374).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from agent_tunix.config.imports import OWN, Origin
from agent_tunix.config.load import validate
from agent_tunix.config.resumed import made_of
from agent_tunix.config.schema import Config, EvaluateConfig, InferenceSection, data_of_set
from agent_tunix.engine.engine import Inference
from agent_tunix.engine.random_keys import Purpose, step_key
from agent_tunix.engine.sampler import Sampling
from agent_tunix.environments import answers
from agent_tunix.environments.rewards import SCORER, Judge
from agent_tunix.environments.stream import Example, batches
from agent_tunix.environments.world import NAME, TOOLS, load_world
from agent_tunix.errors import UserError
from agent_tunix.models.base import Model
from agent_tunix.models.lora import Policy, Trainable
from agent_tunix.training import loading
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
from agent_tunix.training.intervals import interval_text
from agent_tunix.training.loggers.base import LOGGERS, PACKAGES, is_installed, logger_class
from agent_tunix.training.metrics import episode_record
from agent_tunix.training.play import Answers, Episode, Playing, play, turns_of
from agent_tunix.training.progress import counted, say
from agent_tunix.training.rollouts import complete
from agent_tunix.training.run_folder import RunFolder, run_folder
from agent_tunix.training.setup import open_each
from agent_tunix.types import Record

BY_TAGS = Judge()
TABLED = 64  # problems of which loggers are told what was answered
GREEDILY = {"inference": "greedy", "num_passes": 1}  # how answers were drawn, in answers.jsonl
ASKED = ("run", "step", "inference_config", "num_passes", "evaluation", "seed", "data")  # what can be chosen for a run
LENGTH = "generation.max_prompt_length"  # and for its problems, which training did not read
TRUSTED = (SCORER, NAME, TOOLS)  # code that a run's folder names, which its user may name too, so that it is imported
NOT_OF_SET = {
    "data.num_examples": "counts what is trained on; evaluation.num_examples counts what is evaluated",
    **dict.fromkeys(("data.solve_rate", "data.solve_attempts"), "chooses what is trained on; a run is evaluated on all"),
    **dict.fromkeys(("data.system_prompt", "data.enable_thinking"), "a run is asked as it was trained, also on another set"),
}


def answers_of(
    engine: Inference,
    policy: Policy,
    examples: Sequence[Example],
    width: int,
    batch_size: int,
    key: jax.Array,
    sampling: Sampling,
    temperature: float,
    shared: str | None = None,
) -> list[list[str]]:
    """`num_generations` completions of every problem, as many problems at once as are given.

    `shared` names them where other runs may ask for the very same.
    """
    batch_size = min(batch_size, len(examples))
    rows = batch_size + -batch_size % engine.model.mesh.shape["fsdp"]
    texts: list[list[str]] = []
    for index, batch in enumerate(batches(examples, batch_size)):
        full = batch + [batch[-1]] * (rows - len(batch))
        name = shared and f"{shared}, batch {index}"
        of_batch = jax.random.fold_in(key, index)
        found = complete(engine, policy, full, width, of_batch, sampling, temperature, shared=name, by_all=True)
        decoded = [engine.model.tokenizer.decode(ids) for ids in found.ids.values()]
        G = sampling.num_generations
        texts += [decoded[i * G : (i + 1) * G] for i in range(len(batch))]
    return texts


def episodes_of(
    engine: Inference,
    policy: Policy,
    playing: Playing,
    examples: Sequence[Example],
    batch_size: int,
    key: jax.Array,
    sampling: Sampling,
    temperature: float,
) -> Answers:
    """As `answers_of`, for episodes: an answer is the last that the model says in one."""
    G, episodes = sampling.num_generations, list[Episode]()
    rows = -(-min(batch_size, len(examples)) // (cut := engine.model.mesh.shape["fsdp"])) * cut
    for index, batch in enumerate(batches(examples, rows)):
        full = [*batch, *[batch[-1]] * (-len(batch) % cut)]
        of_batch = jax.random.fold_in(key, index)
        found = play(engine, policy, playing, full, of_batch, sampling, temperature)
        episodes += found[: G * len(batch)]
    texts = [[episode.answer for episode in episodes[i : i + G]] for i in range(0, len(episodes), G)]
    record = episode_record(episodes)
    for name in sorted({name for episode in episodes for name in episode.rewards}):
        record[f"reward/{name}"] = float(np.mean([episode.rewards.get(name, 0.0) for episode in episodes]))
    solved = [0.0 if episode.ending else episode.solved for episode in episodes]
    return Answers(texts, solved, record, [episode.said for episode in episodes[::G]])


def answers_to(
    engine: Inference,
    policy: Policy,
    playing: Playing | None,
    examples: Sequence[Example],
    width: int,
    batch_size: int,
    key: jax.Array,
    sampling: Sampling,
    temperature: float,
    shared: str | None = None,
) -> Answers:
    """What a policy says to all problems: in the episodes of a world or, without one, at once."""
    if playing is None:
        return Answers(answers_of(engine, policy, examples, width, batch_size, key, sampling, temperature, shared))
    return episodes_of(engine, policy, playing, examples, batch_size, key, sampling, temperature)


def table_of(step: int, examples: Sequence[Example], found: Answers, right: Sequence[int]) -> list[Record]:
    """Rows for loggers that have tables: the first problems, so that they stay the same, and the first completion of each.

    `right` says how many completions of each problem are.
    """
    rows: list[Record] = [
        {"step": step, "question": example.question, "answer": example.answer, "completion": texts[0], "right": number}
        for example, texts, number in zip(examples[:TABLED], found.texts, right, strict=False)
    ]
    for row, transcript in zip(rows, found.transcripts, strict=False):
        row["turns"] = json.dumps(turns_of(transcript), ensure_ascii=False)
    return rows


def grade(
    examples: Sequence[Example],
    completions: Sequence[Sequence[str]],
    judge: Judge = BY_TAGS,
    solved: Sequence[float | None] = (),
) -> Record:
    """The evaluation's numbers, averaged over problems and passes; `solved` is what a world says of them, where it does."""
    return grade_each(examples, completions, judge, solved)[0]


def grade_each(
    examples: Sequence[Example],
    completions: Sequence[Sequence[str]],
    judge: Judge = BY_TAGS,
    solved: Sequence[float | None] = (),
) -> tuple[Record, Record]:
    """As `grade`, and of each problem, by a name that is the same in every run, how many of its completions are right."""
    pairs = [(example, text) for example, texts in zip(examples, completions, strict=True) for text in texts]
    passes = len(completions[0])
    scores = judge([example for example, _ in pairs], [text for _, text in pairs])
    for place, by_world in enumerate(solved):
        scores[place] = scores[place] if by_world is None else by_world
    right = scores == 1
    partially = [_partially_right(text, e.answer) for e, text in pairs] if judge.by_tags else scores
    leniently = [r or _last_number_right(text, e.answer) for r, (e, text) in zip(right, pairs, strict=True)]
    record: Record = {
        "n": len(examples),
        "accuracy": float(right.mean()),
        "partial_accuracy": float(np.mean(partially)),
        "format_accuracy": float(np.mean([answers.well_formed(text) for _, text in pairs])),
        "lenient_accuracy": float(np.mean(leniently)),
    }
    right = right.reshape(-1, passes)
    if passes > 1:
        judged = zip(completions, right, strict=True)
        record["majority_accuracy"] = float(np.mean([_majority_right(texts, right_ones) for texts, right_ones in judged]))
        for k in (k for k in (1, 2, 4, 8, 16, 32, 64) if k <= passes):
            record[f"pass@{k}"] = float(np.mean([pass_at_k(passes, int(row.sum()), k) for row in right]))
    each = {"problems": [problem_name(example) for example in examples], "right": [int(row.sum()) for row in right]}
    return record, each


def problem_name(example: Example) -> str:
    """What a problem is called in answers.jsonl: it follows from question and answer, or from a row without them."""
    asked = [example.question, example.answer] if example.question else sorted(map(str, example.row.items()))
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _partially_right(completion: str, truth: str) -> bool:
    found = answers.tagged_answer(completion)
    return found is not None and answers.near(answers.first_number(found), answers.first_number(truth))


def _last_number_right(completion: str, truth: str) -> bool:
    """An answer in words, or of several numbers, has no last number to compare."""
    return answers.same_number(answers.last_number(completion), answers.only_number(truth))


def _majority_right(completions: Sequence[str], solved: Sequence[bool]) -> bool:
    """Whether the answer given most often (the earliest among equals) is right; 18 and 18.00 are one answer.

    Those who do not keep to the format have no vote, as they would not count as right.
    """
    given = [
        (answers.tagged_answer(text), right)
        for text, right in zip(completions, solved, strict=True)
        if answers.well_formed(text)
    ]
    votes = Counter(answer for answer, _ in given if answer is not None)
    if not votes:
        return False
    winner = max(votes, key=lambda text: sum(votes[other] for other in votes if answers.same_answer(other, text)))
    return any(right for answer, right in given if answer == winner)


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
            of_all = one.examples, width, cfg.evaluation.batch_size, key
            found = answers_to(engine, policy, playing, *of_all, sampling, way.temperature or 1.0)
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
