"""Run by test_meshes.py in a process of eight host devices: whatever the mesh, the numbers are those of one device."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from agent_tunix.algorithm.objectives import Coefficients, LossForm, per_sequence
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.config.load import read_saved, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine.calls import Sample, Update
from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.engine.update import init_state, update
from agent_tunix.kernels import top_k
from agent_tunix.kernels.mesh import by_rows
from agent_tunix.lab.plan.memory import Shapes, held_adapters, held_base, held_bytes
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import load_weights
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.families.table import family_of
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, Adapters, masters, module_shape
from agent_tunix.models.sharding import mesh_of_sizes, on_mesh_of, place
from agent_tunix.training import loading
from agent_tunix.training.run_folder import read_records
from agent_tunix.types import Batch, Prompts, Rollouts

P, G, S, C = 8, 2, 8, 12
ARCH = Architecture(  # no two axes of one length, so that a shape tells what it is the shape of
    vocab_size=80,
    num_layers=3,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    hidden_dim=56,
    sliding_window=4,
    global_every=2,
    query_scale=10**-0.5,
    rope_local_base=100.0,
    rope_global_base=1000.0,
    rope_global_factor=2.0,
    norm_eps=1e-6,
)
SINGLE_KEY_HEAD = dataclasses.replace(ARCH, num_kv_heads=1, vocab_size=47)
SAMPLING = Sampling(top_k=7, top_p=0.95, max_steps=C, num_generations=G, end_ids=tuple(range(24, 36)), pad_id=0)
H = Hyperparameters(1e-2, 0.01, 0.9, 0.99, 1e-6, 0.1)
LOSS = Coefficients(temperature=0.9, beta=0.1)
RANK, MODULES = 6, ("q_proj", "v_proj", "down_proj")


def prompts() -> Prompts:
    rng = np.random.default_rng(0)
    positions = np.maximum(np.arange(S) - rng.integers(0, 5, (P, 1)), -1)
    tokens = np.where(positions >= 0, rng.integers(2, 47, (P, S)), 0)
    return Prompts(jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32))


@functools.cache
def model(arch: Architecture) -> tuple[Weights, Adapters]:
    """Random weights and adapters, the norms and the adapters' B too."""
    rng, L = np.random.default_rng(5), arch.num_layers

    def normal(*shape: int, scale: float) -> np.ndarray:
        return rng.normal(size=shape, scale=scale).astype(np.float32)

    shapes = {module: module_shape(arch, module) for module in ATTENTION + FEED_FORWARD}
    layers = {module: normal(L, *shape, scale=shape[0] ** -0.5) for module, shape in shapes.items()}
    for norm, (_, width) in family_of(arch).norms.items():
        layers[norm] = normal(L, getattr(arch, width), scale=0.3)
    a = {module: normal(L, shapes[module][0], RANK, scale=0.3) for module in MODULES}
    b = {module: normal(L, RANK, shapes[module][1], scale=0.1) for module in MODULES}
    embed_VD = normal(arch.vocab_size, arch.embed_dim, scale=0.3)
    return Weights(embed_VD, layers, normal(arch.embed_dim, scale=0.3)), Adapters(a, b, 2.0)


def begin(arch: Architecture, sizes: tuple[int, int], whole: bool = False):
    """Weights and a state, of adapters or of all weights, on a mesh."""
    weights, adapters = model(arch)
    mesh = mesh_of_sizes(sizes)
    state = init_state(masters(weights) if whole else adapters)
    return place(weights, arch, mesh), place(jax.tree.map(np.asarray, state), arch, mesh)  # updates use up what they get


def batch_of(rollouts: Rollouts) -> Batch:
    rng = np.random.default_rng(1)
    reference_BC = np.asarray(rollouts.logprobs_BC) + rng.normal(size=(P * G, C), scale=0.1).astype(np.float32)
    weights_BC = per_sequence(np.asarray(rollouts.mask_BC), C)
    return Batch(
        prompts(),
        rollouts.tokens_BC,
        rollouts.mask_BC,
        rollouts.mask_BC,
        rollouts.logprobs_BC,
        reference_logprobs_BC=jnp.asarray(reference_BC),
        weights_BC=jnp.asarray(weights_BC, jnp.float32),
        advantages_B=jnp.asarray(rng.normal(size=P * G), jnp.float32),
    )


