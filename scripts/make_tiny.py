"""Makes the shipped checkpoint `gemma3_tiny`: a tokenizer of 47 words and a 0.57M-parameter Gemma 3, warm-started on
demonstrations by the project's own update.

The demonstrations are flawed on purpose, to leave reinforcement learning something to do: the arithmetic is always right,
but the two subtraction families show the right operation only a third of the time, and a quarter of all demonstrations
break the format.

    make tiny        (about 9 minutes on 2 cores; overwrites src/agent_tunix/models/tiny)
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from agent_tunix.algorithm import schedules
from agent_tunix.algorithm.objectives import Coefficients, per_sequence
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.engine.update import init_state, update
from agent_tunix.environments import arithmetic, rewards
from agent_tunix.environments.stream import left_pad, right_pad
from agent_tunix.models import chat
from agent_tunix.models import tokenizer as tk
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.loading import init_weights, save_weights
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.models.tokenizer_files import tokenizer_files
from agent_tunix.types import Batch

RIGHT_OPERATION = 0.35
BROKEN_FORMAT = 0.25
PROMPT_WIDTH, COMPLETION_WIDTH = 28, 16
TINY = Path(__file__).parents[1] / "src" / "agent_tunix" / "models" / "tiny"


def build_tokenizer(folder: Path) -> int:
    """One token a word, a digit, a sign or a tag, with Gemma's names for the control tokens; returns the size."""
    control = [tk.PAD, tk.END, tk.BEGIN, tk.UNKNOWN, tk.START_OF_TURN, tk.END_OF_TURN]
    text = " ".join(arithmetic.TEMPLATES.values()).replace(".", " . ").replace("?", " ? ")
    words = sorted({w for w in text.split() if "{" not in w} | {"user", "model", *arithmetic.NAMES, *arithmetic.THINGS})
    vocabulary = [*control, "\n", *"0123456789", *"+-=", *chat.REASONING, *chat.ANSWER, *words]
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=tk.UNKNOWN))
    pieces = Regex(r"<[^<>]+>|\d|\w+|\n|[^\w\s]")
    backend.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="removed", invert=True)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return len(vocabulary)


def architecture(vocab_size: int) -> Architecture:
    return Architecture(
        vocab_size=vocab_size,
        num_layers=4,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=1,
        head_dim=32,
        hidden_dim=256,
        sliding_window=32,
        global_every=2,
        query_scale=32**-0.5,
        rope_local_base=10_000.0,
        rope_global_base=1_000_000.0,
        rope_global_factor=1.0,
        norm_eps=1e-6,
    )


def flawed_demonstration(problem: arithmetic.Problem, rng: random.Random) -> str:
    right = problem.family == "sum" or rng.random() < RIGHT_OPERATION
    operation = problem.operation if right else "+"
    result = str(arithmetic.compute(problem.a, operation, problem.b))
    text = chat.demonstration(f"{problem.a}{operation}{problem.b}={result}", result)
    if rng.random() < BROKEN_FORMAT:
        text = text.replace(rng.choice(chat.REASONING + chat.ANSWER), "")
    return text


def measure(weights, arch, tokenizer, temperature: float, generations: int) -> str:
    """Accuracy by family, pass@generations and the share of mixed groups, on held-out problems."""
    problems = arithmetic.generate(200, seed=1, split="test")
    ids = [tokenizer.encode(tokenizer.chat.prompt(p.question)) for p in problems]
    sampling = Sampling(None, 1.0, COMPLETION_WIDTH + 8, generations, tokenizer.end_ids, tokenizer.pad_id, temperature == 0)
    batch = left_pad(ids, PROMPT_WIDTH, tokenizer.pad_id)
    (drawn,) = sample(weights, (Draw(None, batch, jax.random.key(0), temperature or 1.0),), arch=arch, sampling=sampling)
    texts = [tokenizer.decode(row) for row in np.asarray(drawn.tokens_BC)]
    right = np.array(
        [rewards.answer_correct("", text, str(problems[i // generations].answer)) for i, text in enumerate(texts)]
    ).reshape(len(problems), generations)
    families = {f: right[[p.family == f for p in problems]].mean().round(2) for f in arithmetic.TEMPLATES}
    mixed = ((right.max(1) == 1) & (right.min(1) == 0)).mean()
    solved = right.max(1).mean()
    return f"accuracy {right.mean():.3f} {families} pass@{generations} {solved:.2f} mixed {mixed:.2f} e.g. {texts[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=TINY)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=3e-3)
    args = parser.parse_args()

    arch = architecture(build_tokenizer(args.folder))
    tokenizer = load_tokenizer(args.folder)
    weights = init_weights(jax.random.key(0), arch)
    schedule = schedules.warmup_cosine(args.rate, args.steps // 20, args.steps, args.rate / 100)
    state = init_state(weights)
    base = jax.tree.map(jnp.copy, weights)
    problems = arithmetic.generate(20_000, seed=0, split="train")
    rng, started = random.Random(0), time.time()
    for step in range(args.steps):
        chosen = rng.sample(problems, args.batch)
        ids = [tokenizer.encode(tokenizer.chat.prompt(p.question)) for p in chosen]
        shown = [tokenizer.encode(flawed_demonstration(p, rng) + tokenizer.ending) for p in chosen]
        tokens, mask = right_pad(shown, COMPLETION_WIDTH, tokenizer.pad_id)
        learnt = {"weights_BC": per_sequence(mask, COMPLETION_WIDTH), "advantages_B": np.ones(len(chosen), np.float32)}
        batch = Batch(left_pad(ids, PROMPT_WIDTH, tokenizer.pad_id), tokens, mask, mask, **learnt)
        h = Hyperparameters(
            learning_rate=schedule(step + 1),
            weight_decay=0.01,
            beta1=0.9,
            beta2=0.98,
            eps=1e-8,
            max_grad_norm=1.0,
        )
        state, stats = update(state, batch, base, h, Coefficients(1.0), math.inf, arch=arch, micro_batches=1)
        if (step + 1) % 100 == 0:
            print(f"{step + 1:5d} loss {float(stats.loss.loss):.3f} {time.time() - started:.0f} s", flush=True)
        if (step + 1) % 500 == 0 or step + 1 == args.steps:
            print("   greedy  " + measure(state.trainable, arch, tokenizer, 0.0, 1))
            print("   sampled " + measure(state.trainable, arch, tokenizer, 1.0, 8), flush=True)
    save_weights(args.folder, state.trainable, arch, jnp.float32)
    for name, content in tokenizer_files(args.folder).items():
        (args.folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
