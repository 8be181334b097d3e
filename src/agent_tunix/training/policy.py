"""A model that answers: a base, alone or with what a run has made of it. `agent_tunix.load` gives one."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field
from rich.console import Console

from agent_tunix.config.load import validate
from agent_tunix.config.resumed import made_of
from agent_tunix.config.schema import InferenceSection, Length, Positive, StepOrBest
from agent_tunix.engine import distributed
from agent_tunix.engine.engine import Inference
from agent_tunix.engine.sampler import Sampling
from agent_tunix.environments.stream import Example
from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.base import Model
from agent_tunix.models.chat import Message
from agent_tunix.models.checkpoints.hub import find_checkpoint, is_remote
from agent_tunix.models.checkpoints.loading import open_weights, read_architecture, weight_shapes
from agent_tunix.models.checkpoints.peft import base_of, is_peft, read_adapters
from agent_tunix.models.lora import Trainable
from agent_tunix.models.sharding import mesh_of_sizes, place
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.training import loading
from agent_tunix.training.answering import Asking, answers_to
from agent_tunix.training.data import refuse_unknown_tokens
from agent_tunix.training.progress import say
from agent_tunix.training.rollouts import pad_prompts

Dtype = Literal["float32", "bfloat16"]
WIDTH = 32  # tokens, to a multiple of which texts are padded: each width is a program of its own


class Asked(InferenceSection):
    """How completions are drawn."""

    max_new_tokens: Length
    num_generations: Positive
    batch_size: Positive
    seed: int = Field(ge=0, lt=2**31)


class Policy:
    """A model that answers.

    `system_prompt` is the system's in every chat that has no message of the system, and `enable_thinking` the switch of its
    chat template (None: as the template has it): for a run, what it was trained with.
    """

    def __init__(
        self,
        model: Model,
        trainable: Trainable | None = None,
        system_prompt: str = "",
        enable_thinking: bool | None = None,
    ) -> None:
        self.system_prompt, self.enable_thinking = system_prompt, enable_thinking
        self._inference = Inference(model)
        self._weights = self._inference.policy(trainable)

    @property
    def architecture(self) -> Architecture:
        return self._inference.model.arch

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, after the one that begins every text, where the model's tokenizer puts one there."""
        return self._inference.model.tokenizer.begun(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without the control tokens among them."""
        return self._inference.model.tokenizer.decode([int(token) for token in token_ids])

    def logits(self, token_ids: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """Float32 logits over the vocabulary at every position; those at position t are for the token after it.

        Args:
            token_ids: The tokens of one text, or of several, which may differ in length. They are read as they are, so they
                should begin with the token that begins a text, as those of `encode` do.

        Returns:
            (tokens, vocabulary) for one text. (texts, tokens of the longest, vocabulary) for several, NaN after the end of
            those that are shorter. A vocabulary of 262,144 makes 1 MiB of each token.
        """
        single = len(token_ids) > 0 and np.ndim(token_ids[0]) == 0
        given: Any = [token_ids] if single else token_ids
        rows = [[int(token) for token in row] for row in given]
        if not rows or not all(rows):
            raise UserError("logits: every text needs at least one token.")
        if strange := [token for row in rows for token in row if not 0 <= token < self.architecture.vocab_size]:
            raise UserError(f"logits: {strange[0]} is no token; the model has {self.architecture.vocab_size}, from 0 on.")
        model, longest = self._inference.model, max(map(len, rows))
        filled = rows + [rows[-1]] * (-len(rows) % model.mesh.shape["fsdp"])
        prompts = pad_prompts(_examples(filled), _width(rows), model)
        padded_BSV = distributed.whole(self._inference.logits(self._weights, prompts))
        logits_BTV = np.full((len(rows), longest, padded_BSV.shape[-1]), np.nan, np.float32)
        for logits_TV, padded_SV, row in zip(logits_BTV, padded_BSV, rows, strict=False):
            logits_TV[: len(row)] = padded_SV[-len(row) :]
        return logits_BTV[0] if single else logits_BTV

    @typing.overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float = ...,
        seed: int = ...,
        num_generations: None = ...,
        batch_size: int = ...,
    ) -> list[str]: ...
    @typing.overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float = ...,
        seed: int = ...,
        num_generations: int,
        batch_size: int = ...,
    ) -> list[list[str]]: ...
    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        num_generations: int | None = None,
        batch_size: int = 16,
    ) -> list[str] | list[list[str]]:
        """What the model writes after each prompt, by the sampler that training uses.

        The same arguments give the same texts. A prompt is continued as it stands; `chat` asks in the model's format.

        Args:
            prompts: Texts; the token that begins a text is put before each where the model has one (Qwen's have none).
            max_new_tokens: Tokens of a completion, at most.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_k: Sample from the k likeliest tokens; None: from all.
            top_p: Sample from the smallest set of tokens with this probability.
            seed: Of what is drawn.
            num_generations: Completions of each prompt; None: one.
            batch_size: Prompts that are read at once.

        Returns:
            A text for each prompt; with `num_generations`, also with 1, a list of texts for each.
        """
        if isinstance(prompts, str):
            raise UserError("generate: prompts is a list of texts, not one text.")
        if num_generations is not None and num_generations > 1 and not temperature:
            raise UserError(f"num_generations={num_generations}: at temperature 0 all would be the same; give another.")
        given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        given |= {"num_generations": 1 if num_generations is None else num_generations, "batch_size": batch_size}
        texts = self._complete([self.encode(prompt) for prompt in prompts], validate(given, Asked, "generate"))
        return [text for (text,) in texts] if num_generations is None else texts

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """The assistant's answer, asked in the format that training asks in: the model's own chat template.

        Args:
            messages: As in other chat interfaces, `{"role": "user", "content": "..."}`: user and assistant in turn, the user
                first and last. One of the system may come before, in the place of `system_prompt`.
            max_new_tokens, temperature, top_k, top_p, seed: As for `generate`.
        """
        how = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        tokenizer = self._inference.model.tokenizer
        asked = tokenizer.encode(tokenizer.chat.conversation(messages, self.system_prompt, self.enable_thinking))
        ((text,),) = self._complete([asked], validate(how | {"num_generations": 1, "batch_size": 1}, Asked, "chat"))
        return text

    def _complete(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[list[str]]:
        if not prompts:
            return []
        refuse_unknown_tokens(prompts, self.architecture)
        tokenizer = self._inference.model.tokenizer
        sampling = Sampling(
            top_k=asked.top_k,
            top_p=asked.top_p,
            max_steps=asked.max_new_tokens,
            num_generations=asked.num_generations,
            end_ids=tokenizer.end_ids,
            pad_id=tokenizer.pad_id,
            greedy=asked.temperature == 0,
        )
        key, temperature = jax.random.key(asked.seed), asked.temperature or 1.0
        asking = Asking(_width(prompts), asked.batch_size, key, sampling, temperature)
        return answers_to(self._inference, self._weights, None, _examples(prompts), asking).texts


def load(weights: str | None, adapter: str | None, dtype: str | None, step: StepOrBest | None, console: Console) -> Policy:
    """See `agent_tunix.load`."""
    if dtype not in (None, *typing.get_args(Dtype)):
        raise UserError(f"dtype={dtype}: must be one of {', '.join(typing.get_args(Dtype))}")
    if adapter is None and step is not None:
        raise UserError(f"step={step}: a step of which run? Give adapter=<its folder> too.")
    loading.start_device(partial(say, console))
    if adapter is not None and is_remote(adapter):
        adapter = str(loading.adapter_folder(adapter))
    if adapter is not None and not is_peft(Path(adapter)):
        return _of_run(adapter, weights, dtype, step, console)
    if step is not None:
        raise UserError(f"step={step}: {adapter} is an adapter for PEFT, which has no steps.")
    if adapter is not None:
        model = _open(base_of(Path(adapter)) if weights is None else weights, dtype)
        return Policy(model, place(read_adapters(Path(adapter), model.arch), model.arch, model.mesh))
    if weights is None:
        raise UserError("load: give weights, as in load('package:tiny'), or an adapter, as in load(adapter='runs/<time>').")
    return Policy(_open(weights, dtype))


def _of_run(folder: str, weights: str | None, dtype: str | None, step: StepOrBest | None, console: Console) -> Policy:
    """What a run has learnt, over its own base or over the same weights in another place."""
    trained = base = loading.saved_config(folder, "adapter")
    if weights is not None:
        if changed := folder if trained.model.lora_rank == 0 else loading.changed_base(trained):
            raise UserError(
                f"adapter={folder}: {changed} has trained all weights, so this is no adapter of {weights}.\nLeave the "
                "weights out: those that the run has learnt are loaded."
            )
        training = trained.training.model_copy(update={"init_from": None})
        base = trained.model_copy(
            update={"model": trained.model.model_copy(update={"weights": weights}), "training": training}
        )
    if dtype is not None:
        base = loading.held_in(base, dtype, base.model.base_dtype)
    with made_of(folder if weights is None else None):
        model = loading.load_trained_model(base, partial(say, console))
    trainable, _ = loading.learnt_by(folder, trained, model, step)
    return Policy(model, trainable, trained.data.system_prompt, trained.data.enable_thinking)


def _open(weights: str, dtype: str | None) -> Model:
    """A checkpoint as it describes itself, on one device."""
    checkpoint = find_checkpoint(weights)
    arch = read_architecture(checkpoint, {})
    held = arch, jnp.dtype(dtype or loading.usual_dtype(arch)), mesh_of_sizes(), None
    return Model(arch, load_tokenizer(checkpoint), weight_shapes(*held), open_weights(checkpoint, *held))


def _examples(rows: Sequence[Sequence[int]]) -> list[Example]:
    """Prompts without a question, for what takes problems."""
    return [Example("", "", tuple(row)) for row in rows]


def _width(rows: Sequence[Sequence[int]]) -> int:
    return -(-max(map(len, rows)) // WIDTH) * WIDTH
