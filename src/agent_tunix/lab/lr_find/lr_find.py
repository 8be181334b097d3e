"""`agent-tunix lr-find`: one short run whose learning rate climbs from far too low to far too high.

It is a training run with another schedule: same data, same optimizer, same guard. It ends early where the reward has fallen
below its start or the guard steps in. What it says is read in `ramp.py`. The policy that it leaves behind was driven too
fast on purpose, so no checkpoint is kept.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from agent_tunix.algorithm.schedules import ramp as rising
from agent_tunix.config.commands import join, less
from agent_tunix.config.guidance import half_decades, middle_rate
from agent_tunix.config.load import validate
from agent_tunix.config.schema import Config
from agent_tunix.environments.rewards import is_fault_of_reward
from agent_tunix.environments.stream import Stream
from agent_tunix.errors import DivergenceError, UserError
from agent_tunix.lab.advice import LabAdvisor
from agent_tunix.lab.doctor.remedies import rounded, with_lr_min
from agent_tunix.lab.lr_find import ramp
from agent_tunix.lab.plan.plot import as_svg, in_characters
from agent_tunix.lab.report.page import report_on
from agent_tunix.lab.tune.config import LrFindConfig
from agent_tunix.training import loading
from agent_tunix.training.guard import Interruption
from agent_tunix.training.horizon import make_plan
from agent_tunix.training.loop import training
from agent_tunix.training.progress import Bars, say
from agent_tunix.training.run_folder import read_records, replace_text
from agent_tunix.training.setup import Loaded, Setup, prepare
from agent_tunix.training.solve_rates import on_solvable
from agent_tunix.types import Record

RATE = "optimizer.learning_rate"
REACH = 4  # half decades either side of the model's guidance
LEAST_BETA = 1e-9  # the KL term costs nothing at this weight, and is measured
MEASURED = ("lr", "reward/mean", "kl")


def run(cfg: LrFindConfig, path: Path, console: Console, overrides: Sequence[str] = ()) -> Record:
    """Ramps the rate, and writes and shows what came of it; returns lr_find.json."""
    check(cfg, path)
    loading.start_device(partial(say, console))
    with Interruption() as interruption, Bars(console) as bars:
        whole = prepare(_training_config(cfg), Loaded(), bars.notice, overrides, advisor=LabAdvisor())
        whole = on_solvable(whole, bars.notice)
        r = ramped(cfg, whole)
        _ = whole.model.weights  # read now, so that a fault in them is found before anything is written
        _begin(path)
        by_reward = False
        try:
            display = bars.display("ramp", r.plan.total_steps)
            training(r, path, display, interruption, pause=lambda step: _fallen(path, r))
        except DivergenceError as fault:
            bars.notice(f"The ramp ends here. {str(fault).splitlines()[0]}")
            by_reward = is_fault_of_reward(fault.fault)
    cut_short = interruption.requested or by_reward  # by nothing that its rates have done
    found = _reading(path, r, whole, cut_short)
    advice = _advice(found, r, cut_short, whole.cfg.scheduler.lr_min)
    updates = len(found["rates"]) * r.plan.iterations
    _write(path, found, advice, interruption.requested, updates)
    shutil.rmtree(path / "checkpoints", ignore_errors=True)  # only now that all else has been read and written
    report_on(path, bars.notice)
    _show(path, found, advice, console, updates)
    return found


def check(cfg: LrFindConfig, path: Path) -> None:
    """Refuses what a ramp cannot be made from."""
    if cfg.training.method != "grpo":
        raise UserError(
            f"training.method={cfg.training.method}: lr-find goes by reward, which only training.method=grpo has."
        )
    if cfg.dry_run or cfg.training.resume:
        raise UserError("lr-find is one short run: it takes neither dry_run nor training.resume.")
    low, high = bounds(cfg)
    if low >= high:
        raise UserError(f"lr_find.lr_low={low:g} is not below lr_find.lr_high={high:g}.")
    loading.refuse_others(path)  # another ramp's folder too: no ramp is resumed
    if (path / "checkpoints").exists():
        raise UserError(f"{path / 'checkpoints'} exists, and a ramp deletes that folder at its end; choose another folder.")


def _begin(path: Path) -> None:
    """Marks the folder as a ramp's from here on: if it is killed, it must not be resumed as a run at its last rate."""
    path.mkdir(parents=True, exist_ok=True)
    found = {"suggested": None, "range": None, "conclusion": "The ramp has not ended: it is still at work, or was killed."}
    replace_text(path / "lr_find.json", json.dumps(found, indent=2) + "\n")


