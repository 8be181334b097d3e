"""Every key of the optimizer and of the scheduler takes effect; test_keys_are_read.py has all others.

A changed value changes where a few updates lead, or the file's header says that the algorithm has no use for it.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from agent_tunix.algorithm.optimizers import ALGORITHMS
from agent_tunix.algorithm.schedules import SCHEDULES
from agent_tunix.config import schema
from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine.update import init_state, update
from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.families.table import family_of
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, init_adapters, masters, module_shape
from agent_tunix.training.horizon import coefficients, hyperparameters, make_plan
from agent_tunix.types import Batch, Prompts

UPDATES = 6
RUN = ["model=gemma3_tiny", "training.micro_batch_size=2", f"training.num_batches={UPDATES}", "optimizer.learning_rate=1e-2"]
CHANGED = {
    "learning_rate": "2e-2",
    "weight_decay": "0.5",
    "betas[0]": "[0.5,{1}]",
    "betas[1]": "[{0},0.5]",
    "eps": "1e-2",
    "warmup_ratio": "0.5",
    "max_grad_norm": "1.0",
}
UNUSED = {"adafactor": {"betas[0]"}, "lion": {"eps"}, "sgd": {"betas[1]", "eps"}}
SCHEDULE_KEYS = {"warmup_steps": "3", "total_steps": "30", "lr_min": "5e-3", "decay_ratio": "0.8", "num_cycles": "2"}


@cache
def composed(*groups: str) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", groups)


@cache
def configured(*overrides: str) -> Config:
    """Groups are chosen by Hydra, which takes its time; values are then put in their places."""
    given = [override.partition("=") for override in (*RUN, *overrides)]
    tree = composed(*(f"{key}={value}" for key, _, value in given if "." not in key)).copy()
    for key, _, value in given:
        if "." in key:
            OmegaConf.update(tree, key, OmegaConf.create(f"value: {value}").value, force_add=True)
    return validate(tree, Config)


@cache
def model() -> tuple[Architecture, Weights]:
    """Two layers, drawn at random."""
    arch = Architecture(12, 2, 8, 2, 1, 4, 16, 4, 2, 0.5, 100.0, 1000.0, 1.0, 1e-6)
    keys = iter(jax.random.split(jax.random.key(0), 30))
    sizes = {name: getattr(arch, width) for name, (_, width) in family_of(arch).norms.items()}
    norms = {name: 0.3 * jax.random.normal(next(keys), (2, size)) for name, size in sizes.items()}
    shapes = {module: module_shape(arch, module) for module in ATTENTION + FEED_FORWARD}
    matrices = {m: jax.random.normal(next(keys), (2, *shape)) * shape[0] ** -0.5 for m, shape in shapes.items()}
    embed, final = jax.random.normal(next(keys), (12, 8)), 0.3 * jax.random.normal(next(keys), (8,))
    return arch, Weights(embed, {**norms, **matrices}, final)


def batch(scale: float) -> Batch:
    """Two prompts with two completions each; the gradient's norm goes with the scale."""
    rng = np.random.default_rng(1)
    prompts = Prompts(jnp.asarray(rng.integers(1, 12, (2, 4))), jnp.tile(jnp.arange(4), (2, 1)))
    tokens_BC, mask_BC = jnp.asarray(rng.integers(1, 12, (4, 3))), jnp.ones((4, 3), bool)
    advantages_B = scale * jnp.asarray([1.0, -1.0, 0.5, -0.5])
    return Batch(prompts, tokens_BC, mask_BC, mask_BC, weights_BC=mask_BC / 12, advantages_B=advantages_B)


@cache
def trajectory(*overrides: str) -> np.ndarray:
    """Where the updates of a run lead, all numbers in a row, as the workflow would make them."""
    cfg = configured(*overrides)
    plan = make_plan(cfg, 64)
    arch, weights = model()
    adapters = init_adapters(jax.random.key(1), arch, ("q_proj",), 2, 4.0)  # fewer are compiled faster
    name = cfg.optimizer.optimizer_name
    state = init_state(adapters if cfg.model.lora_rank else masters(weights), name)
    for t in range(1, UPDATES + 1):
        given = batch([0.01, 1, 100][t % 3]), weights, hyperparameters(cfg, plan, t), coefficients(cfg), np.inf
        state, _ = update(state, *given, arch=arch, micro_batches=1, optimizer=name)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.trainable)])


def header(group: str, name: str) -> str:
    """The comment that a file opens with."""
    return "".join(line for line in (config_folder() / group / f"{name}.yaml").open() if line.startswith("#"))


@pytest.mark.parametrize("key", CHANGED)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_optimizer_key_changes_the_trajectory_or_the_file_says_that_it_is_not_used(name, key):
    run = (f"optimizer={name}", "model.lora_rank=0" if name == "muon" else "model.lora_rank=2")  # Muon's rest is no adapter
    plain, betas = trajectory(*run), configured(*run).optimizer.betas
    changed = trajectory(*run, f"optimizer.{key.split('[')[0]}={CHANGED[key].format(*betas)}")
    assert np.isfinite(changed).all()
    unused = key in UNUSED.get(name, set())
    assert np.array_equal(plain, changed) == unused
    if unused:
        assert f"{key} is not used" in header("optimizer", name)


def test_the_keys_above_are_all_there_are():
    fields = {key.split("[")[0] for key in CHANGED} | {"optimizer_name", "decay_norms"}
    assert fields == set(schema.OptimizerSection.model_fields)
    assert {*SCHEDULE_KEYS, "scheduler_name"} == set(schema.SchedulerSection.model_fields)


def test_every_algorithm_and_every_schedule_leads_elsewhere():
    ends = [trajectory(f"optimizer={name}", "scheduler=linear") for name in ALGORITHMS]
    ends += [trajectory(f"scheduler={name}") for name in SCHEDULES]
    assert len({end.tobytes() for end in ends}) == len(ALGORITHMS) + len(SCHEDULES) - 1  # adamw with linear is in both


def test_norms_are_decayed_only_where_told_to_be():
    plain, decayed = (trajectory("model.lora_rank=0", f"optimizer.decay_norms={value}") for value in ("null", "true"))
    assert not np.array_equal(plain, decayed)
    assert np.array_equal(plain, trajectory("model.lora_rank=0", "optimizer.decay_norms=false"))


@pytest.mark.parametrize("key", SCHEDULE_KEYS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_key_changes_the_trajectory_or_is_refused(name, key):
    overrides = (f"scheduler={name}", f"scheduler.{key}={SCHEDULE_KEYS[key]}")
    uses = {"warmup_steps", "total_steps"} | {"wsd": {"decay_ratio"}, "cosine_restarts": {"num_cycles"}}.get(name, set())
    if key in uses | ({"lr_min"} if name != "constant" else set()):
        assert not np.array_equal(trajectory(f"scheduler={name}"), trajectory(*overrides))
    else:
        with pytest.raises(UserError, match=f"scheduler_name={name} does not use {key}"):
            configured(*overrides)
