"""Runs as conversations with the device, so that several can share its programs.

A run is a generator: it yields a request for work on the device and is sent what came of it. `alone` answers one run.
`together` keeps several runs in step and answers requests of one kind by one program: K adapters and optimizer states over
one frozen base, the rows of all of them in the same matrix products. A run cannot tell the difference: noise and data
follow from its own seed and position, and what happens to another run is not seen by it.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from agent_tunix.algorithm.objectives import Coefficients, LossForm, LossStats
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine import ahead
from agent_tunix.engine.ahead import Program
from agent_tunix.engine.batch import cut_to, widened
from agent_tunix.engine.rollout import Draw, Sampling, prepare, sample
from agent_tunix.engine.update import UpdateStats, batch_logprobs, gradients_together, update, update_one_of
from agent_tunix.errors import DivergenceError
from agent_tunix.models.gemma3 import Architecture, Weights
from agent_tunix.models.lora import Adapters, Trainable
from agent_tunix.models.mesh import on_mesh_of
from agent_tunix.types import Batch, Rollouts, TrainState


class DeviceRequest(abc.ABC):
    """Asks for a call of a program over the weights; one call can answer the requests of several runs.

    Each has a `kind`, equal for requests that one call can answer.
    """

    weights: Weights

    @staticmethod
    @abc.abstractmethod
    def program(requests: Sequence[Any]) -> Program:
        """The call that serves all of them."""

    @classmethod
    def programs(cls, requests: Sequence[Any]) -> tuple[Program, ...]:
        """All that an answer will call."""
        return (cls.program(requests),)

    @classmethod
    def answer(cls, requests: Sequence[Any]) -> Sequence[Any]:
        with on_mesh_of(requests[0].weights):
            return ahead.run(cls.program(requests))


def _send_to_host(arrays: Any) -> None:
    """Starts copying each array as soon as it is made: asking for many small ones, one after another, takes longer."""
    jax.tree.map(lambda array: array.copy_to_host_async(), arrays)


@dataclasses.dataclass(frozen=True)
class Sample(DeviceRequest):
    """Asks for completions of a policy's prompts, as `Rollouts`.

    `shared` names them where other runs may ask for the very same: if all do, they are drawn once.
    """

    weights: Weights
    draw: Draw
    arch: Architecture
    sampling: Sampling
    shared: str | None = None

    @property
    def kind(self) -> tuple:
        return Sample, self.arch, self.sampling, len(self.draw.prompts.tokens_PS)

    @staticmethod
    def program(requests: Sequence[Sample]) -> Program:
        first, names = requests[0], {r.shared for r in requests}
        drawn = requests[:1] if len(names) == 1 and names != {None} else requests
        static = {"arch": first.arch, "sampling": first.sampling}
        return Program(sample, (first.weights, tuple(r.draw for r in drawn)), static, prepare)

    @classmethod
    def answer(cls, requests: Sequence[Sample]) -> Sequence[Rollouts]:
        found = super().answer(requests)
        _send_to_host([(rollouts.tokens_BC, rollouts.mask_BC, rollouts.ended_B) for rollouts in found])
        return found if len(found) == len(requests) else [*found] * len(requests)


@dataclasses.dataclass(frozen=True)
class Logprobs(DeviceRequest):
    """Asks for the log-probabilities of a batch's completions under weights and adapters.

    Those of the reference are `shared` by all runs that one call serves; those of a policy in training are a run's own.
    """

    weights: Weights
    adapters: Adapters | None
    batch: Batch
    temperature: float
    arch: Architecture
    micro_batches: int
    shared: bool

    @property
    def kind(self) -> tuple:
        return Logprobs, self.arch, self.micro_batches, self.shared

    @staticmethod
    def program(requests: Sequence[Logprobs]) -> Program:
        first = requests[0]
        of_all = first.shared or len(requests) == 1
        adapters = first.adapters if of_all else tuple(r.adapters for r in requests)
        temperatures = tuple(r.temperature for r in requests)
        arguments = (widened([r.batch for r in requests]), first.weights, adapters, temperatures)
        return Program(batch_logprobs, arguments, {"arch": first.arch, "micro_batches": first.micro_batches})

    @classmethod
    def answer(cls, requests: Sequence[Logprobs]) -> Sequence[jax.Array]:
        widths = [r.batch.tokens_BC.shape[1] for r in requests]
        found = super().answer(requests)
        return [cut_to(width, logprobs_BC) for logprobs_BC, width in zip(found, widths, strict=True)]


@dataclasses.dataclass(frozen=True)
class Update(DeviceRequest):
    """Asks for one optimizer update, as the new state and its statistics; the old state is used up."""

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
    def program(requests: Sequence[Update]) -> Program:
        first = requests[0]
        static = {"arch": first.arch, "micro_batches": first.micro_batches, "form": first.form}
        if len(requests) == 1:
            given = (first.state, first.batch, first.weights, first.h, first.c, first.max_kl)
            return Program(update, given, static | {"optimizer": first.optimizer})
        adapters, cs = zip(*((r.state.trainable, r.c) for r in requests), strict=True)
        return Program(gradients_together, (adapters, widened([r.batch for r in requests]), first.weights, cs), static)

    @classmethod
    def programs(cls, requests: Sequence[Update]) -> tuple[Program, ...]:
        if len(requests) == 1:
            return super().programs(requests)
        state, K = requests[0].state, len(requests)
        grads = jax.tree.map(lambda x: _shape((x.shape[0], K, *x.shape[1:]), x), state.trainable)
        of_each: Any = [_shape((K,), state.step, jnp.float32)] * len(dataclasses.fields(LossStats))
        return cls.program(requests), requests[0].own_step(0, grads, LossStats(*of_each))

    @classmethod
    def answer(cls, requests: Sequence[Update]) -> Sequence[tuple[TrainState, UpdateStats]]:
        found: Any = super().answer(requests)
        if len(requests) == 1:
            updated = [found]
        else:
            own = [request for n, request in enumerate(requests) if n == 0 or request is not requests[0]]  # without copies
            with on_mesh_of(requests[0].weights):
                updated = [ahead.run(request.own_step(index, *found)) for index, request in enumerate(own)]
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
class Foresight:
    """Announces, by shapes alone, what a run will soon ask for; there is no answer to wait for."""

    requests: tuple[DeviceRequest, ...]
    kind = ("foresight",)

    @staticmethod
    def answer(foresights: Sequence[Foresight]) -> Sequence[None]:
        for requests in zip(*(f.requests for f in foresights), strict=True):
            alike = [r if r.kind == requests[0].kind else requests[0] for r in requests]  # others will be asked for apart
            for program in requests[0].programs(alike):
                ahead.begin(program, partial(on_mesh_of, requests[0].weights))
        return [None] * len(foresights)


@dataclasses.dataclass(frozen=True)
class Ready:
    """Asks to go on once some arrays have been computed: what runs do before that, all of them do while the device works."""

    arrays: Any
    kind = ("ready",)

    @staticmethod
    def answer(waiting: Sequence[Ready]) -> Sequence[None]:
        jax.block_until_ready([ready.arrays for ready in waiting])
        return [None] * len(waiting)


Request = Sample | Logprobs | Update | Foresight | Ready
Result = TypeVar("Result")
Conversation = Generator[Request, Any, Result]


def alone(run: Conversation[Result]) -> Result:
    """Answers one run's requests until it ends; a fault of the device is raised in it, so that it closes what it holds."""
    try:
        request = next(run)
        while True:
            try:
                (answer,) = request.answer([request])  # type: ignore[list-item]
            except BaseException as fault:
                request = run.throw(fault)
            else:
                request = run.send(answer)
    except StopIteration as end:
        return end.value