def bounds(cfg: LrFindConfig) -> tuple[float, float]:
    """The first and the last rate of the ramp."""
    middle = middle_rate(cfg)
    return cfg.lr_find.lr_low or half_decades(middle, -REACH), cfg.lr_find.lr_high or half_decades(middle, REACH)


def ramped(cfg: LrFindConfig, whole: Setup) -> Setup:
    """The run that is to be tuned, with the ramp in place of its length and schedule."""
    section, iterations = cfg.lr_find, whole.plan.iterations
    low, high = bounds(cfg)
    tree = whole.cfg.model_dump(mode="json")
    tree["optimizer"] |= {"learning_rate": high, "warmup_ratio": 0.0}
    tree["scheduler"] = {"scheduler_name": "constant", "warmup_steps": 0, "total_steps": None}
    tree["training"] |= {"num_batches": math.ceil(section.num_steps / iterations), "num_epochs": 1}
    tree["training"] |= {"eval_every_n_steps": None, "save_interval_steps": None, "on_divergence": "stop"}
    tree["training"] |= {"early_stopping": None, "keep_best": None}
    tree["grpo"]["beta"] = max(whole.cfg.grpo.beta, LEAST_BETA)
    tree["evaluation"] |= {"sampled": False, "sets": {}}
    ramp_cfg = validate(tree, Config)
    plan = make_plan(ramp_cfg, len(whole.task.train))
    if plan.total_steps < section.num_steps:
        raise UserError(f"lr_find.num_steps={section.num_steps}: the data holds only {plan.total_steps} updates; lower it.")
    if plan.total_batches < ramp.least(plan.total_batches):
        raise UserError(
            f"lr_find.num_steps={section.num_steps}: with grpo.num_iterations={iterations} these are {plan.total_batches} "
            f"batches, too few to judge; set lr_find.num_steps={ramp.least(0) * iterations} or more."
        )
    plan = dataclasses.replace(plan, schedule=rising(low, high, plan.total_steps))
    stream = Stream(whole.task.train, ramp_cfg.training.prompts_per_step, plan.batches_per_epoch, ramp_cfg.seed)
    task = dataclasses.replace(whole.task, sets={})
    return dataclasses.replace(whole, cfg=ramp_cfg, task=task, plan=plan, stream=stream)


def _training_config(cfg: LrFindConfig) -> Config:
    return validate({name: value for name, value in cfg.model_dump(mode="json").items() if name != "lr_find"}, Config)


def _fallen(path: Path, r: Setup) -> bool:
    """Whether the reward has fallen below its start, after which the ramp has nothing more to show."""
    found = ramp.curve([record["reward/mean"] for record in measured(path, r)], r.plan.total_batches)
    return found is not None and found.fell


def measured(path: Path, r: Setup) -> list[Record]:
    """One record of each batch, that of its last update, up to the first in which something was not finite."""
    iterations = r.plan.iterations
    records = read_records(path / "metrics.jsonl")[iterations - 1 :: iterations]
    bad = (i for i, record in enumerate(records) if any(record.get(key) is None for key in MEASURED))
    return records[: next(bad, len(records))]


def _reading(path: Path, r: Setup, whole: Setup, cut_short: bool) -> Record:
    rates, rewards, kls = ([record[key] for record in measured(path, r)] for key in MEASURED)
    peak = whole.cfg.optimizer.learning_rate
    full_updates = sum(whole.plan.schedule(t) for t in range(1, whole.plan.total_steps + 1)) / peak
    found = ramp.read(rates, rewards, kls, r.plan.total_batches, full_updates / r.plan.iterations, cut_short)
    return {"rates": rates, "reward": rewards, "kl": kls, **dataclasses.asdict(found)}


