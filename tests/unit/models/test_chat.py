from __future__ import annotations

from agent_tunix.environments import answers, rewards
from agent_tunix.models.chat import END_OF_TURN, chat_prompt, demonstration


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
