"""Where a batch comes from: completions of the policy with their rewards, or demonstrations from the data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agent_tunix.algorithm.advantages import group_advantages, has_spread, overlong_penalty, shuffle_within_groups
from agent_tunix.algorithm.objectives import OBJECTIVES, per_sequence
from agent_tunix.config.schema import Config
from agent_tunix.engine import processes
from agent_tunix.engine.batch import Scored, bucket, groups_to_learn, merged, padded, score, trim, with_learning
from agent_tunix.engine.metrics import Clock, Record, reward_record, sample_records
from agent_tunix.engine.population import Conversation, Logprobs, Ready, Sample, Update
from agent_tunix.engine.rng import Purpose, step_key
from agent_tunix.engine.rollout import Draw, Sampling
from agent_tunix.errors import UserError
from agent_tunix.models.gemma3 import Architecture, Weights
from agent_tunix.models.lora import Adapters, policy
from agent_tunix.models.mesh import lay_rows, on_mesh_of, rows_to_come
from agent_tunix.models.tokenizer import Tokenizer
from agent_tunix.tasks.datasets import Example, Stream, right_pad
from agent_tunix.tasks.prompts import demonstration
from agent_tunix.tasks.rewards import Scorer
from agent_tunix.types import Batch, Prompts, TrainState
from agent_tunix.workflows import setup
from agent_tunix.workflows.examples import Notice, Task
from agent_tunix.workflows.plan import Plan, coefficients, hyperparameters, loss_form


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that stays the same over a run."""

    cfg: Config
    model: setup.Model
    reference: Adapters | None
    task: Task
    plan: Plan
    sampling: Sampling
    scorer: Scorer
    stream: Stream
    overrides: tuple[str, ...]  # as they were given
    started: float  # on the monotonic clock
    beginnings: dict[str, list[list[str]]]  # answers of policies before their first update, for all runs of the process

    @property
    def micro_batches(self) -> int:
        return self.cfg.training.prompts_per_step // self.cfg.training.micro_batch_size

    def key(self, step: int, purpose: Purpose) -> jax.Array:
        return step_key(self.cfg.seed, step, purpose)

    def beginning(self, way: tuple[Sampling, float]) -> str:
        """Equal for runs whose policies, before their first update, give the same answers to held-out problems."""
        cfg, training = self.cfg, self.cfg.training
        begun = cfg.model, cfg.seed, training.init_from, training.init_step
        asked = cfg.data, training.train_fraction, cfg.evaluation, cfg.generation, self.task.prompt_width
        return repr((begun, asked, way))


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a batch begins with: its problems, their prompts on the device, and the key that completions are drawn with."""

    index: int
    examples: list[Example]
    prompts: Prompts
    key: jax.Array


def asked_at(r: Run, index: int, round: int = 0) -> Asked:
    """The problems at a position of the stream; in a further round, others in their place."""
    examples = r.stream.further(index, round) if round else r.stream.batch(index)
    prompts = setup.pad_prompts(examples, r.task.prompt_width, r.model)
    key = r.key(index, Purpose.ROLLOUT)
    return Asked(index, examples, prompts, jax.random.fold_in(key, round) if round else key)


def asked_ahead(r: Run) -> Callable[[int], Asked]:
    """As `asked_at`, remembered for two positions: that of a batch, and the next, which is asked for while it is made."""
    return functools.lru_cache(maxsize=2)(partial(asked_at, r))


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A batch to learn from, with its metrics and samples."""

    batch: Batch
    lengths_B: np.ndarray
    record: Record
    samples: list[Record]


def gather(r: Run, state: TrainState, asked: Asked, clock: Clock, meanwhile: Callable[[], None]) -> Conversation[Gathered]:
    """The batch that comes of some problems; `meanwhile` is called when the device is at work on their completions."""
    if r.cfg.training.method == "supervised":
        return _demonstrations(r, asked)
    return (yield from _rollouts(r, state, asked, clock, meanwhile))


@dataclasses.dataclass(frozen=True)
class Completions:
    """Completions of some problems: on the device as a batch, and what the host knows of them."""

    examples: list[Example]
    batch: Batch
    lengths_B: np.ndarray
    ended_B: np.ndarray
    scored: Scored


