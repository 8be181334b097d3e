"""What is drawn for a request follows from the request, whatever else is in flight."""

from __future__ import annotations

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.engine.engine import Inference
from agent_tunix.kernels.draw import by_sorting
from agent_tunix.serve import slots
from agent_tunix.serve.scheduler import PROMPT, STEPS, Asked, BrokenError, OverloadedError, Scheduler

QUESTIONS = [
    "Ben has 18 coins. Ben wants 40. How many more coins does Ben need?",
    "Tom has 36 books. Tom gives away 11. How many books does Tom have?",
    "Ben has 5 coins.",
]


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[tuple[int, ...]]:
    return [tuple(tokenizer.encode(tokenizer.chat.prompt(question))) for question in QUESTIONS]


async def drawn(scheduler: Scheduler, asked: Asked) -> dict[int, list]:
    found: dict[int, list] = {}
    async for piece in scheduler.stream(asked):
        found.setdefault(piece.choice, []).extend(piece.tokens)
    return found


def all_drawn(scheduler: Scheduler, *asked: Asked) -> list[dict[int, list]]:
    async def together() -> list:
        return await asyncio.gather(*(drawn(scheduler, one) for one in asked))

    return asyncio.run(together())


def ids(tokens: list) -> list[int]:
    return [token.id for token in tokens]


def test_greedy_tokens_are_those_of_generate(scheduler, policy, tokenizer, prompts):
    found = all_drawn(scheduler, *(Asked(prompt, 40) for prompt in prompts))
    texts = [tokenizer.decode(ids(of[0])) for of in found]
    asked = [tokenizer.chat.prompt(question) for question in QUESTIONS]
    assert texts == policy.generate(asked, max_new_tokens=40)
    assert len({len(of[0]) for of in found}) > 1, "they end at different times"


def test_a_request_among_others_has_the_tokens_that_it_has_alone(scheduler, prompts):
    first, second, third = prompts
    kinds = [
        Asked(first, 30, temperature=1.5, seed=3, n=3),
        Asked(second, 20, temperature=1.0, top_k=3, seed=3),
        Asked(third, 25, temperature=2.0, top_p=0.7, seed=-1, n=2),
        Asked(second, 33),
        Asked(first, 5, temperature=1.5, seed=2**40),
    ]
    alone = [{k: ids(v) for k, v in all_drawn(scheduler, one)[0].items()} for one in kinds]
    together = [{k: ids(v) for k, v in of.items()} for of in all_drawn(scheduler, *kinds * 3)]
    assert together == alone * 3
    assert len({tuple(tokens) for tokens in alone[0].values()}) > 1, "choices have noise of their own"


def test_another_seed_draws_other_tokens(scheduler, prompts):
    one, same, other = all_drawn(scheduler, *(Asked(prompts[0], 30, temperature=3.0, seed=seed) for seed in (1, 1, 2)))
    assert ids(one[0]) == ids(same[0]) != ids(other[0])


def test_one_who_comes_later_joins_those_in_flight(scheduler, prompts):
    """A prompt enters between two calls of the device, and changes nothing for the others."""
    long, late = Asked(prompts[0], 200, temperature=5.0, past_ends=True), Asked(prompts[1], 10)
    alone = ids(all_drawn(scheduler, long)[0][0])

    async def joined() -> tuple[list[int], list[int], bool]:
        tokens: list[int] = []
        joining, before = None, True
        async for piece in scheduler.stream(long):
            tokens += ids(piece.tokens)
            joining = joining or asyncio.ensure_future(drawn(scheduler, late))
            before = joining.done() if piece.finish is None else before
            await asyncio.sleep(0)
        assert joining is not None
        return tokens, ids((await joining)[0]), before

    tokens, others, before = asyncio.run(joined())
    assert tokens == alone
    assert others == ids(all_drawn(scheduler, late)[0][0])
    assert before, "the later one has ended first"


