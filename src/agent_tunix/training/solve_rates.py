"""`data.solve_rate`: a run learns from the problems that its starting policy solves now and then.

Those that it always or never solves give completions of one reward, which teach nothing. How often it solves each is
measured once, by completions drawn as in training. It is kept twice: in the user's cache, for other runs, and in the run's
folder, by which the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from agent_tunix.config.schema import Config
from agent_tunix.engine import cache_folder, distributed
from agent_tunix.engine.checksum import digest, summed
from agent_tunix.engine.random_keys import Purpose
from agent_tunix.engine.sampler import Sampling
from agent_tunix.environments.stream import Example, Stream
from agent_tunix.errors import UserError, reading
from agent_tunix.files import RECORDS, read_json, read_text
from agent_tunix.models.tokenizer import Tokenizer
from agent_tunix.training import loading
from agent_tunix.training.answering import Asking, answers_to
from agent_tunix.training.data import Notice, Task
from agent_tunix.training.grading import grade
from agent_tunix.training.horizon import make_plan, too_few
from agent_tunix.training.progress import counted
from agent_tunix.training.run_folder import replace_text
from agent_tunix.training.setup import Setup

FILE = "solve_rates.jsonl"  # of a run's folder
VERSION = 1  # of how it is measured; what was measured otherwise is measured again
LISTED = 12  # numbers of attempts in a message, beyond which they are put together
Solved = list[int]  # of each training problem: how many of data.solve_attempts completions were right


def on_solvable(r: Setup, notice: Notice, folder: Path | None = None) -> Setup:
    """The run with the training problems that `data.solve_rate` keeps; `folder` is the run's own, which may go on."""
    bounds = r.cfg.data.solve_rate
    if bounds is None:
        return r
    train, attempts = r.task.train, r.cfg.data.solve_attempts
    begun = folder is not None and (folder / "config.yaml").exists() and (folder / FILE).exists()
    solved = _of_run(folder / FILE, train, attempts) if folder and begun else _of_cache(r, notice)
    kept = kept_of(r.cfg, train, solved)
    low, high = bounds
    notice(
        f"{len(kept)} of {counted(len(train), 'training problem')} are kept, which are solved in a share of {low:g} to "
        f"{high:g} of {counted(attempts, 'attempt')} (data.solve_rate)."
    )
    plan = make_plan(r.cfg, len(kept))
    for line in too_few(r.cfg, plan) if plan.batches_per_epoch < r.plan.batches_per_epoch else ():
        notice(f"warning: {line}")
    task = dataclasses.replace(r.task, train=kept)
    stream = Stream(kept, r.cfg.training.prompts_per_step, plan.batches_per_epoch, r.cfg.seed)
    lines = [
        json.dumps({"question": example.question, "solved": right, "attempts": attempts}, ensure_ascii=False) + "\n"
        for example, right in zip(train, solved, strict=True)
    ]
    return dataclasses.replace(r, task=task, plan=plan, stream=stream, solve_rates="".join(lines))


def kept_of(cfg: Config, train: Sequence[Example], solved: Solved) -> list[Example]:
    """The problems within the bounds; refuses fewer than a batch, with what was measured."""
    assert cfg.data.solve_rate
    (low, high), attempts, size = cfg.data.solve_rate, cfg.data.solve_attempts, cfg.training.prompts_per_step
    kept = [example for example, right in zip(train, solved, strict=True) if low <= right / attempts <= high]
    if len(kept) >= size:
        return kept
    raise UserError(
        f"data.solve_rate=[{low:g},{high:g}] keeps {len(kept)} of {counted(len(train), 'training problem')}, fewer than a "
        f"batch of {size}.\nSolved in so many of {counted(attempts, 'attempt')}: {_distribution(solved, attempts)}.\n"
        "Widen data.solve_rate, lower training.batch_size, or give more data, or data of another difficulty."
    )


