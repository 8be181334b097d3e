"""How a question becomes a prompt and an answer a demonstration: Gemma's chat turns and our four tags.

Gemma's turns are written by hand, as they are one line of text. A test compares them with the chat template that is
exported, which jinja2 renders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from agent_tunix.errors import UserError

REASONING = ("<reasoning>", "</reasoning>")
ANSWER = ("<answer>", "</answer>")
END_OF_TURN = "<end_of_turn>"
ROLES = ("system", "user", "assistant")
Message = Mapping[str, str]  # its role and its content


def chat_prompt(question: str, system_prompt: str) -> str:
    """The user's turn, with the system prompt at its head (Gemma has no system turn), and the opening of the model's."""
    return conversation([{"role": "user", "content": question}], system_prompt)


def conversation(messages: Sequence[Message], system_prompt: str = "") -> str:
    """Turns of user and assistant, one after the other, and the opening of the model's next one.

    A first message of the system takes the place of the system prompt, and stands where that does.
    """
    _check(messages)
    if messages[0]["role"] == "system":
        system_prompt, messages = messages[0]["content"], messages[1:]
    turns = [message["content"] for message in messages]
    turns[0] = f"{system_prompt}\n\n{turns[0]}" if system_prompt else turns[0]
    spoken = zip(itertools.cycle(("user", "model")), turns)  # the cycle has no end
    return "".join(f"<start_of_turn>{who}\n{turn}{END_OF_TURN}\n" for who, turn in spoken) + "<start_of_turn>model\n"


def demonstration(reasoning: str, answer: str) -> str:
    """A completion in the format the rewards look for, with the token that ends the turn."""
    return f"{REASONING[0]}{reasoning}{REASONING[1]}{ANSWER[0]}{answer}{ANSWER[1]}{END_OF_TURN}"


def _check(messages: Sequence[Message]) -> None:
    """Refuses what is no conversation in which the model is to speak next."""
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str) or message.get("role") not in ROLES:
            raise UserError(
                f"messages[{number}]={message!r:.200}: must be a mapping of role, which is one of {', '.join(ROLES)}, and "
                "content, which is a text."
            )
    roles = [message["role"] for message in messages]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if spoken != [("user", "assistant")[number % 2] for number in range(len(spoken))] or spoken[-1:] != ["user"]:
        raise UserError(
            f"messages have the roles {', '.join(roles) or 'of nobody'}: user and assistant speak in turn, the user first "
            "and last; one message of the system may come before."
        )
