"""`agent-tunix serve` and `agent-tunix chat`: how they begin and end, and what they refuse."""

from __future__ import annotations

import http.client
import io
import json
import signal
import socket
import sys
from unittest.mock import Mock

import pytest

from agent_tunix.serve import chat, server

QUESTION = "Ben has 18 coins. Ben wants 40. How many more coins does Ben need?"
ANSWER = "<reasoning>40+18=58</reasoning><answer>58</answer>"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_ends_it(command, monkeypatch, capsys, number):
    models = []

    def wait(_: float) -> None:
        address = capsys.readouterr().out.partition("http://")[2].partition("/")[0]
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", "/v1/models")
        models.extend(json.loads(connection.getresponse().read())["data"])
        connection.close()
        signal.raise_signal(number)

    monkeypatch.setattr(server, "time", Mock(sleep=wait))
    outcome = command("serve", "model=gemma3_tiny", "serve.port=0")
    assert (outcome.code, outcome.err) == (0, "")
    assert [model["id"] for model in models] == ["package:tiny"]


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(command, monkeypatch):
    monkeypatch.setattr(server, "open_model", Mock(side_effect=AssertionError))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = command("serve", "model=gemma3_tiny", f"serve.port={port}")
    assert outcome.code == 2
    assert f"Port {port} is in use" in outcome.err


def test_other_machines_are_warned_of(command, monkeypatch):
    def stop(_: float) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(server, "time", Mock(sleep=stop))
    assert "every machine" in command("serve", "model=gemma3_tiny", "serve.port=0", "serve.host=0.0.0.0").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run=nowhere"], "nowhere"),
        (["step=3"], "has no steps"),
        (["serve.port=70000"], "serve.port"),
        (["serve.max_batch=0"], "serve.max_batch"),
        (["serve.host=no such host"], "serve.host"),
        (["run=here", "model.lora_rank=3"], "only run, step, serve can be given"),
        (["--multirun", "seed=1,2"], "leave out --multirun"),
    ],
)
def test_mistakes_are_answered_without_a_traceback(command, arguments, said):
    given = [] if arguments[0].startswith("run=") else ["model=gemma3_tiny"]
    outcome = command("serve", *given, "serve.port=0", *arguments)
    assert outcome.code == 2
    assert said in outcome.err
    assert "Traceback" not in outcome.err


def test_a_missing_extra_is_named(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    outcome = command("serve", "model=gemma3_tiny")
    assert outcome.code == 2
    assert "pip install 'agent-tunix[serve]'" in outcome.err


def test_a_run_is_served_as_it_has_learnt(command, oldest_run, monkeypatch):
    """By its last checkpoint, with its own prompt; the name is the folder's."""
    opened = []

    def stop(_: float) -> None:
        opened.append(served.call_args.args[0])
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(server, "Asking", served := Mock(wraps=server.Asking))
    monkeypatch.setattr(server, "time", Mock(sleep=stop))
    assert command("serve", f"run={oldest_run}", "serve.port=0").code == 0
    assert opened[0].name == "2e29ef9"
    assert opened[0].policy[1] is not None, "it has adapters"


def test_what_is_typed_is_answered(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n\n/what\n/reset\n{QUESTION}\n"))
    outcome = command("chat", "model=gemma3_tiny", "inference_config=greedy")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count(ANSWER) == 2
    assert outcome.out.count(chat.COMMANDS) == 2


def test_a_conversation_that_has_grown_too_long_is_told(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n/quit\n{QUESTION}\n"))
    outcome = command("chat", "model=gemma3_tiny", "max_length=10")
    assert outcome.code == 0
    assert "/reset begins anew" in outcome.out.splitlines()[-1]


def test_an_answer_can_be_interrupted(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n/reset\n{QUESTION}\n"))
    push, calls = chat.Asking.answer, []

    async def interrupted(self, asked, stops):
        async for update in push(self, asked, stops):
            calls.append(update)
            if len(calls) == 1:
                signal.raise_signal(signal.SIGINT)
            yield update

    monkeypatch.setattr(chat.Asking, "answer", interrupted)
    outcome = command("chat", "model=gemma3_tiny", "inference_config=greedy")
    assert outcome.code == 0
    assert outcome.out.count(ANSWER) == 1, "the second is whole"