def _distribution(solved: Solved, attempts: int) -> str:
    """How many problems were solved how often; of many attempts by ranges."""
    width = -(-(attempts + 1) // LISTED)
    found = Counter(right // width for right in solved)
    names = {at: str(at) if width == 1 else f"{at * width} to {min(attempts, at * width + width - 1)}" for at in found}
    return ", ".join(f"{names[at]}: {counted(found[at], 'problem')}" for at in sorted(found))


def known(cfg: Config, task: Task, tokenizer: Tokenizer) -> Solved | None:
    """What the cache says of a run, without its weights: of the last that was measured with a model of this name."""
    with contextlib.suppress(UserError, OSError, RuntimeError):
        folder = cache_folder.of_user("solve-rates")
        asked = _asked(cfg, task, _sampling(cfg, tokenizer))
        if folder.is_dir():
            cache_folder.open_for_one(folder)
            paths = sorted(folder.glob(f"{asked}-*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
            found = (_read(path, task.train, cfg.data.solve_attempts, of=_named(cfg)) for path in paths)
            return next((solved for solved in found if solved is not None), None)
    return None


def _of_run(path: Path, train: Sequence[Example], attempts: int) -> Solved:
    """What a run has measured when it began."""
    with reading(path):
        lines = [json.loads(line) for line in read_text(path, RECORDS).split("\n") if line]
        solved, made = [line["solved"] for line in lines], [(line["question"], line["attempts"]) for line in lines]
    if made != [(example.question, attempts) for example in train] or not _possible(solved, train, attempts):
        raise UserError(
            f"{path} does not hold {counted(attempts, 'attempt')} at each of the run's {len(train)} training problems.\n"
            "The run goes on with the problems that it began with, which follow from this file: put back the file, and the "
            "data\nand data.solve_attempts that it was made with; or start another run."
        )
    return solved


def _of_cache(r: Setup, notice: Notice) -> Solved:
    """What another run has measured, or what is measured now; the first of several processes reads and writes the cache."""
    train, attempts = r.task.train, r.cfg.data.solve_attempts
    asked = _asked(r.cfg, r.task, _sampling(r.cfg, r.model.tokenizer))
    policy = loading.new_trainable(r.cfg, r.model)
    name = f"{asked}-{digest({'base': r.model.checksum, 'trained': summed(policy)})}.json"
    folder = _folder(notice) if distributed.first() else None
    found = r.solved.get(name) or (_read(folder / name, train, attempts) if folder else None)
    solved: Solved | None = json.loads(distributed.everyones(json.dumps(found))[0])
    if solved is not None:
        return solved
    notice(
        f"Measuring which of {counted(len(train), 'training problem')} the starting policy solves, by "
        f"{counted(attempts, 'completion')} of each (data.solve_rate)."
    )
    sampling, key = _sampling(r.cfg, r.model.tokenizer), r.key(0, Purpose.SOLVE_RATE)
    asking = Asking(r.task.prompt_width, _at_once(r.cfg), key, sampling, r.cfg.generation.temperature)
    given = answers_to(r.engine, r.engine.policy(policy), r.playing, train, asking)
    by_world = [given.solved[i : i + attempts] for i in range(0, len(given.solved), attempts)] or [[]] * len(train)
    each = zip(train, given.texts, by_world, strict=True)
    shares = [grade([example], [texts], r.judge, of)["accuracy"] for example, texts, of in each]
    solved = [round(attempts * share) for share in shares]
    r.solved[name] = solved
    if folder:
        record = {"of": _named(r.cfg), "solved": solved}
        with contextlib.suppress(OSError):  # a full disk: it is in the run's folder too, and is measured again by others
            replace_text(folder / name, json.dumps(record | {"checksum": digest(record)}))
    return solved


def _folder(notice: Notice) -> Path | None:
    """The cache, where nobody else can write to it: it decides what is trained on."""
    try:
        folder = cache_folder.of_user("solve-rates")
        cache_folder.open_for_one(folder)
    except (UserError, RuntimeError) as fault:
        notice(f"warning: how often problems are solved is not kept for other runs: {fault}")
        return None
    return folder


def _read(path: Path, train: Sequence[Example], attempts: int, of: Any = None) -> Solved | None:
    """What a file of the cache holds; None where there is none, or it is damaged or of another model."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        record = read_json(path)
        if record.pop("checksum") == digest(record) and of in (None, record["of"]):
            return record["solved"] if _possible(record["solved"], train, attempts) else None
    return None


def _possible(solved: Any, train: Sequence[Example], attempts: int) -> bool:
    whole = isinstance(solved, list) and len(solved) == len(train)
    return whole and all(type(right) is int and 0 <= right <= attempts for right in solved)


def _named(cfg: Config) -> list[Any]:
    """The model that a run starts from, by its names."""
    return [cfg.model.weights, cfg.model.adapter, cfg.training.init_from, cfg.training.init_step]


def _sampling(cfg: Config, tokenizer: Tokenizer) -> Sampling:
    return dataclasses.replace(loading.training_sampling(cfg, tokenizer), num_generations=cfg.data.solve_attempts)


def _at_once(cfg: Config) -> int:
    """Problems that are asked at once: as many completions as a batch of training or an evaluation has rows."""
    rows = max(cfg.training.prompts_per_step * cfg.grpo.num_generations, cfg.evaluation.batch_size)
    return max(1, rows // cfg.data.solve_attempts)


def _asked(cfg: Config, task: Task, sampling: Sampling) -> str:
    """A text that tells all that a measurement depends on, but for the numbers of the model."""
    rows = [(example.question, example.answer, example.prompt_ids) for example in task.train]
    drawn = [*dataclasses.astuple(sampling), cfg.generation.temperature, cfg.seed, _at_once(cfg), task.prompt_width]
    judged = cfg.data.scorer, cfg.data.system_prompt, cfg.environment.model_dump()
    held = cfg.model.dtype, cfg.model.base_dtype, cfg.model.mesh_shape, jax.devices()[0].device_kind
    return digest({"version": VERSION, "rows": rows, "drawn": drawn, "held": held, "judged": judged})
