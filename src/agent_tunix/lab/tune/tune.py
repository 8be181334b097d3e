"""`agent-tunix tune`: coarse rate, fine rate, warm-up and weight decay, in one command and within a budget.

The folder of a search holds `tune.yaml` (its configuration), `tune.json` (its record), the sweeps of its stages, and at the
end `best.yaml`. Started again with the same configuration in the same folder, a search goes on.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from agent_tunix.config.commands import join
from agent_tunix.config.load import config_text, leaves, read_saved, validate
from agent_tunix.config.schema import Config
from agent_tunix.errors import DivergenceError, UserError
from agent_tunix.lab.advice import LabAdvisor
from agent_tunix.lab.sweep import sweep
from agent_tunix.lab.tune.closing import close
from agent_tunix.lab.tune.config import TuneConfig
from agent_tunix.lab.tune.halving import Price, lengths, longest, rungs, whole_cost
from agent_tunix.lab.tune.search import measure_pace, search
from agent_tunix.lab.tune.session import AllDivergedError, EndedError, Session
from agent_tunix.lab.tune.stages import Settings, brackets, candidate, shortened, stages, start, training_config
from agent_tunix.training import loading
from agent_tunix.training.guard import Interruption
from agent_tunix.training.horizon import Plan, make_plan
from agent_tunix.training.progress import counted, say
from agent_tunix.training.run_folder import claimed, finite, read_object, replace_text
from agent_tunix.training.setup import Loaded, prepare
from agent_tunix.training.solve_rates import on_solvable
from agent_tunix.types import Record

MARGIN = 0.9  # of a budget in time: what was measured is not quite what will be


def run(cfg: TuneConfig, folder: Path, console: Console, overrides: Sequence[str] = ()) -> Record:
    """Searches, or goes on with the search in `folder`; returns what it also writes to tune.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with Interruption() as interruption, claimed(folder):
        return _in_folder(cfg, folder, console, overrides, interruption)


def _in_folder(
    cfg: TuneConfig, folder: Path, console: Console, overrides: Sequence[str], interruption: Interruption
) -> Record:
    """As `run`, in a folder that no other process writes to."""
    earlier = check(cfg, folder)
    loading.start_device(partial(say, console))
    s, plan = begin(cfg, folder, console, overrides, interruption)
    settings, best, all_diverged = start(cfg), None, False
    try:
        fit(s, plan, settings, earlier)
        best = search(s, settings)
        status, words = "completed", ""
    except EndedError as end:
        status, words, all_diverged = end.status, str(end), isinstance(end, AllDivergedError)
    if not (folder / "tune.yaml").exists():
        s.say(f"{words} Nothing was tried yet.")
        return s.record
    close(s, plan, best, settings, status, words)
    if all_diverged and not s.record["best"]:
        stage = str(folder / s.record["stages"][-1]["folder"])
        raise DivergenceError(f"The search found no settings to train with. What went wrong:\n  {join([stage], 'doctor')}")
    return s.record


def check(cfg: TuneConfig, folder: Path) -> Record:
    """Refuses what cannot be tuned; returns the record of the search to be continued, or an empty one."""
    if cfg.dry_run or cfg.training.resume:
        raise UserError("tune makes runs of its own: it takes neither dry_run nor training.resume.")
    loading.refuse_others(folder, "tune.json")
    if not (folder / "tune.yaml").exists():
        return {}
    try:
        saved = leaves(validate(read_saved(folder / "tune.yaml", TuneConfig), TuneConfig).model_dump(mode="json"))
    except UserError as fault:
        raise UserError(
            f"{folder / 'tune.yaml'} is not the whole configuration of a search. Choose another folder.\n{fault}"
        ) from fault
    wanted = leaves(cfg.model_dump(mode="json"))
    differing = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
    if differing:
        raise UserError(
            f"{folder} holds a search with another configuration, which differs in {', '.join(differing)}. "
            "Go on with the same overrides, or choose another folder."
        )
    earlier = read_object(folder / "tune.json")
    if not _goes_on_from(earlier):
        raise UserError(
            f"{folder / 'tune.json'} cannot be read, and a search cannot go on without it. Choose another folder."
        )
    return earlier


