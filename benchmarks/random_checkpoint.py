"""Writes a checkpoint of random weights, for measuring speed and memory where the real ones are not at hand.

PYTHONPATH=src python benchmarks/random_checkpoint.py 270m /tmp/random-270m [<tokenizer.model>]

Without a tokenizer it makes one up, in which every token but a few is a word of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from race import BOS, EOS, NAMED, PAD, UNKNOWN
from shipped import architecture, model_section
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from agent_tunix.models.checkpoints.loading import init_weights, save_weights


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = {name: i for i, name in enumerate(NAMED)} | {f"w{i}": i for i in range(len(NAMED), vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in NAMED if name.startswith("<")])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNKNOWN}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    size, folder, *tokenizer = sys.argv[1:]
    section = model_section(size)
    arch, dtype = architecture(size), jnp.dtype(section.dtype)
    save_weights(Path(folder), init_weights(jax.random.key(0), arch, dtype), arch, dtype)
    if tokenizer:
        shutil.copy(tokenizer[0], folder)
    else:
        write_tokenizer(Path(folder), arch.vocab_size)


if __name__ == "__main__":
    main()
