"""Runs as conversations with the device, so that several can share its programs.

A run is a generator: it yields a request for work on the device and is sent what came of it. `alone` answers one run.
`together` keeps several runs in step and answers requests of one kind by one program: K adapters and optimizer states over
one frozen base, the rows of all of them in the same matrix products. A run cannot tell the difference: noise and data
follow from its own seed and position, and what happens to another run is not seen by it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import jax
from jax.typing import ArrayLike

from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine.batch import widened
from agent_tunix.engine.rollout import Draw, Sampling, sample
from agent_tunix.engine.update import UpdateStats, reference_logprobs, update, update_together
from agent_tunix.errors import DivergenceError
from agent_tunix.models.gemma3 import Architecture, Weights
from agent_tunix.models.lora import Adapters
from agent_tunix.models.mesh import on_mesh_of
from agent_tunix.types import Batch, Rollouts, TrainState


@dataclasses.dataclass(frozen=True)
class Sample:
    """Asks for completions of a policy's prompts, as `Rollouts`."""

    weights: Weights
    draw: Draw
    arch: Architecture
    sampling: Sampling

    @property
    def kind(self) -> tuple:
        return Sample, self.arch, self.sampling

    @staticmethod
    def answer(requests: Sequence[Sample]) -> Sequence[Rollouts]:
        first = requests[0]
        with on_mesh_of(first.weights):
            return sample(first.weights, tuple(r.draw for r in requests), arch=first.arch, sampling=first.sampling)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Asks for the log-probabilities of a batch's completions under the reference policy."""

    weights: Weights
    adapters: Adapters | None
    batch: Batch
    temperature: float
    arch: Architecture
    micro_batches: int

    @property
    def kind(self) -> tuple:
        return Reference, self.arch, self.micro_batches

    @staticmethod
    def answer(requests: Sequence[Reference]) -> Sequence[jax.Array]:
        first = requests[0]
        batches = widened([r.batch for r in requests])
        temperatures = tuple(r.temperature for r in requests)
        static = {"arch": first.arch, "micro_batches": first.micro_batches}
        with on_mesh_of(first.weights):
            found = reference_logprobs(batches, first.weights, first.adapters, temperatures, **static)
        widths = [r.batch.tokens_BC.shape[1] for r in requests]
        return [logprobs_BC[:, :width] for logprobs_BC, width in zip(found, widths, strict=True)]


@dataclasses.dataclass(frozen=True)
class Update:
    """Asks for one optimizer update, as the new state and its statistics; the old state is used up."""

    state: TrainState
    batch: Batch
    weights: Weights
    h: Hyperparameters
    max_kl: ArrayLike
    arch: Architecture
    micro_batches: int
    optimizer: str

    @property
    def kind(self) -> tuple:
        return Update, self.arch, self.micro_batches, self.optimizer

    @staticmethod
    def answer(requests: Sequence[Update]) -> Sequence[tuple[TrainState, UpdateStats]]:
        first = requests[0]
        static = {"arch": first.arch, "micro_batches": first.micro_batches, "optimizer": first.optimizer}
        with on_mesh_of(first.weights):
            if len(requests) == 1:
                return [update(first.state, first.batch, first.weights, first.h, first.max_kl, **static)]
            batches = widened([r.batch for r in requests])
            states, hs, max_kls = zip(*((r.state, r.h, r.max_kl) for r in requests), strict=True)
            return update_together(states, batches, first.weights, hs, max_kls, **static)


Request = Sample | Reference | Update
Result = TypeVar("Result")
Conversation = Generator[Request, Any, Result]


def alone(run: Conversation[Result]) -> Result:
    """Answers one run's requests until it ends."""
    try:
        request = next(run)
        while True:
            (answer,) = request.answer([request])  # type: ignore[list-item]
            request = run.send(answer)
    except StopIteration as end:
        return end.value


def together(runs: Sequence[Conversation[Result]]) -> list[Result | DivergenceError]:
    """Answers several runs until all have ended; of one that diverged, its error. Any other error ends them all.

    The kind that most runs wait for is answered first, so one that fell out of step, after a rollback say, falls in again.
    The programs keep their size to the end: the place of a run that has ended is filled by a copy that no one looks at.
    """
    results: list[Any] = [None] * len(runs)
    waiting: dict[int, Request] = {}

    def proceed(index: int, answer: Any) -> None:
        try:
            waiting[index] = runs[index].send(answer)
        except StopIteration as end:
            results[index] = end.value
        except DivergenceError as fault:
            results[index] = fault

    try:
        for index in range(len(runs)):
            proceed(index, None)
        while waiting:
            (kind, _), *_ = Counter(request.kind for request in waiting.values()).most_common(1)
            chosen = [index for index, request in waiting.items() if request.kind == kind]
            requests: list[Any] = [waiting.pop(index) for index in chosen]
            fillers = [requests[0]] * (len(runs) - len(requests))
            for index, answer in zip(chosen, requests[0].answer(requests + fillers), strict=False):
                proceed(index, answer)
    finally:
        for run in runs:
            run.close()
    return results
