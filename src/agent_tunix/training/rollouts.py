"""Where a batch comes from: completions of the policy with their rewards, or demonstrations from the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from agent_tunix.algorithm.advantages import group_advantages, has_spread, overlong_penalty, shuffle_within_groups
from agent_tunix.algorithm.objectives import OBJECTIVES, per_sequence
from agent_tunix.engine import distributed
from agent_tunix.engine.batch import bucket, groups_to_learn, merged, padded, trim, with_learning
from agent_tunix.engine.engine import Inference
from agent_tunix.engine.random_keys import Purpose
from agent_tunix.engine.sampler import Sampling
from agent_tunix.environments.rewards import Scored, score
from agent_tunix.environments.stream import Example, left_padded, right_pad
from agent_tunix.models.base import Model
from agent_tunix.models.lora import Policy
from agent_tunix.models.sharding import lay_rows, on_mesh_of
from agent_tunix.training.data import demonstration_ids
from agent_tunix.training.metrics import Clock, reward_record, sample_records
from agent_tunix.training.setup import Setup
from agent_tunix.types import Batch, Prompts, Record, Rollouts


@dataclasses.dataclass(frozen=True)
class Completions:
    """Completions of some problems: on the device, and what the host knows of them.

    `ids` are the tokens of each row that this process reads: its own rows, or all where everyone reads all.
    """

    examples: Sequence[Example]
    prompts: Prompts
    rollouts: Rollouts
    ids: dict[int, list[int]]
    lengths_B: np.ndarray
    ended_B: np.ndarray


def complete(
    engine: Inference,
    policy: Policy,
    examples: Sequence[Example],
    width: int,
    key: jax.Array,
    sampling: Sampling,
    temperature: float,
    *,
    shared: str | None = None,
    by_all: bool = False,
) -> Completions:
    """`num_generations` completions of each problem by a policy, for training and for evaluation alike.

    They are on the host when this returns, so that the device can be given more work at once, which a copy would wait for.
    """
    prompts = pad_prompts(examples, width, engine.model)
    drawn = engine.sample(policy, prompts, key, sampling, temperature, shared)
    lengths_B = distributed.whole(drawn.mask_BC).sum(axis=1)
    rows = dict(enumerate(distributed.whole(drawn.tokens_BC))) if by_all else distributed.own_rows(drawn.tokens_BC)
    ids = {row: tokens[: lengths_B[row]].tolist() for row, tokens in rows.items()}
    return Completions(examples, prompts, drawn, ids, lengths_B, distributed.whole(drawn.ended_B))


def pad_prompts(examples: Sequence[Example], width: int, model: Model) -> Prompts:
    """The prompts of a batch where the model lies; a process pads those that its devices read."""

    def laid(part: int) -> jax.Array:
        def padded(rows: slice) -> np.ndarray:
            return left_padded([example.prompt_ids for example in examples[rows]], width, model.tokenizer.pad_id)[part]

        return lay_rows(padded, (len(examples), width), model.mesh)

    return Prompts(laid(0), laid(1))


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Completions with their rewards, and the batch that they make by themselves."""

    examples: Sequence[Example]
    batch: Batch
    lengths_B: np.ndarray
    ended_B: np.ndarray
    scored: Scored


def sample_groups(r: Setup, policy: Policy, position: int, clock: Clock) -> list[Sampled]:
    """Completions and rewards of the problems at a position of the data.

    While some groups of the batch have no spread in their rewards, other problems are drawn too, for as many rounds as are
    configured.
    """
    draws = [_sample_once(r, policy, position, 0, clock)]
    for round in range(1, 1 + r.cfg.grpo.resample_rounds):
        if _spread(draws)[_chosen(draws)].all():
            break
        draws.append(_sample_once(r, policy, position, round, clock))
    return draws


