from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from agent_tunix.algorithm import optimizers
from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.lab.advice import LabAdvisor
from agent_tunix.lab.plan import plan
from agent_tunix.lab.plan.memory import (
    Shapes,
    adapter_parameters,
    estimate,
    held_bytes,
    largest_micro_batch,
    peak_of_several,
)
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import parameters, read_architecture
from agent_tunix.models.families.table import family_of
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD
from agent_tunix.models.published import of_repository
from agent_tunix.training import loading, setup

MODULES = ATTENTION + FEED_FORWARD

PAGE = Path(__file__).parents[4] / "benchmarks" / "2026-11-16-memory.md"
ROW = re.compile(r"\| (\w+) \| (\d+) x (\d+) \| (\d+) \+ (\d+) \| (\d+) \| (\d+) \| (\w+) \| [\d.]+ \| ([\d.]+) \|")


def measured() -> list[tuple[Shapes, float]]:
    """Shapes and the peaks that an H200 reported for them, with its kernels and, in one section of the page, without.

    That was before rollouts went on with few sequences.
    """
    found = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        for size, *numbers, base, peak in ROW.findall(section):
            base_dtype = None if base == "bf16" else base
            s = dataclasses.replace(shapes(size, *map(int, numbers)), base_dtype=base_dtype, narrows=False)
            found.append((s if section.startswith("Without") else on_hopper(s), float(peak)))
    return found


def architecture(size: str) -> Architecture:
    """Of Gemma 3's models by their size alone, of the others by the name of their file in conf/model."""
    if size == "tiny":
        return read_architecture(find_checkpoint("package:tiny"), {})
    described = config_folder() / "model" / f"{size}.yaml"
    return of_repository(OmegaConf.load(described).weights if described.exists() else f"google/gemma-3-{size}-it")


def shapes(size="270m", P=4, G=4, S=256, C=512, micro=4, rank=32) -> Shapes:
    return Shapes(architecture(size), rank, MODULES, 2, P, micro, G, 1, S, C)


def on_hopper(s: Shapes) -> Shapes:
    """With the kernels that a GPU of the Hopper kind has: all of them for Gemma, that of the loss for other families."""
    return dataclasses.replace(s, kernels=family_of(s.arch).kernels, odds_kernel=True)


def test_the_estimate_is_near_what_the_device_reported():
    rows = measured()
    assert len(rows) >= 60
    for s, peak in rows:
        fitted = s.arch.family == "gemma3"  # to which the factors were; the other families' rows only check them
        assert estimate(s)["peak"] == pytest.approx(peak, rel=0.05 if fitted else 0.1), s


def test_long_completions_go_on_with_a_quarter_of_them_whose_cache_is_held_beside_that_of_all():
    long = dataclasses.replace(shapes(P=64, G=1), evaluated=256)
    whole, narrowed = (estimate(dataclasses.replace(long, narrows=narrows)) for narrows in (False, True))
    assert narrowed["evaluation"] - whole["evaluation"] == pytest.approx(whole["KV cache"])
    short = dataclasses.replace(long, completion_length=63)
    assert estimate(short) == estimate(dataclasses.replace(short, narrows=False))


def test_where_the_kernel_of_the_loss_is_not_known_its_logits_are_counted():
    """As with jax 0.10 on a Hopper GPU, where attention and rollout have their kernels."""
    s = on_hopper(shapes())
    written = dataclasses.replace(s, odds_kernel=False)
    assert estimate(written)["logits chunk"] == estimate(shapes())["logits chunk"]
    assert estimate(written)["peak"] > estimate(s)["peak"]


def test_a_device_that_has_no_room_for_the_layers_twice_is_not_given_them_twice():
    """27B in bfloat16 takes 55 GB, its layers 52 of them."""
    s = on_hopper(shapes("27b", micro=1))
    assert estimate(s)["peak"] > 105 > estimate(dataclasses.replace(s, limit=105e9))["peak"] > 55
    assert estimate(dataclasses.replace(s, limit=130e9)) == estimate(s)


def test_several_policies_share_all_but_their_rows_and_adapters():
    """Eight policies took 7.52 GB: benchmarks/2026-11-16-memory.md."""
    s = on_hopper(shapes())
    assert peak_of_several(s, 1) == estimate(s)["peak"]
    assert peak_of_several(s, 8) == pytest.approx(7.52, rel=0.05)


@pytest.mark.parametrize(("size", "millions"), [("270m", 268.1), ("1b", 999.9), ("4b", 3880.3)])
def test_parameters_are_those_of_the_published_models(size, millions):
    assert parameters(architecture(size)) / 1e6 == pytest.approx(millions, abs=0.05)


def test_adapters_are_counted_as_they_are_made():
    import jax

    from agent_tunix.models.lora import init_adapters

    s = dataclasses.replace(shapes("tiny", rank=3), modules=("q_proj", "down_proj"))
    made = jax.eval_shape(lambda: init_adapters(jax.random.key(0), s.arch, s.modules, 3, 3.0))
    assert adapter_parameters(s) == sum(leaf.size for leaf in jax.tree.leaves(made))


@pytest.mark.parametrize("optimizer", optimizers.ALGORITHMS)
@pytest.mark.parametrize("rank", [0, 32])
def test_what_the_optimizer_keeps_is_counted_as_it_is_made(optimizer, rank):
    """But for norms and single numbers, which are a thousandth of it where all weights are trained."""
    import jax

    from agent_tunix.models.checkpoints.loading import init_weights
    from agent_tunix.models.lora import init_adapters, masters

    s = dataclasses.replace(shapes("270m", rank=rank), optimizer=optimizer)

    def made():
        key = jax.random.key(0)
        trainable = init_adapters(key, s.arch, MODULES, rank, 1.0) if rank else masters(init_weights(key, s.arch))
        return optimizers.init(trainable, optimizer)

    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(made)))
    assert estimate(s)["optimizer"] * 1e9 == pytest.approx(kept, rel=2e-3, abs=1e6)