def _rollouts(
    r: Run, state: TrainState, asked: Asked, clock: Clock, meanwhile: Callable[[], None]
) -> Conversation[Gathered]:
    """A batch of completions, in which groups without a spread are replaced for as many rounds as are configured.

    What is recorded of rewards and lengths is that of the first draw, which is the policy's own.
    """
    policies = policy(r.model.weights, state.trainable)
    first = yield from _completions(r, policies, asked, clock, meanwhile)
    draws, groups = [first], np.arange(len(first.examples))
    for round in range(1, 1 + r.cfg.grpo.resample_rounds):
        if has_spread(first.scored.rewards_PG).sum() + (groups >= len(groups)).sum() == len(groups):
            break
        again = asked_at(r, asked.index, round)
        draws.append((yield from _completions(r, policies, again, clock, meanwhile)))
        groups = groups_to_learn([has_spread(draw.scored.rewards_PG) for draw in draws])
    batch, rewards_PG, lengths_B, ended_B = first.batch, first.scored.rewards_PG, first.lengths_B, first.ended_B
    if len(draws) > 1:
        batch, rewards_PG, lengths_B, ended_B = _merged(draws, groups, r.model.weights)
    if r.cfg.grpo.importance_correction != "none":
        trainer_BC = yield logprobs_of(r, batch, *policies)
        batch = dataclasses.replace(batch, trainer_logprobs_BC=trainer_BC)
    if r.cfg.grpo.beta > 0 and batch.reference_logprobs_BC is None:
        batch = dataclasses.replace(batch, reference_logprobs_BC=(yield reference_of(r, batch)))
    shuffle_key = r.key(asked.index, Purpose.SHUFFLE) if r.cfg.grpo.shuffle_advantages else None
    advantages_PG = _advantages(r, rewards_PG, shuffle_key)
    batch = with_learning(batch, advantages_PG.reshape(-1), _weights(r, batch, lengths_B, ended_B), r.model.mesh)
    record = reward_record(first.scored, first.ended_B) | _discarded(r, draws, groups)
    shown_PG = _advantages(r, first.scored.rewards_PG, shuffle_key)
    samples = sample_records(first.examples[0], first.scored, shown_PG) if processes.first() else []
    return Gathered(batch, np.concatenate([draw.lengths_B for draw in draws]), record, samples)


