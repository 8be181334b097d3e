"""The endpoint as clients see it: OpenAI's own client, and what no client should send."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from urllib.parse import urlsplit

import numpy as np
import pytest

from agent_tunix.serve.asking import Choice, Update
from agent_tunix.serve.scheduler import BrokenError, Token
from agent_tunix.serve.text import Cut, Decoder

openai = pytest.importorskip("openai")

MODEL = "package:tiny"
QUESTION = "Ben has 18 coins. Ben wants 40. How many more coins does Ben need?"
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
ANSWER = "<reasoning>40+18=58</reasoning><answer>58</answer>"


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def send(address):
    """Sends bytes as they are; gives the status and the parsed answer."""

    def sent(body: bytes | dict, path="/v1/chat/completions", method="POST", headers=None):
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        chunked = not isinstance(body, bytes)
        connection.request(
            method, path, body, {"Content-Type": "application/json"} | (headers or {}), encode_chunked=chunked
        )
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        return answer.status, found

    return sent


def test_an_answer_is_that_of_the_python_interface(client, policy):
    found = client.chat.completions.create(**ASKED)
    assert found.choices[0].message.content == policy.chat(ASKED["messages"]) == ANSWER
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.completion_tokens == 15


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_a_stream_adds_up_to_the_answer(client):
    parts = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == ANSWER
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts[-2:-1]] == ["stop"]
    assert parts[-1].usage.completion_tokens == 15
    assert len(parts) > 4, "it comes in pieces"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "expected"), [("+18", "<reasoning>40"), (["zzz", "ing>40"], "<reason"), (["=59"], ANSWER)])
def test_a_stop_string_cuts_the_text_wherever_tokens_end(client, stream, stop, expected):
    found = client.chat.completions.create(**ASKED, stop=stop, stream=stream)
    if stream:
        text = "".join(part.choices[0].delta.content or "" for part in found)
    else:
        text = found.choices[0].message.content
        assert found.choices[0].finish_reason == "stop"
    assert text == expected


def test_a_limit_ends_an_answer(client):
    found = client.chat.completions.create(**ASKED, max_completion_tokens=3)
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 3


def test_choices_follow_from_the_seed(client):
    asked = ASKED | {"temperature": 3.0, "n": 3, "seed": 5, "max_tokens": 20}
    one, same = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in same.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    other = client.chat.completions.create(**asked | {"seed": 6})
    assert texts != [choice.message.content for choice in other.choices]


def test_log_probabilities_and_token_ids_are_told_of_each_token(client, tokenizer):
    asked = ASKED | {"logprobs": True, "top_logprobs": 3}
    found = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    choice = found.choices[0]
    told = choice.logprobs.content
    assert tokenizer.decode(choice.token_ids) == ANSWER
    assert choice.token_ids[-1] in tokenizer.end_ids
    assert found.prompt_token_ids == tokenizer.encode(tokenizer.chat.prompt(QUESTION))
    assert len(told) == len(choice.token_ids) == found.usage.completion_tokens
    assert "".join(one.token for one in told[:-1]) == ANSWER
    assert all(len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob for one in told)
    streamed = list(client.chat.completions.create(**asked, stream=True, extra_body={"return_token_ids": True}))
    parts = [part.choices[0] for part in streamed if part.choices[0].logprobs]
    assert [one.logprob for part in parts for one in part.logprobs.content] == [one.logprob for one in told]
    assert [i for part in parts for i in part.token_ids] == choice.token_ids
    as_ids = client.chat.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True})
    assert [one.token for one in as_ids.choices[0].logprobs.content] == [f"token_id:{i}" for i in choice.token_ids]


def test_completions_take_texts_and_tokens(client, tokenizer, policy):
    prompt = tokenizer.chat.prompt(QUESTION)
    ids = tokenizer.begun(prompt)
    for given, count in ((prompt, 1), ([prompt, prompt], 2), (ids, 1), ([ids, ids[:9]], 2)):
        found = client.completions.create(model=MODEL, prompt=given, temperature=0, max_tokens=40)
        assert [choice.index for choice in found.choices] == list(range(count))
        assert found.choices[0].text == ANSWER
    streamed = client.completions.create(model=MODEL, prompt=[prompt, prompt], temperature=0, max_tokens=40, stream=True)
    texts = {0: "", 1: ""}
    for part in streamed:
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == {0: ANSWER, 1: ANSWER}
    assert client.completions.create(model=MODEL, prompt=prompt, temperature=0).usage.completion_tokens == 15


def test_what_loglikelihoods_are_made_of(client, tokenizer, policy):
    """As lm-eval asks: tokens in, echoed with their log-probabilities, and one token more, which it drops."""
    contexts = [tokenizer.begun(tokenizer.chat.prompt(QUESTION)), tokenizer.begun("How many")]
    ending = tokenizer.encode(ANSWER)
    asked = {"model": MODEL, "prompt": [[*c, *ending] for c in contexts], "temperature": 0, "logprobs": 1, "echo": True}
    greedy = []
    for context, most in ((contexts[0], 1), (contexts[1], 0)):
        found = client.completions.create(**asked | {"max_tokens": most})
        choice = found.choices[contexts.index(context)]
        told, end = choice.logprobs, len(context) + len(ending)
        assert told.token_logprobs[0] is told.top_logprobs[0] is None
        assert len(told.token_logprobs) == end + most
        own = told.token_logprobs[len(context) : end]
        logits = policy.logits([*context, *ending])[len(context) - 1 : -1]
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(own, logprobs[np.arange(len(ending)), ending], atol=1e-4)
        tops = told.top_logprobs[len(context) : end]
        greedy.append(all(p == max(top.values()) for p, top in zip(own, tops, strict=True)))
    assert greedy == [True, False], "the model says just this after its question, and not after other words"


def test_tokens_in_and_tokens_out(send, tokenizer):
    """As the training client of verifiers asks."""
    ids = tokenizer.encode(tokenizer.chat.prompt(QUESTION))
    how = {"temperature": 0, "logprobs": 1, "stop_token_ids": [tokenizer.encode("=")[0]], "skip_special_tokens": False}
    path = "/inference/v1/generate"
    status, found = send({"model": MODEL, "token_ids": ids, "sampling_params": how}, path)
    assert status == 200
    (choice,) = found["choices"]
    assert tokenizer.decode(choice["token_ids"]) == "<reasoning>40+18="
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert (choice["finish_reason"], found["prompt_token_ids"]) == ("stop", ids)
    without = send({"model": MODEL, "token_ids": ids, "sampling_params": {"temperature": 0}}, path)[1]["choices"][0]
    assert tokenizer.decode(without["token_ids"]) == ANSWER
    for wrong in ({"token_ids": []}, {"token_ids": "a"}, {"token_ids": ids, "sampling_params": 3}, {"token_ids": [10**9]}):
        assert send({"model": MODEL, **wrong}, path)[0] == 400


def test_64_at_once_have_the_answers_that_each_has_alone(address, client):
    def asked(number: int) -> dict:
        text = f"Ben has {number} coins. Ben wants 40. How many more coins does Ben need?"
        how = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 30, **how}

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            found = await asyncio.gather(*(client.chat.completions.create(**asked(n)) for n in range(10, 74)))
            return [one.choices[0].message.content for one in found]

    texts = asyncio.run(together())
    assert len(texts) == 64
    alone = [client.chat.completions.create(**asked(n)).choices[0].message.content for n in (10, 31, 73)]
    assert [texts[0], texts[21], texts[63]] == alone


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_drawn_for_no_longer(address, asking, stream):
    async def left() -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            asked = ASKED | {"max_tokens": 200, "n": 40, "extra_body": {"ignore_eos": True}}
            work = asyncio.ensure_future(client.chat.completions.create(**asked, stream=stream))
            while not asking.scheduler.in_flight:
                await asyncio.sleep(0.005)
            if stream:
                parts = await work
                await anext(aiter(parts))
                await parts.close()
            else:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    asyncio.run(left())
    until = time.monotonic() + 30
    while asking.scheduler.in_flight and time.monotonic() < until:
        time.sleep(0.01)
    assert not asking.scheduler.in_flight


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        (b"{", 400, None, "not JSON"),
        (b"[" * 100_000, 400, None, "not JSON"),
        (b"[]", 400, None, "not a JSON object"),
        (b"\xff\xfe", 400, None, "not JSON"),
        (b"", 400, None, "not JSON"),
        ({"model": MODEL}, 400, "messages", "messages"),
        ({**ASKED, "messages": []}, 400, "messages", "messages"),
        ({**ASKED, "messages": [{"role": "wizard", "content": "?"}]}, 400, "messages", "role"),
        ({**ASKED, "messages": [{"role": "system", "content": "?"}]}, 400, "messages", "none of the user"),
        ({**ASKED, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "type text"),
        ({**ASKED, "messages": [{"role": "user", "content": "coins " * 300}]}, 400, "messages", "256 tokens"),
        ({**ASKED, "max_tokens": 250}, 400, "messages", "asks for 250 more"),
        ({**ASKED, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({**ASKED, "temperature": -1}, 400, "temperature", "greater than"),
        (b'{"model": "package:tiny", "messages": [{"role": "user", "content": "?"}], "temperature": NaN}', 400, None, ""),
        ({**ASKED, "temperature": "hot"}, 400, "temperature", "number"),
        ({**ASKED, "top_p": 0}, 400, "top_p", "greater than"),
        ({**ASKED, "n": 10**6}, 400, "n", "less than"),
        ({**ASKED, "top_logprobs": 3}, 400, "top_logprobs", "logprobs=true"),
        ({**ASKED, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
        ({**ASKED, "stop": [""]}, 400, "stop", ""),
        ({**ASKED, "logit_bias": {"5": 1}}, 400, "logit_bias", "does not know"),
        ({**ASKED, "response_format": {"type": "json_object"}}, 400, "response_format", "only writes text"),
        ({**ASKED, "tools": [{"type": "function"}]}, 400, "tools", "function"),
        ({**ASKED, "tool_choice": "required"}, 400, "tool_choice", "cannot be made"),
        ({**ASKED, "model": "gpt"}, 404, "model", "There is no model 'gpt'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_told_as_clients_expect_it(send, body, status, param, said, stream):
    found, answer = send({**body, "stream": stream} if isinstance(body, dict) else body)
    assert found == status
    assert {*answer["error"]} == {"message", "type", "param", "code"}
    assert said in answer["error"]["message"]
    if param:
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [10**9]}, "is no token"),
        ({"prompt": [-1]}, "is no token"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "How", "max_tokens": 0}, "without echo"),
        ({"prompt": "How", "echo": True, "stream": True}, "stream"),
        ({"prompt": "How", "best_of": 3}, "best_of"),
        ({"prompt": "How", "suffix": "?"}, "does not know"),
    ],
)
def test_mistakes_in_completions_are_told_too(send, given, said):
    status, answer = send({"model": MODEL, **given}, "/v1/completions")
    assert status == 400
    assert said in answer["error"]["message"]


def test_other_paths_methods_and_names_of_this_machine_are_refused(send):
    assert send(b"", "/v1/other")[0] == 404
    assert send(b"", "/v1/chat/completions", "GET")[0] == 405
    assert send(b"", "/health", "GET") == (200, {"status": "ok", "in_flight": 0})
    status, answer = send({**ASKED}, headers={"Host": "evil.example"})
    assert (status, answer["error"]["type"]) == (403, "invalid_request_error")
    assert send(b"", "/health", "GET", headers={"Host": "localhost:8000"})[0] == 200


def test_a_body_has_a_bound(send, monkeypatch):
    monkeypatch.setattr("agent_tunix.serve.app.LARGEST_BODY", 100)
    assert send(b" " * 101)[0] == 413
    assert send(iter([b" " * 60] * 2), headers={"Transfer-Encoding": "chunked"})[0] == 413


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_the_device_is_told(send, asking, monkeypatch, stream):
    async def broken(*_: object):
        raise BrokenError("no memory")
        yield

    monkeypatch.setattr(asking, "answer", broken)
    if not stream:
        status, answer = send({**ASKED})
        assert status == 500
        assert "no memory" in answer["error"]["message"]


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('{"name": "weather", "parameters": {"city": "Ulm"}}', None, {"city": "Ulm"}),
        ('{"name": "weather", "parameters"', '{"name": "weather", "parameters"', None),
        ("It rains.", "It rains.", None),
    ],
)
def test_calls_of_tools_are_told_as_such(client, asking, tokenizer, monkeypatch, text, content, arguments):
    async def says(asked, stops):
        choice = Choice(Decoder(tokenizer), Cut(()), [Token(5, 0.0)], text, "stop")
        yield Update(0, choice, text, choice.tokens)

    monkeypatch.setattr(asking, "answer", says)
    found = client.chat.completions.create(**ASKED, tools=[WEATHER]).choices[0]
    assert found.message.content == content
    assert found.finish_reason == ("tool_calls" if arguments else "stop")
    calls = found.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == ([arguments] if arguments else [])
    parts = [part.choices[0] for part in client.chat.completions.create(**ASKED, tools=[WEATHER], stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == (content or "")
    streamed = [call.function.name for part in parts for call in part.delta.tool_calls or []]
    assert streamed == ["weather"] * len(calls)
    assert parts[-1].finish_reason == found.finish_reason
    without = client.chat.completions.create(**ASKED, tools=[WEATHER], tool_choice="none").choices[0]
    assert without.message.content == text


def test_a_conversation_with_tools_is_written_for_a_template_that_knows_none(asking):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no", "name": "weather"},
    ]
    text = asking.prompt(messages, [WEATHER])
    assert '"name": "weather", "parameters": {"city": "Ulm"}' in text
    assert "You may call these functions" in text
    assert text.count("<start_of_turn>user") == 2
    assert "tool" not in text.replace("functions", "")
