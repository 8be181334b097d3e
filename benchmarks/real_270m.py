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
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from agent_tunix.config.load import config_folder
from agent_tunix.config.schema import ModelSection
from agent_tunix.engine.rollout import Draw, Sampling, sample
from agent_tunix.models import gemma3
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.models.weights import load_weights, read_architecture
from agent_tunix.tasks.datasets import left_pad
from agent_tunix.workflows import setup

PROMPTS = ("The capital of France is", "2 + 2 =", "Water boils at a temperature of", "Once upon a time, there was a")
FILLER = " The quick brown fox jumps over the lazy dog." * 60  # longer than the window of 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    section = OmegaConf.to_container(OmegaConf.load(config_folder() / "model" / "gemma3_270m.yaml"))
    started = time.perf_counter()
    arch = setup.architecture(ModelSection.model_validate(section))
    if read_architecture(args.file, arch) != arch:
        raise SystemExit(f"{args.file} is not gemma3_270m")
    weights = load_weights(args.file, arch, jnp.float32)
    model = setup.Model(arch, load_tokenizer(args.file), weights, lambda: weights)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"loaded in {time.perf_counter() - started:.1f} s, peak {peak:.2f} GB")

    ids = [[model.tokenizer.begin_id, *model.tokenizer.encode(text)] for text in (*PROMPTS, FILLER)]
    batch = left_pad(ids[:-1], max(map(len, ids[:-1])), model.tokenizer.pad_id)
    greedy = Sampling(None, 1.0, 24, 1, model.tokenizer.end_ids, model.tokenizer.pad_id, greedy=True)
    (drawn,) = sample(model.weights, (Draw(None, batch, jax.random.key(0)),), arch=model.arch, sampling=greedy)
    for text, row in zip(PROMPTS, np.asarray(drawn.tokens_BC), strict=True):
        print(f"{text!r} -> {model.tokenizer.decode(row)!r}")

    theirs = AutoModelForCausalLM.from_pretrained(args.file.parent, gguf_file=args.file.name, dtype=torch.float32).eval()
    differing = sum(
        int((torch.tensor(np.asarray(value)) != theirs.state_dict()[name]).sum())
        for name, value in (
            ("model.embed_tokens.weight", model.weights.embed_VD),
            ("model.norm.weight", model.weights.final_norm_D),
        )
    )
    print(f"embedding and final norm: {differing} values differ from transformers'")
    forward = jax.jit(lambda w, t, p: gemma3.unembed(w, gemma3.forward(w, None, model.arch, t, p)[0]))
    for row in ids:
        tokens = np.array([row])
        ours = np.asarray(forward(model.weights, tokens, np.arange(len(row))[None]))
        with torch.no_grad():
            found = theirs(torch.tensor(tokens)).logits.numpy()
        same = (ours.argmax(-1) == found.argmax(-1)).mean()
        largest = np.abs(found).max()
        print(f"{len(row)} tokens: logits up to {largest:.0f} differ by at most {np.abs(ours - found).max():.1e}", end=", ")
        print(f"the likeliest token is the same at {same:.1%} of positions")
    with torch.no_grad():
        for row, our_row in zip(ids[:-1], np.asarray(drawn.tokens_BC), strict=True):
            out = theirs.generate(torch.tensor([row]), do_sample=False, max_new_tokens=24, eos_token_id=list(greedy.end_ids))
            new = out[0, len(row) :].numpy()
            print(f"greedy continuation equal: {np.array_equal(new, our_row[: len(new)])}")


if __name__ == "__main__":
    main()
