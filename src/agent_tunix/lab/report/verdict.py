"""The verdict on a run or a sweep, which comes first: a sentence that a person who was not there understands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agent_tunix.lab.doctor.examination import Report
from agent_tunix.lab.doctor.finding import Finding, Severity
from agent_tunix.lab.doctor.records import FINISHED, TOLD_APART, Accuracy, RunRecords, difference
from agent_tunix.lab.doctor.repeats import Repeats
from agent_tunix.lab.doctor.seeds import gained, mean_of, over_seeds
from agent_tunix.lab.doctor.signs import reward_or_loss
from agent_tunix.training.progress import counted

NAMED = 4  # candidates in one sentence
ENDED = (*FINISHED, "rolled back")  # statuses of a candidate that will not change any more
WORKING = ("unfinished", "running")
GOING = (*WORKING, "waiting")  # where no error has ended the sweep
LEADS = {"healthy": "Healthy", "undecided": "Undecided", "too short": "Too short to judge"}
MOODS = {"healthy": "good", "ill": "bad"}
# What is healthy so far may not stay so.
CUT_SHORT = {"unfinished": "going", "interrupted": "unsure", "paused": "unsure", "failed": "bad"}
ENDINGS = {
    "unfinished": "The run has not ended: it is still at work, or was killed.",
    "interrupted": "It was interrupted before its planned end, and can be resumed.",
    "paused": "It rests before its planned end, where the search that it belongs to has left it.",
    "diverged": "The guard stopped it: the numbers had got out of hand. That update did not reach the weights.",
    "failed": "It ended in an error.",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    mood: str  # good | bad | unsure | going
    lead: str
    text: str


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def with_interval(seen: Accuracy) -> str:
    low, high = seen.interval
    return f"{percent(seen.share)} (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"


def run_verdict(run: RunRecords, report: Report) -> Verdict:
    """The doctor's verdict, what became of the accuracy, and how the run ended."""
    status = run.status
    ills = _ills(report.findings)
    lead = f"Ill ({', '.join(ills)})" if ills else LEADS[report.verdict]
    mood = MOODS.get(report.verdict, "unsure")
    if status in CUT_SHORT and not ills:
        lead, mood = f"{status.capitalize()}, {lead[0].lower()}{lead[1:]} so far", CUT_SHORT[status]
    ending = f"It ended in an error: {run.error}" if run.error else ENDINGS.get(status) or _stopped(run)
    return Verdict(mood, lead, " ".join(filter(None, [f"{_progress(run)}.", ending])))


def _stopped(run: RunRecords) -> str | None:
    if (stopped := run.stopped_early) is None:
        return None
    metric = str(stopped.get("metric")).replace("_", " ")
    return f"It stopped early, as {metric} had not been better since update {stopped.get('best_step')}."


def _progress(run: RunRecords) -> str:
    updates = counted(run.reached, "update") + (f", {run.dropped} of them dropped" if run.dropped else "")
    seen = run.accuracies()
    if len(seen) > 1:
        return f"held-out accuracy {change(seen[0], seen[-1])} in {updates}"
    if seen:
        return f"held-out accuracy was {with_interval(seen[0])} at update {seen[0].step}, the only evaluation in {updates}"
    name, moved = reward_or_loss(run)
    if moved is not None:
        return f"the {name} went from {moved.early:.3g} to {moved.late:.3g} in {updates}; nothing was evaluated"
    return f"nothing was evaluated in {updates}"


def change(first: Accuracy, last: Accuracy) -> str:
    """From one accuracy to another, and whether noise alone could do that."""
    moved = difference(first, last)
    ends = f"from {percent(first.share)} to {with_interval(last)}"
    if abs(moved.z) < TOLD_APART:
        return f"went {ends}, which may be noise,"
    return f"{'rose' if moved.gain > 0 else 'fell'} {ends}"


@dataclasses.dataclass(frozen=True)
class Standing:
    """What the verdict on a sweep needs of a candidate."""

    label: str
    status: str
    first: Accuracy | None
    end: Accuracy | None

    @property
    def reached(self) -> str:
        return with_interval(self.end) if self.end else "-"

    @property
    def gained(self) -> bool:
        return not self.first or not self.end or difference(self.first, self.end).z >= TOLD_APART


