"""The metrics of a step, as they stand in metrics.jsonl, and the samples beside them."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agent_tunix.engine.update import UpdateStats
from agent_tunix.environments.rewards import Scored
from agent_tunix.environments.stream import Example
from agent_tunix.training.play import CUT, FAILED, Episode
from agent_tunix.types import Record

REPEATED = 3  # equal calls that make an episode one that repeats itself


class Clock:
    """Laps of one batch, in seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str, *, again: bool = False) -> None:
        """Ends a lap; one that is run `again` adds to the lap of that name."""
        now = time.perf_counter()
        before = self.laps.get(name, 0.0) if again else 0.0
        self.laps[name], self._last = before + now - self._last, now

    def total(self) -> float:
        return self._last - self._start


def update_record(step: int, stats: UpdateStats) -> Record:
    """The metrics of an update; reading the numbers waits for it."""
    loss = stats.loss
    numbers = {
        "loss": loss.loss,
        "lr": stats.lr,
        "grad_norm": stats.grad_norm,
        "update_norm": stats.update_norm,
        "update_survival": stats.update_survival,
        "kl": loss.kl,
        "entropy": loss.entropy,
        "clip_fraction": loss.clip_fraction,
    }
    return {"step": step, **{name: float(number) for name, number in numbers.items()}}


def reward_record(scored: Scored, ended_B: np.ndarray) -> Record:
    """The metrics of a batch of completions and their rewards."""
    return {
        "reward/mean": float(scored.rewards_PG.mean()),
        "reward/std": float(scored.rewards_PG.std()),
        **{f"reward/{name}": float(value.mean()) for name, value in scored.values.items()},
        **({} if scored.penalty_B is None else {"overlong/penalty": float(scored.penalty_B.mean())}),
        "groups/zero_variance": float((np.ptp(scored.rewards_PG, axis=1) == 0).mean()),
        "completion/truncated": float(1 - ended_B.mean()),
    }


def episode_record(episodes: Sequence[Episode]) -> Record:
    """The metrics of episodes in an environment; none of answers."""
    if not episodes:
        return {}
    record = {
        "episode/turns": float(np.mean([episode.turns for episode in episodes])),
        "episode/cut": float(np.mean([episode.ending == CUT for episode in episodes])),
        "episode/failed": float(np.mean([episode.ending == FAILED for episode in episodes])),
    }
    if not any(episode.environment.tools for episode in episodes):
        return record
    calls = [episode.calls for episode in episodes]
    made = [call["function"] for of_one in calls for call in of_one]
    return record | {
        "episode/calls": float(np.mean([len(of_one) for of_one in calls])),
        "episode/calling": float(np.mean([bool(of_one) for of_one in calls])),
        "episode/repeating": float(np.mean([_most_alike(of_one) >= REPEATED for of_one in calls])),
        "calls/malformed": sum("error" in call for call in made) / max(1, len(made)),
    }


def _most_alike(calls: Sequence[Mapping[str, Any]]) -> int:
    """How often the call was made that an episode makes most often, with the same arguments."""
    return max(Counter(repr(call["function"]) for call in calls).values(), default=0)


def cost_record(lengths_B: np.ndarray, clock: Clock) -> Record:
    """What a batch took, up to now."""
    return {
        "completion/length": float(lengths_B.mean()),
        "completion/tokens": int(lengths_B.sum()),
        **clock.laps,
        "tokens_per_second": float(lengths_B.sum() / clock.total()),
        "memory/peak_gb": peak_memory_gb(),
    }


def sample_records(
    example: Example, scored: Scored, advantages_PG: np.ndarray, episodes: Sequence[Episode] = ()
) -> list[Record]:
    """Lines of samples.jsonl: the best and the worst completion of the batch's first prompt."""
    rewards_G = scored.rewards_PG[0]
    return [
        {
            "prompt": example.question,
            "answer": example.answer,
            "completion": scored.texts[g],
            "reward": float(rewards_G[g]),
            "rewards": {name: float(value[g]) for name, value in scored.values.items()},
            "advantage": float(advantages_PG[0, g]),
            **(transcript(episodes[g]) if episodes else {}),
        }
        for g in (int(rewards_G.argmax()), int(rewards_G.argmin()))
    ]


def transcript(episode: Episode) -> Record:
    """All that was said in an episode, and what ended it where that is not its own end."""
    stopped = {"ending": episode.ending, "fault": episode.fault} if episode.ending else {}
    return {"transcript": [dict(message) for message in episode.messages], **stopped}


def peak_memory_gb() -> float:
    """Peak memory of the device, where it reports one; else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