def together(runs: Sequence[Conversation[Result]], size: int | None = None) -> list[Result | DivergenceError]:
    """Answers several runs until all have ended; of one that diverged, its error. Any other error ends them all.

    A kind that few runs wait for, or that is seldom asked for, is answered first: so runs that fell out of step, after a
    rollback say, go on until they fall in with the others. `Ready` comes before more work for the device.
    The programs keep their size to the end: the place of a run that does not ask is filled by a copy, its answer ignored.
    They are larger than the runs are many where some ended before the others go on; `size` then says how many there were.
    """
    results: list[Any] = [None] * len(runs)
    waiting: dict[int, Request] = {}
    answered = Counter[tuple]()

    def proceed(index: int, answer: Any) -> None:
        try:
            waiting[index] = runs[index].send(answer)
        except StopIteration as end:
            results[index] = end.value
        except DivergenceError as fault:
            results[index] = fault

    with contextlib.ExitStack() as closing:
        for run in runs:
            closing.callback(run.close)
        for index in range(len(runs)):
            proceed(index, None)
        while waiting:
            waited_for = Counter(request.kind for request in reversed(waiting.values()))  # the latest first
            kind = min(waited_for, key=lambda kind: (kind != Ready.kind, waited_for[kind] * (1 + answered[kind])))
            answered[kind] += 1
            chosen = [index for index, request in waiting.items() if request.kind == kind]
            requests: list[Any] = [waiting.pop(index) for index in chosen]
            fillers = [requests[0]] * ((size or len(runs)) - len(requests))
            try:
                answers = requests[0].answer(requests + fillers)
            except BaseException as fault:
                runs[chosen[0]].throw(fault)  # one of them notes what has ended all
                raise
            for index, answer in zip(chosen, answers, strict=False):
                proceed(index, answer)
    return results
