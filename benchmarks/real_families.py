"""A real checkpoint in a GGUF file beside transformers' reading of the same file: logits, likeliest tokens, and a chat.

python benchmarks/real_families.py <file.gguf>        (needs the extras `gguf` and `parity`, and accelerate)
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import jax
import numpy as np

import agent_tunix

TEXTS = (
    "The capital of France is Paris, and the capital of Germany is",
    "def add(a, b):\n    return",
    "Natalia sold 48 clips in April and half as many in May. Altogether she sold",
)
QUESTION = "What is the capital of France? Answer in one sentence."
NEW = 16


def theirs(file: Path, rows: list[list[int]]) -> tuple[list[np.ndarray], list[list[int]]]:
    """transformers' logits of each text, and its greedy continuation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    logits, greedy = [], []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            logits.append(model(ids).logits[0].numpy())
            made = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
            greedy.append(made[0, len(row) :].tolist())
    return logits, greedy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    policy = agent_tunix.load(str(file), dtype="float32")
    rows = [policy.encode(text) for text in TEXTS]
    logits, greedy = theirs(file, rows)
    gc.collect()
    print(f"{file.name}: {policy.architecture.family}, {jax.devices()[0].device_kind}, float32\n")
    print("| text | largest difference | of logits up to | likeliest tokens equal | greedy tokens equal |")
    print("|---|---|---|---|---|")
    for text, row, wanted, made in zip(TEXTS, rows, logits, greedy, strict=True):
        found = policy.logits(row)[:, : wanted.shape[1]]
        after = policy.logits(row + made)[len(row) - 1 : -1].argmax(axis=-1)
        same, alike = (found.argmax(-1) == wanted.argmax(-1)).sum(), (after == np.array(made)).sum()
        shown = f"{np.abs(found - wanted).max():.1e} | {np.abs(wanted).max():.0f} | {same} of {len(row)}"
        print(f"| {text[:30]!r} | {shown} | {alike} of {len(made)} |")
    print(f"\nAsked {QUESTION!r}: {policy.chat([{'role': 'user', 'content': QUESTION}], max_new_tokens=24)!r}")


if __name__ == "__main__":
    main()
