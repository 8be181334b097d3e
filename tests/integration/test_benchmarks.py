"""The benchmark against the peers runs on any machine, and says of a peer that cannot run why it cannot."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = ("--prompts", "2", "--generations", "2", "--prompt-length", "12", "--completion-length", "4", "--rank", "2")


@pytest.fixture
def grpo_step(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("grpo_step")


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scale")


@pytest.fixture
def as_trl_learns(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("as_trl_learns")


@pytest.mark.parity
def test_our_step_is_measured_beside_a_peer_that_is_not_installed(tmp_path):
    (tmp_path / "qwix.py").write_text("raise ModuleNotFoundError('no qwix here')\n")  # the peer needs it
    command = [sys.executable, str(BENCHMARKS / "grpo_step.py"), "--model", "tiny", *SHAPE, "--steps", "2"]
    command += ["--contestants", "ours,google-tunix", "--no-warm-cache"]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line.startswith("|")]
    _, _, ours, peer = rows
    assert ours[0] == "ours"
    assert all(float(number.replace(",", "")) > 0 for number in ours[1:8])
    assert ours[8:] == ["2", ""]
    assert peer == ["google-tunix", *["-"] * 7, "0", "ModuleNotFoundError: no qwix here"]


def test_a_lack_of_memory_is_said_as_such(grpo_step):
    log = "step 1\njaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\n----\nbye\n"
    assert grpo_step.reason(log).startswith("out of memory: jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED")
    assert grpo_step.reason("Traceback\nValueError: no such thing\n\n") == "ValueError: no such thing"


def test_what_jax_says_after_an_error_is_not_its_reason(grpo_step):
    log = f"TypeError: no such thing\n{20 * '-'}\n{grpo_step.JAX_NOTE} from the traceback of the following exception.\n"
    assert grpo_step.reason(log) == "TypeError: no such thing"


def test_of_a_contestant_that_was_stopped_what_it_did_counts(grpo_step, tmp_path):
    given = grpo_step.argparse.Namespace(model="tiny", steps=5, micro_batch=None, prompts=2, generations=3)
    race = grpo_step.make_race(given, tmp_path)
    tokens = 6 * race.completion_length
    steps = [
        {"end": 100.0 + i, "seconds": seconds, "cpu": 2 * seconds, "rollout": 0.25, "tokens": tokens, "peak_gb": 1.0 + i}
        for i, seconds in enumerate((60.0, 9.0, 1.0, 2.0, 4.0))
    ]
    result = grpo_step.judge("peer", race, 40.0, steps, "ran out of time")
    assert result == grpo_step.Result("peer", (2.0, 0.25, 1.75, tokens / 0.25, 4.0, 5.0, 60.0), 3, "ran out of time")
    early = [step | {"tokens": tokens - 1} for step in steps]
    assert "not comparable" in grpo_step.judge("peer", race, 40.0, early, "").remark


def test_the_tables_of_the_page_on_scale_are_those_of_the_calculator(scale):
    page = (BENCHMARKS.parent / "docs" / "guide" / "scale.md").read_text()
    assert scale.check_table() in page, "run benchmarks/scale.py and put its tables there"
    assert scale.scale_table() in page


def test_the_calculator_gives_what_was_measured_on_one_card(scale):
    loosest = {(("270m", 4, 4), "rollout"): 1.11}
    for shape, measured in scale.MEASURED.items():
        for part, predicted, found in zip(("rollout", "update", "memory"), scale.predicted(*shape), measured, strict=True):
            within = loosest.get((shape, part), 1.05)
            assert found is None or 1 / within < predicted / found < within, (shape, part, predicted, found)


def test_one_device_receives_nothing_and_many_share_the_work(scale):
    one, eight = scale.cost(scale.shapes("1b", 32, 8, 32)), scale.cost(scale.shapes("1b", 32, 8, 32, 8))
    assert one.traffic == 0
    assert not any(seconds for part, seconds in one.seconds.items() if part.endswith("links"))
    assert one.flops == pytest.approx(8 * eight.flops)
    assert eight.traffic > 0
    assert eight.memory_gb < one.memory_gb


def test_heads_that_are_cut_ask_for_sums_and_rows_that_are_cut_for_weights(scale):
    rows, heads = scale.shapes("4b", 32, 8, 32, 8, 1), scale.shapes("4b", 32, 8, 32, 1, 8)
    assert scale.gathers(heads, 1) == scale.Moved() == scale.gradients(heads)
    weights = scale.layers(rows.arch) * scale.BF16
    assert scale.gathers(rows, 1).bytes == pytest.approx(weights * 7 / 8)
    assert scale.passes(heads, 1).bytes > scale.logits_traffic(heads, 1).bytes


def test_trl_is_told_what_a_preset_means(as_trl_learns):
    told = {name: told_to_trl(as_trl_learns, name) for name in as_trl_learns.PRESETS}
    assert {name: (s["loss_type"], s["importance_sampling_level"], s["scale_rewards"]) for name, s in told.items()} == {
        "grpo": ("grpo", "token", "group"),
        "dr_grpo": ("dr_grpo", "token", "none"),
        "dapo": ("dapo", "token", "group"),
        "gspo": ("grpo", "sequence", "group"),
    }
    assert {name: s["beta"] for name, s in told.items()} == {"grpo": 0.02, "dr_grpo": 0.0, "dapo": 0.0, "gspo": 0.0}
    assert {s["max_steps"] for s in told.values()} == {40}
    with pytest.raises(AssertionError, match=r"grpo\.overlong=mask"):
        told_to_trl(as_trl_learns, "dapo", "grpo.overlong=mask")


def told_to_trl(as_trl_learns, objective, *more):
    setup = as_trl_learns.setup([*as_trl_learns.DEMO, *as_trl_learns.PRESETS[objective], *more], as_trl_learns.Loaded())
    return as_trl_learns.trl_settings(setup.cfg, setup.plan, 16)


def test_a_difference_of_trainings_is_relative_to_what_was_trained(as_trl_learns):
    assert as_trl_learns.largest_relative([0.0, 1.0, 4.0], [0.0, 1.0, 5.0]) == pytest.approx(0.2)
    first, ours, theirs = ({"q_proj": np.full((1, 2, 2), value)} for value in (0.0, 1.0, 1.5))
    zeros = {"q_proj": np.zeros((1, 2, 2))}
    most, share = as_trl_learns.apart(*(as_trl_learns.Adapters(a, zeros, 1.0) for a in (ours, theirs, first)))
    assert (most, share) == pytest.approx((0.5, 0.5))


def test_groups_of_equal_rewards_are_found_by_completion(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    equal = importlib.import_module("learners").equal_groups([0.2, 0.2, 0.2, 1.0, 1.2, 1.2], 2)
    assert equal.tolist() == [True, True, False, False, True, True]


@pytest.mark.parity
def test_trl_makes_our_updates_of_our_completions(tmp_path):
    """Two updates from each batch, so that ratios differ from 1 and gspo clips."""
    command = [
        sys.executable,
        str(BENCHMARKS / "as_trl_learns.py"),
        "fed",
        "--few",
        "--objectives",
        "grpo,gspo,dapo,dr_grpo",
    ]
    command += ["+experiment=quick_test", "grpo.num_iterations=2", "training.num_batches=2", "training.micro_batch_size=4"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line.startswith("|")]
    named = [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert [row["objective"] for row in named] == ["`grpo`", "`gspo`", "`dapo`", "`dr_grpo`"]
    for row in named:
        assert float(row["gradient norms, relative"]) < 1e-3, row
        assert float(row["by the way they went"]) < 1e-2, row
        assert row["rewards"] == "equal", row