@dataclasses.dataclass(frozen=True)
class OverSeeds(Standing):
    """That of a candidate with several seeds: its accuracies are their means."""

    firsts: Sequence[Accuracy]
    ends: Sequence[Accuracy]

    @property
    def reached(self) -> str:
        mean = over_seeds(self.ends)
        interval = f"95 % interval {100 * mean.low:.1f} to {100 * mean.high:.1f} %"
        return f"{percent(mean.middle)} ({interval}) over {counted(len(self.ends), 'seed')}"

    @property
    def gained(self) -> bool:
        return gained(self.firsts, self.ends)


def over_its_seeds(label: str, seeds: Sequence[Standing]) -> OverSeeds:
    """Of those seeds that were evaluated; what they were before is given where it is known of all."""
    measured = [(one.first, one.end) for one in seeds if one.end]
    ends = [end for _, end in measured]
    firsts = [first for first, _ in measured if first]
    firsts = firsts if len(firsts) == len(ends) else []
    return OverSeeds(label, "", mean_of(firsts) if firsts else None, mean_of(ends) if ends else None, firsts, ends)


def sweep_verdict(
    all_: Sequence[Standing],
    best: Standing | None,
    tied: Sequence[Standing],
    findings: Sequence[Finding] = (),
    candidates: Sequence[Repeats] = (),
) -> Verdict:
    """The best of the candidates so far; one that was cut short is not judged by what it had come to.

    `findings` are those on the whole grid: the best of a grid that is ill is not what was looked for. `candidates` are given
    where jobs, which are `all_`, repeat them with several seeds.
    """
    ills, failed = _ills(findings), any(one.status == "failed" for one in all_)
    of_grid = f" ({', '.join(ills)})" if ills else ""
    left = sum(one.status not in ENDED for one in all_)
    under_way = any(one.status in (WORKING if failed else GOING) for one in all_)
    count, kind = (len(candidates), "jobs") if candidates else (len(all_), "candidates")
    not_ended = _not_ended(all_, left, kind)
    unranked = [f" {one.not_ranked}." for one in candidates if one.diverged]
    lost = "".join(unranked)
    if best is None or best.end is None:
        if under_way:
            return Verdict("going", "Under way", f"no candidate has been evaluated yet.{lost}{not_ended}")
        none = f"none of {count} has a final accuracy{' with every seed' if candidates else ''}."
        lead = f"{'Ended in an error' if failed else 'No best candidate'}{of_grid}"
        return Verdict("bad", lead, f"{none}{lost}{not_ended}")
    accuracy = f"held-out accuracy {'stands' if left else 'ends'} at {best.reached}, on {best.end.n} problems"
    others = f" Noise does not tell it from {listed([one.label for one in tied])}.{lost}" if tied else lost
    if not tied and not left and count - len(unranked) > 1:
        others += " Every other candidate is worse by more than noise."
    start = f"; before training it was {percent(best.first.share)}" if best.first else ""
    none = "" if best.gained else " That is no gain beyond noise."
    mood = "going" if under_way else "good" if best.gained and not left and not ills else "unsure"
    so_far = " so far" if left else ""
    lead = f"Best of {count}{so_far}: {best.label}{of_grid}"
    if not best.label:
        seeds, others = counted(len(candidates[0].measured), "seed"), " A better seed is luck."
        lead = f"{seeds}{so_far}: {percent(best.end.share)}"
    return Verdict(mood, lead, f"{accuracy}{start}.{none}{others}{not_ended}")


def _not_ended(all_: Sequence[Standing], left: int, kind: str) -> str:
    failed = [one.label for one in all_ if one.status == "failed"]
    by_error = f" An error, which the table names, has ended {listed(failed)}." if failed else ""
    return f" Not ended yet: {left} of {len(all_)} {kind}.{by_error}" if left else ""


def _ills(findings: Sequence[Finding]) -> list[str]:
    return [finding.illness for finding in findings if finding.severity != Severity.MILD]


def listed(names: Sequence[str]) -> str:
    if len(names) > NAMED + 1:
        names = [*names[:NAMED], f"{len(names) - NAMED} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
