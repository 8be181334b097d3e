from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm.objectives import Coefficients, LossForm
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine import ahead
from agent_tunix.engine.batch import widened
from agent_tunix.engine.population import Logprobs, Ready, Sample, Update, alone, together
from agent_tunix.engine.rollout import Draw, Sampling
from agent_tunix.engine.update import init_state
from agent_tunix.errors import DivergenceError, UserError
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Batch, Prompts


@dataclasses.dataclass(frozen=True)
class Square:
    """A toy request; `log` sees every call with all its members."""

    number: int
    log: list
    kind: str = "square"

    @staticmethod
    def answer(requests):
        requests[0].log.append([r.number for r in requests])
        return [r.number**2 for r in requests]


@dataclasses.dataclass(frozen=True)
class Other(Square):
    kind: str = "other"


@dataclasses.dataclass(frozen=True)
class Third(Square):
    kind: str = "third"


def summing(numbers, log):
    total = 0
    for number in numbers:
        total += yield Square(number, log)
    return total


def test_alone_answers_until_the_run_ends():
    log: list = []
    assert alone(summing([1, 2, 3], log)) == 14
    assert log == [[1], [2], [3]]


def test_runs_in_step_share_every_call_and_get_their_own_answers():
    log: list = []
    assert together([summing([1, 2], log), summing([3, 4], log), summing([5, 6], log)]) == [5, 25, 61]
    assert log == [[1, 3, 5], [2, 4, 6]]


def test_runs_wait_for_the_device_when_all_have_done_what_they_can_before():
    log: list = []

    def run(name):
        made = yield Square(name, [])
        log.append(f"{name} prepares")
        yield Ready(jnp.asarray(made))
        log.append(f"{name} goes on")

    together([run(1), run(2)])
    assert log == ["1 prepares", "2 prepares", "1 goes on", "2 goes on"]


def test_calls_keep_their_size_when_a_run_has_ended():
    log: list = []
    assert together([summing([1], log), summing([2, 3, 4], log)]) == [1, 29]
    assert log == [[1, 2], [3, 3], [4, 4]]
    log.clear()
    assert together([summing([3, 4], log)], size=2) == [25], "the other has ended in an earlier process"
    assert log == [[3, 3], [4, 4]]


def test_a_run_that_diverges_does_not_disturb_the_others():
    log: list = []

    def diverging():
        yield Square(7, log)
        raise DivergenceError("loss is nan")

    first, second = together([diverging(), summing([2, 3], log)])
    assert str(first) == "loss is nan"
    assert second == 13


@pytest.mark.parametrize("strays", [{0}, {1}, {0, 1}, {1, 2, 3}], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_runs_out_of_step_fall_in_again(size, strays):
    """Some ask for something else before the fourth of their steps; all others wait, and share every step with them."""
    log: list = []

    def run(index):
        for step in range(20):
            if step == 3 and index in strays:
                yield Other(index, log)
                yield Ready(())
            for request in (Square(step, log), Third(step, log)):
                yield request
                yield Ready(())

    together([run(index) for index in range(size)])
    shared = [numbers for numbers in log if len(set(numbers)) == 1]
    assert len(log) == 2 * 20 + 1
    assert len(shared) >= 2 * 20


class Broken(Square):
    @staticmethod
    def answer(requests):
        raise MemoryError


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_hears_of_a_fault_of_the_device_and_the_others_close(size):
    heard = []

    def careful():
        try:
            yield Broken(1, [])
        except BaseException as fault:
            heard.append(type(fault))
            raise

    with pytest.raises(MemoryError):
        alone(careful()) if size == 1 else together([careful() for _ in range(size)])
    assert heard == [MemoryError] + [GeneratorExit] * (size - 1)


def test_any_other_error_ends_all_and_lets_each_close():
    closed = []

    def careful():
        try:
            yield Square(1, [])
            yield Square(1, [])
        finally:
            closed.append(True)

    def failing():
        yield Square(1, [])
        raise UserError("a reward function raised")

    with pytest.raises(UserError, match="a reward function"):
        together([careful(), failing(), careful()])
    assert closed == [True, True]


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
    run = ahead.run
    monkeypatch.setattr(ahead, "run", lambda program: drawn.append(len(program.arguments[1])) or run(program))
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
