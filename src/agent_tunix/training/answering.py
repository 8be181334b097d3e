"""Asking a policy problems: their answers, or the episodes that it plays in a world."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from agent_tunix.engine.engine import Inference
from agent_tunix.engine.sampler import Sampling
from agent_tunix.environments.stream import Example, batches
from agent_tunix.models.lora import Policy
from agent_tunix.training.metrics import episode_record
from agent_tunix.training.play import Answers, Episode, Playing, play
from agent_tunix.training.rollouts import complete


@dataclasses.dataclass(frozen=True)
class Asking:
    """How problems are asked: in prompts of one width, so many at once, and how each is then answered.

    `shared` names the answers where other runs may ask for the very same.
    """

    width: int
    at_once: int
    key: jax.Array
    sampling: Sampling
    temperature: float = 1.0
    shared: str | None = None


def answers_to(
    engine: Inference, policy: Policy, playing: Playing | None, examples: Sequence[Example], asking: Asking
) -> Answers:
    """What a policy says to all problems, `num_generations` times: in the episodes of a world or, without one, at once."""
    if playing is None:
        return Answers(_at_once(engine, policy, examples, asking))
    return _in_episodes(engine, policy, playing, examples, asking)


def _at_once(engine: Inference, policy: Policy, examples: Sequence[Example], asking: Asking) -> list[list[str]]:
    G, texts = asking.sampling.num_generations, list[list[str]]()
    at_once = min(asking.at_once, len(examples))
    rows = at_once + -at_once % engine.model.mesh.shape["fsdp"]
    for index, batch in enumerate(batches(examples, at_once)):
        full = [*batch, *[batch[-1]] * (rows - len(batch))]
        name = asking.shared and f"{asking.shared}, batch {index}"
        drawn = jax.random.fold_in(asking.key, index), asking.sampling, asking.temperature
        found = complete(engine, policy, full, asking.width, *drawn, shared=name, by_all=True)
        decoded = [engine.model.tokenizer.decode(ids) for ids in found.ids.values()]
        texts += [decoded[i * G : (i + 1) * G] for i in range(len(batch))]
    return texts


def _in_episodes(
    engine: Inference, policy: Policy, playing: Playing, examples: Sequence[Example], asking: Asking
) -> Answers:
    """An answer is the last that the model says in an episode."""
    G, episodes = asking.sampling.num_generations, list[Episode]()
    rows = -(-min(asking.at_once, len(examples)) // (cut := engine.model.mesh.shape["fsdp"])) * cut
    for index, batch in enumerate(batches(examples, rows)):
        full = [*batch, *[batch[-1]] * (-len(batch) % cut)]
        drawn = jax.random.fold_in(asking.key, index), asking.sampling, asking.temperature
        found = play(engine, policy, playing, full, *drawn)
        episodes += found[: G * len(batch)]
    texts = [[episode.answer for episode in episodes[i : i + G]] for i in range(0, len(episodes), G)]
    record = episode_record(episodes)
    for name in sorted({name for episode in episodes for name in episode.rewards}):
        record[f"reward/{name}"] = float(np.mean([episode.rewards.get(name, 0.0) for episode in episodes]))
    solved = [0.0 if episode.ending else episode.solved for episode in episodes]
    return Answers(texts, solved, record, [episode.said for episode in episodes[::G]])
