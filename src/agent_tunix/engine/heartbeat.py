"""How processes that train together end together: each holds a connection to process 0, and sends signs of life over it.

The death of a process is seen by the end of its connection, or by its silence where its machine died with it. Process 0
then tells all others, and every process stops at once, whatever it waits for: a collective operation may wait for ever,
and JAX's own watch aborts without a word for the user. A process that fails tells process 0, which speaks for all.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

LOST = 4  # exit code of the processes that are left
BEAT, SILENCE = 5.0, 30.0  # seconds between signs of life, and without any until a process counts as lost
PATIENCE = 10.0  # seconds in which others may answer before a process leaves without them
GREETING = 256  # bytes, at most, of the first line that a process sends
current: Heartbeat | None = None  # of this process, where it is one of several


class Heartbeat:
    """The connections of one process: of process 0 to all others, of the others to process 0."""

    advice = ""  # what to do when a process was lost

    def __init__(self, index: int, count: int, peers: Mapping[int, socket.socket], leave: Callable[[int], Any] = os._exit):
        self.index, self.count, self._leave = index, count, leave
        self._peers = dict(peers)
        self._unread = dict.fromkeys(peers, b"")
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._parted: set[int] = set()
        self._ending, self._all_parted, self._closed = threading.Lock(), threading.Event(), False
        self._selector = selectors.DefaultSelector()
        for peer, connection in self._peers.items():
            connection.settimeout(PATIENCE)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def fail(self, text: str, code: int, unexpected: bool = False) -> NoReturn:
        """Ends all processes with one message.

        An unexpected fault may be the consequence of a lost process, whose loss is given time to be reported instead.
        """
        if unexpected:
            time.sleep(PATIENCE / 5)
        if self.index != 0:
            self._tell(0, {"fault": text, "code": code})
            time.sleep(PATIENCE)  # process 0 answers, which ends this process
        self._end(text, code)
        raise SystemExit(code)  # only where `leave` returns, as in a test

    def part(self) -> None:
        """Waits until all have done their work; a process that ends after that does not count as lost."""
        for peer in self._peers:
            self._tell(peer, {"bye": True})
        self._all_parted.wait()
        self._closed = True

    def _watch(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(BEAT / 2):
                self._read(key.data)
            for peer in self._peers:
                self._tell(peer, {})
                if time.monotonic() - self._heard[peer] > SILENCE:
                    self._lost(peer, f"nothing was heard of it for {SILENCE:.0f} s")
            if self._parted == self._peers.keys():
                self._all_parted.set()

    def _read(self, peer: int) -> None:
        try:
            received = self._peers[peer].recv(65536)
        except OSError:
            received = b""
        if not received:
            self._selector.unregister(self._peers[peer])
            return None if peer in self._parted else self._lost(peer, "its connection ended")
        self._heard[peer] = time.monotonic()
        *lines, self._unread[peer] = (self._unread[peer] + received).split(b"\n")
        for message in filter(None, map(json.loads, lines)):
            self._obey(peer, message)

    def _obey(self, peer: int, message: dict[str, Any]) -> None:
        if "bye" in message:
            self._parted.add(peer)
        elif "fault" in message:
            self._end(f"On process {peer} of {self.count}: {message['fault']}", message["code"])
        elif "end" in message:
            self._end(message["end"], message["code"], speak=False)

    def _lost(self, peer: int, why: str) -> None:
        self._end(f"Process {peer} of {self.count} was lost: {why}. The others stop.\n{self.advice}".rstrip(), LOST)

    def _end(self, text: str, code: int, speak: bool = True) -> None:
        """The first to come here speaks, tells the others and ends the process."""
        if not self._ending.acquire(blocking=False):
            time.sleep(PATIENCE)
        sys.stdout.flush()
        if speak:
            print(text, file=sys.stderr, flush=True)
        if self.index == 0:
            for peer in self._peers:
                self._tell(peer, {"end": text, "code": code})
            self._wait_for_ends()
        self._leave(code)

    def _wait_for_ends(self) -> None:
        """Process 0 goes last: with it goes JAX's service, without which the others would be aborted."""
        deadline = time.monotonic() + PATIENCE / 5
        for connection in self._peers.values():
            try:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                while connection.recv(65536):
                    pass
            except OSError:
                continue

    def _tell(self, peer: int, message: dict[str, Any]) -> None:
        try:
            self._peers[peer].sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # its end will be read


def host(server: socket.socket, count: int, token: str, seconds: float) -> dict[int, socket.socket]:
    """Process 0: the connections of all others, by their numbers; those who do not know the token are turned away."""
    peers: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    with server:
        while len(peers) < count - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(PATIENCE)
            words = _greeting(connection).split()
            if len(words) == 2 and words[0] == token and words[1].isdecimal() and 0 < int(words[1]) < count:
                peers[int(words[1])] = connection
            else:
                connection.close()
    return peers


def _greeting(connection: socket.socket) -> str:
    received = b""
    try:
        while not received.endswith(b"\n") and len(received) < GREETING:
            received += connection.recv(1) or b"\n"
    except OSError:
        return ""
    return received.decode(errors="replace")


def call(address: tuple[str, int], index: int, token: str, seconds: float) -> dict[int, socket.socket]:
    """Any other process: its connection to process 0."""
    connection = socket.create_connection(address, timeout=seconds)
    connection.sendall(f"{token} {index}\n".encode())
    return {0: connection}
