"""What every contestant of `grpo_step.py` is given, and what it gives back: one line for every step it has made.

A contestant is started with its `Race` as the only argument. It reads checkpoint and prompts from `folder`, and calls
`step_done` at the end of every optimizer step; so a contestant that is stopped half way has still said how far it came.
There it waits for a line on its input before it goes on, so that contestants can take turns.
"""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import sys
import time
from pathlib import Path

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEARNING_RATE = 1e-5
PAD, EOS, BOS, UNKNOWN, START, END = "<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"
NAMED = (PAD, EOS, BOS, UNKNOWN, START, END, "user", "model")  # tokens 0 to 7; every other token n is the word "w<n>"
NOT_DRAWN = (NAMED.index(PAD), NAMED.index(EOS), NAMED.index(END))  # a completion ends with none of them, nor holds them
TEMPLATE = 6  # tokens that the chat template adds to a question: begin, start, user, end, start, model


@dataclasses.dataclass(frozen=True)
class Race:
    """The shape of a step, the same for all. `micro_batch` counts prompts; None leaves it to the contestant."""

    model: str
    dtype: str
    prompts: int
    generations: int
    prompt_length: int
    completion_length: int
    rank: int
    temperature: float
    top_k: int | None
    beta: float
    steps: int
    micro_batch: int | None
    folder: str
    results: str

    @classmethod
    def given(cls) -> Race:
        return cls(**json.loads(sys.argv[1]))

    @property
    def sequences(self) -> int:
        return self.prompts * self.generations

    def prompt_texts(self) -> list[str]:
        """The prompts as a contestant without a chat template of its own is to read them."""
        questions = [json.loads(line)["question"] for line in self.prompts_file.read_text().splitlines()]
        return [f"{BOS}{START}user\n{question}{END}\n{START}model\n" for question in questions]

    @property
    def prompts_file(self) -> Path:
        return Path(self.folder) / "prompts.jsonl"

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / "checkpoint"

    def write_prompts(self, vocabulary: int) -> None:
        """Random words, as many as fill the prompt, for every step and for a validation split that no one looks at."""
        rng = random.Random(0)
        with open(self.prompts_file, "w", encoding="utf-8") as file:
            for _ in range(2 * self.prompts * (self.steps + 1)):
                words = (f"w{rng.randrange(len(NAMED), vocabulary)}" for _ in range(self.prompt_length - TEMPLATE))
                file.write(json.dumps({"question": " ".join(words), "answer": "w8"}) + "\n")

    def step_done(self, rollout: float, tokens: int, peak_gb: float | None = None) -> None:
        """Notes a step: seconds of its rollout, tokens drawn, the peak of memory so far. Then waits for its next turn."""
        now = time.time(), time.process_time()
        if peak_gb is None:
            peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        seconds, cpu = (end - start for end, start in zip(now, _turn[-1], strict=True))
        line = {"end": now[0], "seconds": seconds, "cpu": cpu, "rollout": rollout, "tokens": tokens, "peak_gb": peak_gb}
        with open(self.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        sys.stdin.readline()
        _turn.append((time.time(), time.process_time()))


_turn = [(time.time(), time.process_time())]
_reward = random.Random(1)


def reward() -> float:
    """Chance: random weights earn nothing, and without a difference in rewards there would be nothing to learn from."""
    return _reward.random()
