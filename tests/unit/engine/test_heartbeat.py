"""Processes that end together, tested as threads of one process: leaving is recorded rather than done."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from agent_tunix.engine import heartbeat
from agent_tunix.engine.heartbeat import LOST, Heartbeat, call, host


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    monkeypatch.setattr(heartbeat, "SILENCE", 0.5)
    monkeypatch.setattr(heartbeat, "PATIENCE", 0.2)


class Company:
    """Three processes, joined by real sockets."""

    def __init__(self):
        server = socket.create_server(("localhost", 0))
        address, token = server.getsockname()[:2], "secret"
        stranger = socket.create_connection(address)
        stranger.sendall(b"guess 1\n")
        self.calls = {index: call(address, index, token, 5) for index in (2, 1)}
        self.hosted = host(server, 3, token, 5)
        assert stranger.recv(1) == b"", "who does not know the token is turned away"
        self.codes: dict[int, queue.Queue[int]] = {index: queue.Queue() for index in range(3)}

    def line(self, index: int) -> Heartbeat:
        def leave(code: int) -> None:
            self.codes[index].put(code)
            threading.Event().wait()  # whoever has left does nothing more

        return Heartbeat(index, 3, self.hosted if index == 0 else self.calls[index], leave)

    def code(self, index: int) -> int:
        return self.codes[index].get(timeout=10)


@pytest.fixture
def company():
    made = Company()
    assert sorted(made.hosted) == [1, 2]
    yield made
    for connection in [*made.hosted.values(), *(c[0] for c in made.calls.values())]:
        connection.close()


def test_a_process_that_dies_ends_the_others_and_process_0_says_which(company, capfd):
    lines = [company.line(0), company.line(2)]
    lines[0].advice = "Do this."
    company.calls[1][0].close()  # what the kernel does for a process that was killed
    assert company.code(0) == company.code(2) == LOST
    assert "Process 1 of 3 was lost: its connection ended. The others stop.\nDo this.\n" in capfd.readouterr().err


def test_the_loss_of_process_0_is_said_by_the_others(company, capfd):
    line = company.line(1)
    line.advice = "Do this."
    company.hosted[1].close()
    assert company.code(1) == LOST
    assert "Process 0 of 3 was lost" in capfd.readouterr().err


def test_a_process_of_which_nothing_is_heard_is_lost(company, capfd):
    company.line(0), company.line(1)  # process 2 is connected and says nothing
    assert company.code(0) == company.code(1) == LOST
    assert "Process 2 of 3 was lost: nothing was heard of it" in capfd.readouterr().err


def test_a_fault_of_one_ends_all_with_its_code_and_one_message(company, capfd):
    lines = [company.line(index) for index in range(3)]
    threading.Thread(target=lines[2].fail, args=("a bad reward", 2), daemon=True).start()
    assert [company.code(index) for index in range(3)] == [2, 2, 2]
    assert capfd.readouterr().err.count("On process 2 of 3: a bad reward") == 1


def test_processes_that_have_done_their_work_may_go(company):
    lines = [company.line(index) for index in range(3)]
    parting = [threading.Thread(target=line.part) for line in lines]
    for thread in parting:
        thread.start()
    for thread in parting:
        thread.join(10)
        assert not thread.is_alive()
    for connections in company.calls.values():
        connections[0].close()
    assert all(codes.empty() for codes in company.codes.values())


def test_no_one_goes_before_all_have_done_their_work(company, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE", 30.0)  # the third is given time, on a busy machine too
    lines = [company.line(index) for index in range(3)]
    first, second, last = (threading.Thread(target=line.part) for line in lines)
    first.start()
    second.start()
    first.join(0.3)
    assert first.is_alive(), "one is still at work"
    last.start()
    for thread in (first, second, last):
        thread.join(10)
        assert not thread.is_alive()
