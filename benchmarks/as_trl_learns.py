"""Does GRPO here learn as TRL's GRPOTrainer does? Five questions, each a table:

    python benchmarks/as_trl_learns.py fed          TRL is given our completions and first adapters: are its updates ours?
    python benchmarks/as_trl_learns.py alone        TRL samples by itself: does it end where we end?
    python benchmarks/as_trl_learns.py adapters     does it matter who draws the first adapters?
    python benchmarks/as_trl_learns.py draws        are these adapters of one distribution?
    python benchmarks/as_trl_learns.py presets      what each of our presets is called there

Overrides of a run may follow; without any it is the demo, +experiment=quick_test. Weights may be any that
`model.weights` takes, as transformers reads the model that we export. All is in float32. Needs the extra `parity`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is on the same device

import jax
import numpy as np
from learners import Learnt, Round, accuracy, first_adapters, setup, train, trl_settings, write_base, write_peft

from agent_tunix.models.checkpoints.peft import read_adapters
from agent_tunix.models.lora import Adapters
from agent_tunix.training import loading
from agent_tunix.training.setup import Loaded, Setup

DEMO = ("+experiment=quick_test",)
# Our presets as papers have them: the demo's divergence is for `grpo` alone.
PRESETS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dr_grpo": ("grpo=dr_grpo", "grpo.beta=0"),
    "dapo": ("grpo=dapo", "grpo.beta=0"),
    "gspo": ("grpo=gspo", "grpo.beta=0"),
}
FIRST = 10  # updates in which a difference of the first adapters would be seen
OTHER_SEEDS = 1000  # by how much seeds are moved for adapters of our own that are others


def apart(ours: Adapters, theirs: Adapters, first: Adapters) -> tuple[float, float]:
    """The largest difference between trained parameters, and the distance between them by the way that ours have gone."""
    sets = [np.concatenate([np.ravel(x) for x in jax.tree.leaves((of.a, of.b))]) for of in (ours, theirs, first)]
    return float(abs(sets[0] - sets[1]).max()), float(np.linalg.norm(sets[0] - sets[1]) / np.linalg.norm(sets[0] - sets[2]))


def largest_relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference by the size of the number; where both are zero there is none."""
    pairs = np.array([ours, theirs], np.float64)
    return float((abs(pairs[0] - pairs[1]) / np.maximum(abs(pairs).max(axis=0), np.finfo(np.float32).tiny)).max())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


class Study:
    """What the questions share: where things are written, what was loaded, and the base that transformers reads."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder, self.loaded = given, folder, Loaded()
        self.overrides = tuple(given.overrides) or DEMO
        self._base: Path | None = None
        self._runs = 0

    def setup(self, objective: str, *more: str) -> Setup:
        return setup([*self.overrides, *PRESETS[objective], *more], self.loaded)

    def base(self, r: Setup) -> Path:
        self._base = self._base or write_base(r, self.folder)
        return self._base

    def peft(self, r: Setup, adapters: Adapters) -> Path:
        self._runs += 1
        return write_peft(r, adapters, self.base(r), self.folder / f"adapters-{self._runs}")

    def trl(
        self, r: Setup, first: Path | None, fed: Sequence[Round] = (), exact_zeros: bool = False, **other: Any
    ) -> Learnt:
        """TRL's run with our settings, from adapters in a folder or its own; `other` are settings of TRL that differ."""
        import trl_learner

        self._runs += 1
        at_once = self.given.at_once or r.cfg.training.prompts_per_step * r.cfg.grpo.num_generations
        settings = trl_settings(r.cfg, r.plan, at_once) | other
        return trl_learner.train(r, self.base(r), first, settings, fed, exact_zeros, self.folder / f"trl-{self._runs}")

    def drawn_by_peft(self, r: Setup, seed: int) -> Path:
        import trl_learner

        self._runs += 1
        return trl_learner.draw_adapters(r, self.base(r), seed, self.folder / f"adapters-{self._runs}")

    def seeds(self) -> range:
        return range(self.given.first_seed, self.given.first_seed + self.given.seeds)


