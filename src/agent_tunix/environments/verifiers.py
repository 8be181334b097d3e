"""Environments of the package verifiers, as they are.

    python run_training.py data=verifiers data.task=my_taskset

There an environment drives an endpoint: its harness asks for the model's turns, and its rewards score the episode. Here that
endpoint is this process, and what answers is the policy in training. A request waits until the turn of its episode has been
sampled, together with those of all others, and is then answered. So an environment is called by verifiers alone, and what is
learnt are the very tokens that were sampled: an episode must go on from what was said, or it fails.

A plain task is played by a harness of our own, in this process and without a program of verifiers' that runs commands of the
model. `data.settings` names another, as in {agent: {harness: {id: codex}, runtime: {type: docker}}}.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import json
import os
import random
import resource
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agent_tunix.environments.base import Row, Transcript
from agent_tunix.environments.reward_call import event_loop
from agent_tunix.environments.tables import Row as TableRow
from agent_tunix.environments.tools import Schema
from agent_tunix.errors import UserError, calling, named
from agent_tunix.models.chat import Message

CHAT = "null"  # verifiers' harness without tools of its own, in whose place ours comes
HARNESS = "agent_tunix_harness"  # verifiers looks for a module of this name
SESSION = "X-Session-ID"  # the header by which verifiers tells the rollouts apart
CUT = "agent_tunix_cut"  # why a rollout stopped, in verifiers' words
NOBODY: Message = {"role": "user", "content": ""}
CLOSING = 10.0  # seconds in which the servers of an environment end
NAMES_CODE = ("id", "fn")  # settings that name what is imported


class Verifiers:
    """One episode of an environment of verifiers, which is known by its taskset's id, as our `Environment` has it."""

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        self._of = opened(task, json.dumps(settings, sort_keys=True))
        self.schemas = self._of.schemas

    async def reset(self, row: Row) -> list[Message]:
        self._rollout = self._of.begin(row["verifiers"])
        weakref.finalize(self, self._rollout.leave)
        asked = await self._rollout.asked()
        if not asked:
            raise ValueError("the environment ended without asking the model for anything")
        return asked

    async def reply(self, transcript: Transcript) -> Sequence[Message] | None:
        self._rollout.say(transcript[-1])
        return await self._rollout.asked() or None

    async def reward(self, transcript: Transcript) -> Mapping[str, float]:
        self._rewards = await self._rollout.rewards(transcript[-1])
        return self._rewards

    def solved(self, transcript: Transcript) -> float:
        """A reward of 1 in all is a solved task."""
        return min(max(sum(self._rewards.values()), 0.0), 1.0)