def step(arch: Architecture, sizes: tuple[int, int]):
    """A rollout and an update from it."""
    weights, state = begin(arch, sizes)
    draw = Draw(state.trainable, prompts(), jax.random.key(3), 0.9)
    (rollouts,) = Sample.answer([Sample(weights, draw, arch, SAMPLING)])
    ask = Update(state, batch_of(rollouts), weights, H, LOSS, jnp.inf, arch, 1, LossForm(), "adamw")
    return rollouts, *Update.answer([ask])[0]


def assert_close(ours, theirs, atol: float) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=atol, rtol=1e-4)


def assert_same(ours, theirs) -> None:
    """Tokens to the bit, log-probabilities, the new state and the statistics to rounding."""
    np.testing.assert_array_equal(ours[0].tokens_BC, theirs[0].tokens_BC)
    np.testing.assert_array_equal(ours[0].mask_BC, theirs[0].mask_BC)
    assert_close(ours[0].logprobs_BC, theirs[0].logprobs_BC, 1e-5)
    assert_close(ours[1], theirs[1], 2e-4)
    assert_close(ours[2], theirs[2], 1e-5)


@pytest.fixture(scope="module")
def alone():
    found = step(ARCH, (1, 1))
    assert len(np.unique(found[0].mask_BC.sum(axis=1))) > 1, "some completions end early"
    return found


@pytest.mark.parity  # it takes long, and a mesh of both axes is below
def test_rollout_and_update_are_those_of_one_device(alone):
    assert_same(step(ARCH, (8, 1)), alone)


@pytest.mark.parity
def test_heads_alone_are_cut(alone):
    weights, state = begin(ARCH, (1, 2))
    (rollouts,) = Sample.answer([Sample(weights, Draw(state.trainable, prompts(), jax.random.key(3), 0.9), ARCH, SAMPLING)])
    np.testing.assert_array_equal(rollouts.tokens_BC, alone[0].tokens_BC)


