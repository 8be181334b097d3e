"""Prompts by chat templates are the tokens that transformers' `apply_chat_template` gives, on 300 texts for each tokenizer.

Those that are made up here are always compared. Real ones are where AGENT_TUNIX_MODELS says: a folder of .gguf files and of
folders with a tokenizer, as `shared/tools/real-weights` and the hub give them. transformers reads them as we export them,
which tests the exports too; what GGUF files mean is tested against transformers' own reading of them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from families_of_tokenizers import llama, qwen, smollm
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from agent_tunix.models.checkpoints.gguf import header_field
from agent_tunix.models.tokenizer import Tokenizer, load_tokenizer
from agent_tunix.models.tokenizer_files import tokenizer_files

pytestmark = pytest.mark.parity
SIGNS = "ab cdé\n\t日1290'’.,;!?<|>🎉\u0301\u00a0  "
ODD = [
    "",
    " \n",
    "\t\ttab\n\n\n\nx",
    "naïve 日本語 🎉 \r\n x\u200bz ﬁ ½ e\u0301",
    "<|im_start|>a<|im_end|>b<|endoftext|>",
    "<|begin_of_text|><|eot_id|><bos><start_of_turn>user\nhi<end_of_turn><s></s>",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # c\n",
    "1,234.50 12345678",
    "I'LL don't WE'VE",
    "{{ x }} {% if %}",
    "<think>\nno\n</think>",
    "a" * 5000,
    " " * 200 + "x",
    "\x00\x01▁",
]
MODELS = os.environ.get("AGENT_TUNIX_MODELS")


def texts() -> list[str]:
    rng = random.Random(0)
    drawn = ["".join(rng.choices(SIGNS, k=rng.randrange(1, 80))) for _ in range(150)]
    sources = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
    return (ODD + drawn + [path.read_text()[:3000] for path in sources] * 3)[:300]


def real() -> list[Path]:
    folder = Path(MODELS) if MODELS else Path(os.devnull)
    return sorted([*folder.glob("*.gguf"), *(path.parent for path in folder.glob("*/tokenizer_config.json"))])


@pytest.fixture(params=[qwen, llama, smollm, "gemma", *real()], ids=lambda p: getattr(p, "__name__", None) or Path(p).name)
def checkpoint(request, tmp_path) -> Path:
    if request.param == "gemma":
        return request.getfixturevalue("data") / "gemma3_tokenizer"
    if isinstance(request.param, Path):
        return request.param
    return request.param(tmp_path / "made", tokenizer_class="PreTrainedTokenizerFast")


def assert_same_prompts(ours: Tokenizer, theirs, longest_run: int = 10**9) -> None:
    for system in ("", "Think.\n\nThen  answer."):
        told = [{"role": "system", "content": system}] if system else []
        for text in texts():
            if " " * longest_run in text:
                continue
            messages = [*told, {"role": "user", "content": text}]
            wanted = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
            assert ours.encode(ours.chat.prompt(text, system)) == list(wanted), text
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_prompts_are_the_tokens_that_transformers_gives(checkpoint, tmp_path):
    for name, content in tokenizer_files(checkpoint).items():
        (tmp_path / name).write_bytes(content)
    # Of Gemma's SentencePiece model transformers makes merges, by which long runs of spaces become other tokens.
    longest_run = 17 if (checkpoint / "tokenizer.model").exists() else 10**9
    assert_same_prompts(load_tokenizer(checkpoint), AutoTokenizer.from_pretrained(tmp_path), longest_run)


@pytest.mark.parametrize("path", [path for path in real() if path.suffix == ".gguf"], ids=lambda path: path.name)
def test_a_real_gguf_is_read_as_transformers_reads_it(path):
    """transformers leaves out what its own classes of these families do first, as their tokenizer.json does."""
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend, pre = theirs.backend_tokenizer, header_field(path, "tokenizer.ggml.pre")
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    if pre == "smollm":
        cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(cut)
    assert_same_prompts(load_tokenizer(path), theirs)


@pytest.mark.skipif(not MODELS, reason="no real models: set AGENT_TUNIX_MODELS to a folder of .gguf files")
def test_real_models_are_there():
    assert real(), f"{MODELS} holds neither .gguf files nor folders with a tokenizer"
