"""Illnesses that any optimizer can have, and the signs by which each is known: one small function per illness.

The loss of GRPO is near zero by construction (advantages sum to zero in each group), so a run is judged by its reward,
held-out accuracy, KL divergence and gradient norm; a supervised run, which has no rewards, by its loss and accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_tunix.environments.rewards import is_fault_of_reward
from agent_tunix.lab.doctor.finding import Finding, Severity, unless
from agent_tunix.lab.doctor.records import RunRecords, late, trend
from agent_tunix.lab.doctor.remedies import GUARD, lower_rate, past_bad_rewards, raised_rate, rerun, rounded, scaled_rate
from agent_tunix.lab.doctor.signs import (
    FEW,
    SHORT,
    fall_below_start,
    fall_from_best,
    learnt,
    near_ceiling,
    progress,
    reversals,
    reward_fell,
    reward_rose,
    stands_still,
    still_climbing,
    swinging,
    would_see,
)
from agent_tunix.training.run_folder import finite

KL_EXPLODED = 5.0  # nats per token: the policy writes what its start would write with probability e^-5 a token
KL_SLOW = 1e-2  # a demo run that learns well passes this after six steps, one at a tenth of its rate never
SURVIVAL = 0.1  # share of weights an update changed; float32 adapters are above 0.4 from the first step on
LATE_PEAK = 0.7  # share of the run before the rate's peak; the reference calls 0.2 a strong warm-up
SPENT = 0.05  # share of the peak under which a rate no longer teaches
FAR_ABOVE = 10.0  # times max_grad_norm
MANY_LOST = 0.1  # share of updates
GAIN = 0.15  # accuracy that evaluations must be able to show before its absence counts
CORE = ("loss", "grad_norm", "update_norm", "kl", "entropy", "reward/mean")


def diverging(run: RunRecords) -> Finding | None:
    """Numbers that are no longer numbers, a guard that stopped the run, or a KL or loss beyond all bounds."""
    signs = [
        f"{key} is not finite at {step_range(broken)}"
        for key in CORE
        if (broken := [r["step"] for r in run.metrics if not finite(r.get(key, 0)) and isinstance(r.get("step"), int)])
    ]
    if run.summary.get("status") == "diverged":
        signs.append(f"the guard stopped the run after step {run.summary.get('steps', run.steps)}")
    if rollbacks := run.summary.get("rollbacks"):
        signs.append(f"rollbacks by the guard: {len(rollbacks) if isinstance(rollbacks, list) else rollbacks}")
    if exploded := {step: kl for step, kl in run.series("kl") if kl >= KL_EXPLODED}:
        signs.append(f"kl reached {max(exploded.values()):.3g} nats a token at {step_range(list(exploded))}")
    loss = run.values("loss")
    if run.supervised and len(loss) >= 3 and min(loss[-3:]) > 3 * loss[0] > 0:
        signs.append(f"loss rose from {loss[0]:.3g} to {min(loss[-3:]):.3g}")
    if not signs:
        return None
    severity = Severity.MILD if run.completed and learnt(run) else Severity.GRAVE
    if (faults := _faults(run)) and all(map(is_fault_of_reward, faults)):
        evidence = f"{'; '.join(signs)}: {faults[-1]}; a reward must be a finite number, so mend the function"
        return Finding("diverging", severity, evidence, rerun(run, {GUARD: past_bad_rewards(run.setting(GUARD))}))
    clipping = {"optimizer.max_grad_norm": 0.01} if run.number("optimizer.max_grad_norm", 1.0) > 0.01 else {}
    evidence = "; ".join(signs) + ": the learning rate is too high"
    return Finding("diverging", severity, evidence, rerun(run, {**lower_rate(run), **clipping}))


def dropped(run: RunRecords) -> Finding | None:
    """Updates that `training.on_divergence=ignore` left out: not applied, or, where a reward was no number, not computed."""
    if run.setting(GUARD) != "ignore":
        return None
    lost, last = run.dropped, run.reached
    if lost == 0:
        return None
    evidence = f"{lost} of {last} updates were dropped, as numbers were out of hand"
    severity = Severity.SERIOUS if lost > MANY_LOST * last else Severity.MILD
    return Finding("batches dropped", severity, f"{evidence}; to stop at the first says why", rerun(run, {GUARD: "stop"}))


def _faults(run: RunRecords) -> list[str]:
    """What the guard gave as its reasons, the last one last; runs of older versions did not write down all."""
    rollbacks = run.summary.get("rollbacks")
    events = [event for event in rollbacks if isinstance(event, dict)] if isinstance(rollbacks, list) else []
    last = run.summary.get("fault") if run.summary.get("status") == "diverged" else None
    return [str(fault) for fault in (*(event.get("reason") for event in events), last) if fault]


def collapsed(run: RunRecords) -> Finding | None:
    """Accuracy far below its start, and no reward to show for it; or a reward that fell while accuracy did not rise."""
    fall = fall_below_start(run)
    if fall is not None and not reward_rose(run):
        return Finding("policy collapse", Severity.GRAVE, f"held-out {fall}{_distance(run)}", rerun(run, lower_rate(run)))
    if reward_fell(run) and not learnt(run):
        evidence = f"{progress(run)}{_distance(run)}"
        return Finding("policy collapse", Severity.SERIOUS, evidence, rerun(run, lower_rate(run)))
    return None


def relapse(run: RunRecords) -> Finding | None:
    """Accuracy that rose and was lost again, though not to below its start."""
    fall = fall_from_best(run)
    if fall is None or fall_below_start(run) is not None or near_ceiling(run):
        return None
    changes = brakes(run) or _gentler(run)
    return Finding("gain lost again", Severity.SERIOUS, f"held-out {fall}{_distance(run)}", rerun(run, changes))


def _gentler(run: RunRecords) -> dict[str, Any]:
    """A third of the rate, and a strong warm-up where there is none."""
    return {**scaled_rate(run, 1 / 3), "optimizer.warmup_ratio": max(0.2, run.number("optimizer.warmup_ratio", 0.0))}


def _distance(run: RunRecords) -> str:
    kl = late(run.values("kl"))
    if run.supervised or kl is None:
        return ""
    return f"; kl {kl:.2g} nats a token" if run.measures_kl else "; kl is not measured with grpo.beta=0"


def not_learning(run: RunRecords) -> Finding | None:
    """Enough steps and problems to see a gain, and none; or a policy that has not moved."""
    if run.steps < SHORT or learnt(run) or fall_from_best(run) is not None or near_ceiling(run) or _warming_up(run):
        return None
    evidence = f"{progress(run)} over {run.steps} steps"
    if (unmoved := stands_still(run)) is not None:
        return Finding("not learning", Severity.SERIOUS, f"{evidence}; {unmoved}", faster(run))
    if run.steps < FEW or not would_see(run, GAIN):
        return None
    if run.supervised:
        return Finding("not learning", Severity.SERIOUS, evidence, faster(run))
    evidence += "; the policy moves, but not towards the reward: the groups are too small or the reward says too little"
    groups = {"grpo.num_generations": int(2 * run.number("grpo.num_generations", 4))}
    return Finding("not learning", Severity.SERIOUS, evidence, rerun(run, groups))


def _warming_up(run: RunRecords) -> bool:
    """A run under way whose rate is still rising has not had its chance."""
    rates = run.values("lr")
    return not run.completed and len(rates) > 1 and rates[-1] == max(rates) > rates[0]


def oscillating(run: RunRecords) -> Finding | None:
    """Accuracy, reward or supervised loss that goes up and down by far more than its noise."""
    for name, points, amplitude in swinging(run):
        turns = reversals([value for _, value in points], amplitude)
        if turns >= 3 or (turns >= 2 and "accuracy" in name):
            values = [value for _, value in points]
            evidence = (
                f"{name} turned {turns} times by more than {amplitude:.2g} between step {points[0][0]} and {points[-1][0]} "
                f"(from {min(values):.3g} to {max(values):.3g}), which noise alone does not do"
            )
            return Finding("oscillating", Severity.SERIOUS, evidence, rerun(run, _gentler(run)))
    return None


def slow(run: RunRecords) -> Finding | None:
    """It learns and is still climbing at the end, far from the ceiling, because its steps are small."""
    if run.steps < FEW or not run.completed or near_ceiling(run) or not learnt(run):
        return None
    if run.supervised:
        loss = trend(run.values("loss"))
        small = loss is not None and loss.late > 0.8 * loss.early
        evidence = f"loss fell only from {loss.early:.3g} to {loss.late:.3g}" if loss else ""
    else:
        kl = late(run.values("kl")) or 0.0
        small = 0 < kl < KL_SLOW and still_climbing(run)
        evidence = f"{progress(run)} and still rising, kl only {kl:.2g} nats a token"
    if not small:
        return None
    decay = {"optimizer.weight_decay": 0.0} if run.number("optimizer.weight_decay", 0.0) > 0 else {}
    remedy = rerun(run, {**raised_rate(run), **decay})
    return Finding("slow convergence", Severity.SERIOUS, f"{evidence} after {run.steps} steps", remedy)


def long_warmup(run: RunRecords) -> Finding | None:
    """The rate was still on its way up for most of the run."""
    rates = run.values("lr")
    if len(rates) < 3 or not run.completed or rates[0] >= 0.9 * max(rates):
        return None
    peak = rates.index(max(rates))
    if peak + 1 < LATE_PEAK * len(rates):
        return None
    evidence = f"the rate rose until step {peak + 1} of {len(rates)}, so that its peak {max(rates):.2g} was hardly used"
    remedy = rerun(run, {"scheduler.total_steps": None, "scheduler.warmup_steps": None, "optimizer.warmup_ratio": 0.1})
    return Finding("warm-up as long as the run", unless(learnt(run)), evidence, remedy)


def spent_rate(run: RunRecords) -> Finding | None:
    """The schedule had brought the rate to almost nothing before half of the run was over; the guard's cuts are its own."""
    rates = run.values("lr")
    peak = max(rates, default=0.0)
    used = sum(rate > SPENT * peak for rate in rates)
    if len(rates) < SHORT or used >= len(rates) / 2 or run.rolled_back:
        return None
    evidence = f"the rate was above {SPENT:.0%} of its peak {peak:.2g} on {used} of {len(rates)} steps only"
    changes: dict[str, Any] = {"scheduler.total_steps": None, "scheduler.warmup_steps": None}
    if run.setting("scheduler.scheduler_name") == "inverse_sqrt":  # which falls the faster the sooner it begins to
        changes["optimizer.warmup_ratio"] = 0.1
    remedy = rerun(run, changes)
    return Finding("rate spent early", unless(learnt(run)), evidence, remedy)


