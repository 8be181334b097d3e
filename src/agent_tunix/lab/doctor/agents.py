"""Illnesses of agents: tools that are not used or used wrongly, episodes that do not come to their end."""

from __future__ import annotations

from typing import Any

from agent_tunix.lab.doctor.finding import Finding, Severity, unless
from agent_tunix.lab.doctor.grpo import answer_functions, weights
from agent_tunix.lab.doctor.records import RunRecords, difference, late, trend
from agent_tunix.lab.doctor.remedies import rerun
from agent_tunix.lab.doctor.signs import CERTAIN, SURE, learnt, progress, reward_rose

HARDLY = 0.02  # share of episodes that call a tool, below which calls are too few to be learnt from
MALFORMED = 0.3  # share of calls that could not be read
REPEATING = 0.3  # share of episodes that make one call again and again
CUT = 0.5  # share of episodes that a limit ends
FAILED = 0.2  # share of episodes whose environment goes wrong
RISE = 0.2  # in the share of episodes that call, from which a rising reward may come of calling alone


def never_calling(run: RunRecords) -> Finding | None:
    """Tools that are there and not called: no completion of a group differs by having called one."""
    calling = late(run.values("episode/calling"))
    if calling is None or calling >= HARDLY:
        return None
    changes: dict[str, Any] = {"grpo.num_generations": int(2 * run.number("grpo.num_generations", 4))}
    if run.setting("environment.tool_format") is not None:
        changes = {"environment.tool_format": None}
    elif run.number("generation.temperature", 1.0) < 1.0:
        changes = {"generation.temperature": 1.0}
    evidence = (
        f"{calling:.1%} of the last episodes called a tool, so that there is nothing to compare with not calling; "
        "data.system_prompt may say when to call one"
    )
    return Finding("tool never called", unless(learnt(run)), evidence, rerun(run, changes))


def malformed(run: RunRecords) -> Finding | None:
    """Calls whose names or arguments cannot be read."""
    share, calling = late(run.values("calls/malformed")), late(run.values("episode/calling"))
    if share is None or share < MALFORMED or not calling:
        return None
    given = run.setting("environment.tool_format")
    evidence = f"{share:.0%} of the last calls could not be read; environment.tool_format={given or 'null'}"
    other = None if given is not None else "hermes"
    return Finding(
        "calls that cannot be read", unless(learnt(run)), evidence, rerun(run, {"environment.tool_format": other})
    )


def repeating(run: RunRecords) -> Finding | None:
    """One call made again and again: its answer is not heeded."""
    share = late(run.values("episode/repeating"))
    if share is None or share < REPEATING:
        return None
    turns = int(run.number("environment.max_turns", 8))
    evidence = f"{share:.0%} of the last episodes made one call three times or more, in up to {turns} turns"
    return Finding(
        "the same call again", unless(learnt(run)), evidence, rerun(run, {"environment.max_turns": max(2, turns // 2)})
    )


def cut_short(run: RunRecords) -> Finding | None:
    """Episodes that a limit ends: of turns where they have about as many as they may, else of tokens."""
    cut, turns = late(run.values("episode/cut")), late(run.values("episode/turns"))
    if cut is None or turns is None or cut < CUT:
        return None
    most, longest = int(run.number("environment.max_turns", 8)), int(run.number("generation.max_generation_steps", 512))
    if turns >= CUT * most:
        limit, changes = f"environment.max_turns={most}", {"environment.max_turns": 2 * most}
    else:
        limit, changes = f"generation.max_generation_steps={longest}", {"generation.max_generation_steps": 2 * longest}
    evidence = f"{cut:.0%} of the last episodes were cut, after {turns:.1f} turns on average, by {limit}"
    return Finding("episodes cut", unless(learnt(run)), evidence, rerun(run, changes))


def failing(run: RunRecords) -> Finding | None:
    """Episodes whose environment raises or takes too long teach what it does, not what is wanted."""
    share = late(run.values("episode/failed"))
    if share is None or share < FAILED:
        return None
    evidence = f"the environment failed in {share:.0%} of the last episodes; `fault` in samples.jsonl says how"
    changes = {} if run.setting("environment.unfinished") == "leave" else {"environment.unfinished": "leave"}
    return Finding("environment fails", unless(learnt(run)), evidence, rerun(run, changes))


def paid_for_calling(run: RunRecords) -> Finding | None:
    """More calls and more reward, and no more solved: it is the call that is paid."""
    calling, seen = trend(run.values("episode/calling")), run.accuracies()
    if calling is None or calling.gain < RISE or calling.z < CERTAIN or not reward_rose(run) or len(seen) < 2:
        return None
    if difference(seen[0], seen[-1]).z >= SURE:
        return None
    given = {key.removeprefix("reward/") for record in run.metrics for key in record if key.startswith("reward/")}
    names = (given - {"mean", "std"} - set(answer_functions(run))) | (set(weights(run)) - set(answer_functions(run)))
    changes = {name: change for name in names if (change := trend(run.values(f"reward/{name}")))}
    risen = sorted(name for name, change in changes.items() if change.gain > 0 and change.z >= CERTAIN)
    evidence = (
        f"episodes that call a tool {calling.early:.0%} -> {calling.late:.0%}; {progress(run)}; "
        f"what rose is {', '.join(risen) or 'none of the rewards by itself'}"
    )
    remedy = rerun(run, {f"reward.weights.{name}": 0.0 for name in risen})
    return Finding("paid for calling", Severity.SERIOUS, evidence, remedy)
