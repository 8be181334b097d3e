"""Requests in, tokens out: what stands between those who ask and the device.

One thread works the device. Between two calls of it new prompts enter, rows that have ended or were given up leave, and
what was drawn is handed out. A request's tokens follow from the request alone: its noise is a function of its seed, the
choice and the position, whatever else is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agent_tunix.engine.engine import Inference
from agent_tunix.environments.stream import left_padded
from agent_tunix.errors import named
from agent_tunix.models.lora import Policy
from agent_tunix.models.sharding import on_mesh_of
from agent_tunix.serve import slots as device
from agent_tunix.serve.slots import MOST_TOP, Form, How, Ways
from agent_tunix.types import Prompts

STEPS = 8  # tokens of every row between two looks at who has ended, left or come
LEAST_WIDTH = 128  # tokens of a row's cache
LEAST_PROMPT = 32  # tokens to which prompts are padded
PREFILL = 2**14  # tokens of prompts that are read at once
MOST_PROMPTS = 16
MOST_WAITING = 4096  # choices
PROMPT = -1  # in the place of a choice: what is said of the prompt's own tokens

Finish = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """`n` continuations of a prompt, and how they are drawn.

    `top` likeliest tokens are told of beside each that was drawn. `prompt_top` asks for the same of the prompt's tokens.
    With `past_ends` a choice goes on behind an end token, as measurements of speed ask for.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    n: int = 1
    top: int = 0
    prompt_top: int | None = None
    past_ends: bool = False
    stop_ids: tuple[int, ...] = ()  # tokens that end a choice, beside the model's own

    @property
    def ways(self) -> Ways:
        if self.temperature == 0:
            return "greedy"
        return "drawn" if self.top_k is None and self.top_p >= 1 else "filtered"


class Token(NamedTuple):
    """A token, its log-probability under the model at temperature 1, and the likeliest tokens at its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Piece(NamedTuple):
    """Further tokens of a choice; the last one of a choice says why it ended. An end token is among the tokens."""

    ticket: Ticket
    choice: int
    tokens: Sequence[Token]
    finish: Finish | None = None


class OverloadedError(Exception):
    """More waits than may wait."""


class BrokenError(Exception):
    """The device could not do what was asked."""


class Ticket:
    """A request that was handed in. Pieces are given to `put`, from the scheduler's thread, until each choice has ended."""

    def __init__(self, asked: Asked, put: Callable[[Sequence[Piece] | BrokenError], None]) -> None:
        self.asked, self.put = asked, put
        self._left: set[int] = set()

    def cancel(self, choice: int | None = None) -> None:
        """Gives up a choice, or all of them: their rows are free from the next call of the device on."""
        self._left |= {*range(PROMPT, self.asked.n)} if choice is None else {choice}

    def is_left(self, choice: int) -> bool:
        return choice in self._left


@dataclasses.dataclass(eq=False)
class _Row:
    """A choice that waits or is in flight."""

    ticket: Ticket
    choice: int
    key: np.ndarray
    drawn: int = 0

    @property
    def length(self) -> int:
        """Tokens in the cache: all but the last one drawn."""
        return len(self.ticket.asked.prompt_ids) + max(0, self.drawn - 1)

    @property
    def is_left(self) -> bool:
        return self.ticket.is_left(self.choice)