def fed(study: Study) -> Iterator[str]:
    """TRL learns from our completions, from our first adapters on."""
    yield row("objective", "TRL", *COMPARED)
    yield row(*(2 + len(COMPARED)) * ["---"])
    for objective in study.given.objectives:
        for corrected in (False, True) if objective == "grpo" and not study.given.few else (False,):
            r = study.setup(objective, f"grpo.kl_correction={corrected}".lower())
            first = first_adapters(r)
            begun = study.peft(r, first)
            ours = train(r)
            ways: dict[str, dict[str, Any]] = {"exact zeros": {"exact_zeros": True}}
            if objective == "grpo" and not (corrected or study.given.few):
                ways["as it is"] = {}
                ways["exact zeros, its default divergence"] = {"exact_zeros": True, "use_bias_correction_kl": True}
            for way, how in ways.items():
                theirs = study.trl(r, begun, ours.rounds, **how)
                name = f"`{objective}`, `kl_correction`" if corrected else f"`{objective}`"
                yield row(name, way, *compared(ours, theirs, first))


COMPARED = (
    *("gradient norms, relative", "loss", "of up to", "rates, relative", "parameters", "by the way they went"),
    *("tokens clipped", "groups alike", "rewards"),
)


def compared(ours: Learnt, theirs: Learnt, first: Adapters) -> list[str]:
    """How far two trainings on the same completions are apart."""
    most, share = apart(ours.adapters, theirs.adapters, first)
    losses = np.array([ours.losses, theirs.losses])
    other = sum(a != b for a, b in zip(ours.rewards, theirs.rewards, strict=True))
    alike = np.mean([np.ptp(one.rewards, axis=1) == 0 for one in ours.rounds])
    return [
        f"{largest_relative(ours.gradient_norms, theirs.gradient_norms):.1e}",
        f"{abs(losses[0] - losses[1]).max():.1e}",
        f"{abs(losses[0]).max():.1e}",
        f"{largest_relative(ours.rates, theirs.rates):.1e}",
        f"{most:.1e}",
        f"{share:.1e}",
        f"{np.mean(ours.clipped):.1%}",
        f"{alike:.0%}",
        f"{other} differ" if other else "equal",
    ]


def alone(study: Study) -> Iterator[str]:
    """TRL draws its own adapters and completions; seeds, problems and their order are ours."""
    yield row("objective", "seed", "reward, ours", "TRL", f"first {FIRST}, ours", "TRL", "accuracy, ours", "TRL")
    yield row(*8 * ["---"])
    sums = [row("objective", "seeds", "reward", f"first {FIRST}", "accuracy, points"), row(*5 * ["---"])]
    for objective in study.given.objectives:
        apart_by: list[list[float]] = []
        for seed in study.seeds():
            r = study.setup(objective, f"seed={seed}")
            numbers = [told_of(r, learnt) for learnt in (train(r), study.trl(r, None))]
            apart_by.append([theirs - ours for ours, theirs in zip(*numbers, strict=True)])
            reward, early, right = zip(*numbers, strict=True)
            shown = [f"{x:.4f}" for pair in (reward, early) for x in pair] + [f"{100 * x:.1f} %" for x in right]
            yield row(objective, seed, *shown)
        sums.append(row(objective, len(apart_by), *differences(apart_by)))
    yield from ("", "TRL less ours, with standard errors:", "", *sums)


def told_of(r: Setup, learnt: Learnt) -> tuple[float, float, float]:
    """The mean reward, that of the first batches, and what of the held-out problems is solved in the end."""
    return float(np.mean(learnt.rewards)), float(np.mean(learnt.rewards[:FIRST])), accuracy(r, learnt.adapters)


def differences(apart_by: Sequence[Sequence[float]]) -> list[str]:
    reward, early, right = (mean_and_error(column) for column in zip(*apart_by, strict=True))
    points = [100 * x for x in right]
    return [f"{m:+.4f} +- {e:.4f}" for m, e in (reward, early)] + [f"{points[0]:+.1f} +- {points[1]:.1f}"]


