"""What is asked of the device: completions and logits of a model; log-probabilities and updates of one in training.

Every method returns arrays at once; they may still be under way, and whoever reads one waits for it. Who answers is the
engine's own affair: a lone run's calls go to the compiled programs, those of the jobs of a sweep may go to programs that
serve them all (`fused.together`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from agent_tunix.algorithm.objectives import Coefficients, LossForm
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine.calls import Answer, CompileAhead, Logits, Logprobs, ProgramCall, Sample, Update, alone
from agent_tunix.engine.sampler import Draw, Sampling
from agent_tunix.engine.update import UpdateStats
from agent_tunix.models.base import Model
from agent_tunix.models.lora import Adapters, Policy, Trainable, policy_of
from agent_tunix.types import Batch, Prompts, Rollouts, TrainState


@dataclasses.dataclass(frozen=True)
class Inference:
    """The device's work for a model that is only asked."""

    model: Model
    answer: Answer = dataclasses.field(default=alone, kw_only=True)

    def policy(self, trainable: Trainable | None) -> Policy:
        """What acts with these parameters on the base; None stands for the base itself."""
        return (self.model.weights, None) if trainable is None else policy_of(self.model.weights, trainable)

    def sample(
        self,
        policy: Policy,
        prompts: Prompts,
        key: jax.Array,
        sampling: Sampling,
        temperature: float,
        shared: str | None = None,
    ) -> Rollouts:
        """Completions by a policy. `shared` names them where other runs may ask for the very same."""
        weights, adapters = policy
        return self.answer(Sample(weights, Draw(adapters, prompts, key, temperature), self.model.arch, sampling, shared))

    def logits(self, policy: Policy, prompts: Prompts) -> jax.Array:
        """Float32 logits (P, S, V) at every token of prompts."""
        return self.answer(Logits(*policy, prompts, self.model.arch))


@dataclasses.dataclass(frozen=True)
class Engine(Inference):
    """The device's work for one run. `reference` are the adapters that the run began with; None stands for the base."""

    reference: Adapters | None
    micro_batches: int
    form: LossForm
    coefficients: Coefficients
    optimizer: str
    max_kl: float

    def reference_logprobs(self, batch: Batch) -> jax.Array:
        """Log-probabilities (B, C) of the completions under the reference policy."""
        return self._logprobs(batch, (self.model.weights, self.reference), shared=True)

    def policy_logprobs(self, policy: Policy, batch: Batch) -> jax.Array:
        """Log-probabilities (B, C) of the completions under a policy in training, as an update computes them."""
        return self._logprobs(batch, policy, shared=False)

    def update(self, state: TrainState, batch: Batch, h: Hyperparameters) -> tuple[TrainState, UpdateStats]:
        """One optimizer update. The old state is used up."""
        fixed = self.model.arch, self.micro_batches, self.form, self.optimizer
        return self.answer(Update(state, batch, self.model.weights, h, self.coefficients, self.max_kl, *fixed))

    def compile_ahead(self, work: Callable[[Engine], object]) -> None:
        """Begins to compile the programs that some work on an engine will call, which is tried on shapes alone."""
        self.answer(CompileAhead(self.calls_of(work)))

    def calls_of(self, work: Callable[[Engine], object]) -> tuple[ProgramCall, ...]:
        """The calls that some work would make, none of which is answered; it sees shapes in the place of weights."""
        calls: list[Any] = []
        work(dataclasses.replace(self, model=self.model.outline(), answer=calls.append))
        return tuple(calls)

    def _logprobs(self, batch: Batch, policy: Policy, *, shared: bool) -> jax.Array:
        read = Batch(batch.prompts, batch.tokens_BC, batch.mask_BC, batch.learnt_BC)  # one program, whatever else is known
        temperature, arch = self.coefficients.temperature, self.model.arch
        return self.answer(Logprobs(*policy, read, temperature, arch, self.micro_batches, shared))
