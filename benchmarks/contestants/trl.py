"""TRL's GRPOTrainer with transformers' generate, PEFT adapters, and its own defaults: eight sequences at a time, activations
recomputed in the backward pass. A small vocabulary leaves room for more: the whole batch at once, and nothing recomputed.
"""

from __future__ import annotations

import time

import torch
from datasets import Dataset
from peft import LoraConfig
from race import LEARNING_RATE, MODULES, NOT_DRAWN, Race, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SMALL_VOCABULARY = 10_000


class Timed(GRPOTrainer):
    """Takes the time of every rollout, and counts what was drawn."""

    rollout, tokens = 0.0, 0

    def _generate_single_turn(self, *args, **kwargs):
        started = time.perf_counter()
        completions, logprobs = super()._generate_single_turn(*args, **kwargs)  # ends with the tokens on the host
        self.rollout, self.tokens = time.perf_counter() - started, sum(map(len, completions))
        return completions, logprobs


class Stopwatch(TrainerCallback):
    def __init__(self, race: Race):
        self.race, self.trainer = race, None

    def on_step_end(self, args, state, control, **kwargs):
        peak_gb = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak_gb = torch.cuda.max_memory_allocated() / 1e9
        self.race.step_done(self.trainer.rollout, self.trainer.tokens, peak_gb)


def chance(completions: list, **_: object) -> list[float]:
    return [reward() for _ in completions]


def settings(race: Race, vocabulary: int) -> GRPOConfig:
    small = vocabulary < SMALL_VOCABULARY
    at_once = race.sequences if small else min(race.sequences, 8)
    if race.micro_batch:
        at_once = race.micro_batch * race.generations
    return GRPOConfig(
        output_dir=f"{race.folder}/trl",
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=race.sequences // at_once,
        num_generations=race.generations,
        max_completion_length=race.completion_length,
        temperature=race.temperature,
        top_k=race.top_k or 0,
        beta=race.beta,
        learning_rate=LEARNING_RATE,
        max_steps=race.steps,
        bf16=race.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=not small,
        generation_kwargs={"suppress_tokens": list(NOT_DRAWN)},
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    race = Race.given()
    model = AutoModelForCausalLM.from_pretrained(race.checkpoint, dtype=getattr(torch, race.dtype))
    watch = Stopwatch(race)
    trainer = Timed(
        model=model,
        reward_funcs=chance,
        args=settings(race, model.config.vocab_size),
        train_dataset=Dataset.from_list([{"prompt": text} for text in race.prompt_texts()]),
        processing_class=AutoTokenizer.from_pretrained(race.checkpoint),
        peft_config=LoraConfig(r=race.rank, lora_alpha=race.rank, target_modules=list(MODULES), task_type="CAUSAL_LM"),
        callbacks=[watch],
    )
    watch.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
