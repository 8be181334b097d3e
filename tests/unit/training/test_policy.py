"""The shipped model as a policy. What a run has learnt is in tests/integration/test_python_interface.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agent_tunix
from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.environments.stream import left_pad
from agent_tunix.errors import UserError
from agent_tunix.models import transformer
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import load_weights, read_architecture, save_weights
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.training import loading
from agent_tunix.training.policy import WIDTH

CHAT = load_tokenizer(find_checkpoint("package:tiny")).chat
QUESTIONS = [
    "Ben has 18 coins. Ben wants 40. How many more coins does Ben need?",
    "Tom has 36 books. Tom gives away 11. How many books does Tom have?",
]


@pytest.fixture(scope="module")
def policy() -> agent_tunix.Policy:
    return agent_tunix.load("package:tiny")


@pytest.fixture(scope="module")
def by_hand(policy):
    checkpoint = find_checkpoint("package:tiny")
    return load_weights(checkpoint, policy.architecture, jnp.float32), load_tokenizer(checkpoint)


def test_logits_are_those_of_the_models_forward_pass(policy, by_hand):
    weights, _ = by_hand
    ids = policy.encode(CHAT.prompt(QUESTIONS[0]))
    hidden, _ = transformer.forward(weights, None, policy.architecture, jnp.array([ids]), jnp.arange(len(ids))[None])
    found = policy.logits(ids)
    assert (found.shape, found.dtype) == ((len(ids), policy.architecture.vocab_size), np.float32)
    np.testing.assert_allclose(found, transformer.unembed(weights, hidden)[0], atol=1e-4)


def test_several_texts_have_the_logits_that_each_has_alone(policy):
    short, long = policy.encode("How many"), policy.encode(" ".join(QUESTIONS))
    assert len(short) < WIDTH < len(long), "they are padded to different widths when alone"
    found = policy.logits([short, long])
    assert found.shape[:2] == (2, len(long))
    np.testing.assert_allclose(found[0, : len(short)], policy.logits(short), atol=1e-4)
    np.testing.assert_allclose(found[1], policy.logits(np.array(long)), atol=1e-4)
    assert np.isnan(found[0, len(short) :]).all()


def test_what_is_generated_is_what_the_sampler_draws(policy, by_hand):
    weights, tokenizer = by_hand
    prompts = [CHAT.prompt(question) for question in QUESTIONS]
    given = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_new_tokens": 16}
    found = policy.generate(prompts, seed=3, num_generations=2, **given)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    key = jax.random.fold_in(jax.random.key(3), 0)  # the first batch
    sampling = Sampling(5, 0.9, 16, 2, tokenizer.end_ids, tokenizer.pad_id)
    draw = Draw(None, left_pad(ids, WIDTH, tokenizer.pad_id), key, 0.7)
    (drawn,) = sample(weights, (draw,), arch=policy.architecture, sampling=sampling)
    texts = [
        tokenizer.decode(row[mask]) for row, mask in zip(*map(np.asarray, (drawn.tokens_BC, drawn.mask_BC)), strict=True)
    ]
    assert found == [texts[:2], texts[2:]]
    assert policy.generate(prompts, seed=3, num_generations=2, **given) == found
    assert policy.generate(prompts, seed=4, num_generations=2, **given) != found


def test_one_completion_of_each_prompt_is_a_text_and_one_that_is_asked_for_a_list(policy):
    prompts = [CHAT.prompt(question) for question in QUESTIONS]
    texts = policy.generate(prompts, max_new_tokens=16)
    assert [type(text) for text in texts] == [str, str]
    assert policy.generate(prompts, max_new_tokens=16, num_generations=1) == [[text] for text in texts]
    assert policy.generate(prompts, max_new_tokens=16, batch_size=1) == texts
    assert policy.generate([], max_new_tokens=16) == []


def test_a_chat_is_asked_as_training_asks(policy):
    asked = [{"role": "user", "content": QUESTIONS[0]}]
    (expected,) = policy.generate([CHAT.prompt(QUESTIONS[0])], max_new_tokens=16)
    assert expected.startswith("<reasoning>")
    assert policy.chat(asked, max_new_tokens=16) == expected
    prompted = agent_tunix.Policy(policy._inference.model, system_prompt="How many")
    (expected,) = policy.generate([CHAT.prompt(QUESTIONS[0], "How many")], max_new_tokens=16)
    assert prompted.chat(asked, max_new_tokens=16) == expected
    assert policy.chat([{"role": "system", "content": "How many"}, *asked], max_new_tokens=16) == expected


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda policy: policy.logits([]), "at least one token"),
        (lambda policy: policy.logits([[1], []]), "at least one token"),
        (lambda policy: policy.logits([1, 47]), "47 is no token; the model has 47, from 0 on"),
        (lambda policy: policy.logits([-1]), "-1 is no token"),
        (lambda policy: policy.generate("How many"), "a list of texts"),
        (lambda policy: policy.generate(["How"], num_generations=2), "at temperature 0 all would be the same"),
        (lambda policy: policy.generate(["How"], top_p=2.0, top_k=0), "(?s)2 faults.*top_k=0.*top_p=2"),
        (lambda policy: policy.chat([]), "user and assistant speak in turn"),
    ],
)
def test_what_cannot_be_answered_is_refused(policy, call, said):
    with pytest.raises(UserError, match=said):
        call(policy)


def test_a_checkpoint_of_another_size_than_any_that_is_shipped_says_what_it_is(arch, weights, tmp_path):
    save_weights(tmp_path, weights, arch, jnp.dtype("float32"))
    assert read_architecture(tmp_path, {}) == arch
    assert loading.usual_dtype(arch) == "bfloat16"
    assert loading.usual_dtype(read_architecture(find_checkpoint("package:tiny"), {})) == "float32"
