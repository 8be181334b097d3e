"""A chat with a model that may call the task's tools, as a harness of verifiers that runs in this process.

It does what verifiers' harness `null` does, without processes of their own for every episode's chat and for its tools.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import verifiers.v1 as vf
from aiohttp import ClientSession, ClientTimeout
from mcp import Client
from mcp.server.mcpserver import MCPServer
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp, mcp_content_to_chat_content

__all__ = ["ChatHarness"]
IN_PROCESS: dict[str, list[vf.Toolset]] = {}  # the toolsets of rollouts, by the ids of their records


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model, answers its calls of tools, and ends with an answer that has none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            tools = await self._tools(trace, mcp_urls, stack)
            told: dict[str, Any] = {"tools": [tool.schema for tool in tools.values()]} if tools else {}
            client = await stack.enter_async_context(ClientSession(endpoint + "/", timeout=ClientTimeout(total=None)))
            while True:
                body = {"model": ctx.model, "messages": messages, **told}
                async with client.post(
                    "chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                ) as answer:
                    if not answer.ok:  # verifiers refuses a turn that a limit or a @stop forbids
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=await answer.text())
                    message = (await answer.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    content = await tools[name].call(arguments) if name in tools else unknown(name, tools)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})

    async def _tools(self, trace: vf.Trace, urls: dict[str, str], stack: AsyncExitStack) -> dict[str, Tool]:
        """All tools of a rollout by their names: of servers that run elsewhere, and of toolsets in this process."""
        tools: dict[str, Tool] = {}
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in urls.items()}
        schemas, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
        for schema in schemas:
            name = schema["function"]["name"]
            tools[name] = Tool(schema, partial(call_mcp, connected, dispatch, name))
        for toolset in IN_PROCESS.get(trace.id, ()):
            for schema, call in await served(toolset, trace, stack):
                tools[schema["function"]["name"]] = Tool(schema, call)
        return tools


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool as the model is told of it, and how it is called."""

    schema: dict[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[Any]]


async def served(toolset: vf.Toolset, trace: vf.Trace, stack: AsyncExitStack) -> list[tuple[dict[str, Any], Any]]:
    """A toolset's tools, served as its own process would serve them, with the rollout's state at hand."""

    async def pulled() -> vf.State:
        return trace.state

    async def pushed(before: bytes) -> None:
        """The state is the rollout's own; nothing is sent."""

    toolset._pull_state, toolset._push_state = pulled, pushed
    await stack.enter_async_context(toolset._exit_stack)
    await toolset.setup()
    await toolset.setup_task(trace.task.data)
    handlers = logging.root.handlers[:]
    server = MCPServer(toolset.server_name or type(toolset).__name__)
    logging.root.handlers[:] = handlers  # it sets up the log of a process that it takes for its own
    toolset.register(server)
    client = await stack.enter_async_context(Client(server))

    async def called(name: str, arguments: dict[str, Any]) -> Any:
        return mcp_content_to_chat_content((await client.call_tool(name, arguments)).content)

    found = []
    for tool in (await client.list_tools()).tools:
        name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
        function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
        found.append(({"type": "function", "function": function}, partial(called, tool.name)))
    return found


def unknown(name: str, tools: Collection[str]) -> str:
    return f"error: there is no tool {name!r}; there is {', '.join(tools) or 'none'}"
