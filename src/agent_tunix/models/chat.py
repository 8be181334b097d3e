"""How a question becomes a prompt and an answer a demonstration: Gemma's chat turns and our four tags.

Gemma's turns are written by hand, as they are one line of text. A test compares them with the chat template that is
exported, which jinja2 renders.
"""

from __future__ import annotations

REASONING = ("<reasoning>", "</reasoning>")
ANSWER = ("<answer>", "</answer>")
END_OF_TURN = "<end_of_turn>"


def chat_prompt(question: str, system_prompt: str) -> str:
    """The user's turn, with the system prompt at its head (Gemma has no system turn), and the opening of the model's."""
    content = f"{system_prompt}\n\n{question}" if system_prompt else question
    return f"<start_of_turn>user\n{content}{END_OF_TURN}\n<start_of_turn>model\n"


def demonstration(reasoning: str, answer: str) -> str:
    """A completion in the format the rewards look for, with the token that ends the turn."""
    return f"{REASONING[0]}{reasoning}{REASONING[1]}{ANSWER[0]}{answer}{ANSWER[1]}{END_OF_TURN}"
