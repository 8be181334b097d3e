from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm.objectives import Coefficients, LossForm
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine import ahead_of_time
from agent_tunix.engine.batch import widened
from agent_tunix.engine.calls import Logprobs, Sample, Update
from agent_tunix.engine.sampler import Draw, Sampling
from agent_tunix.engine.update import init_state
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Batch, Prompts


def batch(width: int) -> Batch:
    """A completion of each of two prompts."""
    tokens = jnp.ones((2, width), jnp.int32)
    learnt = {"weights_BC": tokens / (2 * width), "advantages_B": jnp.ones(2)}
    return Batch(Prompts(tokens[:, :1], tokens[:, :1]), tokens, tokens > 0, tokens > 0, tokens * 0.5, **learnt)


def test_batches_are_padded_on_the_right_to_the_widest():
    narrow, wide = widened([batch(2), batch(4)])
    np.testing.assert_array_equal(narrow.mask_BC, [[True, True, False, False]] * 2)
    assert narrow.tokens_BC.shape == narrow.old_logprobs_BC.shape == wide.tokens_BC.shape == (2, 4)
    assert narrow.reference_logprobs_BC is None


@pytest.mark.parametrize(
    ("request_of", "static"),
    [
        (
            Sample,
            {
                "sampling": [Sampling(None, 1.0, 8, 4, (1,), 0), Sampling(50, 1.0, 8, 4, (1,), 0)],
                "draw": [Draw(None, Prompts(np.ones((rows, 3)), np.ones((rows, 3))), None) for rows in (2, 4)],
            },
        ),
        (Logprobs, {"micro_batches": [1, 2], "shared": [True, False]}),
        (Update, {"micro_batches": [1, 2], "form": [LossForm(), LossForm("gspo")], "optimizer": ["adamw", "lion"]}),
    ],
)
def test_what_needs_another_program_is_of_another_kind(request_of, static):
    """And what any two runs bring of their own is not."""
    given: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(request_of))
    given |= {name: first for name, (first, _) in static.items()}
    one = request_of(**given)
    assert one.kind == request_of(**given | {"weights": "of another"}).kind
    for name, (_, second) in static.items():
        assert one.kind != request_of(**given | {name: second}).kind


def test_completions_that_all_runs_share_are_drawn_once(weights, arch, monkeypatch):
    """If only some do, all are drawn: the program of all is there already."""
    drawn = []
    run = ahead_of_time.run
    monkeypatch.setattr(ahead_of_time, "run", lambda program: drawn.append(len(program.arguments[1])) or run(program))
    sampling = Sampling(None, 1.0, 4, 1, (1,), 0, greedy=True)
    prompts = Prompts(jnp.full((2, 3), 7), jnp.tile(jnp.arange(3), (2, 1)))

    def ask(shared: str | None) -> Sample:
        return Sample(weights, Draw(None, prompts, jax.random.key(0)), arch, sampling, shared)

    for names, programs in ((["a", "a", "a"], 1), (["a", "b", "a"], 3), ([None, None, None], 3)):
        found = Sample.answer([ask(name) for name in names])
        assert drawn.pop() == programs
        assert [rollouts.tokens_BC.tolist() for rollouts in found] == [found[0].tokens_BC.tolist()] * 3


def test_a_reference_is_as_wide_as_its_own_batch(weights, arch):
    narrow, wide = (Logprobs(weights, None, batch(width), 1.0, arch, 1, shared=True) for width in (2, 4))
    found, _ = Logprobs.answer([narrow, wide])
    (by_itself,) = Logprobs.answer([narrow])
    np.testing.assert_allclose(found, by_itself, atol=1e-5)


def test_a_copy_that_fills_a_place_is_not_updated(weights, adapters, arch):
    """Its state is the first's own, which an update uses up."""
    h = Hyperparameters(0.01, 0.0, 0.9, 0.99, 1e-8, 1.0)
    state = init_state(Adapters({"q_proj": jnp.copy(adapters.a["q_proj"])}, {"q_proj": jnp.copy(adapters.b["q_proj"])}, 2.0))
    request = Update(state, batch(2), weights, h, Coefficients(1.0), np.inf, arch, 1, LossForm(), "adamw")
    ((updated, _),) = Update.answer([request, request])
    assert int(updated.step) == 1
