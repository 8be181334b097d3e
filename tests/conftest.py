"""Shared by all tests: the command line, run in this process so that compiled programs are shared; runs that never were;
goldens; outside data.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from absl import logging as absl_logging
from hydra import compose, initialize_config_dir
from hydra._internal import config_loader_impl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import Overrides
from omegaconf import OmegaConf

from agent_tunix import cli, signals
from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config

REPOSITORY = Path(__file__).parents[1]

# Hydra closes the log handlers it finds; absl's would close the stream under pytest's capture with it.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__

# Compiling is most of what these tests take, so XLA is to hurry, here and in the processes that tests start. Loops that
# are not unrolled are compiled in two thirds of the time. Older emitters need a third; later releases have them no more.
# To cut a program into parts for many threads costs more than it brings where there are two cores. JAX looks for a cache of
# programs only once, so it is there before the first of them.
OLDER = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
HURRY = ["--xla_backend_optimization_level=1", "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"]
HURRY += OLDER if jax.__version_info__ < (0, 11) else []
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *HURRY])
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["XDG_CACHE_HOME"] = str(REPOSITORY / ".pytest_cache")  # no programs of tests in the cache of the user
gc.freeze = lambda: None  # here one process makes many runs, whose garbage would be kept
gc.set_threshold(20_000)  # to look for it as often as Python does takes a twentieth of the time

from agent_tunix.engine import compiler_options  # noqa: E402  it heeds these flags when it is imported
from agent_tunix.training import loading  # noqa: E402

assert compiler_options.LEVEL not in compiler_options.OPTIONS, "imported before the flags were set, it overrules them"
loading.start_device(print)


def remember_compositions() -> None:
    """Hydra composes every command twice, from files that hardly ever change: what it makes of the same files is kept here.

    Three of its steps are answered from memory: what a file holds, which files a choice of groups leads to, and what these
    are together. Hydra itself still sets the values of each command line. A fault is not kept.
    """
    kept: dict[tuple, bytes] = {}
    loader, read = config_loader_impl.ConfigLoaderImpl, ConfigRepository.load_config
    choose, merge = config_loader_impl.create_defaults_list, loader._compose_config_from_defaults_list

    def files(repository: Any) -> tuple:
        """Where files are looked for, and the state of each: one that is written anew is another. Ours stay as they are."""
        places = [(source.provider, source.path) for source in repository.get_sources()]
        walks = (os.walk(place) for _, place in places if place != str(REPOSITORY / "conf"))
        paths = (os.path.join(folder, name) for walk in walks for folder, _, names in walk for name in names)
        states = ((path, os.stat(path)) for path in paths if os.path.exists(path))
        return (*places, *((path, state.st_mtime_ns, state.st_size) for path, state in states))

    def remembered(key: tuple, make: Callable[[], Any]) -> Any:
        if key not in kept:
            kept[key] = pickle.dumps(make())
        return pickle.loads(kept[key])

    def load_config(repository, config_path):
        return remembered(("read", config_path, files(repository)), lambda: read(repository, config_path))

    def create_defaults_list(repo, config_name, overrides_list, prepend_hydra, skip_missing):
        asked = Overrides(repo, overrides_list)
        chosen = repr((asked.override_choices, asked.append_group_defaults, asked.deletions))
        key = ("choose", config_name, prepend_hydra, skip_missing, chosen, files(repo))
        found = remembered(key, lambda: choose(repo, config_name, overrides_list, prepend_hydra, skip_missing))
        return dataclasses.replace(found, config_overrides=asked.config_overrides)

    def compose_config_from_defaults_list(loader_, defaults, repo):
        return remembered(("merge", repr(defaults), files(repo)), lambda: merge(loader_, defaults, repo))

    ConfigRepository.load_config = load_config
    config_loader_impl.create_defaults_list = create_defaults_list
    loader._compose_config_from_defaults_list = compose_config_from_defaults_list


remember_compositions()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules of long runs come first, the longest at the very first: no process compiles now one way, now the other."""
    items.sort(key=lambda item: -getattr(item.module, "LONG_RUNS", 0))


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request: pytest.FixtureRequest) -> None:
    """Programs are hardly optimized, but where a module says LONG_RUNS: there fast ones are worth their time.

    Most of those modules train two prompts of four completions and evaluate eight problems, and so share their programs.
    """
    hurry, hurried = not getattr(request.module, "LONG_RUNS", False), jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", hurry)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(hurry))  # for the processes that tests start
    if hurried != hurry:
        jax.clear_caches()  # those of the other kind would be found and used


