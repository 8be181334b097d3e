"""A game of several turns: the model finds a number by guesses, and is told whether it is larger or smaller.

    cd examples
    python ../run_training.py data=jsonl data.path=numbers.jsonl environment.name=number_game.NumberGame \
        reward=environment 'environment.settings={largest: 20}'

A row of numbers.jsonl is {"question": "Find the number.", "answer": 13}.
"""

from __future__ import annotations

import re

from agent_tunix.environments.base import Environment


class NumberGame(Environment):
    def __init__(self, largest: int = 20) -> None:
        self.largest = largest

    def reset(self, row):
        self.secret = int(row["answer"])
        asked = f"I think of a number from 1 to {self.largest}. Guess it: answer with a number alone."
        return [{"role": "user", "content": asked}]

    def reply(self, transcript):
        guess = self._guess(transcript)
        if guess == self.secret:
            return None
        said = "Answer with a number." if guess is None else "It is larger." if guess < self.secret else "It is smaller."
        return {"role": "user", "content": said}

    def reward(self, transcript):
        guesses = sum(message["role"] == "assistant" for message in transcript)
        return {"found": self.solved(transcript), "quick": 1.0 / max(1, guesses)}

    def solved(self, transcript):
        return float(self._guess(transcript) == self.secret)

    def _guess(self, transcript) -> int | None:
        found = re.search(r"\d+", transcript[-1]["content"])
        return int(found[0]) if found else None