def lost_updates(run: RunRecords) -> Finding | None:
    """Updates too small to change the stored weights; those that the guard dropped were not."""
    left_out = run.unapplied if run.setting(GUARD) == "ignore" else set()
    survival = late([share for step, share in run.series("update_survival") if step not in left_out])
    if survival is None or survival >= SURVIVAL or run.steps < 2:
        return None
    evidence = f"an update changed {survival:.2%} of the trainable weights; the rest rounded away"
    return Finding("updates that do not survive", Severity.SERIOUS, evidence, faster(run))


def clipped_gradients(run: RunRecords) -> Finding | None:
    """The default max_grad_norm clips nearly always, by design; worth a word only where the policy stands still."""
    norms, limit = run.values("grad_norm"), run.number("optimizer.max_grad_norm", 0.0)
    if not norms or limit <= 0 or min(norms) < FAR_ABOVE * limit or not_learning(run) is None or stands_still(run) is None:
        return None
    evidence = (
        f"the gradient norm was between {min(norms):.2g} and {max(norms):.2g}, always far above max_grad_norm={limit:g}"
    )
    remedy = rerun(run, {"optimizer.max_grad_norm": max(1.0, rounded(FAR_ABOVE * limit))})
    if run.setting("optimizer.optimizer_name") == "sgd":
        evidence += ", and sgd's steps are as long as what is left of it times the rate"
        return Finding("gradients clipped on every step", Severity.SERIOUS, evidence, remedy)
    evidence += "; Adam's steps do not grow with the gradient, so this seldom matters there"
    return Finding("gradients clipped on every step", Severity.MILD, evidence, remedy)


# Settings that keep a policy where it is, each with its limit and the value to go back to.
BRAKES: tuple[tuple[str, float, Any], ...] = (
    ("grpo.beta", 0.5, 0.08),
    ("optimizer.eps", 1e-4, 1e-8),
    ("optimizer.weight_decay", 0.2, 0.01),
)


def brakes(run: RunRecords) -> dict[str, Any]:
    """The settings that hold this run back, at the values to go back to."""
    held = {key: value for key, limit, value in BRAKES if run.number(key, 0.0) >= limit}
    return held | ({"optimizer.max_grad_norm": 0.1} if run.number("optimizer.max_grad_norm", 1.0) < 1e-3 else {})


def faster(run: RunRecords) -> str:
    """The command for a policy that does not move: without the brake that holds it, else at ten times the rate."""
    return rerun(run, brakes(run) or raised_rate(run))


def step_range(steps: Sequence[int]) -> str:
    """Steps as a person names them."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps from {min(steps)} to {max(steps)}"