class Request:
    """What a harness asks of the model, until it is answered."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.messages: list[Message] = [_read(message) for message in body["messages"]]
        self.tools: Sequence[Schema] = body.get("tools") or []
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


class Rollout:
    """An episode that verifiers plays in a task of the event loop, one request after the other."""

    def __init__(self, environment: Opened, task: Any, toolsets: list[Any]) -> None:
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.trace: Any = None
        self.fault: str | None = None
        self.tools: tuple[Schema, ...] = ()
        self._said: list[Message] = []  # what the model was last asked with, and its answer
        self._waiting: Request | None = None
        self._environment, self._toolsets = environment, toolsets
        self._playing = asyncio.create_task(environment.played(task, self))

    def minted(self, trace: Any) -> None:
        """verifiers has begun an agent's record, under whose id its requests come."""
        if self.trace is not None:
            self.fault = "the environment plays more than one agent, and one is learnt from"
        self.trace = self.trace or trace
        self._environment.rollouts[trace.id] = self
        if self._toolsets:
            tools_in_process = sys.modules[HARNESS].IN_PROCESS
            tools_in_process[trace.id] = self._toolsets
            self._playing.add_done_callback(lambda done: tools_in_process.pop(trace.id, None))

    async def asked(self) -> list[Message]:
        """What is new in the next request; nothing where the episode is over."""
        request = self._waiting = await self._next()
        if request is None:
            await self._playing  # raises what was raised
            if self.fault:
                raise ValueError(self.fault)
            return []
        self.tools = tuple(request.tools)
        before, self._said = self._said, request.messages
        if [_essence(message) for message in request.messages[: len(before)]] != [_essence(message) for message in before]:
            raise ValueError("the environment changed what had been said; an episode must go on from the model's own tokens")
        if before and len(before) == len(request.messages):
            raise ValueError("the environment asked again without a message in between")
        return request.messages[len(before) :]

    async def _next(self) -> Request | None:
        """The next request; None where the episode is over."""
        waiting = asyncio.create_task(self.requests.get())
        await asyncio.wait([waiting, self._playing], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        return None

    def say(self, message: Message, ending: str | None = None) -> None:
        """Answers the request with the model's turn."""
        assert self._waiting is not None
        calls = [] if ending else [_written(call, f"call_{len(self._said)}_{n}") for n, call in enumerate(_calls(message))]
        answer = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
        self._said = [*self._said, _read(answer)]
        reason = ending or ("tool_calls" if calls else "stop")
        self._waiting.answer.set_result({"message": answer, "finish_reason": reason})
        self._waiting = None

    async def rewards(self, last: Message) -> dict[str, float]:
        """What the episode was worth, each part with its weight. One that was cut is ended, and scored as it is."""
        if self._waiting is not None and last["role"] == "assistant":
            self.say(last, "length")
        while not self._playing.done():
            request = self._waiting or await self._next()
            self._waiting = None
            if request is not None:
                self.trace.stop(CUT)
                request.answer.set_exception(ConnectionError("the episode was cut"))
                await asyncio.sleep(0)
        episode = await self._playing
        if self.fault:
            raise ValueError(self.fault)
        faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise ValueError(f"verifiers says {faults[-1].type}: {faults[-1].message}" if faults else "verifiers failed")
        found = {name: given.value for trace in episode.traces for name, given in trace.rewards.items() if given is not None}
        if not found:
            raise ValueError("the environment gave no reward")
        return found

    def leave(self) -> None:
        """Ends what nobody waits for any more."""
        with contextlib.suppress(RuntimeError):  # of a loop that is closed
            event_loop().call_soon_threadsafe(self._playing.cancel)


class Opened:
    """An environment of verifiers with its servers, and the endpoint that it asks."""

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        import verifiers.v1 as vf

        self.rollouts: weakref.WeakValueDictionary[str, Rollout] = weakref.WeakValueDictionary()
        _allow_many_files()
        self.environment = vf.load_environment(vf.resolve_env_config(_with_harness(task, settings)))
        self.taskset = self.environment.taskset
        harnesses = self.environment.config.agent_harnesses().values()
        self._serves_tools = all(harness.id == HARNESS for harness in harnesses)
        _let_children_import(type(self.taskset))
        self.schemas: tuple[Schema, ...] = ()

    async def start(self) -> None:
        """Brings up the endpoint and the environment's own servers, and asks one task for the tools of all."""
        import verifiers.v1 as vf
        from aiohttp import web

        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._completion)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="AGENT_TUNIX_NO_KEY")
        self.context = vf.ModelContext(model="policy", client=client)
        await self._serving()
        first = next(iter(self.taskset), None)
        if first is None:
            raise ValueError("it has no task")
        rollout = self.begin(first.data.model_dump(mode="json"))
        try:
            if not await rollout.asked():
                await rollout.rewards(NOBODY)  # says what went wrong
            self.schemas = rollout.tools
        finally:
            rollout.leave()

    async def _serving(self) -> None:
        """Holds the environment's servers until Python ends: they are left by the task that has entered them."""
        ready, over = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def hold() -> None:
            try:
                async with self.environment.serving():
                    ready.set_result(None)
                    await over.wait()
            except BaseException as fault:
                if ready.done():
                    raise
                ready.set_exception(fault)

        holding = asyncio.create_task(hold())
        loop = asyncio.get_running_loop()

        async def end() -> None:
            over.set()
            await holding

        def close() -> None:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(end(), loop).result(CLOSING)

        atexit.register(close)
        await ready

    def begin(self, data: Mapping[str, Any]) -> Rollout:
        """A new episode of a task, made of its data as verifiers' own servers make it."""
        kind = type(self.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), self.taskset.config.task)
        toolsets = task.toolsets(task.config) if self._serves_tools else []
        here = [toolset for toolset in toolsets if not toolset.config.url and toolset.config.runtime.type == "subprocess"]
        elsewhere = [toolset for toolset in toolsets if toolset not in here]
        if here:
            task.toolsets = lambda config: elsewhere
        return Rollout(self, task, here)

    async def played(self, task: Any, rollout: Rollout) -> Any:
        return await self.environment.run_episode(task, self.context, on_trace=rollout.minted)

    async def _completion(self, request: Any) -> Any:
        """The endpoint: a request waits here for its turn."""
        from aiohttp import web

        rollout = self.rollouts.get(request.headers.get(SESSION, ""))
        body = await request.json()
        try:
            if rollout is None or rollout.fault:
                raise ValueError(rollout.fault if rollout else "this episode is over")
            asked = Request(body)
            rollout.requests.put_nowait(asked)
            said = await asked.answer
        except (ValueError, ConnectionError) as fault:
            if rollout and isinstance(fault, ValueError):
                rollout.fault = rollout.fault or str(fault)
            return web.json_response({"error": {"message": str(fault), "type": "invalid_request_error"}}, status=400)
        head = {"id": f"chatcmpl-{id(asked):x}", "created": int(time.time()), "model": body["model"]}
        if not body.get("stream"):
            return web.json_response({**head, "object": "chat.completion", "choices": [{"index": 0, **said}]})
        calls = [{"index": n, **call} for n, call in enumerate(said["message"].get("tool_calls", []))]
        delta = said["message"] | ({"tool_calls": calls} if calls else {})
        parts = [{"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": said["finish_reason"]}]
        chunks = [{**head, "object": "chat.completion.chunk", "choices": [{"index": 0, **part}]} for part in parts]
        text = "".join(f"data: {line}\n\n" for line in (*map(json.dumps, chunks), "[DONE]"))
        return web.Response(text=text, content_type="text/event-stream")