@pytest.mark.parametrize("base_dtype", [None, "int8", "nf4"])
def test_weights_are_counted_as_they_are_held(base_dtype):
    import jax
    import jax.numpy as jnp

    from agent_tunix.models.checkpoints.loading import init_weights

    s = dataclasses.replace(shapes("tiny"), base_dtype=base_dtype)
    made = jax.eval_shape(lambda: init_weights(jax.random.key(0), s.arch, jnp.bfloat16, base_dtype))
    assert held_bytes(s) == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))


def test_4b_in_4_bits_trains_on_a_card_of_11_gb():
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = loading.described(validate(compose("config", ["+experiment=small_gpu"]), Config))
    s = plan.shapes(cfg, cfg.generation.max_prompt_length)
    assert s.arch == architecture("4b")
    peaks = [estimate(dataclasses.replace(s, base_dtype=held))["peak"] for held in ("nf4", "int8", None)]
    assert peaks == sorted(peaks)
    assert peaks[0] <= plan.USABLE * 11
    assert peaks[1] <= 11 < peaks[2]


def test_the_plan_names_the_evaluation_that_fits_where_that_is_the_greatest():
    s = dataclasses.replace(shapes("4b", micro=1), evaluated=100)
    limit = estimate(dataclasses.replace(s, evaluated=40))["peak"]
    assert plan._notes_on_evaluation(s, limit) == [f"evaluation.batch_size=40 takes {limit:.1f} GB, which fits"]
    assert not plan._notes_on_evaluation(s, estimate(s)["peak"])
    assert not plan._notes_on_evaluation(s, 5.0), "the weights alone are more"


def test_a_run_that_needs_more_than_there_is_is_told_before_it_begins(config, monkeypatch):
    """With the micro-batch that fits, where one does."""
    said: list[str] = []
    cfg = loading.described(validate(config, Config))
    peak = estimate(plan.shapes(cfg, cfg.generation.max_prompt_length))["peak"]
    for limit in (2 * peak, peak / 2, peak / 100):
        monkeypatch.setattr(plan, "card", lambda limit=limit: ("the device", limit))
        setup.prepare(cfg, setup.Loaded(), said.append, advisor=LabAdvisor())
    fits, none = (line for line in said if "GB of memory" in line)
    assert 1 <= int(re.search(r"the device has .*; training\.micro_batch_size=(\d+) would fit$", fits)[1]) <= 8
    assert none.endswith("`agent-tunix plan` shows what needs it")


def test_the_plan_names_the_widest_base_that_fits():
    s = shapes("4b", micro=2)
    for limit, said in ((20.0, []), (11.0, ["model.base_dtype=int8 takes 8.3 GB, which fits"]), (5.0, [])):
        assert plan._notes_on_base(s, limit) == said
    (line,) = plan._notes_on_base(dataclasses.replace(s, base_dtype="int8"), 7.0)
    assert line.startswith("model.base_dtype=nf4 takes 6.7 GB")
    assert not plan._notes_on_base(shapes("4b", micro=2, rank=0), 11.0)


@given(st.sampled_from(["P", "G", "S", "C", "micro", "rank"]), st.integers(1, 64))
def test_more_of_anything_never_takes_less(name, factor):
    base = shapes()
    grown = {"P": "prompts", "G": "generations", "S": "prompt_length", "C": "completion_length"}
    field = grown.get(name, "micro_batch" if name == "micro" else "lora_rank")
    more = dataclasses.replace(base, **{field: getattr(base, field) * factor})
    assert estimate(more)["peak"] >= estimate(base)["peak"]


@pytest.mark.parametrize("limit", [1.0, 5.0, 24.0, 80.0])
def test_the_largest_micro_batch_fits_and_the_next_does_not(limit):
    base = shapes()

    def fits(micro: int, batch: int) -> bool:
        return estimate(dataclasses.replace(base, micro_batch=micro, prompts=batch))["peak"] <= limit

    size = largest_micro_batch(base, limit)
    assert size == 0 or fits(size, size)
    assert not fits(size + 1, size + 1)
    assert largest_micro_batch(base, limit, there=3) == min(size, 3)
    assert largest_micro_batch(base, limit, 12) == max((n for n in (1, 2, 3, 4, 6, 12) if fits(n, 12)), default=0)


@pytest.mark.parametrize("size", ["270m", "4b"])
@pytest.mark.parametrize(("rank", "base_dtype"), [(0, None), (32, None), (32, "nf4")])
def test_a_device_of_a_mesh_holds_its_share_and_no_less(size, rank, base_dtype):
    alone = dataclasses.replace(shapes(size, P=8, micro=8, rank=rank), base_dtype=base_dtype)
    one = estimate(alone)
    for fsdp, tp in ((2, 1), (1, 2), (4, 2)):
        mesh = dataclasses.replace(alone, fsdp=fsdp, tp=tp)
        part = estimate(mesh)
        for name, gigabytes in one.items():
            assert gigabytes / (fsdp * tp) * 0.999 <= part[name] <= gigabytes, name
        assert part["weights"] < 1.01 * one["weights"] / (fsdp * tp) if size == "4b" else True
        assert largest_micro_batch(mesh, 24.0) % fsdp == 0