def adapters(study: Study) -> Iterator[str]:
    """Our runs from adapters of our own, from those that PEFT draws, and from others of our own: what chance does."""
    yield row("seed", *(f"{what}, {whose}" for what in (f"first {FIRST}", "reward", "accuracy") for whose in ARMS))
    yield row(*(1 + 3 * len(ARMS)) * ["---"])
    apart_by: dict[str, list[list[float]]] = {arm: [] for arm in ARMS[1:]}
    for seed in study.seeds():
        r = study.setup("grpo", f"seed={seed}")
        other = first_adapters(study.setup("grpo", f"seed={seed + OTHER_SEEDS}"))
        begun = study.drawn_by_peft(r, seed), study.peft(r, other)
        runs = [r, *(study.setup("grpo", f"seed={seed}", f"model.adapter={folder}") for folder in begun)]
        numbers = [told_of(run, train(run, study.given.stop)) for run in runs]
        for arm, found in zip(ARMS[1:], numbers[1:], strict=True):
            apart_by[arm].append([x - y for x, y in zip(found, numbers[0], strict=True)])
        reward, early, right = zip(*numbers, strict=True)
        shown = [*(f"{x:.4f}" for x in (*early, *reward)), *(f"{100 * x:.1f} %" for x in right)]
        yield row(seed, *shown)
    yield from ("", "Less ours, with standard errors:", "")
    yield row("first adapters", "seeds", "reward", f"first {FIRST}", "accuracy, points")
    yield row(*5 * ["---"])
    for arm, found in apart_by.items():
        yield row(arm, len(found), *differences(found))


ARMS = ("ours", "PEFT's", "others of ours")


def draws(study: Study) -> Iterator[str]:
    """A of fresh adapters, ours and PEFT's, times the root of their inputs: both are to be uniform from -1 to 1.

    The last column is how far their distributions may be apart by chance, once in a hundred times.
    """
    found: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for seed in study.seeds():
        r = study.setup("grpo", f"seed={seed}")
        ours, theirs = first_adapters(r), read_adapters(study.drawn_by_peft(r, seed), r.model.arch)
        for module, a in ours.a.items():
            for drawn, values in zip(found.setdefault(module, ([], [])), (a, theirs.a[module]), strict=True):
                drawn.append(np.ravel(values) * np.sqrt(a.shape[1]))
    yield row("module", "numbers", "deviation, ours", "PEFT's", "largest, ours", "PEFT's", "apart", "by chance, at most")
    yield row(*8 * ["---"])
    grid = np.linspace(-1, 1, 201)
    for module, drawn in found.items():
        x, y = (np.sort(np.concatenate(values)) for values in drawn)
        apart = abs(np.searchsorted(x, grid) - np.searchsorted(y, grid)).max() / x.size  # Kolmogorov and Smirnov's
        shown = [f"{number:.4f}" for number in (x.std(), y.std(), abs(x).max(), abs(y).max(), apart)]
        yield row(f"`{module}`", x.size, *shown, f"{1.63 * np.sqrt(2 / x.size):.4f}")


def presets(study: Study) -> Iterator[str]:
    """What TRL is told for each preset, where presets differ."""
    told: dict[str, Mapping[str, Any]] = {}
    for objective in PRESETS:
        r = study.setup(objective)
        told[objective] = trl_settings(r.cfg, r.plan, r.cfg.grpo.num_generations)
    names = [name for name in told["grpo"] if len({repr(settings[name]) for settings in told.values()}) > 1]
    yield row("preset", *(f"`{name}`" for name in names))
    yield row(*(1 + len(names)) * ["---"])
    for objective, settings in told.items():
        yield row(f"`{objective}`", *(settings[name] for name in names))


QUESTIONS = {"fed": fed, "alone": alone, "adapters": adapters, "draws": draws, "presets": presets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--objectives", type=lambda text: text.split(","), default=[*PRESETS], help=",".join(PRESETS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, help="sequences in a micro-batch of TRL (default: all of a batch)")
    parser.add_argument("--stop", type=int, help="adapters: batches of a run that are made (default: all)")
    parser.add_argument("--few", action="store_true", help="fed: leave out other forms of grpo")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    jax.config.update("jax_default_matmul_precision", "highest")  # a GPU would round the factors of float32 products
    loading.start_device(print)
    started = time.monotonic()
    print(f"{json.dumps(given.overrides or DEMO)} on {jax.devices()[0].device_kind}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for line in QUESTIONS[given.question](Study(given, Path(folder))):
            print(line, flush=True)
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
