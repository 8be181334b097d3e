"""Small tokenizers with the special tokens of families of models, as their publishers write them to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "Ann has 12 pears and Bob has 30.",
    "How many pears has Ann in all?",
    "def f(x):\n    return x + 1",
    "naïve 日本語 🎉",
]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)


def bpe(cut: list[Any], special: list[str], normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE, with special tokens after its own, as those of Qwen and Llama 3 are."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def by(pattern: str) -> list[Any]:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None, ends: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def qwen(folder: Path, **config: Any) -> Path:
    """Qwen2.5 Instruct: no begin, and its padding ends a text too."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|vision_pad|>"]
    tokenizer = bpe(by(QWEN), special, normalizers.NFC())
    told = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    return write(folder, tokenizer, told | {"unk_token": None, "chat_template": CHATML} | config, ends)


def llama(folder: Path, **config: Any) -> Path:
    """Llama 3.2 Instruct: its post-processor puts the begin token in front, and no padding is named."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"]
    special += ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    tokenizer = bpe(by(LLAMA), special)
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    around = processors.TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A {begin[0]} $B", special_tokens=[begin]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    told = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": HEADERS}
    ends = [tokenizer.token_to_id(token) for token in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")]
    return write(folder, tokenizer, told | config, ends)


def smollm(folder: Path, **config: Any) -> Path:
    """SmolLM2 Instruct: its padding is its end, and its begin opens a turn."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>"]
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    told = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    tokenizer = bpe(cut, special)
    ends = tokenizer.token_to_id("<|im_end|>")
    return write(folder, tokenizer, told | {"chat_template": CHATML} | config, ends)
