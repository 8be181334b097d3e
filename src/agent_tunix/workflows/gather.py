"""Where a batch comes from: completions of the policy with their rewards, or demonstrations from the data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agent_tunix.config.schema import Config
from agent_tunix.engine import processes
from agent_tunix.engine.batch import bucket, score, trim, with_advantages
from agent_tunix.engine.metrics import Clock, Record, reward_record, sample_records
from agent_tunix.engine.population import Conversation, Ready, Reference, Sample, Update
from agent_tunix.engine.rng import Purpose, step_key
from agent_tunix.engine.rollout import Draw, Sampling
from agent_tunix.errors import UserError
from agent_tunix.models.gemma3 import Architecture
from agent_tunix.models.lora import Adapters, policy
from agent_tunix.models.mesh import lay_rows, rows_to_come
from agent_tunix.models.tokenizer import Tokenizer
from agent_tunix.tasks.datasets import Example, Stream, right_pad
from agent_tunix.tasks.prompts import demonstration
from agent_tunix.tasks.rewards import Scorer
from agent_tunix.types import Batch, Prompts, TrainState
from agent_tunix.workflows import setup
from agent_tunix.workflows.examples import Notice, Task
from agent_tunix.workflows.plan import Plan, hyperparameters


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


def asked_at(r: Run, index: int) -> Asked:
    """The problems at a position of the stream."""
    examples = r.stream.batch(index)
    prompts = setup.pad_prompts(examples, r.task.prompt_width, r.model)
    return Asked(index, examples, prompts, r.key(index, Purpose.ROLLOUT))


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


def _rollouts(
    r: Run, state: TrainState, asked: Asked, clock: Clock, meanwhile: Callable[[], None]
) -> Conversation[Gathered]:
    examples, prompts, index = asked.examples, asked.prompts, asked.index
    weights, adapters = policy(r.model.weights, state.trainable)
    draw = Draw(adapters, prompts, asked.key, r.cfg.generation.temperature)
    drawn = yield Sample(weights, draw, r.model.arch, r.sampling)
    meanwhile()
    yield Ready(drawn)
    rollouts, lengths_B = trim(drawn)
    # All that the host needs is fetched before the device is given more work, which a copy would have to wait for.
    ids, ended_B = processes.own_rows(rollouts.tokens_BC), processes.whole(rollouts.ended_B)
    clock.lap("time/rollout")
    batch = Batch(prompts, rollouts.tokens_BC, rollouts.mask_BC, rollouts.logprobs_BC, None, None)
    if r.cfg.grpo.beta > 0:  # beta 0 costs no pass; the device makes it while the host reads and scores the completions
        logprobs_BC = yield reference_of(r, batch)
        batch = dataclasses.replace(batch, reference_logprobs_BC=logprobs_BC)
    texts = {row: r.model.tokenizer.decode(own.tolist()) for row, own in ids.items()}
    shuffle_key = r.key(index, Purpose.SHUFFLE) if r.cfg.grpo.shuffle_advantages else None
    scored = score(r.scorer, examples, texts, r.sampling.num_generations, shuffle_key)
    clock.lap("time/reward")
    samples = sample_records(examples[0], scored) if processes.first() else []
    return Gathered(with_advantages(batch, scored, r.model.mesh), lengths_B, reward_record(scored, ended_B), samples)


def reference_of(r: Run, batch: Batch) -> Reference:
    temperature = r.cfg.generation.temperature
    return Reference(r.model.weights, r.reference, batch, temperature, r.model.arch, r.micro_batches)


def update_of(r: Run, state: TrainState, batch: Batch, step: int, rate_scale: float = 1.0) -> Update:
    """The request for the update that makes this step; the guard may have scaled its rate down."""
    h = hyperparameters(r.cfg, r.plan, step, rate_scale)
    fixed = (r.model.arch, r.micro_batches, r.cfg.optimizer.optimizer_name)
    return Update(state, batch, r.model.weights, h, r.cfg.training.max_kl, *fixed)


def foreseen(r: Run) -> tuple[Sample | Reference | Update, ...]:
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
    batch = Batch(sample.draw.prompts, to_come(shape, jnp.int32), to_come(shape, bool), numbers_BC, None, None)
    scored = dataclasses.replace(batch, advantages_B=numbers_B)
    if r.cfg.grpo.beta == 0:
        return update_of(r, state, scored, 1), *before, sample, *after
    with_reference = dataclasses.replace(scored, reference_logprobs_BC=numbers_BC)
    return update_of(r, state, with_reference, 1), *before, sample, reference_of(r, batch), *after


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
    padded = (*right_pad(ids, width, r.model.tokenizer.pad_id), np.ones(len(examples), np.float32))
    tokens_BC, mask_BC, ones_B = (lay_rows(a.__getitem__, a.shape, r.model.mesh) for a in padded)
    batch = Batch(asked.prompts, tokens_BC, mask_BC, None, None, ones_B)
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