def held(tree) -> int:
    """Bytes on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def gathered(compiled) -> list[list[int]]:
    """The shapes that a compiled program gathers from several devices."""
    lists = re.findall(r"= (\(?[^=]*?\)?) all-gather\(", compiled.as_text())
    return [[int(n) for n in dims.split(",") if n] for shapes in lists for dims in re.findall(r"\w\d*\[([\d,]*)\]", shapes)]


def test_things_really_are_cut(alone):
    """Bytes by device; in the compiled programs the cache, the logits and the embedding; and the numbers are right."""
    sizes = (4, 2)
    weights, state = begin(ARCH, sizes)
    s = Shapes(ARCH, RANK, MODULES, 4, P, P, G, 1, S, C, *sizes)
    assert held(weights) == 4 * held_base(s)
    assert held(state) == 4 * (3 * held_adapters(s) + 2), "adapters, two moments of them, and two counts"
    matrices = [leaf for leaf in jax.tree.leaves(weights) if leaf.ndim == 3]
    assert 8 * held(matrices) == sum(leaf.nbytes for leaf in matrices)

    draw = Draw(state.trainable, prompts(), jax.random.key(3), 0.9)
    with on_mesh_of(weights):
        sampling = sample.lower(weights, (draw,), arch=ARCH, sampling=SAMPLING).compile()
        (rollouts,) = sampling(weights, (draw,))
        given = (state, batch_of(rollouts), weights, H, LOSS, jnp.inf)
        updating = update.lower(*given, arch=ARCH, micro_batches=2, optimizer="adamw").compile()
        assert_same((rollouts, *updating(*given)), alone)
    assert f"f32[{ARCH.num_layers},{P * G // 4},{C},{ARCH.num_kv_heads // 2},{ARCH.head_dim}]" in sampling.as_text()
    assert f"{C},{ARCH.num_kv_heads},{ARCH.head_dim}]" not in sampling.as_text(), "no device has the cache of all heads"
    for program in (sampling, updating):
        assert [ARCH.embed_dim, ARCH.hidden_dim // 2] in gathered(program), "a layer's weights are, over fsdp"
        assert not any(ARCH.vocab_size in shape for shape in gathered(program)), "neither logits nor the embedding are"
        assert not any(shape[:1] == [ARCH.num_layers] for shape in gathered(program)), "never all layers at once"
    prefill = [shape for shape in gathered(sampling) if shape == [ARCH.embed_dim, ARCH.hidden_dim // 2]]
    assert len(prefill) == 2, "gate and up are, to read prompts; to read one more token weights stay where they are"


@pytest.mark.parity
def test_a_quantised_base_is_cut_too():
    """Loaded on the mesh; its blocks lie as their matrix would, and the numbers are those of one device."""
    folder = find_checkpoint("package:tiny")
    arch = read_architecture(folder)

    def logprobs(sizes: tuple[int, int]):
        weights = load_weights(folder, arch, jnp.float32, mesh_of_sizes(sizes), "nf4")
        draw = Draw(None, prompts(), jax.random.key(3), 0.9)
        (rollouts,) = Sample.answer([Sample(weights, draw, arch, SAMPLING)])
        return weights, rollouts

    _, one = logprobs((1, 1))
    weights, many = logprobs((2, 2))
    np.testing.assert_array_equal(many.tokens_BC, one.tokens_BC)
    assert_close(many.logprobs_BC, one.logprobs_BC, 1e-5)
    s = Shapes(arch, 0, (), 4, P, P, G, 1, S, C, 2, 2, "nf4")
    assert held(weights) == held_bytes(s)
    assert 4 * held(weights.layers["up_proj"]) == sum(leaf.nbytes for leaf in jax.tree.leaves(weights.layers["up_proj"]))


@pytest.mark.parity
def test_all_weights_with_one_key_head_and_a_vocabulary_that_is_not_divided():
    def updated(sizes: tuple[int, int], micro_batches: int):
        weights, state = begin(SINGLE_KEY_HEAD, sizes, whole=True)
        ask = Update(state, batch, weights, H, LOSS, jnp.inf, SINGLE_KEY_HEAD, micro_batches, LossForm(), "adamw")
        return ask, *Update.answer([ask])[0]

    tokens_BC = jnp.asarray(np.random.default_rng(4).integers(2, 47, (P * G, C)), jnp.int32)
    batch = batch_of(Rollouts(tokens_BC, tokens_BC != 5, jnp.full((P * G, C), -3.0), jnp.ones(P * G, bool)))
    _, one, one_stats = updated((1, 1), 1)
    ask, many, many_stats = updated((2, 2), 2)
    assert_close(many_stats, one_stats, 1e-5)
    assert_close(many.trainable, one.trainable, 2e-4)
    assert 4 * held(many.trainable.layers["q_proj"]) == held(one.trainable.layers["q_proj"])
    programs = update._cache_size()
    Update.answer([dataclasses.replace(ask, state=many)])
    assert update._cache_size() == programs, "the second update finds the state where the first did"


@pytest.mark.parity  # it takes long
def test_policies_that_share_a_program_share_a_mesh(alone):
    weights, state = begin(ARCH, (2, 2))
    other = jax.tree.map(lambda x: x * 1.5, state.trainable)
    draws = [Draw(adapters, prompts(), jax.random.key(3), 0.9) for adapters in (state.trainable, other)]
    first, second = Sample.answer([Sample(weights, draw, ARCH, SAMPLING) for draw in draws])
    assert (np.asarray(second.tokens_BC) != np.asarray(first.tokens_BC)).any()
    rates = [dataclasses.replace(H, learning_rate=rate) for rate in (H.learning_rate, 1e-3)]
    states = [jax.tree.map(jnp.copy, state) for _ in rates]
    given = zip(states, rates, strict=True)
    asks = [Update(own, batch_of(first), weights, h, LOSS, jnp.inf, ARCH, 1, LossForm(), "adamw") for own, h in given]
    updated, (slower, _) = Update.answer([*asks, asks[0]])  # the last fills a place
    assert_same((first, *updated), alone)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states))
    assert not np.allclose(slower.trainable.a["q_proj"], updated[0].trainable.a["q_proj"], atol=1e-3)


RUN = [
    "model=gemma3_tiny",
    "data.num_examples=64",
    "training.micro_batch_size=2",
    "scheduler.total_steps=4",
    "grpo.num_iterations=2",
    "optimizer.learning_rate=3e-5",
    "evaluation.num_examples=6",
    "evaluation.sampled=false",
    "generation.max_generation_steps=16",
    "model.lora_module_path='(q|down)_proj'",  # fewer adapters are compiled faster
    "training.eval_every_n_steps=2",
]


def on(fsdp: int, tp: int) -> str:
    return f"model.mesh_shape=[[{fsdp},{tp}],[fsdp,tp]]"


def final_adapters(run: str):
    cfg = validate(read_saved(Path(run) / "config.yaml"), Config)
    model = loading.load_model(cfg)
    return loading.load_trained(run, cfg, model)[0], model


@pytest.mark.parity  # it takes long
def test_tokens_drawn_by_kernels_are_those_of_one_device():
    """In Pallas's interpreter, as several GPUs would draw them: each its own rows."""
    logits_BV = 3 * jax.random.normal(jax.random.key(0), (8, 2**14))
    rows = logits_BV, jnp.full((8, 1), 0.9), jax.random.uniform(jax.random.key(1), (8, 1))
    draw = functools.partial(top_k.draw, k=20, top_p=0.9, pad_id=0, interpret=True)
    with jax.set_mesh(mesh_of_sizes((4, 2))):
        got = jax.jit(functools.partial(by_rows, draw))(*rows)
    np.testing.assert_array_equal(got[0], jax.jit(draw)(*rows)[0])


