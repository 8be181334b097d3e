from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import pytest

from agent_tunix.engine.calls import Call, alone
from agent_tunix.engine.fused import StoppedError, together
from agent_tunix.errors import DivergenceError, UserError


@dataclasses.dataclass(frozen=True)
class Square(Call):
    """A toy call; `log` sees every answer with all its members."""

    number: int
    log: list

    @property
    def kind(self) -> tuple:
        return (type(self),)

    @staticmethod
    def answer(calls):
        calls[0].log.append([call.number for call in calls])
        return [call.number**2 for call in calls]


class Other(Square): ...


class Third(Square): ...


class Broken(Square):
    @staticmethod
    def answer(calls):
        raise MemoryError


def summing(numbers, log):
    """A loop that squares some numbers, one call each."""
    return lambda answer: sum(answer(Square(number, log)) for number in numbers)


def test_a_run_alone_is_answered_at_once():
    log: list = []
    assert summing([1, 2, 3], log)(alone) == 14
    assert log == [[1], [2], [3]]


def test_loops_in_step_share_every_call_and_get_their_own_answers():
    log: list = []
    assert together([summing([1, 2], log), summing([3, 4], log), summing([5, 6], log)]) == [5, 25, 61]
    assert log == [[1, 3, 5], [2, 4, 6]]


def test_one_loop_works_at_a_time():
    at_work, most = [0], [0]

    def loop(answer):
        for number in range(3):
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
            time.sleep(0.001)
            at_work[0] -= 1
            answer(Square(number, []))

    together([loop] * 4)
    assert most == [1]


def test_calls_keep_their_size_when_a_loop_has_ended():
    log: list = []
    assert together([summing([1], log), summing([2, 3, 4], log)]) == [1, 29]
    assert log == [[1, 2], [3, 3], [4, 4]]
    log.clear()
    assert together([summing([3, 4], log)], size=2) == [25], "the other has ended in an earlier process"
    assert log == [[3, 3], [4, 4]]


def test_a_loop_that_diverges_does_not_disturb_the_others():
    def diverging(answer):
        answer(Square(7, []))
        raise DivergenceError("loss is nan")

    first, second = together([diverging, summing([2, 3], [])])
    assert str(first) == "loss is nan"
    assert second == 13


@pytest.mark.parametrize("strays", [{0}, {1}, {0, 1}, {1, 2, 3}], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_loops_out_of_step_fall_in_again(size, strays):
    """Some ask for something else before the fourth of their steps; all others wait, and share every step with them."""
    log: list = []

    def loop(index, answer):
        for step in range(20):
            if step == 3 and index in strays:
                answer(Other(index, log))
            answer(Square(step, log))
            answer(Third(step, log))

    together([lambda answer, index=index: loop(index, answer) for index in range(size)])
    shared = [numbers for numbers in log if len(set(numbers)) == 1]
    assert len(log) == 2 * 20 + 1
    assert len(shared) >= 2 * 20


@pytest.mark.parametrize("size", [1, 3])
def test_a_loop_hears_of_a_fault_of_the_device_and_the_others_close(size):
    heard = []

    def careful(answer):
        try:
            answer(Broken(1, []))
        except BaseException as fault:
            heard.append(type(fault))
            raise

    with pytest.raises(MemoryError):
        careful(alone) if size == 1 else together([careful] * size)
    assert sorted(map(str, heard)) == sorted(map(str, [MemoryError] + [StoppedError] * (size - 1)))


def test_any_other_error_ends_all_and_lets_each_close():
    closed = []

    def careful(answer):
        try:
            answer(Square(1, []))
            answer(Square(1, []))
        finally:
            closed.append(True)

    def failing(answer):
        answer(Square(1, []))
        raise UserError("a reward function raised")

    with pytest.raises(UserError, match="a reward function"):
        together([careful, failing, careful])
    assert closed == [True, True]


def test_a_loop_that_asks_again_while_it_closes_is_stopped_again():
    def careful(answer):
        try:
            answer(Square(1, []))
            answer(Other(1, []))
        finally:
            answer(Square(2, []))

    def failing(answer):
        answer(Square(1, []))
        raise UserError("a reward function raised")

    with pytest.raises(UserError, match="a reward function"):
        together([careful, failing])


@pytest.fixture
def interruptible():
    """Tests may have been started in the background, where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_reaches_the_loop_at_work_and_stops_the_others():
    """As a second Ctrl-C does in a lone run."""
    heard = []

    def waiting(answer):
        try:
            answer(Square(1, []))
        except BaseException as fault:
            heard.append(type(fault))
            raise

    def at_work(answer):
        try:
            ctrl_c.start()
            while True:
                time.sleep(0.001)
        except BaseException as fault:
            heard.append(type(fault))
            raise

    ctrl_c, before = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)), threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        together([waiting, at_work])
    ctrl_c.join()
    assert sorted(map(str, heard)) == sorted(map(str, [KeyboardInterrupt, StoppedError]))
    assert not set(threading.enumerate()) - set(before)  # no loop is left behind
