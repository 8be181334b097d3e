"""Tasksets in the style of verifiers' own, played by verifiers; what the model says is put into their requests here."""

from __future__ import annotations

import asyncio
import gc

import pytest

from agent_tunix.config.imports import OWN, Origin
from agent_tunix.config.schema import VERIFIERS, EnvironmentSection
from agent_tunix.environments.tools import awaited
from agent_tunix.environments.verifiers import Verifiers, rows
from agent_tunix.environments.world import foreseen, load_world, schemas_of
from agent_tunix.errors import UserError

pytest.importorskip("verifiers.v1", reason="verifiers comes with the extra `verifiers`")

HEAD = "import itertools\n\nimport verifiers.v1 as vf\n\n\n"
TASKSETS = {
    "once": """
class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    count: int = 10

class Task(vf.Task[Data]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 9)

class Once(vf.Taskset[Task, Config]):
    def load(self):
        for n in range(self.config.count):
            yield Task(Data(prompt=f"say {n}", system_prompt="Obey.", answer=str(n)), self.config.task)

__all__ = ["Once"]
""",
    "told": """
class Data(vf.TaskData):
    words: list[str]

class Task(vf.Task[Data]):
    @vf.reward
    async def echoed(self, trace: vf.Trace) -> float:
        said = [message.content for message in trace.assistant_messages]
        return sum(a == b for a, b in zip(said, self.data.words)) / len(self.data.words)

class ToldEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for word in task.data.words:
                if (await interaction.turn(word)).terminated:
                    break

class Told(vf.Taskset[Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield Task(Data(prompt=None, words=[f"a{n}", f"b{n}", f"c{n}"]), self.config.task)

__all__ = ["Told", "ToldEnv"]
""",
    "counted": """
class Count(vf.State):
    total: int = 0

class Counter(vf.Toolset[vf.ToolsetConfig, Count]):
    TOOL_PREFIX = "counter"

    async def setup_task(self, task):
        self.step = task.step

    @vf.tool
    def add(self, times: int) -> str:
        "Adds to the total."
        self.state.total += times * self.step
        return f"total {self.state.total}"

class Data(vf.TaskData):
    step: int

class Task(vf.Task[Data, Count]):
    @classmethod
    def toolsets(cls, config):
        return [Counter(vf.ToolsetConfig())]

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward
    async def seven(self, trace: vf.Trace) -> float:
        return float(trace.state.total == 7)

class Counted(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt="Come to seven.", step=step), self.config.task) for step in (1, 7)]

__all__ = ["Counted"]
""",
    "forgetful": """
from openai import AsyncOpenAI

class Forgets(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        for asked in (data.prompt, "something else"):
            messages = [{"role": "user", "content": asked}]
            async for _ in await client.chat.completions.create(model=ctx.model, messages=messages, stream=True):
                pass
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

class Task(vf.Task[vf.TaskData]):
    @vf.reward
    async def any(self, trace: vf.Trace) -> float:
        return 1.0

class Forgetful(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt="remember"), self.config.task)]

class ForgetfulConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})

class ForgetfulEnv(vf.Env[ForgetfulConfig]):
    async def run(self, task, agents):
        await agents.agent.run(task)

__all__ = ["Forgetful", "Forgets", "ForgetfulEnv"]
""",
    "faulty": """
class Task(vf.Task[vf.TaskData]):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        raise RuntimeError("the scorer is away")

class Faulty(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt="anything"), self.config.task)]

__all__ = ["Faulty"]
""",
    "duel": """
class Duel(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    second: vf.AgentConfig = vf.AgentConfig()

class DuelEnv(vf.Env[Duel]):
    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)

class Tasks(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt="fight"))]

__all__ = ["Tasks", "DuelEnv"]
""",
    "empty": """
class Empty(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return []

__all__ = ["Empty"]
""",
}


@pytest.fixture(scope="module", autouse=True)
def _tasksets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasksets")
    for name, text in TASKSETS.items():
        (folder / f"vf_{name}.py").write_text(HEAD + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def first(task, settings=None, number=0):
    """A new episode of a task's row, and what it begins with."""
    world = Verifiers(f"vf-{task}", settings or {})
    tasks = rows(f"vf-{task}", settings or {}, "validation", 0.0, 8)
    (row,) = [one.fields for one in tasks if one.fields["verifiers"]["idx"] == number]
    return world, awaited(world.reset(row))


def says(text, **called):
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in called.items()]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def heard(world, transcript, message):
    """What the world says to a message, and all that has been said."""
    transcript = [*transcript, message]
    replies = awaited(world.reply(transcript))
    return replies, [*transcript, *(replies or [])]


def test_a_task_is_asked_and_its_weighted_rewards_are_those_of_the_episode():
    world, asked = first("once", number=3)
    assert asked == [{"role": "system", "content": "Obey."}, {"role": "user", "content": "say 3"}]
    replies, transcript = heard(world, asked, says("3"))
    assert replies is None
    assert awaited(world.reward(transcript)) == {"right": 0.75, "short": 0.25}
    assert world.solved(transcript) == 1
    world, asked = first("once", number=3)
    _, transcript = heard(world, asked, says("4"))
    assert awaited(world.reward(transcript)) == {"right": 0.0, "short": 0.25}
    assert world.solved(transcript) == 0.25


def test_a_user_of_several_turns_goes_on_from_what_was_said():
    world, transcript = first("told", number=2)
    assert transcript == [{"role": "user", "content": "a2"}]
    for word, following in (("a2", "b2"), ("wrong", "c2"), ("c2", None)):
        replies, transcript = heard(world, transcript, says(word))
        assert replies == (following and [{"role": "user", "content": following}])
    assert awaited(world.reward(transcript)) == {"echoed": pytest.approx(2 / 3)}


