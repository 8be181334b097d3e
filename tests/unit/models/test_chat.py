from __future__ import annotations

import pytest

from agent_tunix.environments import answers, rewards
from agent_tunix.errors import UserError
from agent_tunix.models.chat import END_OF_TURN, chat_prompt, conversation, demonstration


def test_a_prompt_is_gemmas_user_turn_and_the_opening_of_the_models():
    assert chat_prompt("Why?", "") == "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"


def test_the_system_prompt_heads_the_users_turn():
    assert chat_prompt("Why?", "Be brief.").startswith("<start_of_turn>user\nBe brief.\n\nWhy?<end_of_turn>")


def test_a_demonstration_is_what_the_rewards_look_for_and_ends_its_turn():
    shown = demonstration("3+4=7", "7")
    completion = shown.removesuffix(END_OF_TURN)
    assert completion != shown
    assert answers.well_formed(completion)
    assert rewards.answer_correct("", completion, "7") == 1


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_a_conversation_goes_on_turn_by_turn():
    text = conversation(said(("user", "2+2?"), ("assistant", "4"), ("user", "Why?")))
    assert text == (
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n" + chat_prompt("Why?", "")
    )


def test_what_the_system_says_takes_the_place_of_the_system_prompt():
    asked = said(("user", "Why?"))
    assert conversation(asked, "Be brief.") == chat_prompt("Why?", "Be brief.")
    assert conversation([*said(("system", "Sing.")), *asked], "Be brief.") == chat_prompt("Why?", "Sing.")
    assert conversation([*said(("system", "")), *asked], "Be brief.") == chat_prompt("Why?", "")


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
        conversation(messages)
