"""Prompts in the turns of every kind of model, with templates as they are published, and what is done where they fail."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from jinja2 import Environment
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agent_tunix.environments import answers, rewards
from agent_tunix.errors import UserError
from agent_tunix.models.chat import BEGIN, KINDS, Chat, JinjaTemplate, Turns, demonstration, template_of, turns_of

GEMMA, CHATML, LLAMA, PLAIN = KINDS.values()
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
# The essential shape of published templates: Qwen2.5's system prompt of its own and Qwen3's switch; Gemma 2's refusal of
# system messages; one that leaves them out.
QWEN = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
    "{%- else %}\n    {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages if message.role != 'system' %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n{%- endif %}\n"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEAF = GEMMA_2.replace("{{ raise_exception('System role not supported') }}", "{% set messages = messages[1:] %}")


def own(source: str) -> Chat:
    return Chat(JinjaTemplate(source, "model/chat_template.jinja", TOKENS))


def rendered(source: str, *messages: tuple[str, object], opened: bool = True) -> str:
    """By the engine that transformers and vLLM use, set as they set it."""
    environment: Environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    told = [{"role": role, "content": content} for role, content in messages]
    return environment.from_string(source).render(messages=told, **TOKENS, add_generation_prompt=opened)


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_the_kind_of_a_model_is_seen_by_its_vocabulary():
    for kind, tokens in zip((GEMMA, CHATML, LLAMA, PLAIN), KINDS, strict=True):
        assert turns_of(tokens, "", False).head == kind.head
    assert turns_of(["<|im_start|>"], "", False) == PLAIN, "a token alone is not a kind"
    assert Chat(PLAIN).is_plain
    assert not Chat(CHATML).is_plain


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        (GEMMA, "<start_of_turn>user\nBe brief.\n\nWhy?<end_of_turn>\n<start_of_turn>model\n"),
        (CHATML, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA,
            "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "Why?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (PLAIN, "Be brief.\n\nWhy?\n"),
    ],
)
def test_the_turns_of_each_kind(kind, prompt):
    assert Chat(kind).prompt("Why?", "Be brief.") == prompt


texts = st.text("ab {}<|>\n\t", max_size=12)


@given(texts, texts, texts, texts, st.booleans(), st.sampled_from(list(KINDS)))
def test_the_templates_that_are_exported_write_what_was_trained_on(system, first, answer, last, begins, tokens):
    kind = turns_of(tokens, "<bos>", begins)
    turns = [("user", first), ("assistant", answer), ("user", last)]
    for told in (turns, [("system", system), *turns]):
        for opened in (True, False):
            assert kind.write(said(*told), opened, None) == rendered(kind.source, *told, opened=opened)
    assert kind.write(said(*turns), True, None).startswith("<bos>") == (begins or BEGIN in kind.source)


def test_an_exported_template_is_written_by_hand_when_it_is_read_again():
    for tokens in KINDS:
        for begins in (True, False):
            kind = turns_of(tokens, "<bos>", begins)
            assert template_of(kind.source, "", TOKENS) == kind
    assert not isinstance(template_of(QWEN, "", TOKENS), Turns)


def test_gemmas_template_leaves_no_message_out():
    turn = "<start_of_turn>user\n{}<end_of_turn>\n".format
    assert rendered(GEMMA.source, ("user", "Hi"), ("system", "Be brief"), ("user", None)) == (
        "<bos>" + turn("Hi") + turn("Be brief") + turn("") + "<start_of_turn>model\n"
    )
    assert rendered(GEMMA.source, ("system", "Alone")) == "<bos>" + turn("Alone") + "<start_of_turn>model\n"


@pytest.mark.parametrize("role", ["assistant", "model"])
def test_gemmas_template_knows_turns_and_contents_in_parts(role):
    parts = [{"type": "text", "text": "2"}, {"type": "image"}, {"type": "text", "text": "+2?"}]
    turns = [("user", "Hi"), (role, "Hello"), ("user", parts)]
    want = "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    assert rendered(GEMMA.source, *turns) == want + "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n"


def test_a_checkpoints_own_template_asks():
    asked = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert own(QWEN).prompt("Why?", "Be brief.") == "<|im_start|>system\nBe brief.<|im_end|>\n" + asked
    assert own(QWEN).prompt("Why?") == "<|im_start|>system\nYou are Qwen.<|im_end|>\n" + asked, (
        "its own, where none is given"
    )


def test_thinking_is_switched_where_it_is_said():
    plain, thinking, not_thinking = (own(QWEN).prompt("Why?", thinking=switch) for switch in (None, True, False))
    assert plain == thinking
    assert not_thinking == plain + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("source", [GEMMA_2, DEAF])
def test_a_system_prompt_heads_the_users_turn_where_the_template_has_none(source):
    """One raises at a message of the system, one leaves it out."""
    asked = "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n".format
    assert own(source).prompt("Why?", "Be brief.") == asked("Be brief.\n\nWhy?")
    assert own(source).prompt(" Why? ") == asked("Why?")
    assert own(source).conversation(said(("system", ""), ("user", "Why?"))) == asked("Why?")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('only tools') }}", "only tools"),
        ("{{ messages.nothing.at_all }}", "has no attribute 'nothing'"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.1 seconds"),
    ],
)
def test_a_template_that_fails_is_named(source, why, monkeypatch):
    monkeypatch.setattr("agent_tunix.models.jinja.SECONDS", 0.1)
    for ask in (own(source).prompt, lambda text: own(source).prompt(text, "Be brief.")):
        with pytest.raises(UserError, match=r"^model/chat_template\.jinja: the chat template fails: ") as fault:
            ask("Why?")
        assert why in str(fault.value)


@pytest.mark.parametrize(
    ("chat", "ending"),
    [
        (Chat(GEMMA), "<end_of_turn>"),
        (Chat(CHATML), "<|im_end|>"),
        (Chat(LLAMA), "<|eot_id|>"),
        (Chat(PLAIN), ""),
        (own(QWEN), "<|im_end|>"),
        (own(GEMMA_2), "<end_of_turn>"),
        (own("{% for m in messages %}[INST] {{ m.content }} </s>{% endfor %}"), " </s>"),
        (own("{% for m in messages %}{{ m.content }}\nUser: <|im_end|>{% endfor %}"), ""),
        (own("{{ raise_exception('never') }}"), ""),
    ],
)
def test_the_token_that_ends_a_turn_is_what_the_template_writes_behind_the_assistant(chat, ending):
    special = ["<|im", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "</s>", "<bos>"]
    assert chat.ending(special) == ending


def test_a_demonstration_is_what_the_rewards_look_for():
    completion = demonstration("3+4=7", "7")
    assert answers.well_formed(completion)
    assert rewards.answer_correct("", completion, "7") == 1


def test_a_conversation_goes_on_turn_by_turn():
    text = Chat(GEMMA).conversation(said(("user", "2+2?"), ("assistant", "4"), ("user", "Why?")))
    assert text == (
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n" + Chat(GEMMA).prompt("Why?")
    )


@pytest.mark.parametrize("chat", [Chat(GEMMA), own(QWEN), own(GEMMA_2)])
def test_what_the_system_says_takes_the_place_of_the_system_prompt(chat):
    asked = said(("user", "Why?"))
    assert chat.conversation(asked, "Be brief.") == chat.prompt("Why?", "Be brief.")
    assert chat.conversation([*said(("system", "Sing.")), *asked], "Be brief.") == chat.prompt("Why?", "Sing.")
    assert "Be brief." not in chat.conversation([*said(("system", "")), *asked], "Be brief.")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        said(("system", "Sing.")),
        said(("assistant", "4")),
        said(("user", "2+2?"), ("assistant", "4")),
        said(("user", "2+2?"), ("user", "Why?")),
        said(("user", "2+2?"), ("system", "Sing."), ("user", "Why?")),
        said(("tool", "4")),
        ["2+2?"],
        [{"role": "user", "content": None}],
        [{"content": "2+2?"}],
    ],
    ids=str,
)
def test_what_is_no_conversation_that_the_model_can_answer_is_refused(messages):
    with pytest.raises(UserError, match=r"^messages"):
        Chat(GEMMA).conversation(messages)


TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>{{ message.content }}"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
REPLIES = {"by the user": ("user", "Again?"), "by a tool": ("tool", "42")}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
@pytest.mark.parametrize("chat", [*map(Chat, (GEMMA, CHATML, LLAMA)), own(TOOLS)], ids=["gemma", "chatml", "llama", "tools"])
def test_an_episode_goes_on_as_the_template_writes_the_whole(chat, reply):
    """What was said until the reply, and what comes with it, are the conversation as it is written at once."""
    role, content = reply
    if role == "tool" and isinstance(chat.template, Turns):
        role = "user"  # a kind of model that knows no tools
    ending = chat.ending({"<|im_end|>", "<end_of_turn>", "<|eot_id|>"})
    begun = chat.asked(said(("user", "Why?")), "", None)
    continued = chat.continued([{"role": reply[0], "name": "add", "content": content}], ending, None)
    whole = chat.template.write(said(("user", "Why?"), ("assistant", "So."), (role, content)), True, None)
    assert f"{begun}So.{ending}{continued}" == whole


def test_the_model_is_told_of_tools_by_its_template_or_in_the_systems_message():
    asked = own(TOOLS).asked(said(("user", "Why?")), "", None, [SCHEMA], "told")
    assert '"name": "add"' in asked
    assert "told" not in asked
    asked = Chat(CHATML).asked(said(("user", "Why?")), "Be brief.", None, [SCHEMA], "told")
    assert asked.startswith("<|im_start|>system\nBe brief.\n\ntold<|im_end|>")
    asked = Chat(GEMMA).asked(said(("system", "Mine."), ("user", "Why?")), "Be brief.", None, [SCHEMA], "told")
    assert "Mine.\n\ntold\n\nWhy?" in asked
    assert Chat(CHATML).asked(said(("user", "Why?")), "", None) == Chat(CHATML).prompt("Why?")


@pytest.mark.parametrize("messages", [[], said(("assistant", "So.")), said(("narrator", "Once."))])
def test_an_episode_does_not_begin_with_the_model(messages):
    with pytest.raises(UserError, match="an episode begins with messages of the roles"):
        Chat(CHATML).asked(messages, "", None)
