"""Where a batch comes from, and which programs a run knows that it will call."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine import ahead_of_time
from agent_tunix.engine.calls import Logprobs, Sample
from agent_tunix.engine.fused import together
from agent_tunix.environments.rewards import Scorer
from agent_tunix.training import loading, loop
from agent_tunix.training.horizon import hyperparameters
from agent_tunix.training.metrics import Clock
from agent_tunix.training.play import Answers
from agent_tunix.training.rollouts import TrainingBatch, make_batch, sample_groups
from agent_tunix.training.setup import Loaded, Setup, compile_ahead, prepare
from agent_tunix.types import Rollouts

PROMPTS, GENERATIONS, STEPS = 2, 2, 8


class Watched(Scorer):
    """Rewards the second completion of a group, and counts how often it is asked."""

    asked = 0

    def __init__(self) -> None:
        super().__init__({}, {"second": 1.0})
        self.weights = {"second": 1.0}

    def of_problems(self, problems):
        self.asked += 1
        return {"second": np.tile(np.float32([0, 1]), PROMPTS)}


def prepared(*overrides: str, loaded: Loaded | None = None) -> Setup:
    small = f"training.micro_batch_size={PROMPTS}", f"grpo.num_generations={GENERATIONS}"
    short = f"generation.max_generation_steps={STEPS}", "evaluation.num_examples=3"
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = validate(compose("config", ["+experiment=quick_test", *small, *short, *overrides]), Config)
    return prepare(cfg, loaded or Loaded(), lambda text: None)


def answered(r: Setup, answer) -> Setup:
    return dataclasses.replace(r, engine=dataclasses.replace(r.engine, answer=answer))


def first_batch(r: Setup) -> TrainingBatch:
    policy = r.engine.policy(loading.new_state(r.cfg, r.model).trainable)
    return make_batch(r, policy, 0, sample_groups(r, policy, 0, Clock()))


def rollouts() -> Rollouts:
    shape = PROMPTS * GENERATIONS, STEPS
    logprobs_BC = jnp.full(shape, -2.0)
    return Rollouts(jnp.full(shape, 7, jnp.int32), jnp.ones(shape, bool), logprobs_BC, jnp.zeros(shape[0], bool))


def made(scorer: Scorer, *overrides: str) -> tuple[TrainingBatch, list]:
    """What comes of completions that are all alike, and the calls that were made for it."""
    calls: list = []

    def answer(call):
        calls.append((call, scorer.asked))
        return rollouts() if isinstance(call, Sample) else jnp.full(call.batch.tokens_BC.shape, -3.0)

    return first_batch(answered(dataclasses.replace(prepared(*overrides), scorer=scorer), answer)), calls


def test_the_reference_is_called_for_before_the_host_scores():
    found, [(sample, _), (reference, scored)] = made(Watched(), "grpo.beta=0.1")
    assert (type(sample), type(reference), scored) == (Sample, Logprobs, 0)
    np.testing.assert_array_equal(found.batch.reference_logprobs_BC, jnp.full((4, 8), -3.0))
    np.testing.assert_array_equal(np.sign(found.batch.advantages_B), [-1, 1] * PROMPTS)


def test_without_kl_there_is_no_reference():
    found, calls = made(Watched(), "grpo.beta=0")
    assert [type(call) for call, _ in calls] == [Sample]
    assert found.batch.reference_logprobs_BC is None


@pytest.mark.parametrize(
    ("seeds", "overrides"),
    [((0,), []), ((0, 1), []), ((0, 0), []), ((0,), ["grpo.importance_correction=truncate"])],
    ids=["one", "two", "two that begin alike", "corrected"],
)
def test_evaluations_and_step_call_what_was_announced_and_nothing_else(seeds, overrides, monkeypatch):
    """Every program that they run, of one run and of two at once, is one whose compiling was begun ahead."""
    begun, ran = set(), set()
    monkeypatch.setattr(ahead_of_time, "begin", lambda program, context: begun.add(program.signature()))
    run_program = ahead_of_time.run
    monkeypatch.setattr(ahead_of_time, "run", lambda program: ran.add(program.signature()) or run_program(program))
    given = ["grpo.beta=0.1", "model.lora_module_path=q_proj", *overrides]
    runs = [prepared(*given, f"seed={seed}") for seed in seeds]

    def step(r: Setup, answer) -> int:
        r = answered(r, answer)
        compile_ahead(r)
        assert "_read" not in vars(r.model), "what is to come is known before weights are read"
        state = loading.new_state(r.cfg, r.model)
        for way in r.evaluation_ways():
            loop._answers(r, state, way, whole=True)
        state, _ = r.engine.update(state, first_batch(r).batch, hyperparameters(r.cfg, r.plan, 1))
        for way in r.evaluation_ways():
            loop._answers(r, state, way, whole=True)
        return int(state.step)

    assert together([lambda answer, r=r: step(r, answer) for r in runs]) == [1] * len(seeds)
    evaluation = 4 if seeds == (0, 0) else 2  # runs that begin with one policy have its first evaluation by itself
    of_step = 2 + len(overrides) + len(seeds)  # of several, an update has its gradients and then each run's own part
    assert len(ran) == evaluation + of_step
    assert ran == begun


def test_runs_that_begin_with_one_policy_ask_for_its_answers_once(monkeypatch):
    """All jobs of a sweep over rates do. Another seed or another way of asking begins otherwise, and an update ends it."""
    asked, loaded = [], Loaded()
    monkeypatch.setattr(loop, "answers_to", lambda *given: asked.append(given) or Answers([["answer"]]))

    def answers(*overrides: str, step: int = 0, way: int = 0):
        run = prepared(*overrides, loaded=loaded)
        state = dataclasses.replace(loading.new_state(run.cfg, run.model), step=jnp.asarray(step))
        assert loop._answers(run, state, run.evaluation_ways()[way], whole=True).texts == [["answer"]]
        return len(asked)

    assert answers("optimizer.learning_rate=1e-5") == 1
    assert answers("optimizer.learning_rate=1e-4", "grpo.beta=0") == 1
    assert answers(way=1) == 2
    assert answers("seed=7") == 3
    assert answers("evaluation.num_examples=2") == 4
    assert answers("model.lora_alpha=3") == 5
    assert [answers(step=1), answers(step=1)] == [6, 7]
    assert answers() == 7


def test_groups_without_a_spread_are_drawn_anew_and_what_is_recorded_is_the_first_draw():
    """Of the first draw no group has a spread, of the second the second, of the third there is none left to ask for."""

    class Rising(Watched):
        def of_problems(self, problems):
            self.asked += 1
            by_draw = {1: [1, 1, 1, 1], 2: [0, 0, 0, 1], 3: [1, 0, 1, 0]}
            return {"second": np.float32(by_draw[self.asked])}

    found, calls = made(Rising(), "grpo.beta=0", "grpo.resample_rounds=5")
    prompts = [np.asarray(call.draw.prompts.tokens_PS) for call, _ in calls]
    assert len(prompts) == 3
    np.testing.assert_array_equal(found.batch.prompts.tokens_PS, [prompts[1][1], prompts[2][0]])
    np.testing.assert_array_equal(np.sign(found.batch.advantages_B), [-1, 1, 1, -1])
    assert found.record["groups/discarded"] == 3
    assert (found.record["reward/mean"], found.record["groups/zero_variance"]) == (1.0, 1.0)
    assert len(found.lengths_B) == 3 * PROMPTS * GENERATIONS


def test_completions_that_were_cut_are_left_out_or_paid_less():
    def of(*overrides: str) -> TrainingBatch:
        return made(Watched(), "grpo.beta=0", *overrides)[0]

    assert not np.asarray(of("grpo.overlong=mask").batch.weights_BC).any(), "none of them ended"
    np.testing.assert_allclose(np.asarray(of().batch.weights_BC).sum(), 1, rtol=1e-5)
    paid_less = of("grpo.overlong=penalty", "grpo.overlong_buffer=2").record
    assert paid_less["overlong/penalty"] == -1
    assert paid_less["reward/mean"] == of().record["reward/mean"] - 1
