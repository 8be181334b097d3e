"""The table of symptoms, and the diagnosis of a run that shows some of them: at its end, or while it is young."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from agent_tunix.lab.doctor import agents, grpo, optimizer
from agent_tunix.lab.doctor.finding import Finding, Severity
from agent_tunix.lab.doctor.records import RunRecords, difference, late
from agent_tunix.lab.doctor.signs import ACCURACIES, SHORT, learnt, near_ceiling, reward_or_loss

Symptom = Callable[[RunRecords], Finding | None]

# Of equal severity, the first in this list is shown first: causes before what they cause.
SYMPTOMS: tuple[Symptom, ...] = (
    optimizer.diverging,
    optimizer.dropped,
    agents.failing,
    grpo.wrong_reward,
    agents.paid_for_calling,
    optimizer.collapsed,
    grpo.kl_runaway,
    grpo.blind,
    agents.malformed,
    agents.never_calling,
    agents.repeating,
    agents.cut_short,
    grpo.truncated,
    grpo.too_hard,
    grpo.no_signal,
    grpo.discarded,
    grpo.never_positive,
    grpo.entropy_collapse,
    grpo.mismatch,
    optimizer.long_warmup,
    optimizer.spent_rate,
    optimizer.lost_updates,
    grpo.format_only,
    grpo.overfitting,
    grpo.clipped_ratios,
    optimizer.oscillating,
    optimizer.relapse,
    optimizer.not_learning,
    optimizer.slow,
    grpo.control,
    optimizer.clipped_gradients,
)
# What a finding explains: its consequences are no illnesses of their own, and their remedies would not help.
IDLE = {"not learning", "slow convergence", "format learnt but not arithmetic", "updates that do not survive"}
SILENT = {"no signal", "task too hard"}
RUIN = IDLE | SILENT | {"answers truncated", "entropy collapse", "rewards never positive", "oscillating", "overfitting"}
EXPLAINS = {
    "diverging": RUIN,
    "policy collapse": RUIN,
    "reward against accuracy": IDLE | {"policy collapse", "oscillating", "overfitting", "KL runaway"},
    "completions are noise": IDLE | SILENT | {"answers truncated", "rewards never positive"},
    "answers truncated": IDLE | SILENT | {"rewards never positive", "entropy collapse"},
    "KL runaway": IDLE,
    "environment fails": IDLE | SILENT | {"rewards never positive"},
    "tool never called": IDLE | SILENT | {"rewards never positive"},
    "calls that cannot be read": IDLE | SILENT | {"rewards never positive", "the same call again", "episodes cut"},
    "the same call again": IDLE | SILENT | {"rewards never positive", "episodes cut", "answers truncated"},
    "episodes cut": IDLE | SILENT | {"rewards never positive", "answers truncated"},
    "paid for calling": IDLE | {"overfitting"},
    "task too hard": IDLE | {"most groups thrown away"},
    "no signal": IDLE | {"most groups thrown away"},
    "most groups thrown away": IDLE,
    "rewards never positive": IDLE,
    "entropy collapse": IDLE | {"task too hard"},
    "sampler/trainer mismatch": IDLE,
    "warm-up as long as the run": IDLE,
    "rate spent early": IDLE,
    "updates that do not survive": IDLE - {"updates that do not survive"},
    "format learnt but not arithmetic": {"slow convergence", "not learning"},
    "overfitting": {"slow convergence", "not learning"},
    "clipping on every step": IDLE,
    "oscillating": {"gain lost again", "not learning"},
    "gain lost again": {"slow convergence", "not learning"},
    "a control": IDLE,
}
# What can be seen while a run is young, without waiting for its end.
EARLY: tuple[Symptom, ...] = (
    agents.failing,
    grpo.blind,
    agents.malformed,
    agents.never_calling,
    agents.cut_short,
    grpo.truncated,
    grpo.too_hard,
    grpo.no_signal,
    grpo.never_positive,
    grpo.entropy_collapse,
    grpo.mismatch,
    grpo.kl_runaway,
    optimizer.collapsed,
    optimizer.lost_updates,
)
EARLIEST = 5  # steps before the first warning: one batch may be unlucky
RECENT = 60  # steps a warning looks back, so that asking costs the same all through a run
JUDGED_BY = {
    False: "The GRPO loss is near zero by construction; a run is judged by reward, held-out accuracy, KL and gradient norm.",
    True: "A supervised run has no rewards; it is judged by its loss and by held-out accuracy.",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What the doctor says of one run."""

    verdict: str  # ill | healthy | undecided | too short
    vitals: dict[str, str]
    findings: list[Finding]
    judged_by: str


def diagnose(run: RunRecords) -> list[Finding]:
    """All findings that no other explains, the gravest first."""
    ranks = list(Severity)
    return sorted(_unexplained(run, SYMPTOMS), key=lambda finding: ranks.index(finding.severity))


def early_warnings(run: RunRecords) -> list[Finding]:
    """What should be said while there is time to stop: cheap enough to ask every few steps; mild findings are left out."""
    recent = dataclasses.replace(run, metrics=run.metrics[-RECENT:])
    found = _unexplained(recent, EARLY) if run.steps >= EARLIEST else []
    return [finding for finding in found if finding.severity != Severity.MILD]


def _unexplained(run: RunRecords, symptoms: Iterable[Symptom]) -> list[Finding]:
    found = [finding for symptom in symptoms if (finding := symptom(run)) is not None]
    causes = [f.illness for f in found if f.severity != Severity.MILD or f.illness == "a control"]
    explained = set().union(*(EXPLAINS.get(cause, set()) for cause in causes))
    return [finding for finding in found if finding.illness not in explained]


def examine(run: RunRecords) -> Report:
    findings = diagnose(run)
    if any(finding.severity != Severity.MILD for finding in findings):
        verdict = "ill"
    elif learnt(run) or (run.steps >= SHORT and (near_ceiling(run) or any(f.illness == "a control" for f in findings))):
        verdict = "healthy"
    else:
        verdict = "too short" if run.steps < SHORT else "undecided"
    return Report(verdict, vitals(run), findings, JUDGED_BY[run.supervised])


def vitals(run: RunRecords) -> dict[str, str]:
    """The numbers by which a run is judged, whatever is found."""
    early = ", stopped early" if run.stopped_early else ""
    shown = {key.replace("_name", ""): value for key, value in run.metadata.items()}
    shown |= {"steps": f"{run.steps}, status {run.summary.get('status', 'unknown')}{early}"}
    if run.error:
        shown["ended by"] = run.error
    shown["learning rate"] = f"{run.setting('optimizer.learning_rate')}"
    for key in ACCURACIES:
        seen = run.accuracies(key)
        if len(seen) > 1:
            error = difference(seen[0], seen[-1]).error
            shown[f"held-out {key.replace('_', ' ')}"] = f"{seen[0]} -> {seen[-1]} (+- {error:.1%}, {seen[-1].n} problems)"
    name, change = reward_or_loss(run)
    if change is not None:
        shown[name] = f"{change.early:.3g} -> {change.late:.3g} (+- {change.error:.2g}, first and last third)"
    for key, name in (("kl", "kl at the end"), ("entropy", "entropy at the end"), ("grad_norm", "gradient norm at the end")):
        end = late(run.values(key))
        if end is not None and (key != "kl" or run.measures_kl):
            shown[name] = f"{end:.2g}"
    return shown
