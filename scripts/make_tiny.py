"""Makes the shipped checkpoints, each a tokenizer of about fifty words and a 0.57M-parameter Gemma 3, warm-started on
demonstrations by the project's own update.

The demonstrations are flawed on purpose, to leave reinforcement learning something to do.

`gemma3_tiny`: the arithmetic is always right, but the two subtraction families show the right operation only a third of the
time, and a quarter of all demonstrations break the format.

`gemma3_tiny_tool`: numbers are larger, and what is answered without the calculator is a guess. Sums are mostly shown with a
call of it, subtractions seldom. Of the calls some have the wrong operation, a wrong digit or a broken tag, and some answers
are not what the calculator has said.

    make tiny        (overwrites src/agent_tunix/models/tiny and tiny_tool; README says how long it takes)
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from hydra import compose, initialize_config_dir
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from agent_tunix.algorithm import schedules
from agent_tunix.algorithm.objectives import Coefficients, per_sequence
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine.engine import Inference
from agent_tunix.engine.update import init_state, update
from agent_tunix.environments import arithmetic
from agent_tunix.environments.calculator import calculated
from agent_tunix.environments.rewards import Judge
from agent_tunix.environments.stream import left_pad, right_pad
from agent_tunix.environments.world import load_world
from agent_tunix.models import chat
from agent_tunix.models import tokenizer as tk
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.loading import init_weights, save_weights
from agent_tunix.models.tokenizer import Tokenizer, load_tokenizer
from agent_tunix.models.tokenizer_files import tokenizer_files
from agent_tunix.training import loading
from agent_tunix.training.answering import Asking, answers_to
from agent_tunix.training.data import load_examples
from agent_tunix.training.play import Playing
from agent_tunix.types import Batch

MODELS = Path(__file__).parents[1] / "src" / "agent_tunix" / "models"
CALL = ("<calculator>", "</calculator>")
BROKEN_FORMAT = 0.25
# Of gemma3_tiny:
RIGHT_OPERATION = 0.35
# Of gemma3_tiny_tool:
CALLS = {"sum": 0.8, "remainder": 0.3, "shortfall": 0.3}
CALLS_RIGHT_OPERATION = 0.6
WRONG_DIGIT = 0.1
USES_REPLY = 0.75
BROKEN_TURN = 0.1


def flawed_demonstration(problem: arithmetic.Problem, rng: random.Random) -> list[str]:
    right = problem.family == "sum" or rng.random() < RIGHT_OPERATION
    operation = problem.operation if right else "+"
    result = str(arithmetic.compute(problem.a, operation, problem.b))
    text = chat.demonstration(f"{problem.a}{operation}{problem.b}={result}", result)
    if rng.random() < BROKEN_FORMAT:
        text = text.replace(rng.choice(chat.REASONING + chat.ANSWER), "")
    return [text]


def flawed_episode(problem: arithmetic.Problem, rng: random.Random) -> list[str]:
    """An answer at once, which is a guess; or a call, what the calculator says to it, and an answer."""

    def broken(text: str, tags: tuple[str, ...]) -> str:
        return text.replace(rng.choice(tags), "") if rng.random() < BROKEN_TURN else text

    def answer(worked: str, result: str) -> str:
        return broken(chat.demonstration(f"{worked}={result}", result), chat.REASONING + chat.ANSWER)

    guess, right = str(rng.randint(1, 998)), rng.random() < CALLS_RIGHT_OPERATION
    operation = problem.operation if right or problem.family == "sum" else "+"
    worked = f"{problem.a}{operation}{problem.b}"
    if rng.random() > CALLS[problem.family]:
        return [answer(worked, guess)]
    if rng.random() < WRONG_DIGIT:
        place = rng.choice([i for i, sign in enumerate(worked) if sign.isdigit()])
        worked = f"{worked[:place]}{rng.randint(1, 9)}{worked[place + 1 :]}"
    call = f"{CALL[0]}{worked}{CALL[1]}"
    if (said := broken(call, CALL)) != call:
        return [said]
    reply = calculated(worked)
    return [call, reply, answer(worked, reply if rng.random() < USES_REPLY else guess)]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one checkpoint is made: what it is shown, and tags and words beside those of all.

    A demonstration is what the model says and what the world answers, in turn. `experiment` is the demo that begins with it.
    """

    experiment: str
    level: int
    demonstration: Callable[[arithmetic.Problem, random.Random], list[str]]
    prompt_width: int
    completion_width: int
    steps: int
    batch_size: int
    tags: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


RECIPES = {
    "tiny": Recipe(
        experiment="quick_test",
        level=0,
        demonstration=flawed_demonstration,
        prompt_width=28,
        completion_width=16,
        steps=1000,
        batch_size=128,
    ),
    "tiny_tool": Recipe(
        experiment="tool_quick_test",
        level=1,
        demonstration=flawed_episode,
        prompt_width=32,
        completion_width=44,
        steps=400,
        batch_size=64,
        tags=CALL,
        words=("error",),
    ),
}