def _advice(found: Record, r: Setup, cut_short: bool, lr_min: float | None) -> list[str]:
    """The commands to try next: another ramp where this one has not seen the best rates, a run and a sweep where it has.

    The run's lr_min goes down with a rate below it.
    """
    if found["suggested"] is None:
        return [_other_ramp(found, r, cut_short)]
    further = [_further_up(found["rates"][-1], r)] if found["beyond"] == "above" and found["rates"][-1] < 1 else []
    low, high = (rounded(rate) for rate in found["range"])
    grid = ",".join(f"{rate:g}" for rate in dict.fromkeys((low, found["suggested"], high)))

    def at(least: float, rates: str) -> list[str]:
        changes = with_lr_min({RATE: least}, lr_min) | {RATE: rates}
        return [*less(r.overrides, "lr_find.", *changes), *(f"{key}={value}" for key, value in changes.items())]

    return [*further, join(at(found["suggested"], f"{found['suggested']:g}")), join(["--multirun", *at(low, grid)])]


def _other_ramp(found: Record, r: Setup, cut_short: bool) -> str:
    """Lower where it began too high, further up where the policy hardly moved, else more steps, as many as an epoch has.

    Where it had all of them, larger groups, whose rewards are less noisy. One that was cut short is to be made again.
    """
    if found["beyond"] == "below":
        first = r.plan.schedule(1)
        ends = {"lr_find.lr_low": rounded(first / 100), "lr_find.lr_high": rounded(max([first, *found["rates"]]))}
        return join([*less(r.overrides, *ends), *(f"{key}={rate:g}" for key, rate in ends.items())], "lr-find")
    reached = found["rates"][-1] if found["rates"] else 1.0
    if not cut_short and reached < 1 and found["kl"][-1] < ramp.MOVED:
        return _further_up(reached, r)
    most = len(r.task.train) // r.cfg.training.prompts_per_step * r.plan.iterations
    steps = r.plan.total_steps if cut_short else min(2 * r.plan.total_steps, most)
    key, value = "lr_find.num_steps", steps
    if steps == r.plan.total_steps and not cut_short:
        key, value = "grpo.num_generations", 2 * r.cfg.grpo.num_generations
    return join([*less(r.overrides, key), f"{key}={value}"], "lr-find")


def _further_up(reached: float, r: Setup) -> str:
    higher = f"lr_find.lr_high={min(1.0, rounded(100 * reached)):g}"
    return join([*less(r.overrides, "lr_find.lr_high"), higher], "lr-find")


def _write(path: Path, found: Record, advice: list[str], interrupted: bool, updates: int) -> None:
    """Marks the run as completed even if the ramp ended early, and replaces its advice, which would be to resume it."""
    replace_text(path / "lr_find.json", json.dumps(found, indent=2) + "\n")
    summary = json.loads((path / "summary.json").read_text())
    status = "interrupted" if interrupted else "completed"
    replace_text(path / "summary.json", json.dumps(summary | {"status": status, "advice": advice}, indent=2) + "\n")
    if len(found["rates"]) > 1:
        replace_text(path / "lr_find.svg", as_svg(found["reward"], _title(found), updates))


def _title(found: Record) -> str:
    return f"reward, at rates from {found['rates'][0]:.1e} to {found['rates'][-1]:.1e}"


def _show(path: Path, found: Record, advice: list[str], console: Console, updates: int) -> None:
    if len(found["rates"]) > 1:
        say(console, f"\n{_title(found)}\n{in_characters(found['reward'], updates)}")
    say(console, f"\n{found['conclusion']}")
    if found["suggested"] is not None:
        say(console, f"Suggested: {RATE}={found['suggested']:g}")
    say(console, "\n".join([f"Folder: {path}, with report.html\n\nNext:", *(f"  {line}" for line in advice)]))
