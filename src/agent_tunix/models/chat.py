"""How a question becomes a prompt and an answer a demonstration: by the checkpoint's chat template, and our four tags.

A checkpoint without a template is asked in the turns of its kind, which its vocabulary tells: Gemma's, ChatML (as of Qwen
and SmolLM), or those of Llama 3. They are written here by hand, since jinja2 takes half a second of a demo's beginning, and
are exported as templates that write the same; a test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from agent_tunix.errors import UserError, calling, said

REASONING = ("<reasoning>", "</reasoning>")
ANSWER = ("<answer>", "</answer>")
ROLES = ("system", "user", "assistant")
TOOL = "tool"  # the role of what a tool returned
ANY_ROLE = (*ROLES, TOOL)
MARK = "MarkOfAgentTunix"  # a word that no template writes by itself
Message = Mapping[str, Any]  # its role and its content; of an assistant's also its tool_calls, of a tool's its name
Schemas = Sequence[Mapping[str, Any]]  # what a model is told of tools, as OpenAI's interface has it
ASKED: Message = {"role": "user", "content": "?"}


class Template(Protocol):
    """What writes a conversation as one text. `source` says how, in Jinja's language, for exports."""

    @property
    def source(self) -> str: ...

    def write(self, messages: Sequence[Message], opened: bool, thinking: bool | None, tools: Schemas = ()) -> str:
        """`opened`: with the beginning of the assistant's next turn. `thinking`: the template's switch; None leaves it."""


@dataclasses.dataclass(frozen=True)
class JinjaTemplate:
    """A checkpoint's own template. `tokens` are its special tokens by the names that transformers gives them: bos_token."""

    source: str
    place: str  # where it stands, for messages
    tokens: Mapping[str, str]

    @cached_property
    def _render(self) -> Callable[[Mapping[str, Any]], str]:
        from agent_tunix.models import jinja

        with self._calling():
            return jinja.compiled(self.source)

    def write(self, messages: Sequence[Message], opened: bool, thinking: bool | None, tools: Schemas = ()) -> str:
        switches = {} if thinking is None else {"enable_thinking": thinking}
        told = [dict(tool) for tool in tools] or None
        given = {"messages": [dict(message) for message in messages], "tools": told, "documents": None}
        render = self._render
        with self._calling():
            return render({**self.tokens, **given, "add_generation_prompt": opened, **switches})

    def _calling(self) -> Any:
        return calling(
            lambda fault: UserError(
                f"{self.place}: the chat template fails: {said(fault)}\n"
                "Mend it, or put another one beside the weights as chat_template.jinja."
            )
        )


@dataclasses.dataclass(frozen=True)
class Turns:
    """The turns of a kind of model, for checkpoints that have no template.

    Each begins with `head`, in which {role} stands for who speaks, in the kind's own words where `roles` has some, and ends
    with `end` and `between`. A kind without turns of the system has what that says at the head of the user's.
    """

    source: str
    head: str
    end: str
    between: str
    begin: str = ""
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_system: bool = True
    strips: bool = True  # what user and assistant say

    def write(self, messages: Sequence[Message], opened: bool, thinking: bool | None, tools: Schemas = ()) -> str:
        if self.strips:
            messages = [m if m["role"] == "system" else {**m, "content": m["content"].strip()} for m in messages]
        if not self.has_system:
            messages = headed(messages)
        turns = "".join(f"{self._opening(m['role'])}{m['content']}{self.end}{self.between}" for m in messages)
        return f"{self.begin}{turns}{self._opening('assistant') if opened else ''}"

    def _opening(self, role: str) -> str:
        return self.head.replace("{role}", self.roles.get(role, role))


def headed(messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation with what the system says at the head of the first user's turn, and a blank line between."""
    if messages[0]["role"] != "system":
        return messages
    system, first, *others = messages
    content = f"{system['content']}\n\n{first['content']}" if system["content"] else first["content"]
    return [{**first, "content": content}, *others]


# A content may be text or, as some clients send it, a list of parts.
GEMMA = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% elif content %}"
    "{% for part in content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endmacro %}"
    "{{ bos_token }}{% for message in messages %}"
    "{% if not (loop.first and message['role'] == 'system' and not loop.last) %}"
    "<start_of_turn>{{ 'model' if message['role'] in ['assistant', 'model'] else 'user' }}\n"
    "{% if loop.index0 == 1 and messages[0]['role'] == 'system' and messages[0]['content'] %}"
    "{{ text(messages[0]['content']) + '\n\n' }}{% endif %}"
    "{{ text(message['content']) | trim }}<end_of_turn>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] if message['role'] == 'system' else message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '\n' if message['role'] != 'system' else '\n\n' if message['content'] }}{% endfor %}"
)
BEGIN = "{{ bos_token }}"  # before turns that do not have it, where the tokenizer begins every text with it
KINDS = {  # by the tokens that a vocabulary must have
    ("<start_of_turn>", "<end_of_turn>"): Turns(  # Gemma's
        GEMMA, "<start_of_turn>{role}\n", "<end_of_turn>", "\n", roles={"assistant": "model"}, has_system=False
    ),
    ("<|im_start|>", "<|im_end|>"): Turns(CHATML, "<|im_start|>{role}\n", "<|im_end|>", "\n", strips=False),
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"): Turns(
        LLAMA, "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ""
    ),
    (): Turns(PLAIN, "", "", "\n", has_system=False, strips=False),
}
TURN_TOKENS = [token for tokens in KINDS for token in tokens]


