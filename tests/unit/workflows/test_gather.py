"""What a run asks for to make a batch, and what it foresees that it will ask for."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine import ahead
from agent_tunix.engine.metrics import Clock
from agent_tunix.engine.population import Foresight, Logprobs, Ready, Sample, together
from agent_tunix.tasks.rewards import Scorer
from agent_tunix.types import Rollouts
from agent_tunix.workflows import setup, train
from agent_tunix.workflows.gather import Run, asked_at, evaluation_ways, foreseen, gather, update_of
from agent_tunix.workflows.train import prepare

PROMPTS, GENERATIONS, STEPS = 2, 2, 8


class Watched(Scorer):
    """Rewards the second completion of a group, and tells when it is asked."""

    asked = False

    looks = 0

    def __init__(self) -> None:
        super().__init__({}, {"second": 1.0})
        self.weights = {"second": 1.0}

    def look(self) -> None:
        self.looks += 1

    def __call__(self, prompts, completions, truths):
        self.asked = True
        return {"second": np.tile(np.float32([0, 1]), PROMPTS)}


def prepared(*overrides: str, shelf: setup.Shelf | None = None) -> Run:
    small = f"training.micro_batch_size={PROMPTS}", f"grpo.num_generations={GENERATIONS}"
    short = f"generation.max_generation_steps={STEPS}", "evaluation.num_examples=3"
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = validate(compose("config", ["+experiment=quick_test", *small, *short, *overrides]), Config)
    return prepare(cfg, shelf or setup.Shelf(), lambda text: None)


def conversation(scorer: Scorer, *overrides: str):
    run = dataclasses.replace(prepared(*overrides), scorer=scorer)
    return gather(run, setup.new_state(run.cfg, run.model), asked_at(run, 0), Clock(), scorer.look)


def rollouts() -> Rollouts:
    shape = PROMPTS * GENERATIONS, STEPS
    logprobs_BC = jnp.full(shape, -2.0)
    return Rollouts(jnp.full(shape, 7, jnp.int32), jnp.ones(shape, bool), logprobs_BC, jnp.zeros(shape[0], bool))


def test_the_reference_is_asked_for_before_the_host_scores():
    scorer = Watched()
    asking = conversation(scorer, "grpo.beta=0.1")
    assert isinstance(next(asking), Sample)
    assert scorer.looks == 0
    assert isinstance(asking.send(rollouts()), Ready)
    assert scorer.looks == 1, "there is time for other things before completions are waited for"
    request = asking.send(None)
    assert isinstance(request, Logprobs)
    assert not scorer.asked
    logprobs_BC = jnp.full(request.batch.tokens_BC.shape, -3.0)
    gathered = _end(asking, logprobs_BC)
    assert scorer.asked
    assert gathered.batch.reference_logprobs_BC is logprobs_BC
    np.testing.assert_array_equal(np.sign(gathered.batch.advantages_B), [-1, 1] * PROMPTS)


def test_without_kl_no_reference_is_asked_for():
    asking = conversation(Watched(), "grpo.beta=0")
    next(asking)
    asking.send(rollouts())
    assert _end(asking, None).batch.reference_logprobs_BC is None


@pytest.mark.parametrize("seeds", [(0,), (0, 1), (0, 0)])
def test_evaluations_and_step_ask_for_what_was_foreseen_and_for_nothing_else(seeds, monkeypatch):
    """Every program that they run, of one run and of two at once, is one that was begun ahead."""
    begun, ran = set(), set()
    monkeypatch.setattr(ahead, "begin", lambda program, context: begun.add(program.signature()))
    run_program = ahead.run
    monkeypatch.setattr(ahead, "run", lambda program: ran.add(program.signature()) or run_program(program))
    runs = [prepared("grpo.beta=0.1", "model.lora_module_path=q_proj", f"seed={seed}") for seed in seeds]

    def step(run: Run):
        yield Foresight(foreseen(run))
        assert "_read" not in vars(run.model), "what is to come is known before weights are read"
        state = setup.new_state(run.cfg, run.model)
        for way in evaluation_ways(run):
            yield from train._answers(run, state, way, lambda: None, whole=True)
        gathered = yield from gather(run, state, asked_at(run, 0), Clock(), lambda: None)
        state, _ = yield update_of(run, state, gathered.batch, 1)
        for way in evaluation_ways(run):
            yield from train._answers(run, state, way, lambda: None, whole=True)
        return int(state.step)

    assert together([step(run) for run in runs]) == [1] * len(seeds)
    evaluation = 4 if seeds == (0, 0) else 2  # runs that begin with one policy have its first evaluation by itself
    assert len(ran) == evaluation + 2 + len(seeds), "of several, a step has its gradients and then each run's own part"
    assert ran == begun


def test_runs_that_begin_with_one_policy_ask_for_its_answers_once(monkeypatch):
    """All jobs of a sweep over rates do. Another seed or another way of asking begins otherwise, and an update ends it."""
    asked, shelf = [], setup.Shelf()

    def complete(*given):
        asked.append(given)
        return [["answer"]]
        yield

    monkeypatch.setattr(train, "complete", complete)

    def answers(*overrides: str, step: int = 0, way: int = 0):
        run = prepared(*overrides, shelf=shelf)
        state = dataclasses.replace(setup.new_state(run.cfg, run.model), step=jnp.asarray(step))
        assert _end(train._answers(run, state, evaluation_ways(run)[way], lambda: None, whole=True), None) == [["answer"]]
        return len(asked)

    assert answers("optimizer.learning_rate=1e-5") == 1
    assert answers("optimizer.learning_rate=1e-4", "grpo.beta=0") == 1
    assert answers(way=1) == 2
    assert answers("seed=7") == 3
    assert answers("evaluation.num_examples=2") == 4
    assert answers("model.lora_alpha=3") == 5
    assert [answers(step=1), answers(step=1)] == [6, 7]
    assert answers() == 7


def _end(asking, answer):
    try:
        request = asking.send(answer)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"asked for more: {request}")


def test_groups_without_a_spread_are_drawn_anew_and_what_is_recorded_is_the_first_draw():
    """Of the first draw no group has a spread, of the second the second, of the third there is none left to ask for."""

    class Rising(Watched):
        def __call__(self, prompts, completions, truths):
            self.looks += 1
            by_draw = {1: [1, 1, 1, 1], 2: [0, 0, 0, 1], 3: [1, 0, 1, 0]}
            return {"second": np.float32(by_draw[self.looks])}

    scorer = Rising()
    run = dataclasses.replace(prepared("grpo.beta=0", "grpo.resample_rounds=5"), scorer=scorer)
    asking = gather(run, setup.new_state(run.cfg, run.model), asked_at(run, 0), Clock(), lambda: None)
    prompts = []
    request = next(asking)
    for _ in range(3):
        prompts.append(np.asarray(request.draw.prompts.tokens_PS))
        assert isinstance(asking.send(rollouts()), Ready)
        try:
            request = asking.send(None)
        except StopIteration as end:
            gathered = end.value
    assert scorer.looks == 3
    want = [prompts[1][1], prompts[2][0]]
    np.testing.assert_array_equal(gathered.batch.prompts.tokens_PS, want)
    np.testing.assert_array_equal(np.sign(gathered.batch.advantages_B), [-1, 1, 1, -1])
    assert gathered.record["groups/discarded"] == 3
    assert (gathered.record["reward/mean"], gathered.record["groups/zero_variance"]) == (1.0, 1.0)
    assert len(gathered.lengths_B) == 3 * PROMPTS * GENERATIONS


def test_completions_that_were_cut_are_left_out_or_paid_less(monkeypatch):
    def gathered(*overrides: str):
        asking = conversation(Watched(), "grpo.beta=0", *overrides)
        next(asking)
        asking.send(rollouts())
        return _end(asking, None)

    assert not np.asarray(gathered("grpo.overlong=mask").batch.weights_BC).any(), "none of them ended"
    np.testing.assert_allclose(np.asarray(gathered().batch.weights_BC).sum(), 1, rtol=1e-5)
    paid_less = gathered("grpo.overlong=penalty", "grpo.overlong_buffer=2").record
    assert paid_less["overlong/penalty"] == -1
    assert paid_less["reward/mean"] == gathered().record["reward/mean"] - 1