def rows(task: str | None, settings: Mapping[str, Any], split: str, fraction: float, count: int | None) -> list[TableRow]:
    """The tasks of a taskset as rows of data: a share of them to train on, the others held out.

    The last `count` are taken of a taskset that has no end.
    """
    if task not in _known:  # what a stranger's run names is imported by the environment alone, which asks first
        raise UserError(f"data.task={task} is not open: it goes with environment=verifiers.")
    taskset = opened(task, json.dumps(settings, sort_keys=True)).taskset
    if not taskset.bounded:
        if count is None:
            raise UserError(f"data.num_examples=null: {task} has no end, so it needs a number of examples.")
        taskset = taskset.take(count)
    found = [_row(one.data) for one in taskset]
    random.Random(0).shuffle(found)
    cut = round(len(found) * fraction)
    return found[:cut] if split == "train" else found[cut:]


def code_named_in(settings: Mapping[str, Any]) -> tuple[str, bool]:
    """The import path of what an environment's settings name first, and whether they name more."""

    def deeper(value: Any) -> Iterator[str]:
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        yield from (key for key in value if key in NAMES_CODE) if isinstance(value, Mapping) else ()
        for one in inner:
            yield from deeper(one)

    module = str(settings.get("task")).rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    return f"{module}.Taskset", any(deeper(settings.get("settings", {})))


_known: set[str] = set()


@cache
def opened(task: str, settings: str) -> Opened:
    """An environment, opened once in this process."""
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as fault:
        raise UserError("data=verifiers needs the package verifiers: pip install 'agent-tunix[verifiers]'") from fault
    with calling(lambda fault: UserError(f"data.task={task} with data.settings={settings}: {named(fault)}.")):
        found = Opened(task, json.loads(settings))
        asyncio.run_coroutine_threadsafe(found.start(), event_loop()).result()
    _known.add(task)
    return found


def _with_harness(task: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """An environment's configuration, in which roles that name no harness have ours."""
    import verifiers.v1 as vf

    sys.modules[HARNESS] = importlib.import_module("agent_tunix.environments.verifiers_harness")
    given = {**settings, "taskset": {**settings.get("taskset", {}), "id": task}}
    if vf.default_harness_id(task) != "bash":  # the taskset has one of its own
        return given
    for name, field in vf.env_config_type(task, given.get("id", "")).model_fields.items():
        if isinstance(field.default, vf.AgentConfig) and (field.default.harness is None or field.default.harness.id == CHAT):
            own = {} if "runtime" in field.default.model_fields_set else {"runtime": {"type": "subprocess"}}
            role = given.get(name, {})
            given[name] = role if "harness" in role else {"harness": {"id": HARNESS}, **own, **role}
    return given


def _allow_many_files() -> None:
    """An episode takes four sockets, and many systems allow a process a thousand files if it does not ask for more."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _let_children_import(kind: type) -> None:
    """Servers of shared tools are processes, which find the taskset's module where this one has found it."""
    package = sys.modules[kind.__module__.partition(".")[0]]
    if file := getattr(package, "__file__", None):
        place = Path(file).resolve().parent
        found = str(place.parent if hasattr(package, "__path__") else place)
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([found, *([others] if others else [])])


def _row(data: Any) -> TableRow:
    question = data.prompt_text.strip() or f"task {data.idx}"
    answer = getattr(data, "answer", None)
    fields = {"verifiers": data.model_dump(mode="json")}
    return TableRow(question, "" if answer is None else str(answer), fields=fields)


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return [call for call in message.get("tool_calls", ()) if "error" not in call["function"]]


def _written(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A call as OpenAI's interface has it."""
    function = call["function"]
    return {"id": name, "type": "function", "function": {**function, "arguments": json.dumps(function["arguments"])}}


def _read(message: Mapping[str, Any]) -> Message:
    """A message of OpenAI's interface as ours."""
    content = message.get("content")
    if isinstance(content, list):
        if strange := [part.get("type") for part in content if part.get("type") != "text"]:
            raise ValueError(f"the environment says something with a part of type {strange[0]}; only text is read")
        content = "".join(part["text"] for part in content)
    read: dict[str, Any] = {"role": message["role"], "content": content or ""}
    if message.get("name"):
        read["name"] = message["name"]
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [
            {"type": "function", "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    return read


def _essence(message: Message) -> tuple[str, str]:
    """What tokens are made of: a harness may add or leave out other fields."""
    return message["role"], message["content"]
