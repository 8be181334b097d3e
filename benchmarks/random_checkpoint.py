"""Writes a checkpoint of random weights, for measuring speed and memory where the real ones are not at hand.

PYTHONPATH=src python benchmarks/random_checkpoint.py 270m /tmp/random-270m <tokenizer.model>
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from memory import architecture

from agent_tunix.models.weights import init_weights, save_weights


def main() -> None:
    size, folder, tokenizer = sys.argv[1:]
    arch = architecture(size)
    save_weights(Path(folder), init_weights(jax.random.key(0), arch, jnp.bfloat16), arch, jnp.bfloat16)
    shutil.copy(tokenizer, folder)


if __name__ == "__main__":
    main()
