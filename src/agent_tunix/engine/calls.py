"""The calls that are made of the device, each of which several runs can make as one.

A call knows its arguments and the compiled program that serves it. Calls of one kind, of several runs over one base, are
served by one program: that is how a sweep over rates costs little more than one run (see `fused.py`).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from agent_tunix.algorithm.objectives import Coefficients, LossForm, LossStats
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine import ahead_of_time
from agent_tunix.engine.ahead_of_time import Program
from agent_tunix.engine.batch import cut_to, widened
from agent_tunix.engine.sampler import Draw, Sampling, logits, prepare, sample
from agent_tunix.engine.update import UpdateStats, batch_logprobs, gradients_together, update, update_one_of
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.lora import Adapters, Trainable
from agent_tunix.models.sharding import on_mesh_of
from agent_tunix.types import Batch, Prompts, Rollouts, TrainState


class Call(abc.ABC):
    """A call of the device. Each has a `kind`, equal for calls that one program can serve."""

    @property
    @abc.abstractmethod
    def kind(self) -> tuple[Hashable, ...]: ...

    @staticmethod
    @abc.abstractmethod
    def answer(calls: Sequence[Any]) -> Sequence[Any]:
        """What comes of calls of one kind, in their order."""


Answer = Callable[[Call], Any]


def alone(call: Call) -> Any:
    """Answers a call of a run that shares no program."""
    (answer,) = call.answer([call])
    return answer


class ProgramCall(Call):
    """A call of a program over the weights."""

    weights: Weights

    @staticmethod
    @abc.abstractmethod
    def program(calls: Sequence[Any]) -> Program:
        """The program, with its arguments, that serves all of them."""

    @classmethod
    def programs(cls, calls: Sequence[Any]) -> tuple[Program, ...]:
        """All that an answer will run."""
        return (cls.program(calls),)

    @classmethod
    def answer(cls, calls: Sequence[Any]) -> Sequence[Any]:
        with on_mesh_of(calls[0].weights):
            return ahead_of_time.run(cls.program(calls))


def _send_to_host(arrays: Any) -> None:
    """Starts copying each array as soon as it is made: asking for many small ones, one after another, takes longer."""
    jax.tree.map(lambda array: array.copy_to_host_async(), arrays)


@dataclasses.dataclass(frozen=True)
class Sample(ProgramCall):
    """Completions of a policy's prompts, as `Rollouts`.

    `shared` names them where other runs may ask for the very same: if all do, they are drawn once.
    """

    weights: Weights
    draw: Draw
    arch: Architecture
    sampling: Sampling
    shared: str | None = None

    @property
    def kind(self) -> tuple:
        return Sample, self.arch, self.sampling, self.draw.prompts.tokens_PS.shape

    @staticmethod
    def program(calls: Sequence[Sample]) -> Program:
        first, names = calls[0], {r.shared for r in calls}
        drawn = calls[:1] if len(names) == 1 and names != {None} else calls
        static = {"arch": first.arch, "sampling": first.sampling}
        return Program(sample, (first.weights, tuple(r.draw for r in drawn)), static, prepare)

    @classmethod
    def answer(cls, calls: Sequence[Sample]) -> Sequence[Rollouts]:
        found = super().answer(calls)
        _send_to_host([(rollouts.tokens_BC, rollouts.mask_BC, rollouts.ended_B) for rollouts in found])
        return found if len(found) == len(calls) else [*found] * len(calls)


@dataclasses.dataclass(frozen=True)
class Logits(ProgramCall):
    """The logits of a policy at every token of prompts."""

    weights: Weights
    adapters: Adapters | None
    prompts: Prompts
    arch: Architecture

    @property
    def kind(self) -> tuple:
        return Logits, self.arch, self.prompts.tokens_PS.shape

    @staticmethod
    def program(calls: Sequence[Logits]) -> Program:
        (call,) = calls
        return Program(logits, (call.weights, call.adapters, call.prompts), {"arch": call.arch})

    @classmethod
    def answer(cls, calls: Sequence[Logits]) -> Sequence[jax.Array]:
        found: Any = super().answer(calls)
        return [found]


@dataclasses.dataclass(frozen=True)
class Logprobs(ProgramCall):
    """The log-probabilities of a batch's completions under weights and adapters.

    Those of the reference are `shared` by all runs that one call serves; those of a policy in training are a run's own.
    """

    weights: Weights
    adapters: Adapters | None
    batch: Batch
    temperature: ArrayLike
    arch: Architecture
    micro_batches: int
    shared: bool

    @property
    def kind(self) -> tuple:
        return Logprobs, self.arch, self.micro_batches, self.shared

    @staticmethod
    def program(calls: Sequence[Logprobs]) -> Program:
        first = calls[0]
        of_all = first.shared or len(calls) == 1
        adapters = first.adapters if of_all else tuple(r.adapters for r in calls)
        temperatures = tuple(r.temperature for r in calls)
        arguments = (widened([r.batch for r in calls]), first.weights, adapters, temperatures)
        return Program(batch_logprobs, arguments, {"arch": first.arch, "micro_batches": first.micro_batches})

    @classmethod
    def answer(cls, calls: Sequence[Logprobs]) -> Sequence[jax.Array]:
        widths = [r.batch.tokens_BC.shape[1] for r in calls]
        found = super().answer(calls)
        return [cut_to(width, logprobs_BC) for logprobs_BC, width in zip(found, widths, strict=True)]


@dataclasses.dataclass(frozen=True)
class Update(ProgramCall):
    """One optimizer update, as the new state and its statistics; the old state is used up."""

    state: TrainState
    batch: Batch
    weights: Weights
    h: Hyperparameters
    c: Coefficients
    max_kl: ArrayLike
    arch: Architecture
    micro_batches: int
    form: LossForm
    optimizer: str

    @property
    def kind(self) -> tuple:
        return Update, self.arch, self.micro_batches, self.form, self.optimizer

    @staticmethod
    def program(calls: Sequence[Update]) -> Program:
        first = calls[0]
        static = {"arch": first.arch, "micro_batches": first.micro_batches, "form": first.form}
        if len(calls) == 1:
            given = (first.state, first.batch, first.weights, first.h, first.c, first.max_kl)
            return Program(update, given, static | {"optimizer": first.optimizer})
        adapters, cs = zip(*((r.state.trainable, r.c) for r in calls), strict=True)
        return Program(gradients_together, (adapters, widened([r.batch for r in calls]), first.weights, cs), static)

    @classmethod
    def programs(cls, calls: Sequence[Update]) -> tuple[Program, ...]:
        if len(calls) == 1:
            return super().programs(calls)
        state, K = calls[0].state, len(calls)
        grads = jax.tree.map(lambda x: _shape((x.shape[0], K, *x.shape[1:]), x), state.trainable)
        of_each: Any = [_shape((K,), state.step, jnp.float32)] * len(dataclasses.fields(LossStats))
        return cls.program(calls), calls[0].own_step(0, grads, LossStats(*of_each))

    @classmethod
    def answer(cls, calls: Sequence[Update]) -> Sequence[tuple[TrainState, UpdateStats]]:
        found: Any = super().answer(calls)
        if len(calls) == 1:
            updated = [found]
        else:
            own = [request for n, request in enumerate(calls) if n == 0 or request is not calls[0]]  # without copies
            with on_mesh_of(calls[0].weights):
                updated = [ahead_of_time.run(request.own_step(index, *found)) for index, request in enumerate(own)]
        _send_to_host([(state.step, stats) for state, stats in updated])
        return updated

    def own_step(self, index: int, grads: Trainable, stats_K: LossStats) -> Program:
        """This run's step, by its gradient among those of several policies."""
        given = (self.state, index, grads, stats_K, self.h, self.max_kl)
        return Program(update_one_of, given, {"arch": self.arch, "optimizer": self.optimizer})


def _shape(shape: tuple[int, ...], beside: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The shape of an array to come, which will lie on the same devices as `beside`."""
    return jax.ShapeDtypeStruct(shape, dtype or beside.dtype, sharding=beside.sharding)


@dataclasses.dataclass(frozen=True)
class CompileAhead(Call):
    """Announces, by shapes alone, the calls that a run will make; there is no answer to wait for."""

    calls: tuple[ProgramCall, ...]

    @property
    def kind(self) -> tuple:
        return (CompileAhead,)

    @staticmethod
    def answer(announced: Sequence[CompileAhead]) -> Sequence[None]:
        for calls in zip(*(a.calls for a in announced), strict=True):
            alike = [call if call.kind == calls[0].kind else calls[0] for call in calls]  # others will be made apart
            for program in calls[0].programs(alike):
                ahead_of_time.begin(program, partial(on_mesh_of, calls[0].weights))
        return [None] * len(announced)