class Scheduler:
    """Draws for up to `max_batch` choices at once. A prompt and its tokens must fit into `max_length`."""

    def __init__(self, inference: Inference, policy: Policy, max_batch: int, max_length: int) -> None:
        self.max_batch, self.max_length = max_batch, max_length
        self._model, self._policy = inference.model, policy
        self._scored, self._waiting = deque[Ticket](), deque[_Row]()
        self._rows: list[_Row | None] = []
        self._entering: list[_Row] = []  # which no longer wait, and are not yet in flight
        self._slots: device.Slots | None = None
        self._closed, self._turn = False, threading.Condition()
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, asked: Asked, put: Callable[[Sequence[Piece] | BrokenError], None]) -> Ticket:
        """Hands in a request; `put` is given its pieces, and must not block."""
        if not 0 < len(asked.prompt_ids) <= self.max_length - asked.max_tokens:
            raise ValueError(f"a prompt of {len(asked.prompt_ids)} tokens and {asked.max_tokens} more do not fit")
        ticket = Ticket(asked, put)
        with self._turn:
            if len(self._waiting) + asked.n > MOST_WAITING:
                raise OverloadedError
            if asked.prompt_top is not None:
                self._scored.append(ticket)
            elif asked.max_tokens:
                self._waiting.extend(_rows(ticket))
            self._turn.notify()
        return ticket

    async def stream(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        """The pieces of a request as they come; who stops listening gives it up."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def put(pieces: Sequence[Piece] | BrokenError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(queue.put_nowait, pieces)

        ticket, open_choices = self.submit(asked, put), asked.n if asked.max_tokens else 0
        open_choices += asked.prompt_top is not None
        try:
            while open_choices:
                pieces = await queue.get()
                if isinstance(pieces, BrokenError):
                    raise pieces
                for piece in pieces:
                    yield piece
                    open_choices -= piece.choice == PROMPT or piece.finish is not None
        finally:
            ticket.cancel()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def in_flight(self) -> int:
        """Choices that are being drawn or wait to be."""
        return sum(row is not None for row in self._rows) + len(self._entering) + len(self._waiting) + len(self._scored)

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._turn:
                while not self._closed and not (self._scored or self._waiting or any(self._rows)):
                    self._slots = None  # an idle server holds no cache
                    self._turn.wait()
                if self._closed:
                    return
            try:
                with on_mesh_of(self._model.weights):
                    self._score()
                    self._admit()
                    self._advance()
            except Exception as fault:  # as that there is no memory for so many rows; those who wait may still be served
                self._fail(BrokenError(named(fault)))

    def _fail(self, fault: BrokenError) -> None:
        """Tells all who are in flight, and begins anew without them."""
        with self._turn:
            rows = [*self._waiting, *self._entering, *filter(None, self._rows)]
            tickets = {id(ticket): ticket for ticket in [*self._scored, *(row.ticket for row in rows)]}
            self._scored.clear()
            self._waiting.clear()
            self._rows, self._entering, self._slots = [], [], None
        for ticket in tickets.values():
            ticket.put(fault)

    def _score(self) -> None:
        """What the model says of the tokens of some prompts; their choices may then be drawn."""
        with self._turn:
            while self._scored and self._scored[0].is_left(PROMPT):
                self._scored.popleft()
            width = self._prompt_width(self._scored[0].asked) if self._scored else 0
            most = min(MOST_PROMPTS, max(1, PREFILL // max(1, width)))
            chosen = [t for t in self._scored if self._prompt_width(t.asked) == width][:most]
        if not chosen:
            return
        prompts = self._padded([ticket.asked.prompt_ids for ticket in chosen], width)
        top = MOST_TOP if any(ticket.asked.prompt_top for ticket in chosen) else 0
        found = jax.device_get(device.score(*self._policy, prompts, arch=self._model.arch, top=top))
        for number, ticket in enumerate(chosen):
            asked = ticket.asked
            places = range(width - len(asked.prompt_ids), width)
            tokens = [_token(found, (number, place), asked.prompt_top or 0, asked.prompt_ids) for place in places]
            tokens = [t._replace(id=i) for t, i in zip(tokens, asked.prompt_ids, strict=True)]
            with self._turn:
                self._scored.remove(ticket)
                if asked.max_tokens:
                    self._waiting.extend(_rows(ticket))
            ticket.put([Piece(ticket, PROMPT, tokens)])

    def _admit(self) -> None:
        """Rows that wait, as far as there is room: those whose prompts are padded alike, the first one's fellows."""
        for number, row in enumerate(self._rows):
            if row is not None and row.is_left:
                self._rows[number] = None
        with self._turn:
            self._waiting = deque(row for row in self._waiting if not row.is_left)
            room = self.max_batch - sum(row is not None for row in self._rows)
            if not self._waiting or room < 1:
                return
            width = self._prompt_width(self._waiting[0].ticket.asked)
            most = min(MOST_PROMPTS, max(1, PREFILL // width))
            taken, prompts = list[_Row](), dict[tuple[int, ...], int]()
            for row in self._waiting:
                ids = row.ticket.asked.prompt_ids
                fits = self._prompt_width(row.ticket.asked) == width and (ids in prompts or len(prompts) < most)
                if fits and len(taken) < room:
                    prompts.setdefault(ids, len(prompts))
                    taken.append(row)
            self._entering = taken
            self._waiting = deque(row for row in self._waiting if row not in taken)
        live = [row for row in self._rows if row is not None]
        longest = max(width, *(row.length + STEPS for row in live), 0) if live else width
        self._fit(len(live) + len(taken), longest)
        free = [number for number, row in enumerate(self._rows) if row is None]
        source = np.full(len(self._rows), -1, np.int32)
        for number, row in zip(free, taken, strict=False):
            self._rows[number] = row
            source[number] = prompts[row.ticket.asked.prompt_ids]
        self._entering = []
        batch = self._padded([*prompts], width)
        how, form = self._how(), self._form(taken)
        self._slots, drawn = device.fill(*self._policy, self._held, batch, source, how, form=form)
        self._hand_out(jax.tree.map(lambda x: x[None], jax.device_get(drawn)), [n for n in free if self._rows[n]])

    def _advance(self) -> None:
        live = [number for number, row in enumerate(self._rows) if row is not None]
        if not live:
            return
        rows = [row for row in self._rows if row is not None]
        self._fit(len(live), max(row.length for row in rows) + STEPS)
        live = [number for number, row in enumerate(self._rows) if row is not None]
        live_B = np.array([row is not None for row in self._rows])
        self._slots, drawn = device.advance(*self._policy, self._held, live_B, form=self._form(rows), steps=STEPS)
        self._hand_out(jax.device_get(drawn), live)

    def _hand_out(self, drawn: device.Drawn, numbers: Sequence[int]) -> None:
        """Gives the tokens of some rows to those who asked, up to their ends; what was drawn after those is dropped."""
        ends = set(self._model.tokenizer.end_ids)
        pieces = dict[int, tuple[Ticket, list[Piece]]]()
        for number in numbers:
            row = self._rows[number]
            assert row is not None
            asked, tokens = row.ticket.asked, list[Token]()
            finish: Finish | None = None
            for step in range(len(drawn.tokens)):
                tokens.append(_token(drawn, (step, number), asked.top))
                row.drawn += 1
                if tokens[-1].id in asked.stop_ids or (tokens[-1].id in ends and not asked.past_ends):
                    finish = "stop"
                elif row.drawn >= asked.max_tokens:
                    finish = "length"
                if finish:
                    break
            if finish:
                self._rows[number] = None
            if not row.is_left:
                pieces.setdefault(id(row.ticket), (row.ticket, []))[1].append(Piece(row.ticket, row.choice, tokens, finish))
        for ticket, found in pieces.values():
            ticket.put(found)

    def _fit(self, rows: int, width: int) -> None:
        """Sees to a cache that is large enough, and not much larger than it need be."""
        there = len(self._rows), 0 if self._slots is None else self._slots.keys_LBSKN.shape[2]
        needed = self._row_bucket(rows), self._width_bucket(width)
        fits = all(have >= need for have, need in zip(there, needed, strict=True))
        if self._slots is None:
            self._rows = [None] * needed[0]
            arch, dtype = self._model.arch, self._model.weights.embed_VD.dtype
            self._slots = device.empty(arch, *needed, dtype)
        elif not fits or there[0] >= 4 * needed[0] or there[1] >= 4 * needed[1]:
            kept = [number for number, row in enumerate(self._rows) if row is not None]
            take = np.array(kept + [-1] * (needed[0] - len(kept)), np.int32)
            self._slots = device.resized(self._slots, take, width=needed[1])
            self._rows = [self._rows[number] if number >= 0 else None for number in take]

    @property
    def _held(self) -> device.Slots:
        assert self._slots is not None
        return self._slots

    def _form(self, rows: Sequence[_Row]) -> Form:
        """The program that can do what some rows need."""
        ways: Ways = max((row.ticket.asked.ways for row in rows), key=("greedy", "drawn", "filtered").index)
        top = MOST_TOP if any(row.ticket.asked.top for row in rows) else 0
        return Form(self._model.arch, self._model.tokenizer.pad_id, ways, top)

    def _how(self) -> How:
        """How each row is drawn; of free ones it is of no account."""
        vocabulary, nobody = self._model.arch.vocab_size, Asked((0,), 1)
        of = [nobody if row is None else row.ticket.asked for row in self._rows]
        keys = [np.zeros(2, np.uint32) if row is None else row.key for row in self._rows]
        return How(
            np.stack(keys),  # type: ignore[arg-type]  # arrays of the host, which a program takes as they are
            np.array([asked.temperature for asked in of], np.float32),  # type: ignore[arg-type]
            np.array([min(asked.top_k or vocabulary, vocabulary) for asked in of], np.int32),  # type: ignore[arg-type]
            np.array([asked.top_p for asked in of], np.float32),  # type: ignore[arg-type]
        )

    def _padded(self, prompts: Sequence[Sequence[int]], width: int) -> Prompts:
        """Prompts of one width; there are few numbers of rows, as each is a program of its own."""
        rows = next(bucket for bucket in _fours() if bucket >= len(prompts))
        filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
        return Prompts(*map(jnp.asarray, left_padded(filled, width, self._model.tokenizer.pad_id)))

    def _prompt_width(self, asked: Asked) -> int:
        return next(width for width in _doubled(LEAST_PROMPT) if width >= len(asked.prompt_ids))

    def _row_bucket(self, rows: int) -> int:
        return next(bucket for bucket in _fours() if bucket >= rows)

    def _width_bucket(self, width: int) -> int:
        return next(bucket for bucket in _doubled(LEAST_WIDTH) if bucket >= width)


def _fours() -> Any:
    return (4**power for power in itertools.count())


def _doubled(least: int) -> Any:
    return (least * 2**power for power in itertools.count())


def _rows(ticket: Ticket) -> list[_Row]:
    """The choices of a request, each with a key of its own, which is made without the device: it is at work."""

    def key(choice: int) -> np.ndarray:
        digest = hashlib.blake2b(f"{ticket.asked.seed}, choice {choice}".encode(), digest_size=8).digest()
        return np.frombuffer(digest, "<u4").astype(np.uint32)

    return [_Row(ticket, choice, key(choice)) for choice in range(ticket.asked.n)]


def _token(drawn: device.Drawn, at: tuple[int, int], top: int, ids: Sequence[int] | None = None) -> Token:
    likeliest = zip(drawn.top_ids[at][:top].tolist(), drawn.top_logprobs[at][:top].tolist(), strict=True) if top else ()
    return Token(int(drawn.tokens[at]), float(drawn.logprobs[at]), tuple(likeliest))