def test_a_run_saved_on_one_mesh_goes_on_on_another(command):
    assert command("train", *RUN, "training.num_batches=2", "hydra.run.dir=straight").code == 0
    straight, _ = final_adapters("straight")
    for begun, sizes in (((2, 2), (1, 1)), ((1, 1), (2, 2))):
        name = "on{}x{}".format(*sizes)
        half = command("train", *RUN, on(*begun), "training.num_batches=1", f"hydra.run.dir={name}")
        assert half.code == 0, half.err
        went_on = command("train", f"training.resume={name}", on(*sizes), "training.num_batches=2")
        assert went_on.code == 0, went_on.err
        ours, theirs = (read_records(Path(run) / "metrics.jsonl") for run in (name, "straight"))
        assert [record["step"] for record in ours] == [1, 2, 3, 4]
        for a, b in zip(ours, theirs, strict=True):
            for key in ("loss", "lr", "reward/mean", "kl", "entropy", "completion/length", "grad_norm"):
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key
        samples = [
            [record["completion"] for record in read_records(Path(run) / "samples.jsonl")] for run in (name, "straight")
        ]
        assert samples[0] == samples[1]
        adapters, model = final_adapters(name)
        assert dict(model.weights.embed_VD.sharding.mesh.shape) == {"fsdp": sizes[0], "tp": sizes[1]}
        assert_close(adapters, straight, 2e-5)

    for run in ("on2x2", "straight"):
        assert command("evaluate", f"run={run}", "evaluation.num_examples=6", "inference_config=greedy").code == 0
    ours, theirs = (read_records(Path(run) / "evals.jsonl")[-1] for run in ("on2x2", "straight"))
    assert ours == theirs

    for run in ("on2x2", "straight"):
        assert command("export", f"run={run}", "format=merged", f"output=exported-{run}").code == 0
    ours, theirs = (load_file(f"exported-{run}/model.safetensors") for run in ("on2x2", "straight"))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_allclose(value.astype(np.float32), theirs[key].astype(np.float32), atol=2e-3, rtol=2e-2)

    saved = validate(read_saved(Path("on2x2/config.yaml")), Config).model_dump(mode="json")
    saved["training"] |= {"init_from": "on2x2", "resume": None}
    saved["model"] |= {"mesh_shape": [[2, 1], ["fsdp", "tp"]]}
    cfg = validate(saved, Config)
    model = loading.load_model(cfg)
    begun = loading.new_state(cfg, model)
    assert_close(begun.trainable, straight, 2e-5)
    assert begun.trainable.a["q_proj"].sharding.mesh.size == 2
