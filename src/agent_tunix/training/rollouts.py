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
from agent_tunix.environments.rewards import TAKEN, Scored, Scorer, score
from agent_tunix.environments.stream import Example, left_padded, right_pad
from agent_tunix.errors import UserError
from agent_tunix.models.base import Model
from agent_tunix.models.lora import Policy
from agent_tunix.models.sharding import lay_rows, on_mesh_of
from agent_tunix.training.data import demonstration_ids
from agent_tunix.training.metrics import Clock, episode_record, reward_record, sample_records
from agent_tunix.training.play import CUT, Episode, Playing, arrays_of, play
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
    """Completions with their rewards, and the batch that they make by themselves.

    `lengths_B` count the model's own tokens, which `learnt_BC` says where the world's stand among them.
    """

    examples: Sequence[Example]
    batch: Batch
    lengths_B: np.ndarray
    ended_B: np.ndarray
    scored: Scored
    learnt_BC: np.ndarray
    episodes: Sequence[Episode] = ()


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
    examples = r.stream.further(position, round) if round else r.stream.batch(position)
    key = r.key(position, Purpose.ROLLOUT)
    key = jax.random.fold_in(key, round) if round else key
    if (playing := r.playing) is None:
        sampled = _answered(r, policy, examples, key, clock)
    else:
        sampled = _played(r, playing, policy, examples, key, clock)
    grpo, scored = r.cfg.grpo, sampled.scored
    if grpo.overlong == "penalty":
        longest = r.sampling.max_steps
        penalty_B = overlong_penalty(sampled.lengths_B, longest, grpo.overlong_buffer or max(1, longest // 4))
        rewards_PG = scored.rewards_PG + penalty_B.reshape(scored.rewards_PG.shape)
        scored = dataclasses.replace(scored, rewards_PG=rewards_PG, penalty_B=penalty_B)
        sampled = dataclasses.replace(sampled, scored=scored)
    clock.lap("time/reward", again=True)
    return sampled


def _answered(r: Setup, policy: Policy, examples: Sequence[Example], key: jax.Array, clock: Clock) -> Sampled:
    """Answers to the problems, of one turn each."""
    completions = complete(r.engine, policy, examples, r.task.prompt_width, key, r.sampling, r.cfg.generation.temperature)
    clock.lap("time/rollout", again=True)
    rollouts, lengths_B = trim(completions.rollouts, completions.lengths_B), completions.lengths_B
    batch = Batch(completions.prompts, rollouts.tokens_BC, rollouts.mask_BC, rollouts.mask_BC, rollouts.logprobs_BC)
    batch = _with_reference(r, batch)  # the device computes it while the host reads and scores the completions
    texts = {row: r.model.tokenizer.decode(ids) for row, ids in completions.ids.items()}
    scored = score(r.scorer, examples, texts, r.sampling.num_generations)
    learnt_BC = np.arange(batch.tokens_BC.shape[1]) < lengths_B[:, None]
    return Sampled(examples, batch, lengths_B, completions.ended_B, scored, learnt_BC)


def _played(
    r: Setup, playing: Playing, policy: Policy, examples: Sequence[Example], key: jax.Array, clock: Clock
) -> Sampled:
    """Episodes of the problems in the run's world."""
    G, section = r.sampling.num_generations, r.cfg.environment
    episodes = play(r.engine, policy, playing, examples, key, r.sampling, r.cfg.generation.temperature)
    clock.lap("time/rollout", again=True)
    made = arrays_of(episodes, G, playing, r.sampling.max_steps, r.engine)
    left_B = np.array([bool(episode.ending) for episode in episodes])
    learnt_BC = made.learnt_BC & ~left_B[:, None] if section.unfinished == "leave" else made.learnt_BC
    arrays = made.tokens_BC, made.mask_BC, learnt_BC, made.logprobs_BC
    laid = (lay_rows(array.__getitem__, array.shape, r.model.mesh) for array in arrays)
    batch = _with_reference(r, Batch(made.prompts, *laid))
    ended_B = np.array([episode.ending != CUT for episode in episodes])
    scored = score_episodes(r.scorer, episodes, G, section.unfinished)
    return Sampled(examples, batch, made.learnt_BC.sum(axis=1), ended_B, scored, learnt_BC, episodes)


def _with_reference(r: Setup, batch: Batch) -> Batch:
    if r.cfg.grpo.beta == 0 or r.cfg.grpo.resample_rounds:  # of several draws it is computed for the groups that are taken
        return batch
    return dataclasses.replace(batch, reference_logprobs_BC=r.engine.reference_logprobs(batch))


def score_episodes(scorer: Scorer, episodes: Sequence[Episode], G: int, unfinished: str) -> Scored:
    """Rewards of G episodes per row: of the configured functions, given the model's last message, and of the environment.

    An episode that was cut or failed is worth nothing or, where it leaves its group, what the others in it are on average.
    """
    texts = {row: episode.answer for row, episode in enumerate(episodes)}
    values = scorer.of_problems([episode.problem() for episode in episodes])
    for name in sorted({name for episode in episodes for name in episode.rewards}):
        if name in values or name in TAKEN:
            raise UserError(f"The environment gives a reward of the name {name}, which is taken; call it something else.")
        values[name] = np.array([episode.rewards.get(name, 0.0) for episode in episodes], np.float32)
    finished_PG = np.array([not episode.ending for episode in episodes]).reshape(-1, G)
    rewards_PG = np.where(finished_PG, scorer.total(values).reshape(-1, G), 0.0).astype(np.float32)
    if unfinished == "zero":
        return Scored(texts, values, rewards_PG)
    means_P1 = rewards_PG.sum(axis=1, keepdims=True) / np.maximum(finished_PG.sum(axis=1, keepdims=True), 1)
    return Scored(texts, values, np.where(finished_PG, rewards_PG, means_P1), kept_PG=finished_PG)


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
    batch, of = (first.batch, ToLearn.of(first)) if len(draws) == 1 else _merged(r, draws, groups)
    if r.cfg.grpo.importance_correction != "none":
        batch = dataclasses.replace(batch, trainer_logprobs_BC=r.engine.policy_logprobs(policy, batch))
    if r.cfg.grpo.beta > 0 and batch.reference_logprobs_BC is None:
        batch = dataclasses.replace(batch, reference_logprobs_BC=r.engine.reference_logprobs(batch))
    shuffle_key = r.key(position, Purpose.SHUFFLE) if r.cfg.grpo.shuffle_advantages else None
    advantages_PG = _advantages(r, of, shuffle_key)
    batch = with_learning(batch, advantages_PG.reshape(-1), _weights(r, of), r.model.mesh)
    record = reward_record(first.scored, first.ended_B) | episode_record(first.episodes)
    if r.cfg.grpo.resample_rounds:
        left_out = np.setdiff1d(np.arange(len(draws) * len(groups)), groups)
        record["groups/discarded"] = int((~_spread(draws)[left_out]).sum())
    shown_PG = _advantages(r, ToLearn.of(first), shuffle_key)
    samples = sample_records(first.examples[0], first.scored, shown_PG, first.episodes) if distributed.first() else []
    return TrainingBatch(batch, record, samples, np.concatenate([draw.lengths_B for draw in draws]))


@dataclasses.dataclass(frozen=True)
class ToLearn:
    """What the host knows of the completions that are learnt from, by group."""

    rewards_PG: np.ndarray
    kept_PG: np.ndarray
    ended_PG: np.ndarray
    learnt_PGC: np.ndarray

    @classmethod
    def of(cls, sampled: Sampled, width: int | None = None) -> ToLearn:
        """Those of a draw, its tokens padded to a width."""
        rewards_PG, (_, C) = sampled.scored.rewards_PG, sampled.learnt_BC.shape
        kept_PG = np.ones(rewards_PG.shape, bool) if sampled.scored.kept_PG is None else sampled.scored.kept_PG
        learnt_BC = np.pad(sampled.learnt_BC, ((0, 0), (0, (width or C) - C)))
        P, G = rewards_PG.shape
        return cls(rewards_PG, kept_PG, sampled.ended_B.reshape(P, G), learnt_BC.reshape(P, G, -1))


def _merged(r: Setup, draws: Sequence[Sampled], groups: np.ndarray) -> tuple[Batch, ToLearn]:
    """The chosen groups of several draws: their batch, and what the host knows of them."""
    width = max(draw.batch.tokens_BC.shape[1] for draw in draws)
    with on_mesh_of(r.model.weights):
        batch = merged(tuple(padded(draw.batch, width) for draw in draws), groups)
    each = [ToLearn.of(draw, width) for draw in draws]
    fields = [field.name for field in dataclasses.fields(ToLearn)]
    return batch, ToLearn(*(np.concatenate([getattr(one, name) for one in each])[groups] for name in fields))


def _advantages(r: Setup, of: ToLearn, shuffle_key: jax.Array | None) -> np.ndarray:
    """Advantages as the objective has them; with a key, those of the control experiment."""
    leave_one_out = OBJECTIVES[r.cfg.grpo.objective].baseline == "leave_one_out"
    advantages_PG = group_advantages(of.rewards_PG, r.cfg.grpo.scale_rewards, leave_one_out, of.kept_PG)
    return advantages_PG if shuffle_key is None else shuffle_within_groups(shuffle_key, advantages_PG)


def _weights(r: Setup, of: ToLearn) -> np.ndarray:
    """Each token's share in the objective; none for completions that were cut where they are not learnt from."""
    counted_PGC = of.learnt_PGC
    if r.cfg.grpo.overlong == "mask":
        counted_PGC = counted_PGC & of.ended_PG[..., None]
    counted_BC = counted_PGC.reshape(-1, counted_PGC.shape[-1])
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
