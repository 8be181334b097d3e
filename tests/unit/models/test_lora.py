from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.models.lora import (
    ATTENTION,
    FEED_FORWARD,
    Adapters,
    huggingface_name,
    init_adapters,
    merged_if_it_pays,
    module_shape,
    policy_of,
    select_modules,
    stack,
    strange_words,
    unadapted,
)
from agent_tunix.models.quantization import Quantised
from agent_tunix.models.transformer import forward


@partial(jax.jit, static_argnames="arch")
def hidden(weights, adapters, arch, prompts):
    return forward(weights, adapters, arch, prompts.tokens_PS, prompts.positions_PS)[0]


@pytest.fixture(scope="module")
def fresh_adapters(arch) -> Adapters:
    return init_adapters(jax.random.key(2), arch, ("q_proj", "down_proj"), rank=3, alpha=6.0)


def test_fresh_adapters_change_nothing(weights, fresh_adapters, arch, prompts):
    base, adapted = (hidden(weights, a, arch, prompts) for a in (None, fresh_adapters))
    np.testing.assert_allclose(adapted, base, rtol=1e-4, atol=1e-5)


def test_fresh_adapters_are_float32_bounded_and_differ_by_layer_and_module(fresh_adapters, arch):
    for module in ("q_proj", "down_proj"):
        a, b = fresh_adapters.a[module], fresh_adapters.b[module]
        fan_in, fan_out = module_shape(arch, module)
        assert a.shape == (4, fan_in, 3)
        assert b.shape == (4, 3, fan_out)
        assert a.dtype == b.dtype == jnp.float32
        assert (b == 0).all()
        assert 0.9 * fan_in**-0.5 < jnp.abs(a).max() <= fan_in**-0.5
        assert not np.array_equal(a[0], a[1])
    assert not np.array_equal(fresh_adapters.a["q_proj"][:, :16], fresh_adapters.a["down_proj"][:, :16])


def test_drawing_all_modules_at_once_gives_each_what_it_would_draw_by_itself(fresh_adapters, arch):
    for module, key in zip(("q_proj", "down_proj"), jax.random.split(jax.random.key(2)), strict=True):
        bound = module_shape(arch, module)[0] ** -0.5
        alone = jax.random.uniform(key, fresh_adapters.a[module].shape, minval=-bound, maxval=bound)
        np.testing.assert_array_equal(fresh_adapters.a[module], alone)


def test_adapters_equal_the_base_with_their_product_added(weights, adapters, arch, prompts):
    merged = {
        module: weights.array(module) + adapters.scale * jnp.einsum("lir,lro->lio", adapters.a[module], adapters.b[module])
        for module in ATTENTION + FEED_FORWARD
    }
    want = hidden(dataclasses.replace(weights, layers=weights.layers | merged), None, arch, prompts)
    seen = np.asarray(prompts.positions_PS) >= 0
    np.testing.assert_allclose(hidden(weights, adapters, arch, prompts)[seen], want[seen], rtol=1e-3, atol=2e-5)


def test_a_policy_that_reads_many_rows_is_merged_and_is_the_same_policy(weights, adapters, arch, prompts):
    merged, nothing = merged_if_it_pays(weights, adapters, rows=1000)
    assert nothing is None
    want, got = hidden(weights, adapters, arch, prompts), hidden(merged, None, arch, prompts)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-5)


def test_what_reads_few_rows_or_is_several_policies_or_is_quantised_stays_apart(weights, adapters):
    matrices = {module: Quantised(jnp.zeros(1), jnp.zeros(1)) for module in ATTENTION + FEED_FORWARD}
    quantised = dataclasses.replace(weights, layers=weights.layers | matrices)
    for base, policy_, rows in [
        (weights, adapters, 1),
        (weights, stack([adapters, adapters]), 1000),
        (quantised, adapters, 1000),
        (weights, None, 1000),
    ]:
        found = merged_if_it_pays(base, policy_, rows)
        assert found[0] is base
        assert found[1] is policy_


