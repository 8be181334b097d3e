"""`agent-tunix chat`: a conversation with a model in the terminal, in this process and without a server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from agent_tunix.config.schema import ChatConfig
from agent_tunix.models.chat import Message
from agent_tunix.serve.asking import Asking
from agent_tunix.serve.opened import open_model
from agent_tunix.serve.protocol import RequestError
from agent_tunix.serve.scheduler import BrokenError, Scheduler
from agent_tunix.training.progress import say

ASKED = ("run", "step", "inference_config", "max_length", "seed")  # what can be chosen for a run
COMMANDS = "/reset begins anew, /quit or Ctrl-D ends; Ctrl-C ends an answer."


def run(cfg: ChatConfig, overrides: Sequence[str], console: Console) -> None:
    """Opens the model, and answers what is typed until there is no more."""
    opened = open_model(cfg, overrides, ASKED, console)
    scheduler = Scheduler(opened.inference, opened.policy, 1, cfg.max_length)
    say(console, f"{opened.name} answers. {COMMANDS}")
    try:
        with _interrupts():
            _converse(Asking(opened, scheduler), cfg)
    finally:
        scheduler.close()


def _converse(asking: Asking, cfg: ChatConfig) -> None:
    messages, turns = list[Message](), 0
    while (line := _typed()) is not None and line != "/quit":
        if line == "/reset":
            messages = []
        elif line.startswith("/"):
            print(COMMANDS)
        elif line:
            messages.append({"role": "user", "content": line})
            turns += 1
            answer = _answer(asking, messages, cfg, turns)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:  # nobody has answered it
                messages.pop()


def _typed() -> str | None:
    """The next line; None at the end."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:  # as in a shell, what was typed is dropped
            print(f"\n{COMMANDS}")


def _answer(asking: Asking, messages: Sequence[Message], cfg: ChatConfig, turn: int) -> str:
    """Shows an answer while it is drawn; returns what there is of it when it ends or is ended."""
    parts, how = list[str](), cfg.inference_config

    async def shown() -> None:
        asked = asking.asked(asking.tokenizer.encode(asking.prompt(messages)), None, "messages")
        seed = cfg.seed + (turn << 32)
        asked = dataclasses.replace(asked, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, seed=seed)
        async for update in asking.answer(asked, ()):
            parts.append(update.text)
            print(update.text, end="", flush=True)
        print()

    try:
        asyncio.run(shown())
    except KeyboardInterrupt:
        print()
    except RequestError as mistake:
        too_long = mistake.code == "context_length_exceeded"
        print(
            f"The conversation has more than max_length={cfg.max_length} tokens; /reset begins anew."
            if too_long
            else mistake
        )
    except BrokenError as fault:
        print(f"The model could not answer: {fault}")
    return "".join(parts)


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Ctrl-C is an exception again; other signals end the command as they do everywhere."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
