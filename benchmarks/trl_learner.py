"""TRL's GRPOTrainer for `as_trl_learns.py`: its own loss, advantages, gradient, clipping, optimizer and schedule."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from learners import Learnt, Round, equal_groups
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from agent_tunix.environments.stream import Example
from agent_tunix.models.checkpoints.peft import read_adapters
from agent_tunix.training.loading import adapters_of
from agent_tunix.training.setup import Setup

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # see `create_scheduler`


class Trainer(GRPOTrainer):
    """Notes what it does. With `exact_zeros`, groups of equal rewards have advantages of zero rather than of rounding."""

    def __init__(self, exact_zeros: bool, **given: Any) -> None:
        self.exact_zeros = exact_zeros
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.rewarded: list[list[float]] = []
        super().__init__(**given)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A step ahead: here, as in transformers, the first update would be at a rate of zero, and ours is not."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        scheduler.step()
        return scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return loss

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        if self.exact_zeros:
            equal = equal_groups(self.rewarded[-1], self.num_generations)
            made["advantages"][torch.as_tensor(equal, device=made["advantages"].device)] = 0.0
        return made


def train(
    r: Setup,
    base: Path,
    first: Path | None,
    settings: dict[str, Any],
    fed: Sequence[Round],
    exact_zeros: bool,
    folder: Path,
) -> Learnt:
    """A run of TRL on the problems of ours, in their order; it samples by itself where it is not `fed` completions."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    examples = [example for position in range(r.plan.total_batches) for example in r.stream.batch(position)]
    prompts = [messages(r, example) for example in examples]
    _refuse_other_prompts(tokenizer, prompts, examples)
    trainer: Trainer

    def reward(prompts: Any, completions: Any, number: list[int], **_: Any) -> list[float]:
        of, texts = [examples[index] for index in number], [turns[0]["content"] for turns in completions]
        columns = [e.question for e in of], texts, [e.answer for e in of], [e.row for e in of]
        trainer.rewarded.append(r.scorer.total(r.scorer(*columns)).tolist())
        return trainer.rewarded[-1]

    def ours(prompts: Any, _: Any) -> dict[str, Any]:
        given = fed[len(trainer.rewarded)]
        G = len(given.completion_ids) // len(given.examples)
        ids = [list(example.prompt_ids) for example in given.examples for _ in range(G)]
        return {"prompt_ids": ids, "completion_ids": given.completion_ids, "logprobs": None}

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if first is not None:
        model = PeftModel.from_pretrained(model, first, is_trainable=True)
    never = [r.model.tokenizer.pad_id] if r.model.tokenizer.pad_id not in r.sampling.end_ids else []
    trainer = Trainer(
        exact_zeros,
        model=model,
        peft_config=None if first is not None else lora(r),
        reward_funcs=reward,
        args=GRPOConfig(
            **settings,
            output_dir=str(folder),
            shuffle_dataset=False,
            generation_kwargs={"suppress_tokens": never} if never else None,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt, "number": i} for i, prompt in enumerate(prompts)]),
        processing_class=tokenizer,
        rollout_func=ours if fed else None,
    )
    assert {*trainer.eos_token_ids} == {*r.sampling.end_ids}, "completions end otherwise there"
    trainer.log = lambda logs, *_, **__: trainer.state.log_history.append(logs)  # not on the screen
    trainer.train()
    trainer.model.save_pretrained(folder / "learnt", selected_adapters=["default"])
    slices = trainer.args.gradient_accumulation_steps
    return Learnt(
        losses=[sum(trainer.losses[at : at + slices]) for at in range(0, len(trainer.losses), slices)],
        gradient_norms=[float(logs["grad_norm"]) for logs in trainer.state.log_history if "grad_norm" in logs],
        rates=trainer.rates[::slices],
        rewards=[float(np.mean(np.asarray(rewards, np.float32))) for rewards in trainer.rewarded],
        adapters=read_adapters(folder / "learnt", r.model.arch),
    )


def messages(r: Setup, example: Example) -> list[dict[str, str]]:
    system = r.cfg.data.system_prompt
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": example.question}]


def _refuse_other_prompts(tokenizer: Any, prompts: Sequence[Any], examples: Sequence[Example]) -> None:
    found = tokenizer.apply_chat_template([*prompts], add_generation_prompt=True, tokenize=True, return_dict=True)
    assert [tuple(ids) for ids in found["input_ids"]] == [e.prompt_ids for e in examples], "prompts are other tokens there"


def lora(r: Setup) -> LoraConfig:
    """PEFT's own adapters of the kind of ours."""
    section, modules = r.cfg.model, adapters_of(r.cfg, r.model.arch)["modules"]
    kind = {"r": section.lora_rank, "lora_alpha": section.lora_alpha, "use_rslora": section.use_rslora}
    return LoraConfig(**kind, target_modules=[*modules], task_type="CAUSAL_LM")


def draw_adapters(r: Setup, base: Path, seed: int, folder: Path) -> Path:
    """Adapters as PEFT begins, in a folder."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    get_peft_model(model, lora(r)).save_pretrained(folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": r.cfg.model.weights}))
    return folder
