"""The signs that diagnoses share: has it learnt, has it fallen, has it moved at all, does it swing.

Every sign must be stronger than the noise of what it is read from: an accuracy is binomial in the number of problems, the
reward of a batch scatters with its prompts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from agent_tunix.lab.doctor.records import Accuracy, Change, Point, RunRecords, difference, late, trend

SURE = 2.5  # standard errors at which an accuracy has changed; two accuracies are looked at, so a little over 2
CERTAIN = 3.0  # standard errors for what would alarm, or is read from the scatter of a few steps
FALL = 0.1  # accuracy lost before a fall is called one: smaller ones cost little and come back
SHORT = 8  # steps below which no trend is judged
FEW = 20  # steps below which only a policy that has not moved at all is called flat
KL_FLAT = 1e-3  # nats per token after FEW steps, a tenth of it before; the demo passes it on its third step
CEILING = 0.9  # accuracy above which there is little left to gain
ACCURACIES = ("accuracy", "sampled_accuracy")


def learnt(run: RunRecords) -> bool:
    """Accuracy rose beyond its noise; or, where that cannot be told, the reward (or the supervised loss) improved."""
    if any(change.z >= SURE for change in accuracy_changes(run)):
        return True
    if run.supervised:
        loss = _judged(run, "loss")
        return loss is not None and loss.z <= -CERTAIN
    return reward_rose(run) and fall_below_start(run) is None


def reward_rose(run: RunRecords) -> bool:
    reward = _judged(run, "reward/mean")
    return reward is not None and reward.z >= CERTAIN


def reward_fell(run: RunRecords) -> bool:
    """Whether it fell beyond noise, and by a quarter of the spread of rewards or more."""
    reward, spread = _judged(run, "reward/mean"), run.values("reward/std")
    if reward is None or not spread:
        return False
    return reward.z <= -CERTAIN and reward.gain <= -statistics.fmean(spread) / 4


def _judged(run: RunRecords, key: str) -> Change | None:
    """The trend of a metric, where the run is long enough to judge by it."""
    return trend(run.values(key)) if run.steps >= SHORT else None


def accuracy_changes(run: RunRecords) -> list[Change]:
    """From before training to now, greedy and sampled."""
    pairs = [run.accuracies(key) for key in ACCURACIES]
    return [difference(seen[0], seen[-1]) for seen in pairs if len(seen) > 1]


@dataclasses.dataclass(frozen=True)
class Fall:
    """An accuracy lost, beyond noise and by enough for an alarm."""

    name: str
    before: Accuracy
    after: Accuracy

    def __str__(self) -> str:
        ends = f"from {self.before} (step {self.before.step}) to {self.after} (step {self.after.step}"
        return f"{self.name} fell {ends}, {self.after.n} problems)"


def fall_below_start(run: RunRecords) -> Fall | None:
    return _fall(run, lambda seen: seen[0])


def fall_from_best(run: RunRecords) -> Fall | None:
    return _fall(run, lambda seen: max(seen, key=lambda one: one.share))


def _fall(run: RunRecords, before: Callable[[list[Accuracy]], Accuracy]) -> Fall | None:
    for key in ACCURACIES:
        seen = run.accuracies(key)
        if len(seen) > 1:
            change = difference(before(seen), seen[-1])
            if change.gain <= -FALL and change.z <= -CERTAIN:
                return Fall(key.replace("_", " "), before(seen), seen[-1])
    return None


def near_ceiling(run: RunRecords) -> bool:
    return best_success(run) >= CEILING


def reward_or_loss(run: RunRecords) -> tuple[str, Change | None]:
    """The name and the trend of what training is to change step by step: the reward, or the loss where there is none."""
    key, name = ("loss", "loss") if run.supervised else ("reward/mean", "reward")
    return name, trend(run.values(key))


def progress(run: RunRecords) -> str:
    """What became of accuracy and reward, in words."""
    parts, seen, (name, change) = [], run.accuracies(), reward_or_loss(run)
    if len(seen) > 1:
        parts.append(f"held-out accuracy {seen[0]} -> {seen[-1]} (+- {difference(seen[0], seen[-1]).error:.1%})")
    if change is not None:
        parts.append(f"{name} {change.early:.3g} -> {change.late:.3g} (+- {change.error:.2g})")
    return ", ".join(parts) or "nothing measured"


def reversals(values: Sequence[float], amplitude: float) -> int:
    """How often a series turns back by more than an amplitude."""
    turns, direction = 0, 0
    low = high = values[0] if values else 0.0
    for value in values:
        low, high = min(low, value), max(high, value)
        if direction >= 0 and value < high - amplitude:
            turns, direction, low = turns + direction, -1, value
        elif direction <= 0 and value > low + amplitude:
            turns, direction, high = turns - direction, 1, value
    return turns


def swinging(run: RunRecords) -> Iterable[tuple[str, list[Point], float]]:
    """What may swing, with the amplitude that its noise cannot explain."""
    for key in ACCURACIES:
        seen = run.accuracies(key)
        if len(seen) > 2:
            noise = max(difference(a, b).error for a, b in itertools.pairwise(seen))
            yield f"held-out {key.replace('_', ' ')}", [(one.step, one.share) for one in seen], max(FALL, CERTAIN * noise)
    if run.supervised:
        loss = run.series("loss")
        if len(loss) >= SHORT:
            yield "loss", loss, max(1e-6, loss[0][1])  # batches differ in their loss, but by less than all of it
        return
    rewards, spread = run.series("reward/mean"), run.values("reward/std")
    if len(rewards) >= SHORT and spread:
        prompts = run.number("training.batch_size", run.number("training.micro_batch_size", 1))
        yield "reward", rewards, max(1e-6, 4 * statistics.fmean(spread) / math.sqrt(max(1.0, prompts)))


def stands_still(run: RunRecords) -> str | None:
    """What shows that the updates, whatever they were, changed nothing that matters; None where something moved."""
    kl = late(run.values("kl"))
    if kl:
        limit = KL_FLAT if run.steps >= FEW else KL_FLAT / 10
        return f"kl {kl:.1g} nats a token: the policy has hardly moved" if kl < limit else None
    if run.supervised:
        loss = trend(run.values("loss"))
        return "the loss has not moved" if loss and abs(loss.gain) < 0.05 * abs(loss.early) else None
    seen = run.accuracies()
    entropy = trend(run.values("entropy"))
    same = len(seen) > 2 and max(one.share for one in seen) - min(one.share for one in seen) <= 1 / seen[0].n
    return "accuracy and entropy have not moved" if same and entropy and abs(entropy.z) < SURE else None


def would_see(run: RunRecords, gain: float) -> bool:
    """Whether the evaluations are large enough for such a gain in accuracy to stand out."""
    return any(SURE * change.error <= gain for change in accuracy_changes(run))


def still_climbing(run: RunRecords) -> bool:
    """Whether the last evaluation is, up to noise, the best."""
    seen = run.accuracies()
    return len(seen) > 1 and seen[-1].share >= max(one.share for one in seen) - difference(seen[0], seen[-1]).error


def best_success(run: RunRecords) -> float:
    """The share of problems solved at the end, greedy or sampled, whichever is more."""
    return max((seen[-1].share for key in ACCURACIES if (seen := run.accuracies(key))), default=0.0)


def success(run: RunRecords) -> float | None:
    """The share of problems solved at the end: as sampled in training where that is known."""
    for key in reversed(ACCURACIES):
        if seen := run.accuracies(key):
            return seen[-1].share
    return None