def _goes_on_from(record: Record) -> bool:
    """Whether this is the record of a search, as far as another process needs it to go on."""
    batches, price = record.get("batches"), record.get("price")
    numbers = [record.get("seconds"), *(price.values() if isinstance(price, dict) else [])]
    whole = type(batches) is int and batches > 0 and all(map(finite, numbers))
    return whole and set(price or ()) == {"update", "rung"} and record.get("fuse", "auto") in typing.get_args(sweep.Fuse)


def begin(
    cfg: TuneConfig, folder: Path, console: Console, overrides: Sequence[str], interruption: Interruption
) -> tuple[Session, Plan]:
    """Loads what all candidates share; whatever the user must mend is found here, before anything is written."""
    loaded, whole = Loaded(), training_config(cfg)
    notice = partial(say, console)
    plan = on_solvable(prepare(candidate(whole, start(cfg)), loaded, notice, advisor=LabAdvisor()), notice).plan
    refuse_impossible(cfg, whole, plan, "in whole runs")
    candidate(whole, {"seed": cfg.seed + cfg.tune.seeds - 1})  # the last that a finalist is trained with
    record: Record = {
        "status": "running",
        "budget": str(cfg.tune.budget),
        "stages": [],
        "best": {},
        "command": "",
        "verdict": "",
    }
    return Session(cfg, whole, [plan.total_steps], folder, overrides, console, loaded, interruption, record), plan


def refuse_impossible(cfg: TuneConfig, base: Config, plan: Plan, length: str) -> None:
    """Names the first value of a stage that no run can have."""
    examples = plan.batches_per_epoch * base.training.prompts_per_step
    for stage in stages(cfg, start(cfg), plan.total_steps):
        for value in stage.values:
            try:
                make_plan(candidate(base, {**start(cfg), stage.key: value}), examples)
            except UserError as fault:
                raise UserError(f"tune would try {stage.key}={value:g} {length}: {fault}") from fault


def fit(s: Session, plan: Plan, settings: Settings, earlier: Record) -> None:
    """Sets how long candidates run, so that the whole search is sure to stay within the budget."""
    if earlier:
        batches, s.price, s.spent = earlier["batches"], Price(**earlier["price"]), earlier["seconds"]
        s.fuse = earlier.get("fuse", s.fuse)  # which earlier versions did not write
        s.say(f"Going on with the search in {s.folder}.")
    else:
        limit = s.cfg.tune.seconds
        s.price = Price() if limit is None else measure_pace(s, settings, plan.iterations)
        budget = float(s.cfg.tune.budget) if limit is None else MARGIN * limit - s.seconds()
        batches = _affordable(s, plan, budget)
    s.base, s.places = shortened(s.base, plan, batches), rungs(batches, plan.iterations)
    refuse_impossible(s.cfg, s.base, plan, f"in runs of {s.end} updates, as tune.budget={s.cfg.tune.budget} allows")
    price = {"update": s.price.update, "rung": s.price.rung}
    s.record |= {"batches": batches, "updates": s.end, "rungs": list(s.places), "price": price}
    s.write()
    replace_text(s.folder / "tune.yaml", config_text(s.cfg))
    of = "" if s.end == plan.total_steps else f" of the {plan.total_steps} that the whole run has"
    s.say(f"Candidates run for {counted(s.end, 'update')}{of} and are compared after {', '.join(map(str, s.places))}.")


def _affordable(s: Session, plan: Plan, budget: float) -> int:
    def cost(batches: int) -> float:
        places = rungs(batches, plan.iterations)
        more = s.cfg.tune.finalists * (s.cfg.tune.seeds - 1)
        return whole_cost(brackets(s.cfg, places[-1]), places, more, s.price)

    possible = lengths(plan.batches_per_epoch, plan.total_batches // plan.batches_per_epoch)
    found = longest(budget, possible, cost)
    if found is None:
        least = min(possible)
        if s.cfg.tune.seconds is None:
            enough, unit = str(math.ceil(cost(least))), " updates"
        else:
            enough, unit = f"{math.ceil((cost(least) + s.seconds()) / MARGIN / 60)}m", ""
        raise UserError(
            f"tune.budget={s.cfg.tune.budget} is too small: with runs of {least * plan.iterations} updates, the shortest "
            f"worth comparing, the search may take {enough}{unit}. Set tune.budget={enough}, or lower tune.seeds, "
            "tune.finalists or tune.rates."
        )
    return found