def test_every_module_of_every_layer_has_its_adapter_in_the_forward_pass(weights, adapters, arch, prompts):
    grads = jax.jit(jax.grad(lambda a: (hidden(weights, a, arch, prompts)[:, -1] ** 3).sum()))(adapters)
    for module in ATTENTION + FEED_FORWARD:
        assert (np.abs(grads.a[module]).max(axis=(1, 2)) > 1e-6).all()
        assert (np.abs(grads.b[module]).max(axis=(1, 2)) > 1e-6).all()


def test_adapters_may_sit_on_some_modules_only(weights, adapters, arch, prompts):
    silent = Adapters(adapters.a, {k: v * (k == "v_proj") for k, v in adapters.b.items()}, adapters.scale)
    alone = Adapters({"v_proj": adapters.a["v_proj"]}, {"v_proj": adapters.b["v_proj"]}, adapters.scale)
    got, want = (hidden(weights, a, arch, prompts) for a in (alone, silent))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_rank_and_alpha_make_the_scale(arch):
    assert init_adapters(jax.random.key(0), arch, ("q_proj",), rank=4, alpha=32.0).scale == 8
    assert init_adapters(jax.random.key(0), arch, ("q_proj",), rank=4, alpha=32.0, use_rslora=True).scale == 16


def test_policy_is_adapters_over_the_base_or_all_weights_in_the_type_of_the_base(weights, adapters):
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    assert policy_of(base, adapters) == (base, adapters)
    trained = jax.tree.map(lambda x: x + 1, weights)
    cast, none = policy_of(base, trained)
    assert none is None
    assert {leaf.dtype for leaf in jax.tree.leaves(cast)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(cast.embed_VD, trained.embed_VD.astype(jnp.bfloat16))


def test_names_are_those_of_hugging_face():
    assert huggingface_name(3, "q_proj") == "model.layers.3.self_attn.q_proj"
    assert huggingface_name(0, "down_proj") == "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("(q|k|v|o|gate|up|down)_proj", ATTENTION + FEED_FORWARD),
        ("q_proj|v_proj", ("q_proj", "v_proj")),
        ("self_attn", ATTENTION),
        (r".*mlp\.", FEED_FORWARD),
        (r"\.o_proj$", ("o_proj",)),
    ],
)
def test_a_pattern_chooses_modules(pattern, modules):
    assert select_modules(pattern, 4) == modules


@pytest.mark.parametrize(
    ("pattern", "fault"), [("w_proj", "fits no module.*q_proj"), (r"layers\.0\..*q_proj", "q_proj in 1 of 4 layers")]
)
def test_a_pattern_that_fits_nothing_or_part_of_the_layers_is_refused(pattern, fault):
    with pytest.raises(ValueError, match=fault):
        select_modules(pattern, 4)


@pytest.mark.parametrize(
    ("pattern", "strange"),
    [
        ("(q|k|v|o|gate|up|down)_proj", []),
        (r"model\.layers\.[0-9]+\.(self_attn|mlp)\..*_proj$", []),
        (r"(?i:Q_PROJ)|[qv]_proj|(?P<other>\w+_proj)(?!.*lm_head)", ["Q_PROJ"]),
        (".*q_einsum|.*kv_einsum|.*gate_proj|.*attn_vec_einsum", ["q_einsum", "kv_einsum", "attn_vec_einsum"]),
        ("q_proj|lm_head", ["lm_head"]),
    ],
)
def test_words_that_are_in_no_module_name_are_found(pattern, strange):
    assert strange_words(pattern) == strange


def test_what_is_left_out_is_told_by_block():
    assert unadapted(ATTENTION + FEED_FORWARD) == {}
    assert unadapted(("q_proj", "v_proj")) == {"self_attn": ["k_proj", "o_proj"], "mlp": list(FEED_FORWARD)}
    assert unadapted(FEED_FORWARD) == {"self_attn": list(ATTENTION)}
