"""Seconds of rollouts and evaluations whose completions end where a trained policy ends them, narrowed and not.

    PYTHONPATH=src python benchmarks/real_lengths.py <run folder> [held-out problems]

Rollouts are of the run's first batches, as it would draw them now. Held-out problems are answered greedily, as many at once
as the run's `evaluation.batch_size` says, and all at once. A rollout that narrows goes on with a quarter of its sequences
once the others have ended. Medians of three, in turn; the first calls, which compile, apart.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from agent_tunix.engine import compiler_options, sampler
from agent_tunix.engine.random_keys import Purpose
from agent_tunix.engine.sampler import Draw, Sampling
from agent_tunix.environments.stream import Example, batches
from agent_tunix.training import loading
from agent_tunix.training.data import load_examples, prompt_width
from agent_tunix.training.rollouts import pad_prompts
from agent_tunix.training.setup import Loaded, Setup, prepare
from agent_tunix.types import Prompts, Rollouts

BATCHES, REPEATS = 3, 3
NEVER = 10**9  # steps that no rollout has, so that none narrows
Drawer = Callable[[Prompts, jax.Array, Sampling, float], Rollouts]


def drawer(r: Setup, trainable, narrows: bool) -> Drawer:
    """Draws by a program of its own."""
    weights, adapters = r.engine.policy(trainable)
    least = sampler.LEAST_STEPS if narrows else NEVER

    @partial(jax.jit, static_argnames="sampling", compiler_options=compiler_options.LOOP_OPTIONS)
    def draw(weights, draws, sampling):
        before, sampler.LEAST_STEPS = sampler.LEAST_STEPS, least  # it is read while this is traced
        try:
            return sampler.sample.__wrapped__(weights, draws, arch=r.model.arch, sampling=sampling)[0]
        finally:
            sampler.LEAST_STEPS = before

    return lambda prompts, key, sampling, temperature: draw(weights, (Draw(adapters, prompts, key, temperature),), sampling)


def rollouts(r: Setup, draw: Drawer) -> list[Rollouts]:
    width, found = r.task.prompt_width, []
    for position in range(BATCHES):
        prompts = pad_prompts(r.stream.batch(position), width, r.model)
        key = r.key(position, Purpose.ROLLOUT)
        found.append(jax.block_until_ready(draw(prompts, key, r.sampling, r.cfg.generation.temperature)))
    return found


def answers(r: Setup, examples: Sequence[Example], at_once: int, draw: Drawer) -> list[Rollouts]:
    width = prompt_width(examples, r.cfg.generation.max_prompt_length)
    greedy, found = dataclasses.replace(r.sampling, num_generations=1, greedy=True), []
    for index, batch in enumerate(batches(examples, at_once)):
        full = [*batch, *[batch[-1]] * (min(at_once, len(examples)) - len(batch))]
        key = jax.random.fold_in(r.key(0, Purpose.EVALUATION), index)
        found.append(jax.block_until_ready(draw(pad_prompts(full, width, r.model), key, greedy, 1.0)))
    return found


def timed(ways: dict[str, Callable[[], list[Rollouts]]]) -> dict[str, tuple[float, float, list[Rollouts]]]:
    """Seconds of each way's first call, the median of the later ones, and what came of it."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last = {}
    for _ in range(REPEATS + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            last[name] = way()
            seconds[name].append(time.perf_counter() - begin)
    return {name: (first, statistics.median(later), last[name]) for name, (first, *later) in seconds.items()}


def show(title: str, measured: dict[str, tuple[float, float, list[Rollouts]]]) -> None:
    base = next(iter(measured.values()))[1]
    print(f"\n{title}\n{'':34}{'first s':>9}{'s':>9}{'tokens/s':>10}{'times':>7}{'mean':>7}{'longest':>9}")
    for name, (first, seconds, found) in measured.items():
        lengths = np.concatenate([np.asarray(one.mask_BC).sum(axis=1) for one in found])
        rate, times = lengths.sum() / seconds, base / seconds
        print(f"{name:34}{first:9.2f}{seconds:9.3f}{rate:10.0f}{times:7.2f}{lengths.mean():7.1f}{lengths.max():9d}")


def main() -> None:
    folder, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1319
    cfg = loading.saved_config(folder, "run")
    loading.start_device(print)
    r = prepare(cfg, Loaded(), print)
    trainable, step = loading.learnt_by(folder, cfg, r.model, None)
    draws = {way: drawer(r, trainable, way == "narrowed") for way in ("whole", "narrowed")}
    examples = load_examples(cfg, "test", count, r.model.tokenizer, print)
    at_once = min(cfg.evaluation.batch_size, len(examples))
    P, G = r.cfg.training.prompts_per_step, r.sampling.num_generations
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {folder} at step {step}")
    ways = {name: partial(rollouts, r, draw) for name, draw in draws.items()}
    show(f"{BATCHES} rollouts, {P} x {G}, of at most {r.sampling.max_steps} tokens", timed(ways))
    ways = {f"{at_once} at once, {name}": partial(answers, r, examples, at_once, draw) for name, draw in draws.items()}
    ways["all at once, narrowed"] = partial(answers, r, examples, len(examples), draws["narrowed"])
    show(f"{len(examples)} held-out problems, greedy", timed(ways))


if __name__ == "__main__":
    main()