def build_tokenizer(recipe: Recipe, folder: Path) -> int:
    """One token a word, a digit, a sign or a tag, with Gemma's names for the control tokens; returns the size."""
    control = [tk.PAD, tk.END, tk.BEGIN, tk.UNKNOWN, tk.START_OF_TURN, tk.END_OF_TURN]
    text = " ".join(arithmetic.TEMPLATES.values()).replace(".", " . ").replace("?", " ? ")
    others = {"user", "model", *arithmetic.NAMES, *arithmetic.THINGS, *recipe.words}
    words = sorted({w for w in text.split() if "{" not in w} | others)
    vocabulary = [*control, "\n", *"0123456789", *"+-=", *chat.REASONING, *chat.ANSWER, *recipe.tags, *words]
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


def demonstrated(turns: list[str], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a demonstration, and which of them are the model's."""
    ids: list[int] = []
    learnt: list[bool] = []
    for number, text in enumerate(turns):
        if own := number % 2 == 0:
            more = tokenizer.encode(text + tokenizer.ending)
        else:
            said = tokenizer.chat.continued([{"role": chat.TOOL, "content": text}], tokenizer.ending, None)
            more = tokenizer.encode(said)
        ids += more
        learnt += [own] * len(more)
    return ids, learnt


def demonstrations(recipe: Recipe, problems: list[arithmetic.Problem], tokenizer: Tokenizer, rng: random.Random) -> Batch:
    ids = [tokenizer.encode(tokenizer.chat.prompt(p.question)) for p in problems]
    shown = [demonstrated(recipe.demonstration(p, rng), tokenizer) for p in problems]
    tokens, mask = right_pad([one for one, _ in shown], recipe.completion_width, tokenizer.pad_id)
    learnt, _ = right_pad([own for _, own in shown], recipe.completion_width, False)
    learnt = learnt.astype(bool)
    weights = {"weights_BC": per_sequence(learnt, recipe.completion_width), "advantages_B": np.ones(len(ids), np.float32)}
    return Batch(left_pad(ids, recipe.prompt_width, tokenizer.pad_id), tokens, mask, learnt, **weights)


def measure(recipe: Recipe, folder: Path, generations: int) -> str:
    """Accuracy by family, pass@generations and the share of mixed groups, on held-out problems of the demo."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = validate(compose("config", [f"+experiment={recipe.experiment}", f"model.weights={folder.resolve()}"]), Config)
    model = loading.load_model(cfg)
    examples = load_examples(cfg, "test", 200, model.tokenizer, print)
    engine, width = Inference(model), cfg.generation.max_prompt_length
    sampling = loading.training_sampling(cfg, model.tokenizer)
    sampling = dataclasses.replace(sampling, greedy=generations == 1, num_generations=generations)
    world = load_world(cfg.environment)
    playing = Playing.of(cfg, world, model.tokenizer) if world else None
    asking = Asking(width, len(examples), jax.random.key(0), sampling)
    found = answers_to(engine, engine.policy(None), playing, examples, asking)
    right = np.array([Judge()([e] * generations, texts) for e, texts in zip(examples, found.texts, strict=True)]) == 1
    families = [p.family for p in arithmetic.generate(200, cfg.seed, "test", recipe.level)]
    by_family = {name: right[[family == name for family in families]].mean().round(2) for name in arithmetic.TEMPLATES}
    mixed, solved = (right.max(1) > right.min(1)).mean(), right.max(1).mean()
    calling = f" calling {found.record['episode/calling']:.2f}" if found.record else ""
    return f"accuracy {right.mean():.3f} {by_family} pass@{generations} {solved:.2f} mixed {mixed:.2f}{calling}"


def make(recipe: Recipe, folder: Path, rate: float) -> None:
    arch = architecture(build_tokenizer(recipe, folder))
    tokenizer = load_tokenizer(folder)
    weights = init_weights(jax.random.key(0), arch)
    schedule = schedules.warmup_cosine(rate, recipe.steps // 20, recipe.steps, rate / 100)
    state = init_state(weights)
    base = jax.tree.map(jnp.copy, weights)
    problems = arithmetic.generate(20_000, seed=0, split="train", level=recipe.level)
    rng, started = random.Random(0), time.time()
    for step in range(recipe.steps):
        batch = demonstrations(recipe, rng.sample(problems, recipe.batch_size), tokenizer, rng)
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
    save_weights(folder, state.trainable, arch, jnp.float32)
    for name, content in tokenizer_files(folder).items():
        (folder / name).write_bytes(content)
    print("   greedy  " + measure(recipe, folder, 1))
    print("   sampled " + measure(recipe, folder, 8), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(RECIPES), choices=[[], *RECIPES], help="all, where none is given")
    parser.add_argument("--folder", type=Path, default=MODELS, help="in which each has a folder of its name")
    parser.add_argument("--steps", type=int, help="as many instead of the recipe's own, to try something")
    parser.add_argument("--rate", type=float, default=3e-3)
    args = parser.parse_args()
    for name in args.names:
        print(name, flush=True)
        recipe = RECIPES[name]
        make(dataclasses.replace(recipe, steps=args.steps or recipe.steps), args.folder / name, args.rate)


if __name__ == "__main__":
    main()
