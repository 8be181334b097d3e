"""What holding the base in 8 or 4 bits does to the logits: model.base_dtype against plain bfloat16, on a CPU.

    PYTHONPATH=src python benchmarks/base_dtype.py 270m                                        random weights, random tokens
    PYTHONPATH=src python benchmarks/base_dtype.py 270m --weights gemma-3-270m-q4_k_m.gguf     real ones, worked problems

The row of float32 shows how far bfloat16 arithmetic itself is from exact arithmetic over the same weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from shipped import architecture

from agent_tunix.environments.stream import left_pad
from agent_tunix.models import transformer
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import init_weights, load_weights, quantised, read_architecture
from agent_tunix.models.tokenizer import load_tokenizer

TEXTS = (
    "A baker makes 12 trays of rolls a day, with 24 rolls on each tray. She sells two thirds of them before noon and gives "
    "a dozen to her neighbours. How many rolls are left? She makes 12 * 24 = 288 rolls. Before noon she sells "
    "288 * 2 / 3 = 192. That leaves 288 - 192 = 96, and after the gift 96 - 12 = 84. The answer is 84.",
    "A train leaves the city at 9:15 and arrives at the coast at 11:45. It stops for 6 minutes at each of 5 stations. How "
    "long does it move? The journey takes two and a half hours, which is 150 minutes. The stops take 5 * 6 = 30 minutes. So "
    "the train moves for 150 - 30 = 120 minutes, or two hours. The answer is 120.",
    "The river rises in the mountains, where snow lies until May, and runs south for three hundred miles before it meets "
    "the sea. For most of that way it is slow and brown. Farmers on both banks draw water from it in summer, and every few "
    "years, after a wet spring, it takes back some of their fields.",
)


def inputs(arch: Architecture, checkpoint: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions, three sequences: of the texts, or drawn at random where there is no tokenizer."""
    if checkpoint is None:
        rng = np.random.default_rng(0)
        ids = [list(rng.integers(6, arch.vocab_size, 80)) for _ in TEXTS]
    else:
        tokenizer = load_tokenizer(checkpoint)
        ids = [tokenizer.begun(text) for text in TEXTS]
    batch = left_pad(ids, max(map(len, ids)), 0)
    return np.asarray(batch.tokens_PS), np.asarray(batch.positions_PS)


def logits(weights: Weights, arch: Architecture, tokens, positions) -> np.ndarray:
    """Of all tokens that are no padding."""
    read = jax.jit(lambda w: transformer.unembed(w, transformer.forward(w, None, arch, tokens, positions)[0]))
    return np.asarray(read(weights))[positions >= 0]


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def compare(name: str, z: np.ndarray, reference: np.ndarray, following: np.ndarray, seen: np.ndarray) -> str:
    centred = reference - reference.mean(axis=-1, keepdims=True)
    difference = z - z.mean(axis=-1, keepdims=True) - centred
    ours, theirs = log_softmax(z), log_softmax(reference)
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)
    agree = (z.argmax(axis=-1) == reference.argmax(axis=-1)).mean()
    nll = -np.take_along_axis(ours, following[:, None], axis=-1)[:, 0][seen].mean()
    error = np.linalg.norm(difference) / np.linalg.norm(centred)
    return f"| {name} | {error:.2%} | {kl.mean():.5f} | {np.quantile(kl, 0.99):.4f} | {agree:.1%} | {nll:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size")
    parser.add_argument("--weights", help="as model.weights; none: random")
    args = parser.parse_args()
    arch = architecture(args.size)
    checkpoint = find_checkpoint(args.weights) if args.weights else None
    if checkpoint is not None and read_architecture(checkpoint, {}) != arch:
        raise SystemExit(f"{args.weights} is not gemma3_{args.size}")
    bf16 = jnp.bfloat16
    plain = load_weights(checkpoint, arch, bf16) if checkpoint else init_weights(jax.random.key(0), arch, bf16)
    tokens, positions = inputs(arch, checkpoint)
    following, last = np.roll(tokens, -1, axis=1), np.arange(tokens.shape[1]) == tokens.shape[1] - 1
    kept = positions >= 0
    seen = ~np.broadcast_to(last, kept.shape)[kept]
    reference = logits(plain, arch, tokens, positions)
    print(f"{args.size}, {args.weights or 'random weights'}, {kept.sum()} tokens")
    print("| base | logits differ by | KL, mean nats | KL, 99 % | same likeliest token | nats a token of the text |")
    print("|---|---|---|---|---|---|")
    variants = {
        "bfloat16": lambda: plain,
        "float32 arithmetic": lambda: jax.tree.map(lambda x: x.astype(jnp.float32), plain),
        "int8": lambda: quantised(plain, "int8"),
        "nf4": lambda: quantised(plain, "nf4"),
    }
    for name, make in variants.items():
        print(compare(name, logits(make(), arch, tokens, positions), reference, following[kept], seen), flush=True)


if __name__ == "__main__":
    main()
