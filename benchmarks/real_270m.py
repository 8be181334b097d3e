"""The real Gemma 3 270M (base), from a GGUF file, through our loader, tokenizer, model and sampler, against transformers.

    python benchmarks/real_270m.py gemma-3-270m-q4_k_m.gguf        (needs the extras gguf and parity)

transformers dequantises the same file by its own code, so its logits must be ours.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from shipped import architecture
from transformers import AutoModelForCausalLM

from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.environments.stream import left_pad
from agent_tunix.models import transformer
from agent_tunix.models.checkpoints.loading import load_weights, read_architecture
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.training import loading

PROMPTS = ("The capital of France is", "2 + 2 =", "Water boils at a temperature of", "Once upon a time, there was a")
FILLER = " The quick brown fox jumps over the lazy dog." * 60  # longer than the window of 512
NEW_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    model = load(args.file)
    ids = [model.tokenizer.begun(text) for text in (*PROMPTS, FILLER)]
    tokens_BC = continue_greedily(model, ids[:-1])
    theirs = AutoModelForCausalLM.from_pretrained(args.file.parent, gguf_file=args.file.name, dtype=torch.float32).eval()
    compare_embeddings(model, theirs)
    compare_logits(model, theirs, ids)
    compare_continuations(model, theirs, ids[:-1], tokens_BC)


def load(file: Path) -> loading.Model:
    started, arch = time.perf_counter(), architecture("270m")
    if read_architecture(file, {}) != arch:
        raise SystemExit(f"{file} is not gemma3_270m")
    weights = load_weights(file, arch, jnp.float32)
    model = loading.Model(arch, load_tokenizer(file), weights, lambda: weights)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"loaded in {time.perf_counter() - started:.1f} s, peak {peak:.2f} GB")
    return model


def continue_greedily(model: loading.Model, ids: list[list[int]]) -> np.ndarray:
    """What our sampler makes of the prompts."""
    tokenizer = model.tokenizer
    batch = left_pad(ids, max(map(len, ids)), tokenizer.pad_id)
    greedy = Sampling(None, 1.0, NEW_TOKENS, 1, tokenizer.end_ids, tokenizer.pad_id, greedy=True)
    (drawn,) = sample(model.weights, (Draw(None, batch, jax.random.key(0)),), arch=model.arch, sampling=greedy)
    tokens_BC = np.asarray(drawn.tokens_BC)
    for text, row in zip(PROMPTS, tokens_BC, strict=True):
        print(f"{text!r} -> {tokenizer.decode(row)!r}")
    return tokens_BC


def compare_embeddings(model: loading.Model, theirs: torch.nn.Module) -> None:
    ours = {"model.embed_tokens.weight": model.weights.embed_VD, "model.norm.weight": model.weights.final_norm_D}
    found = theirs.state_dict()
    differing = sum(int((torch.tensor(np.asarray(value)) != found[name]).sum()) for name, value in ours.items())
    print(f"embedding and final norm: {differing} values differ from transformers'")


def compare_logits(model: loading.Model, theirs: torch.nn.Module, ids: list[list[int]]) -> None:
    forward = jax.jit(lambda w, t, p: transformer.unembed(w, transformer.forward(w, None, model.arch, t, p)[0]))
    for row in ids:
        tokens = np.array([row])
        ours = np.asarray(forward(model.weights, tokens, np.arange(len(row))[None]))
        with torch.no_grad():
            found = theirs(torch.tensor(tokens)).logits.numpy()
        same = (ours.argmax(-1) == found.argmax(-1)).mean()
        largest = np.abs(found).max()
        print(f"{len(row)} tokens: logits up to {largest:.0f} differ by at most {np.abs(ours - found).max():.1e}", end=", ")
        print(f"the likeliest token is the same at {same:.1%} of positions")


def compare_continuations(
    model: loading.Model, theirs: torch.nn.Module, ids: list[list[int]], tokens_BC: np.ndarray
) -> None:
    ends = list(model.tokenizer.end_ids)
    for row, our_row in zip(ids, tokens_BC, strict=True):
        with torch.no_grad():
            out = theirs.generate(torch.tensor([row]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=ends)
        new = out[0, len(row) :].numpy()
        print(f"greedy continuation equal: {np.array_equal(new, our_row[: len(new)])}")


if __name__ == "__main__":
    main()
