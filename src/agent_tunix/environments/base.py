"""Environments: the worlds that a model acts in, over one turn or many.

One instance plays one episode. `reset` gives the messages that the model is asked with. `reply` is what the world answers to
its last turn, or None when the episode is over. `reward` is what the whole was worth, by names that `reward.weights` weighs.
A class of one's own inherits `Environment`, writes the methods that differ, and is named by its import path:

    python run_training.py environment.name=my_module.MyWorld

Any method may be `async`. Calls of many episodes are made at the same time, each in a thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_tunix.environments import tools
from agent_tunix.models.chat import Message

Transcript = Sequence[Message]  # all messages of an episode, the prompt's first
Row = Mapping[str, Any]  # of data: all its fields
Replies = Message | Sequence[Message] | None


class Environment:
    """A question and its answer, with tools that the model may call before it gives that."""

    tools: Sequence[Callable[..., Any]] = ()
    schemas: Sequence[Mapping[str, Any]] = ()  # of tools beside them, whose calls `reply` answers in its own way

    def reset(self, row: Row) -> list[Message]:
        """The messages that the model is asked with: the same for every episode of a row. `data.system_prompt` is put
        before them where none is the system's. `row` has all fields of the data, `question` and `answer` as they are read,
        and where the data has messages to begin with, these as `prompt`.
        """
        asked = row.get("prompt")
        return [*asked] if isinstance(asked, list | tuple) else [{"role": "user", "content": str(row["question"])}]

    def reply(self, transcript: Transcript) -> Replies:
        """What the world says to the model's last message; None: the episode is over.

        The message's `tool_calls` are the calls that were found in its text, each of which is answered.
        """
        calls = transcript[-1].get("tool_calls", ())
        return [tools.answered(call, self.tools) for call in calls] or None

    def reward(self, transcript: Transcript) -> Mapping[str, float]:
        """What the episode was worth, by name, beside the functions of `reward.functions`."""
        return {}

    def solved(self, transcript: Transcript) -> float | None:
        """How far the episode solved its row, from 0 to 1; accuracy counts those with 1.

        None: as without an environment, by `data.scorer` or by the answer in the model's last message.
        """
        return None


class MethodsAsTools(Environment):
    """An environment as TRL's `environment_factory` makes them: a class of which this inherits nothing.

    `reset(**row)` may return a text, which is put behind the last user's message. Every other public method is a tool.
    `get_reward()`, where there is one, is the reward, under the class's name; a reward of 1 is a solved row.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        names = [name for name in dir(world) if not name.startswith("_") and name not in ("reset", "get_reward")]
        self.tools = [method for name in names if callable(method := getattr(world, name))]
        self._has_reward = callable(getattr(world, "get_reward", None))

    def reset(self, row: Row) -> list[Message]:
        messages = super().reset(row)
        taken = inspect.signature(self.world.reset).parameters.values()
        names = {parameter.name for parameter in taken}
        anything = any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken)
        said = tools.awaited(self.world.reset(**{key: value for key, value in row.items() if anything or key in names}))
        if said is not None:
            last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
            if last is None:
                return [*messages, {"role": "user", "content": str(said)}]
            messages[last] = {**messages[last], "content": f"{messages[last]['content']}{said}"}
        return messages

    def reward(self, transcript: Transcript) -> Mapping[str, float]:
        if not self._has_reward:
            return {}
        self._reward = float(tools.awaited(self.world.get_reward()))
        return {type(self.world).__name__: self._reward}

    def solved(self, transcript: Transcript) -> float | None:
        return min(max(self._reward, 0.0), 1.0) if self._has_reward else None
