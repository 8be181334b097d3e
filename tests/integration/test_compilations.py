"""A run compiles its programs in its first two steps, and none after that, whatever else it does in between."""

from __future__ import annotations

import jax
import pytest

from agent_tunix.training.progress import Display
from agent_tunix.training.run_folder import read_records

STEPS = 6
COMPILED = "/jax/core/compile/backend_compile_duration"
RUN = (  # a shape that no other test has compiled already
    "model=gemma3_tiny",
    "optimizer.learning_rate=1e-5",
    "grpo.num_generations=3",
    "training.micro_batch_size=3",
    "model.lora_module_path=q_proj",  # fewer adapters are compiled faster
    f"training.num_batches={STEPS}",
    "training.eval_every_n_steps=2",
    "training.save_interval_steps=2",
    "evaluation.num_examples=10",
    "evaluation.batch_size=10",
    "evaluation.sampled=false",
)


@pytest.fixture
def compilations():
    """Names a list that grows by one with every program that XLA is asked for."""
    seen = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event == COMPILED:
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_is_compiled_after_the_second_step(command, compilations, monkeypatch, tmp_path):
    """The steps from the third on, with two evaluations and two checkpoints between them, find every program ready."""
    counts, show = [], Display.step

    def step(self, record):
        counts.append(len(compilations))
        show(self, record)

    monkeypatch.setattr(Display, "step", step)
    outcome = command("train", *RUN, f"hydra.run.dir={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.err
    assert len(counts) == STEPS
    assert counts[0] > 0, "the listener has heard of no compilation at all"
    assert [*counts[1:], len(compilations)] == [counts[1]] * STEPS  # the close of the run included
    assert [record["step"] for record in read_records(tmp_path / "run" / "evals.jsonl")] == [0, 2, 4, 6]


def test_a_new_shape_is_heard_of(compilations):
    """The listener hears of every program, so that a silence means that there was none."""
    function = jax.jit(lambda x: x * 2.5 + 1)
    for size in (3, 4, 3):
        function(jax.numpy.ones(size)).block_until_ready()
    before = len(compilations)
    function(jax.numpy.ones(5)).block_until_ready()
    assert len(compilations) > before