def test_tools_have_the_rollouts_own_state_and_know_its_task():
    worlds = [first("counted", number=number) for number in (0, 1)]
    (schema,) = schemas_of(worlds[0][0])
    assert schema["function"]["name"] == "counter_add"
    assert schema["function"]["parameters"]["properties"]["times"]["type"] == "integer"
    for (world, transcript), total in zip(worlds, (1, 7), strict=True):
        replies, transcript = heard(world, transcript, says("<call>", counter_add={"times": 1}))
        assert replies == [{"role": "tool", "name": "counter_add", "content": f"total {total}"}]
        assert heard(world, transcript, says("so"))[0] is None
        assert awaited(world.reward([*transcript, says("so")])) == {"seven": float(total == 7)}


@pytest.mark.parametrize("call", [{"counter_sub": {"times": 1}}, {"counter_add": {"times": "some"}}])
def test_a_wrong_call_is_answered_with_what_is_wrong(call):
    world, transcript = first("counted")
    replies, transcript = heard(world, transcript, says("<call>", **call))
    assert "error" in replies[0]["content"].lower()
    assert heard(world, transcript, says("<call>", counter_add={"times": 7}))[0][0]["content"] == "total 7"


def test_a_stop_of_the_task_ends_the_episode_and_it_is_scored():
    world, transcript = first("counted")
    for times, replies_come in ((3, True), (2, True), (2, False)):
        replies, transcript = heard(world, transcript, says("<call>", counter_add={"times": times}))
        assert (replies is not None) == replies_come
    assert awaited(world.reward(transcript)) == {"seven": 1.0}


@pytest.mark.parametrize("where", ["within the model's turn", "behind the world's"])
def test_an_episode_that_is_cut_is_scored_as_it_is(where):
    world, transcript = first("told")
    replies, transcript = heard(world, transcript, says("a0"))
    assert replies
    if where.startswith("within"):
        transcript = [*transcript, says("b0")]
    assert awaited(world.reward(transcript)) == {"echoed": pytest.approx((2 if where.startswith("within") else 1) / 3)}


def test_a_harness_of_the_tasksets_own_is_kept_and_may_not_change_what_was_said():
    world, transcript = first("forgetful")
    assert transcript == [{"role": "user", "content": "remember"}]
    with pytest.raises(ValueError, match="changed what had been said"):
        heard(world, transcript, says("yes"))


def test_faults_of_the_environment_are_told():
    world, transcript = first("faulty")
    _, transcript = heard(world, transcript, says("yes"))
    with pytest.raises(ValueError, match="the scorer is away"):
        awaited(world.reward(transcript))
    world, transcript = first("duel")
    with pytest.raises(ValueError, match="more than one agent"):
        heard(world, transcript, says("yes"))
    with pytest.raises(UserError, match=r"vf-empty.*no task"):
        Verifiers("vf-empty", {})
    with pytest.raises(UserError, match="vf-none"):
        Verifiers("vf-none", {})
    with pytest.raises(UserError, match="counts"):
        Verifiers("vf-once", {"taskset": {"counts": 3}})


def test_an_episode_that_nobody_holds_any_more_ends():
    world, _ = first("once")
    playing = world._rollout._playing
    del world
    gc.collect()

    async def ended():
        await asyncio.wait([playing], timeout=10)
        return playing.cancelled()

    assert awaited(ended())


def test_rows_are_the_tasks_in_an_order_that_does_not_change():
    Verifiers("vf-once", {})
    train, held_out = (rows("vf-once", {}, split, 0.8, None) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (8, 2)
    assert {row.question for row in (*train, *held_out)} == {f"say {n}" for n in range(10)}
    assert train == rows("vf-once", {}, "train", 0.8, None)
    assert held_out == rows("vf-once", {}, "test", 0.8, None)
    assert all(row.answer == row.question[-1] == row.fields["verifiers"]["answer"] for row in train)
    assert len(rows("vf-once", {"taskset": {"count": 4}}, "train", 1.0, None)) == 4
    Verifiers("vf-told", {})
    assert len(rows("vf-told", {}, "train", 1.0, 6)) == 6
    with pytest.raises(UserError, match=r"data.num_examples=null: vf-told has no end"):
        rows("vf-told", {}, "train", 1.0, None)
    with pytest.raises(UserError, match=r"data.task=vf-other is not open"):
        rows("vf-other", {}, "train", 1.0, None)


def section(task, settings=None, **keys):
    return EnvironmentSection(name=VERIFIERS, settings={"task": task, "settings": settings or {}}, **keys)


def test_what_a_strangers_run_names_is_not_imported(tmp_path):
    run = tmp_path / "runs" / "theirs"
    run.mkdir(parents=True)
    (run / "vf_theirs.py").write_text("raise SystemExit('imported')")
    origin = Origin(run)
    with pytest.raises(UserError, match=r"data.task=vf_theirs.*is not imported"):
        load_world(section("vf-theirs"), origin)
    said = []
    assert load_world(section("vf-once"), origin, said.append)
    assert said == [f"imports vf_once.Taskset, named by {run / 'config.yaml'}"]
    with pytest.raises(UserError, match="name more code"):
        load_world(section("vf-once", {"agent": {"harness": {"id": "vf_theirs"}}}), origin)
    assert foreseen(section("vf-once"), origin) == [
        f"training imports vf_once.Taskset, named by {run / 'config.yaml'}; the plan does not"
    ]


def test_a_taskset_must_be_named_and_has_its_own_tools():
    with pytest.raises(UserError, match=r"data.task=null: give the id"):
        load_world(section(None), OWN)
    with pytest.raises(UserError, match=r"environment.tools does not go together with data=verifiers"):
        load_world(section("vf-once", tools=["my_module.search"]), OWN)