def _completions(
    r: Run, policies: tuple[Weights, Adapters | None], asked: Asked, clock: Clock, meanwhile: Callable[[], None]
) -> Conversation[Completions]:
    """Completions of some problems and their rewards."""
    weights, adapters = policies
    grpo, draw = r.cfg.grpo, Draw(adapters, asked.prompts, asked.key, r.cfg.generation.temperature)
    drawn = yield Sample(weights, draw, r.model.arch, r.sampling)
    meanwhile()
    yield Ready(drawn)
    rollouts, lengths_B = trim(drawn)
    # All that the host needs is fetched before the device is given more work, which a copy would have to wait for.
    ids, ended_B = processes.own_rows(rollouts.tokens_BC), processes.whole(rollouts.ended_B)
    clock.lap("time/rollout", again=True)
    batch = Batch(asked.prompts, rollouts.tokens_BC, rollouts.mask_BC, rollouts.mask_BC, rollouts.logprobs_BC)
    if grpo.beta > 0 and not grpo.resample_rounds:  # the device makes it while the host reads and scores the completions
        batch = dataclasses.replace(batch, reference_logprobs_BC=(yield reference_of(r, batch)))
    texts = {row: r.model.tokenizer.decode(own.tolist()) for row, own in ids.items()}
    scored = score(r.scorer, asked.examples, texts, r.sampling.num_generations)
    if grpo.overlong == "penalty":
        longest = r.sampling.max_steps
        penalty_B = overlong_penalty(lengths_B, longest, grpo.overlong_buffer or max(1, longest // 4))
        rewards_PG = scored.rewards_PG + penalty_B.reshape(scored.rewards_PG.shape)
        scored = dataclasses.replace(scored, rewards_PG=rewards_PG, penalty_B=penalty_B)
    clock.lap("time/reward", again=True)
    return Completions(asked.examples, batch, lengths_B, ended_B, scored)


def _merged(
    draws: Sequence[Completions], groups: np.ndarray, weights: Weights
) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
    """The chosen groups of several draws: their batch, rewards, lengths, and which completions ended."""
    width, G = max(draw.batch.tokens_BC.shape[1] for draw in draws), draws[0].scored.rewards_PG.shape[1]
    with on_mesh_of(weights):
        batch = merged(tuple(padded(draw.batch, width) for draw in draws), groups)
    rewards_PG = np.concatenate([draw.scored.rewards_PG for draw in draws])[groups]
    lengths_B, ended_B = (
        np.concatenate([of.reshape(-1, G) for of in each])[groups].reshape(-1)
        for each in ([draw.lengths_B for draw in draws], [draw.ended_B for draw in draws])
    )
    return batch, rewards_PG, lengths_B, ended_B


def _advantages(r: Run, rewards_PG: np.ndarray, shuffle_key: jax.Array | None) -> np.ndarray:
    """Advantages as the objective has them; with a key, those of the control experiment."""
    leave_one_out = OBJECTIVES[r.cfg.grpo.objective].baseline == "leave_one_out"
    advantages_PG = group_advantages(rewards_PG, r.cfg.grpo.scale_rewards, leave_one_out)
    return advantages_PG if shuffle_key is None else shuffle_within_groups(shuffle_key, advantages_PG)


def _weights(r: Run, batch: Batch, lengths_B: np.ndarray, ended_B: np.ndarray) -> np.ndarray:
    """Each token's share in the objective; none for completions that were cut where they are not learnt from."""
    counted_BC = np.arange(batch.tokens_BC.shape[1]) < lengths_B[:, None]
    if r.cfg.grpo.overlong == "mask":
        counted_BC = counted_BC & ended_B[:, None]
    return OBJECTIVES[r.cfg.grpo.objective].weights(counted_BC, r.sampling.max_steps).astype(np.float32)


def _discarded(r: Run, draws: Sequence[Completions], groups: np.ndarray) -> Record:
    """How many of the groups that were drawn had no spread and were left out of the batch."""
    if not r.cfg.grpo.resample_rounds:
        return {}
    left_out = np.setdiff1d(np.arange(len(draws) * len(groups)), groups)
    spread = np.concatenate([has_spread(draw.scored.rewards_PG) for draw in draws])
    return {"groups/discarded": int((~spread[left_out]).sum())}


def reference_of(r: Run, batch: Batch) -> Logprobs:
    """The request for the reference's log-probabilities, which beta 0 does without."""
    temperature = r.cfg.generation.temperature
    return Logprobs(r.model.weights, r.reference, batch, temperature, r.model.arch, r.micro_batches, shared=True)


def logprobs_of(r: Run, batch: Batch, weights: Weights, adapters: Adapters | None) -> Logprobs:
    """The request for the log-probabilities of the policy itself, as the trainer reads the completions."""
    return Logprobs(weights, adapters, batch, r.cfg.generation.temperature, r.model.arch, r.micro_batches, shared=False)


def update_of(r: Run, state: TrainState, batch: Batch, step: int, rate_scale: float = 1.0) -> Update:
    """The request for the update that makes this step; the guard may have scaled its rate down."""
    h, c = hyperparameters(r.cfg, r.plan, step, rate_scale), coefficients(r.cfg)
    fixed = (r.model.arch, r.micro_batches, loss_form(r.cfg), r.cfg.optimizer.optimizer_name)
    return Update(state, batch, r.model.weights, h, c, r.cfg.training.max_kl, *fixed)


def foreseen(r: Run) -> tuple[Sample | Logprobs | Update, ...]:
    """The first requests of a run that trains adapters by GRPO on one device, if completions are as long as they can be.

    They are known before any weight is read. The update comes first: it takes longest to compile.
    """
    if r.cfg.training.method == "supervised" or r.cfg.model.lora_rank == 0 or r.model.mesh.size > 1:
        return ()
    r = dataclasses.replace(r, model=r.model.outline())
    state = setup.state_shapes(r.cfg, r.model)
    weights, adapters = policy(r.model.weights, state.trainable)
    to_come, key = partial(rows_to_come, mesh=r.model.mesh), jax.eval_shape(r.key, 0, Purpose.ROLLOUT)

    def sample_of(rows: int, sampling: Sampling, temperature: float, shared: str | None = None) -> Sample:
        ids_PS = to_come((rows, r.task.prompt_width), jnp.int32)
        return Sample(weights, Draw(adapters, Prompts(ids_PS, ids_PS), key, temperature), r.model.arch, sampling, shared)

    held_out, ways = min(r.cfg.evaluation.batch_size, len(r.task.validation)), evaluation_ways(r)
    before = [sample_of(held_out, *way, r.beginning(way)) for way in ways]
    after = [sample_of(held_out, *way) for way in ways]
    sample = sample_of(r.cfg.training.prompts_per_step, r.sampling, r.cfg.generation.temperature)
    shape = (r.cfg.training.prompts_per_step * r.sampling.num_generations, r.sampling.max_steps)
    numbers_BC, numbers_B = to_come(shape, jnp.float32), to_come(shape[:1], jnp.float32)
    tokens_BC, mask_BC = to_come(shape, jnp.int32), to_come(shape, bool)
    batch = learnt = Batch(sample.draw.prompts, tokens_BC, mask_BC, mask_BC, numbers_BC)
    logprobs: list[Logprobs] = []
    if r.cfg.grpo.importance_correction != "none":
        logprobs.append(logprobs_of(r, batch, weights, adapters))
        batch = learnt = dataclasses.replace(batch, trainer_logprobs_BC=numbers_BC)
    if r.cfg.grpo.beta > 0:
        logprobs.append(reference_of(r, batch))
        learnt = dataclasses.replace(batch, reference_logprobs_BC=numbers_BC)
    learnt = dataclasses.replace(learnt, weights_BC=numbers_BC, advantages_B=numbers_B)
    return update_of(r, state, learnt, 1), *before, sample, *logprobs, *after


def evaluation_ways(r: Run) -> list[tuple[Sampling, float]]:
    """How held-out problems are answered, and at which temperature: greedily and, if that is asked for, as in training."""
    one = dataclasses.replace(r.sampling, num_generations=1)
    as_trained = [(one, r.cfg.generation.temperature)] if r.cfg.evaluation.sampled else []
    return [(dataclasses.replace(one, greedy=True), 1.0), *as_trained]


def _demonstrations(r: Run, asked: Asked) -> Gathered:
    """Worked answers as completions of advantage 1: the update then is maximum likelihood."""
    examples = asked.examples
    ids = demonstration_ids(examples, r.model.tokenizer)
    width = bucket(max(map(len, ids)), r.sampling.max_steps)
    tokens, mask = right_pad(ids, width, r.model.tokenizer.pad_id)
    tokens_BC, mask_BC = (lay_rows(a.__getitem__, a.shape, r.model.mesh) for a in (tokens, mask))
    batch = Batch(asked.prompts, tokens_BC, mask_BC, mask_BC)
    weights = per_sequence(mask, width).astype(np.float32)
    batch = with_learning(batch, np.ones(len(examples), np.float32), weights, r.model.mesh)
    shown = {"prompt": examples[0].question, "answer": examples[0].answer, "completion": r.model.tokenizer.decode(ids[0])}
    return Gathered(batch, np.array([len(own) for own in ids]), {}, [shown])


def demonstration_ids(examples: Sequence[Example], tokenizer: Tokenizer) -> list[list[int]]:
    return tokenizer.encode_all([demonstration(example.worked, example.answer) for example in examples])


def with_demonstrations(
    examples: list[Example], tokenizer: Tokenizer, arch: Architecture, longest: int, notice: Notice
) -> list[Example]:
    """The examples that have a worked answer of at most `longest` tokens; says how many have not."""
    worked = [e for e in examples if e.worked]
    ids = demonstration_ids(worked, tokenizer)
    kept = [example for example, own in zip(worked, ids, strict=True) if len(own) <= longest]
    if not kept:
        raise UserError(
            "training.method=supervised: no example has a worked answer that fits generation.max_generation_steps="
            f"{longest}. A worked answer is what stands before data.answer_pattern in data.answer_field."
        )
    setup.refuse_unknown_tokens(ids, arch)
    if len(kept) < len(examples):
        notice(f"{len(examples) - len(kept)} of {len(examples)} examples have no worked answer of at most {longest} tokens.")
    return kept