def _sample_once(r: Setup, policy: Policy, position: int, round: int, clock: Clock) -> Sampled:
    grpo = r.cfg.grpo
    examples = r.stream.further(position, round) if round else r.stream.batch(position)
    key = r.key(position, Purpose.ROLLOUT)
    key = jax.random.fold_in(key, round) if round else key
    completions = complete(r.engine, policy, examples, r.task.prompt_width, key, r.sampling, r.cfg.generation.temperature)
    clock.lap("time/rollout", again=True)
    rollouts = trim(completions.rollouts, completions.lengths_B)
    batch = Batch(completions.prompts, rollouts.tokens_BC, rollouts.mask_BC, rollouts.mask_BC, rollouts.logprobs_BC)
    if grpo.beta > 0 and not grpo.resample_rounds:  # the device computes it while the host reads and scores the completions
        batch = dataclasses.replace(batch, reference_logprobs_BC=r.engine.reference_logprobs(batch))
    texts = {row: r.model.tokenizer.decode(ids) for row, ids in completions.ids.items()}
    scored = score(r.scorer, examples, texts, r.sampling.num_generations)
    if grpo.overlong == "penalty":
        longest = r.sampling.max_steps
        penalty_B = overlong_penalty(completions.lengths_B, longest, grpo.overlong_buffer or max(1, longest // 4))
        rewards_PG = scored.rewards_PG + penalty_B.reshape(scored.rewards_PG.shape)
        scored = dataclasses.replace(scored, rewards_PG=rewards_PG, penalty_B=penalty_B)
    clock.lap("time/reward", again=True)
    return Sampled(examples, batch, completions.lengths_B, completions.ended_B, scored)


def _spread(draws: Sequence[Sampled]) -> np.ndarray:
    """Which groups of several draws, one draw after another, have rewards that differ."""
    return np.concatenate([has_spread(draw.scored.rewards_PG) for draw in draws])


def _chosen(draws: Sequence[Sampled]) -> np.ndarray:
    """Which of those groups make the batch."""
    return groups_to_learn([has_spread(draw.scored.rewards_PG) for draw in draws])


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """A batch to learn from, with its metrics, its samples, and the lengths of all completions that were drawn for it."""

    batch: Batch
    record: Record
    samples: list[Record]
    lengths_B: np.ndarray


def make_batch(r: Setup, policy: Policy, position: int, draws: Sequence[Sampled]) -> TrainingBatch:
    """The batch that some draws make: the groups to learn from, advantages, weights of tokens, log-probabilities.

    What is recorded of rewards and lengths is that of the first draw, which is the policy's own.
    """
    first, groups = draws[0], _chosen(draws)
    batch, rewards_PG, lengths_B, ended_B = first.batch, first.scored.rewards_PG, first.lengths_B, first.ended_B
    if len(draws) > 1:
        batch, rewards_PG, lengths_B, ended_B = _merged(r, draws, groups)
    if r.cfg.grpo.importance_correction != "none":
        batch = dataclasses.replace(batch, trainer_logprobs_BC=r.engine.policy_logprobs(policy, batch))
    if r.cfg.grpo.beta > 0 and batch.reference_logprobs_BC is None:
        batch = dataclasses.replace(batch, reference_logprobs_BC=r.engine.reference_logprobs(batch))
    shuffle_key = r.key(position, Purpose.SHUFFLE) if r.cfg.grpo.shuffle_advantages else None
    advantages_PG = _advantages(r, rewards_PG, shuffle_key)
    batch = with_learning(batch, advantages_PG.reshape(-1), _weights(r, batch, lengths_B, ended_B), r.model.mesh)
    record = reward_record(first.scored, first.ended_B)
    if r.cfg.grpo.resample_rounds:
        left_out = np.setdiff1d(np.arange(len(draws) * len(groups)), groups)
        record["groups/discarded"] = int((~_spread(draws)[left_out]).sum())
    shown_PG = _advantages(r, first.scored.rewards_PG, shuffle_key)
    samples = sample_records(first.examples[0], first.scored, shown_PG) if distributed.first() else []
    return TrainingBatch(batch, record, samples, np.concatenate([draw.lengths_B for draw in draws]))


def _merged(r: Setup, draws: Sequence[Sampled], groups: np.ndarray) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
    """The chosen groups of several draws: their batch, rewards, lengths, and which completions ended."""
    width, G = max(draw.batch.tokens_BC.shape[1] for draw in draws), r.sampling.num_generations
    with on_mesh_of(r.model.weights):
        batch = merged(tuple(padded(draw.batch, width) for draw in draws), groups)
    rewards_PG = np.concatenate([draw.scored.rewards_PG for draw in draws])[groups]
    lengths_B, ended_B = (
        np.concatenate([of.reshape(-1, G) for of in each])[groups].reshape(-1)
        for each in ([draw.lengths_B for draw in draws], [draw.ended_B for draw in draws])
    )
    return batch, rewards_PG, lengths_B, ended_B


def _advantages(r: Setup, rewards_PG: np.ndarray, shuffle_key: jax.Array | None) -> np.ndarray:
    """Advantages as the objective has them; with a key, those of the control experiment."""
    leave_one_out = OBJECTIVES[r.cfg.grpo.objective].baseline == "leave_one_out"
    advantages_PG = group_advantages(rewards_PG, r.cfg.grpo.scale_rewards, leave_one_out)
    return advantages_PG if shuffle_key is None else shuffle_within_groups(shuffle_key, advantages_PG)


def _weights(r: Setup, batch: Batch, lengths_B: np.ndarray, ended_B: np.ndarray) -> np.ndarray:
    """Each token's share in the objective; none for completions that were cut where they are not learnt from."""
    counted_BC = np.arange(batch.tokens_BC.shape[1]) < lengths_B[:, None]
    if r.cfg.grpo.overlong == "mask":
        counted_BC = counted_BC & ended_B[:, None]
    return OBJECTIVES[r.cfg.grpo.objective].weights(counted_BC, r.sampling.max_steps).astype(np.float32)


def demonstrations(r: Setup, position: int) -> TrainingBatch:
    """Worked answers as completions of advantage 1: the update then is maximum likelihood."""
    examples = r.stream.batch(position)
    ids = demonstration_ids(examples, r.model.tokenizer)
    width = bucket(max(map(len, ids)), r.sampling.max_steps)
    tokens, mask = right_pad(ids, width, r.model.tokenizer.pad_id)
    tokens_BC, mask_BC = (lay_rows(a.__getitem__, a.shape, r.model.mesh) for a in (tokens, mask))
    batch = Batch(pad_prompts(examples, r.task.prompt_width, r.model), tokens_BC, mask_BC, mask_BC)
    weights = per_sequence(mask, width).astype(np.float32)
    batch = with_learning(batch, np.ones(len(examples), np.float32), weights, r.model.mesh)
    shown = {"prompt": examples[0].question, "answer": examples[0].answer, "completion": r.model.tokenizer.decode(ids[0])}
    return TrainingBatch(batch, {}, [shown], np.array([len(own) for own in ids]))