@pytest.fixture
def hardly_optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test of LONG_RUNS that makes few steps by programs of its own: these are worth no more time than others are."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def signals_given_back() -> Iterator[None]:
    """A command that a test calls in this process leaves its own handlers, which would end the tests.

    A job in the background may have been started to ignore Ctrl-C, for which some tests would wait without an end.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in signals.STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """Runs `agent-tunix <arguments>` in an empty working directory; the modules imported from there are then forgotten."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["agent-tunix", *arguments])
        code = 0
        with signals.heeded_by(signal.default_int_handler):  # a command does not give signals back
            try:
                cli.main()
            except SystemExit as stop:
                code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    yield run
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def config() -> dict:
    """The configuration of the demo, as a run writes it down."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose("config", ["+experiment=quick_test"])
    model = loading.described(validate(composed, Config)).model
    return OmegaConf.to_container(composed, resolve=True) | {"model": model.model_dump(mode="json")}


@pytest.fixture(scope="session")
def write_run(config) -> Callable[..., Path]:
    """Writes the folder of a run that never was; it learns, and reward and KL rise from step to step."""

    def at(step: int, steps: int) -> dict:
        reward = {
            "reward/mean": 0.4 + 0.6 * step / steps,
            "reward/std": 0.5,
            "reward/answer": 0.4,
            "reward/format_exact": 0.9,
        }
        return {"step": step, "loss": 1e-4, "lr": 1e-5, "grad_norm": 9.5, "kl": 0.002 * step, "entropy": 0.1, **reward}

    def sample(step: int, completion: str) -> dict:
        scores = {"reward": 1.2, "rewards": {"answer": 1.0, "format_exact": 1.0}, "advantage": 0.5}
        return {"step": step, "prompt": f"prompt {step}", "answer": "7", "completion": completion, **scores}

    def write(
        folder: Path, steps=24, accuracies=(0.4, 0.6, 0.8), completion="<answer>7</answer>", status="completed", **keys
    ):
        folder.mkdir(parents=True)
        own = OmegaConf.create(config)
        for key, value in keys.items():
            OmegaConf.update(own, key.replace("__", "."), value)
        OmegaConf.save(own, folder / "config.yaml")
        spaced = [round(i * steps / max(1, len(accuracies) - 1)) for i in range(len(accuracies))]
        evals = [
            {"step": step, "split": "validation", "n": 200, "accuracy": share, "sampled_accuracy": share}
            for step, share in zip(spaced, accuracies, strict=True)
        ]
        walk = range(1, steps + 1)
        samples = [sample(i, completion) for i in walk[:: max(1, steps // 24)]]
        lines = {"metrics": [at(i, steps) for i in walk], "evals": evals, "samples": samples}
        for name, records in lines.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if status:
            (folder / "summary.json").write_text(json.dumps({"status": status, "steps": steps, "seconds": 12.5}))
        return folder

    return write


@pytest.fixture(scope="session")
def oldest_run() -> Path:
    """A run that was interrupted after 2 of its 4 updates, as commit 2e29ef9 has left it: old runs stay readable.

    It was made by `agent-tunix train model=gemma3_tiny model.lora_rank=1 model.lora_alpha=512 model.lora_module_path=q_proj
    training.micro_batch_size=2 training.num_batches=4 training.save_interval_steps=2 training.eval_every_n_steps=2
    evaluation.num_examples=8 evaluation.sampled=false data.num_examples=64 optimizer.learning_rate=1e-5`.
    """
    return REPOSITORY / "tests" / "old_runs" / "2e29ef9"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Numbers by code we did not write: the committed ones, or fresh ones that `make parity` has just made."""
    return Path(os.environ.get("AGENT_TUNIX_GOLDENS", REPOSITORY / "tests" / "golden"))


@pytest.fixture(scope="session")
def data() -> Path:
    """Large files that are not part of the repository; tests that need them are skipped, visibly, where they are absent."""
    folder = Path(os.environ.get("AGENT_TUNIX_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set AGENT_TUNIX_DATA to the folder that holds gsm8k and gemma3_tokenizer")
    return folder
