"""The close of a search: the verdict, `best.yaml`, and the command of step 5."""

from __future__ import annotations

import statistics

from omegaconf import OmegaConf

from agent_tunix.config.commands import join, less, value_text
from agent_tunix.config.load import config_folder
from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.doctor.seeds import gained
from agent_tunix.lab.report.page import report_on
from agent_tunix.lab.tune import wording
from agent_tunix.lab.tune.config import MOST_RATES, TuneConfig
from agent_tunix.lab.tune.search import FINALISTS, Best
from agent_tunix.lab.tune.session import Session
from agent_tunix.lab.tune.stages import LR_MIN, RATE, Settings, candidate, possible, stages, start
from agent_tunix.training.horizon import Plan
from agent_tunix.training.run_folder import replace_text
from agent_tunix.types import Record

HEAD = """# @package _global_
# Found by agent-tunix tune. {verdict}
# Save it as conf/experiment/best.yaml for +experiment=best, or with another experiment '+experiment=[quick_test,best]';
# or as conf/optimizer/best.yaml for optimizer=best, which an experiment that sets a rate itself overrules.
"""


def close(s: Session, plan: Plan, best: Best | None, settings: Settings, status: str, words: str) -> None:
    """Writes and shows what a search came to; `settings` are the best so far where it ended early."""
    concluded = [stage for stage in s.record["stages"] if stage["chosen"] is not None]
    found = best or Best(settings, [accuracy for one, accuracy in s.ended() if one == settings][:1])
    s.record["status"] = status
    if concluded:
        changed = possible(s.base, found.settings)
        s.record["best"] = changed
        s.record["command"] = step_5(s, changed)
        s.record["gained"] = gained(starts(s, found), found.accuracies)
        s.record["verdict"] = _verdict(s, plan, found, best is not None, words)
        replace_text(s.folder / "best.yaml", best_yaml(s, changed))
    else:
        s.record["verdict"] = words
    s.write()
    report_on(s.folder, s.say)
    _show(s)


def step_5(s: Session, changed: Settings) -> str:
    """The whole run with the best settings, by the user's own overrides."""
    own = less(s.overrides, "tune.", *changed)
    return join([*own, *(f"{key}={value_text(value)}" for key, value in changed.items())])


def best_yaml(s: Session, changed: Settings) -> str:
    """One file that serves as an experiment and as an optimizer: it says from the root which section it fills.

    It chooses the schedule that the settings were found with; scheduler=... on the command line overrules it.
    """
    optimizer = candidate(s.base, changed).optimizer.model_dump(mode="json")
    schedule = {"override /scheduler@_global_.scheduler": s.base.scheduler.scheduler_name}
    tree: Record = {"defaults": [schedule, "_self_"]}
    tree["optimizer"] = {key: value for key, value in optimizer.items() if value is not None}
    own = _of_schedule(s.cfg) | ({"lr_min": changed[LR_MIN]} if LR_MIN in changed else {})
    tree |= {"scheduler": own} if own else {}
    return HEAD.format(verdict=s.record["verdict"]) + OmegaConf.to_yaml(OmegaConf.create(tree))


def _of_schedule(cfg: TuneConfig) -> Record:
    """The keys in which the user's schedule differs from the shipped file of its name."""
    shipped = OmegaConf.load(config_folder() / "scheduler" / f"{cfg.scheduler.scheduler_name}.yaml")
    own = cfg.scheduler.model_dump(mode="json")
    return {key: value for key, value in own.items() if value != OmegaConf.select(shipped, key)}


def starts(s: Session, found: Best) -> list[Accuracy]:
    """The accuracies of the best settings' seeds before training; none where one of them is not known."""
    seeds = range(s.cfg.seed, s.cfg.seed + len(found.accuracies))
    known = {trial.job.cfg.seed: a for trial in s.trials if (a := trial.accuracy(0)) is not None}
    return [known[seed] for seed in seeds] if known.keys() >= set(seeds) else []


def _verdict(s: Session, plan: Plan, found: Best, whole: bool, words: str) -> str:
    before = statistics.fmean(a.share for a in known) if (known := starts(s, found)) else None
    notes = [words, _not_done(s)] if not whole else []
    notes += [] if s.record["gained"] else ["That is no gain beyond noise."]
    notes += [_within_noise(found), _unmoved(s), at_the_edge(s, found.settings), _shorter(s, plan), _without_warm_up(s)]
    return wording.verdict(found.settings, found.accuracies, before, [note for note in notes if note])


def _not_done(s: Session) -> str:
    done = {stage["name"] for stage in s.record["stages"] if stage["chosen"] is not None}
    left = [stage.title for stage in stages(s.cfg, start(s.cfg), s.end) if stage.name not in done]
    return f"Not done: {', '.join([*left, *(['finalists'] if FINALISTS not in done else [])]).lower()}."


def _within_noise(found: Best) -> str:
    return f"No difference within noise from {'; '.join(map(wording.label, found.tied))}." if found.tied else ""


def _unmoved(s: Session) -> str:
    same = [stage["title"].lower() for stage in s.record["stages"] if stage.get("no_difference")]
    if not same:
        return ""
    of = ", ".join(same)
    return f"No difference within noise, as far as they were trained, between the values that were tried of {of}."


def at_the_edge(s: Session, settings: Settings) -> str:
    """Says so where no rate beyond the best was tried, or none did anything; the fine rates reach beyond the coarse ones."""
    tried = [trial.settings[RATE] for trial in s.trials]
    coarse: Record = next(iter(s.record["stages"]), {})
    nothing = not s.record["gained"] and coarse.get("no_difference")
    if min(tried) < settings[RATE] < max(tried) and not nothing:
        return ""
    grid = f"{min(tried):g} to {max(tried):g}"
    more = s.cfg.tune.rates + 2
    further = f": tune.rates={more} looks further" if more <= MOST_RATES else ""
    if nothing:
        return f"No rate from {grid} moved the accuracy{further}."
    return f"The rate is at the edge of what was tried, {grid}{further}."


def _shorter(s: Session, plan: Plan) -> str:
    short = s.end < plan.total_steps
    return f"It was found with runs of {s.end} updates; the whole run has {plan.total_steps}." if short else ""


def _without_warm_up(s: Session) -> str:
    given = s.cfg.scheduler.warmup_steps
    return "" if given is None else f"scheduler.warmup_steps={given} is given, so the warm-up ratio was not tuned."


def _show(s: Session) -> None:
    s.say(f"\n{s.record['verdict']}\nSearch folder: {s.folder}, with report.html ({s.record['seconds']:.0f} s)")
    if s.record["status"] == "interrupted":
        s.say(f"\nTo go on:\n  {join([*s.overrides, f'hydra.run.dir={value_text(str(s.folder))}'], 'tune')}")
    if s.record["command"]:
        s.say(f"\nThe settings, as a file: {s.folder / 'best.yaml'}\nStep 5, the whole run:\n  {s.record['command']}")