def template_of(source: str, place: str, tokens: Mapping[str, str]) -> Template:
    """A checkpoint's template; by hand where it is one of those that are written here."""
    for kind in KINDS.values():
        if source in (kind.source, BEGIN + kind.source):
            return dataclasses.replace(kind, source=source, begin=tokens.get("bos_token", "") if BEGIN in source else "")
    return JinjaTemplate(source, place, tokens)


def turns_of(tokens: Collection[str], begin: str, begins: bool) -> Turns:
    """The turns of the first kind whose tokens a vocabulary has, of all TURN_TOKENS; plain text where it has those of none.

    `begin` is the token that begins a text, `begins` whether the tokenizer puts it there by itself.
    """
    kind = next(kind for needed, kind in KINDS.items() if set(needed) <= set(tokens))
    if BEGIN in kind.source:
        return dataclasses.replace(kind, begin=begin)
    return dataclasses.replace(kind, source=BEGIN + kind.source, begin=begin) if begins and begin else kind


@dataclasses.dataclass(frozen=True)
class Chat:
    """A checkpoint's way to be asked."""

    template: Template

    @property
    def is_plain(self) -> bool:
        """Whether there are no turns at all, as for a model that was only pretrained."""
        return isinstance(self.template, Turns) and not self.template.head

    def prompt(self, question: str, system_prompt: str = "", thinking: bool | None = None) -> str:
        """The user's turn and the opening of the model's, after the system prompt where there is one."""
        return self._asked([{"role": "user", "content": question}], system_prompt, thinking)

    def conversation(self, messages: Sequence[Message], system_prompt: str = "", thinking: bool | None = None) -> str:
        """Turns of user and assistant, one after the other, and the opening of the model's next one.

        A first message of the system takes the place of the system prompt.
        """
        _check(messages)
        return self._asked(messages, system_prompt, thinking)

    def asked(
        self, messages: Sequence[Message], system_prompt: str, thinking: bool | None, tools: Schemas = (), told: str = ""
    ) -> str:
        """The messages with which an episode begins, and the opening of the model's turn.

        `told` says of the tools what the template does not say: it ends the system's message where that is silent of them.
        """
        roles = [message.get("role") for message in messages]
        if not set(roles) <= {*ANY_ROLE} or roles[-1:] in ([], ["assistant"]):
            named = ", ".join(map(str, roles)) or "of nobody"
            raise UserError(f"an episode begins with messages of the roles {named}: the last must not be the assistant's.")
        if tools and not self.tells_of_tools:
            system = messages[0]["content"] if messages[0]["role"] == "system" else system_prompt
            others = messages[1:] if messages[0]["role"] == "system" else messages
            whole = "\n\n".join(filter(None, [system, told]))
            messages = [{"role": "system", "content": whole}, *others] if whole else others
            tools = ()
        return self._asked(messages, system_prompt, thinking, tools)

    def continued(self, replies: Sequence[Message], ending: str, thinking: bool | None, tools: Schemas = ()) -> str:
        """What stands between the end of the assistant's turn and its next: the replies, and the opening of that.

        `ending` is what the template writes behind an assistant's words, which a turn that was sampled has already.
        """
        replies = [message if message["role"] != TOOL or self.takes_tools else by_user(message) for message in replies]
        said = [ASKED, {"role": "assistant", "content": MARK}, *replies]
        text = self.template.write(said, True, thinking, tools if self.tells_of_tools else ()).partition(MARK)[2]
        return text.removeprefix(ending)

    @cached_property
    def tells_of_tools(self) -> bool:
        """Whether the template tells the model of the tools that it is given."""
        function = {"name": MARK, "description": "", "parameters": {"type": "object", "properties": {}, "required": []}}
        try:
            return MARK in self.template.write([ASKED], True, None, [{"type": "function", "function": function}])
        except UserError:
            return False

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes what a tool returned."""
        said = [ASKED, {"role": "assistant", "content": "!"}, {"role": TOOL, "name": "f", "content": MARK}]
        try:
            return not isinstance(self.template, Turns) and MARK in self.template.write(said, True, None)
        except UserError:
            return False

    def ending(self, special: Collection[str]) -> str:
        """What the template writes behind an assistant's words, up to the special token that ends the turn; "" for none."""
        try:
            text = self.template.write([ASKED, {"role": "assistant", "content": MARK}], False, None)
        except UserError:  # whoever asks in this template hears of it
            return ""
        behind = text.rpartition(MARK)[2]
        found = max((token for token in special if behind.lstrip().startswith(token)), key=len, default="")
        return behind[: behind.index(found) + len(found)] if found else ""

    def _asked(self, messages: Sequence[Message], system_prompt: str, thinking: bool | None, tools: Schemas = ()) -> str:
        if messages[0]["role"] != "system" and system_prompt:
            messages = [{"role": "system", "content": system_prompt}, *messages]
        if messages[0]["role"] == "system" and not self._takes_system:
            messages = headed(messages)
        return self.template.write(messages, True, thinking, tools)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template writes what the system says; some raise, and some leave it out."""
        self.template.write([ASKED], True, None)  # a template that fails anyway is to say so
        try:
            return MARK in self.template.write([{"role": "system", "content": MARK}, ASKED], True, None)
        except UserError:
            return False


def by_user(message: Message) -> Message:
    """What a tool returned, for a template that knows no tools: the user says it."""
    return {"role": "user", "content": message["content"]}


def demonstration(reasoning: str, answer: str) -> str:
    """A completion in the format the rewards look for; the end of the turn comes behind it."""
    return f"{REASONING[0]}{reasoning}{REASONING[1]}{ANSWER[0]}{answer}{ANSWER[1]}"


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
