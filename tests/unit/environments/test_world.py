from __future__ import annotations

import threading

import pytest

from agent_tunix.config.imports import Origin
from agent_tunix.config.schema import EnvironmentSection
from agent_tunix.environments.base import Environment
from agent_tunix.environments.world import AT_ONCE, Calls, Fault, foreseen, load_world, messages_of, rewards_of
from agent_tunix.errors import UserError

WORLDS = """
from agent_tunix.environments.base import Environment

def double(x: int) -> int:
    "Doubles."
    return 2 * x

class Mine(Environment):
    tools = [double]
    def __init__(self, size=3):
        self.size = size

class Guess:
    def reset(self, word="", **row):
        self.word, self.tries = word, 0
        return f" It has {len(word)} letters."
    def guess(self, word: str) -> str:
        "Guesses the word."
        self.tries += 1
        return "right" if word == self.word else "wrong"
    def _hidden(self): ...
    async def get_reward(self):
        return 1.0 / self.tries if self.tries else 0.0

class NoReset:
    pass
"""


@pytest.fixture
def section(tmp_path, monkeypatch):
    (tmp_path / "my_worlds.py").write_text(WORLDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name=None, **keys: EnvironmentSection(name=name and f"my_worlds.{name}", **keys)


def test_without_a_class_or_tools_there_is_no_world(section):
    assert load_world(section()) is None


def test_a_world_is_made_with_its_settings_and_knows_its_tools(section):
    world = load_world(section("Mine", settings={"size": 5}, tools=["my_worlds.double"]))
    assert world.make().size == 5
    assert [schema["function"]["name"] for schema in world.schemas] == ["double", "double"]
    assert [t.__name__ for t in load_world(section(tools=["my_worlds.double"])).make().tools] == ["double"]


def test_a_class_as_trl_has_them_is_played_as_it_is(section):
    one = load_world(section("Guess")).make()
    assert [tool.__name__ for tool in one.tools] == ["guess"]
    row = {"prompt": [{"role": "user", "content": "Guess a word."}], "word": "tree"}
    messages = one.reset(row)
    assert messages == [{"role": "user", "content": "Guess a word. It has 4 letters."}]
    call = {"function": {"name": "guess", "arguments": {"word": "tree"}}}
    (reply,) = one.reply([*messages, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert reply == {"role": "tool", "name": "guess", "content": "right"}
    assert one.reply([*messages, {"role": "assistant", "content": "done"}]) is None
    assert rewards_of(one, ()) == ({"Guess": 1.0}, 1.0)
    assert row["prompt"][0]["content"] == "Guess a word.", "rows are read again in the next epoch"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"name": "Absent"}, r"environment\.name=my_worlds\.Absent"),
        ({"name": "NoReset"}, "has no method reset"),
        ({"name": "Mine", "settings": {"width": 3}}, "width"),
        ({"tools": ["my_worlds.triple"]}, r"environment\.tools=my_worlds\.triple"),
    ],
)
def test_what_cannot_be_played_is_said_before_anything_else(section, keys, said):
    with pytest.raises(UserError, match=said):
        load_world(section(**keys))


def test_what_a_runs_folder_names_is_not_imported_from_it(section, tmp_path):
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "stranger.py").write_text("raise SystemExit")
    for keys in ({"name": "stranger.World"}, {"tools": ["stranger.tool"]}):
        for ask in (foreseen, load_world):
            with pytest.raises(UserError, match=r"named by .*config\.yaml, is not imported"):
                ask(EnvironmentSection(**keys), Origin(run))


def test_calls_are_made_at_the_same_time_and_answered_in_their_order():
    meet = threading.Barrier(AT_ONCE)

    def call(number):
        meet.wait(timeout=30)
        return number

    many = [lambda n=n: call(n) for n in range(2 * AT_ONCE)]
    assert Calls(None).made(many) == list(range(2 * AT_ONCE))
    assert Calls(None).made([]) == []


def test_a_call_that_raises_or_hangs_harms_no_other():
    never = threading.Event()

    async def later():
        return 2

    def exits():
        raise SystemExit

    hanging = [never.wait] * (AT_ONCE + 1)
    found = Calls(0.2).made([lambda: 1, later, exits, *hanging, lambda: 3])
    never.set()
    assert found[:2] == [1, 2]
    assert found[2] == Fault("raised SystemExit")
    assert found[-1] == 3
    assert {one.said for one in found[3:-1]} == {"took longer than environment.timeout=0.2 s"}


@pytest.mark.parametrize("given", [7, "text", [7], {"role": "user"}, {"content": "x"}, {"role": "user", "content": 7}])
def test_what_is_no_message_is_a_fault(given):
    assert isinstance(messages_of(given), Fault)
    assert messages_of({"role": "user", "content": "x"}) == [{"role": "user", "content": "x"}]


def test_an_environment_by_itself_asks_the_question_and_is_over():
    one = Environment()
    assert one.reset({"question": 7}) == [{"role": "user", "content": "7"}]
    assert one.reply([{"role": "assistant", "content": "7"}]) is None
    assert rewards_of(one, ()) == ({}, None)
