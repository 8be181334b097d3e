"""Agent-Tunix: teach small open language models to reason, with GRPO and LoRA in plain JAX.

    run = agent_tunix.train(["+experiment=quick_test"])        # as `agent-tunix train +experiment=quick_test`
    policy = agent_tunix.load(adapter=run)                     # what it has learnt, over the base that it names
    policy.chat([{"role": "user", "content": "Ben has 18 coins. Ben wants 40. How many more coins does Ben need?"}])

What the user must mend is raised as a `UserError`, whose message says what is wrong and what to do; a run whose numbers got
out of hand as a `DivergenceError`. See docs/guide/python.md.

Importing this loads nothing else, neither JAX nor Hydra nor any module of Python's: what a call needs is imported by it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as that of `typing`, which takes time to load
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from typing import Any, Literal

    from agent_tunix.errors import DivergenceError, UserError
    from agent_tunix.training.policy import Policy
    from agent_tunix.training.run_reader import Run

__version__ = "0.1.0"
__all__ = ["DivergenceError", "Policy", "Run", "UserError", "evaluate", "load", "train"]


def load(
    weights: str | PathLike[str] | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] | None = None,
    adapter: str | PathLike[str] | None = None,
    step: int | Literal["best"] | None = None,
) -> Policy:
    """A model that answers: a base or, if an adapter is given, what a run has made of it.

    Args:
        weights: Whatever `model.weights` takes: a repository of the Hugging Face hub, a folder of safetensors, a .gguf file,
            `kaggle:<handle>`, or `package:tiny`, which is shipped. The checkpoint says what its architecture is. None: the
            base that the adapter names.
        dtype: In which the weights are held and multiplied. None: as the run had them or, without a run, as `conf/model`
            has a model of this architecture, and bfloat16 where it has none.
        adapter: The folder of a run (or its `Run`), or a PEFT folder that `agent-tunix export format=peft` has written.
        step: The checkpoint of that run; None: its last; "best": its best evaluated one; 0: what it began with.
    """
    from agent_tunix import interface

    return interface.load(weights, dtype, adapter, step)


def train(
    overrides: Sequence[str] | Mapping[str, Any] = (),
    reward_functions: Mapping[str, Callable[[str, str, str], float]] | None = None,
    *,
    quiet: bool = False,
) -> Run:
    """Trains a run as `agent-tunix train <overrides>` does, and returns its folder.

    Args:
        overrides: As on the command line, `["+experiment=quick_test", "optimizer.learning_rate=1e-5"]`, or by keys,
            `{"+experiment": "quick_test", "optimizer.learning_rate": 1e-5}`. `training.resume=<folder>` goes on with a run.
        reward_functions: Functions `(prompt, completion, answer) -> float` by their names, beside those that `reward` has;
            docs/guide/extending.md has the other shapes.
            `reward.weights.<name>` weighs them, by 1 if it is not given. The run writes down their import paths. One that
            has none, as it stands in a notebook, a script or another function, has to be given again when the run goes on.
        quiet: Whether to print nothing.

    Interrupting it once ends the run after the batch at hand, with a checkpoint; `Run.summary["status"]` says so.
    """
    from agent_tunix import interface

    return interface.train(overrides, reward_functions, quiet)


def evaluate(overrides: Sequence[str] | Mapping[str, Any] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Evaluates as `agent-tunix evaluate <overrides>` does; returns the record that it also writes, with those of further
    test sets by name under `sets`, where `evaluation.sets` asks for some.

    `overrides` are given as to `train`, for instance `{"run": run, "inference_config": "standard", "num_passes": 8}`.
    """
    from agent_tunix import interface

    return interface.evaluate(overrides, quiet)


WHERE = {
    "DivergenceError": "agent_tunix.errors",
    "UserError": "agent_tunix.errors",
    "Policy": "agent_tunix.training.policy",
    "Run": "agent_tunix.training.run_reader",
}
if not TYPE_CHECKING:  # else a type checker would take every name for one of ours

    def __getattr__(name):
        """Classes, which are imported when they are first asked for."""
        if name not in WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