def test_log_probabilities_are_those_of_the_models_logits(scheduler, policy, prompts):
    (found,) = all_drawn(scheduler, Asked(prompts[0], 12, temperature=2.0, seed=1, top=3, prompt_top=2))
    tokens = ids(found[0])
    logprobs = jax.nn.log_softmax(policy.logits([*prompts[0], *tokens]), axis=-1)
    places = np.arange(len(tokens)) + len(prompts[0]) - 1
    np.testing.assert_allclose([t.logprob for t in found[0]], logprobs[places, tokens], atol=1e-4)
    for token, row in zip(found[0], logprobs[places], strict=True):
        likeliest = np.argsort(-row)[:3]
        assert [i for i, _ in token.top] == likeliest.tolist()
        np.testing.assert_allclose([p for _, p in token.top], row[likeliest], atol=1e-4)
    told = found[PROMPT]
    assert ids(told) == list(prompts[0])
    own = logprobs[np.arange(len(told) - 1), np.array(prompts[0][1:])]
    np.testing.assert_allclose([t.logprob for t in told[1:]], own, atol=1e-4)
    assert [len(t.top) for t in told] == [2] * len(told)


def test_prompts_of_many_lengths_are_scored_together(scheduler, policy, prompts):
    texts = [prompts[0][:n] for n in (1, 2, 17, 28)]
    found = all_drawn(scheduler, *(Asked(text, 0, prompt_top=0) for text in texts))
    for text, of in zip(texts, found, strict=True):
        logprobs = jax.nn.log_softmax(policy.logits(text), axis=-1)
        np.testing.assert_allclose(
            [t.logprob for t in of[PROMPT][1:]], logprobs[np.arange(len(text) - 1), text[1:]], atol=1e-4
        )


def test_who_stops_listening_frees_the_row(model, prompts):
    scheduler = Scheduler(Inference(model), (model.weights, None), max_batch=1, max_length=2**12)

    async def left_and_asked() -> list[int]:
        stream = scheduler.stream(Asked(prompts[0], 2**11, past_ends=True))
        await anext(stream)
        await stream.aclose()
        return ids((await drawn(scheduler, Asked(prompts[1], 10)))[0])

    try:
        assert len(asyncio.run(left_and_asked())) == 10
        assert scheduler.in_flight == 0
    finally:
        scheduler.close()


def test_one_choice_can_be_given_up_and_the_others_go_on(scheduler, prompts):
    counts: dict[int, int] = {0: 0, 1: 0}
    over = threading.Event()

    def put(pieces) -> None:
        for piece in pieces:
            counts[piece.choice] += len(piece.tokens)
            if piece.choice == 0:
                piece.ticket.cancel(0)
            if piece.choice == 1 and piece.finish:
                over.set()

    scheduler.submit(Asked(prompts[0], 100, temperature=100.0, n=2, past_ends=True), put)
    assert over.wait(60)
    assert counts[0] <= 1 + STEPS < counts[1]


def test_a_device_that_fails_is_told_of_and_goes_on(scheduler, prompts, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: no room")

    with monkeypatch.context() as patch:
        patch.setattr(slots, "advance", broken)
        with pytest.raises(BrokenError, match="no room"):
            all_drawn(scheduler, Asked(prompts[0], 10))
    assert len(ids(all_drawn(scheduler, Asked(prompts[0], 10))[0][0])) == 10


def test_what_does_not_fit_is_refused(scheduler, prompts, monkeypatch):
    with pytest.raises(ValueError, match="do not fit"):
        scheduler.submit(Asked(prompts[0], 256), print)
    monkeypatch.setattr("agent_tunix.serve.scheduler.MOST_WAITING", 3)
    with pytest.raises(OverloadedError):
        scheduler.submit(Asked(prompts[0], 2, n=4), print)


@pytest.mark.parametrize(("k", "p"), [(3, 1.0), (None, 0.6), (20, 0.5), (1, 1.0), (None, 1.0)])
def test_the_filter_keeps_what_sorting_keeps(k, p):
    """The tokens that can be drawn are those that the sampler of training draws from."""
    logits = jax.random.normal(jax.random.key(0), (1, 50)) * 2
    k_B, p_B = jnp.array([k or 50]), jnp.array([p])
    kept = {*np.flatnonzero(np.isfinite(slots._filtered(logits, k_B, p_B)[0])).tolist()}
    uniform = jnp.linspace(0, 1, 4000, endpoint=False)[:, None]
    sorted_out = by_sorting(jnp.repeat(logits, 4000, axis=0), uniform, k=k or 50, top_p=p, pad_id=-1)
    probs = np.asarray(jax.nn.softmax(logits[0]))
    likely = {token for token in kept if probs[token] > 2e-3}
    assert likely <= {*np.asarray(sorted_out).tolist()} <= kept
