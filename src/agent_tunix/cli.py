"""The `agent-tunix` command, one verb per workflow; `run_training.py` and `evaluate.py` are its verbs train and evaluate.

Hydra composes the configuration; this module decides where a run's folder is and how a mistake is shown.
"""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from agent_tunix.config.load import config_folder, did_you_mean, read_config, validate
from agent_tunix.config.schema import Config, EvaluateConfig, ExportConfig
from agent_tunix.config.tuning import LrFindConfig, TuneConfig
from agent_tunix.errors import DivergenceError, UserError

console = Console(highlight=False)
EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "optuna": "optuna"}


def train() -> None:
    """Trains a model; see `python run_training.py --help`."""
    _hydra("config", _train)


def plan() -> None:
    """Shows what a run would do: updates, learning rate, memory, warnings; see `agent-tunix plan --help`."""
    sys.argv.append("dry_run=true")
    train()


def lr_find() -> None:
    """Ramps the learning rate in one short run and suggests one; see `agent-tunix lr-find --help`."""
    _hydra("lr_find", _lr_find)


def tune() -> None:
    """Finds learning rate, warm-up and weight decay within a budget; see `agent-tunix tune --help`."""
    _hydra("tune", _tune)


def evaluate() -> None:
    """Evaluates a run or a base model; see `python evaluate.py --help`."""
    _hydra("evaluate", _evaluate)


def export() -> None:
    """Writes a run's adapter or merged model for other tools; see `agent-tunix export --help`."""
    _hydra("export", _export)


def doctor() -> None:
    """Names what ails a run or a sweep, from its folder; see `agent-tunix doctor --help`."""
    from agent_tunix.workflows import doctor as workflow

    _on_folder(workflow.main)


def report() -> None:
    """Writes report.html, one page on a run, a sweep or a tune; see `agent-tunix report --help`."""
    from agent_tunix.workflows.report import page

    _on_folder(page.main)


def watch() -> None:
    """Shows that page live in a browser while training runs; see `agent-tunix watch --help`."""
    from agent_tunix.workflows import watch as workflow

    _on_folder(workflow.main)


def main() -> None:
    """`agent-tunix <verb> <overrides>`."""
    verbs = {"train": train, "plan": plan, "lr-find": lr_find, "tune": tune, "evaluate": evaluate, "export": export}
    verbs |= {"doctor": doctor, "report": report, "watch": watch}
    verb = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if verb not in verbs:
        usage = "\n".join(
            f"  agent-tunix {name:10} {(function.__doc__ or '').split(';')[0]}" for name, function in verbs.items()
        )
        wrong = (
            f"'{verb}' is no verb of agent-tunix{did_you_mean(verb, verbs)}\n"
            if verb.strip("-") not in ("", "help", "h")
            else ""
        )
        print(f"{wrong}usage:\n{usage}", file=sys.stderr)
        sys.exit(2 if wrong else 0)
    verbs[verb]()


def _train(composed: DictConfig) -> float | None:
    """Returns the held-out accuracy, by which Hydra's sweepers search."""
    from agent_tunix.workflows import dry_run
    from agent_tunix.workflows import train as workflow

    cfg = validate(composed, Config)
    output = Path(HydraConfig.get().runtime.output_dir)
    if cfg.dry_run:
        dry_run.run(cfg, _relative(output), console)
        return None
    if cfg.training.resume is None:
        if (output / "config.yaml").exists():
            raise UserError(
                f"{output} already holds a run; continue it with training.resume={output}, or choose another folder."
            )
    else:
        cfg, output = _resumed(cfg.training.resume)
    return _accuracy(workflow.run(cfg, _relative(output), console, _given(HydraConfig.get().overrides.task)))


def run_sweep(composed: Sequence[JobReturn], fuse: str) -> list[float]:
    """Trains the jobs that Hydra has composed, as one sweep; returns the held-out accuracy of each."""
    from agent_tunix.workflows import sweep

    if fuse not in typing.get_args(sweep.Fuse):
        raise UserError(f"hydra.launcher.fuse={fuse}: must be one of {', '.join(typing.get_args(sweep.Fuse))}")
    jobs = [
        sweep.Job(
            validate(typing.cast(DictConfig, job.cfg), Config),
            _relative(Path(job.hydra_cfg.hydra.runtime.output_dir)),  # type: ignore[union-attr]
            _given(job.overrides or ()),
        )
        for job in composed
    ]
    return [_accuracy(summary) for summary in sweep.run(jobs, jobs[0].folder.parent, console, typing.cast(sweep.Fuse, fuse))]


def close_sweep(folder: Path) -> None:
    """Sums up a sweep that any launcher has run."""
    from agent_tunix.workflows import doctor, sweep_folder
    from agent_tunix.workflows.report.page import report_on

    if folder.is_dir() and (jobs := sweep_folder.job_folders(folder)):
        sweep_folder.write_index(folder)
        if not any(doctor.is_ramp(job) for job in jobs):  # a ramp ends in collapse, and has said what it suggests
            doctor.show(_relative(folder), doctor.diagnose(folder), console)
        report_on(folder, console.print)
        console.print(f"\nSweep folder: {_relative(folder)}, with report.html", soft_wrap=True, markup=False)


def _given(overrides: Iterable[str]) -> tuple[str, ...]:
    """Overrides as they were written on the command line."""
    return tuple(override.removeprefix("++") for override in overrides)


def _accuracy(summary: Mapping[str, Any]) -> float:
    """The last accuracy of a run; one that diverged is worth nothing."""
    final = summary.get("final_eval")
    return final["accuracy"] if final and summary["status"] != "diverged" else 0.0


def _resumed(folder: str) -> tuple[Config, Path]:
    """A run's own configuration, with the values that were overridden on the command line of its continuation."""
    path = Path(folder)
    if not (path / "config.yaml").exists():
        raise UserError(f"training.resume={folder}: this is not the folder of a run, it has no config.yaml.")
    saved = read_config(path / "config.yaml")
    for override in HydraConfig.get().overrides.task:
        key, _, value = override.lstrip("+").partition("=")
        if key == "training.resume":
            continue
        if "." not in key and key != "seed":
            raise UserError(
                f"{override}: a resumed run keeps its own groups; only single values, as in a.b=c, can be changed."
            )
        saved.merge_with(OmegaConf.from_dotlist([f"{key}={value}"]))
    return validate(saved, Config), path


def _lr_find(composed: DictConfig) -> None:
    from agent_tunix.workflows import lr_find as workflow

    cfg, output = validate(composed, LrFindConfig), _relative(Path(HydraConfig.get().runtime.output_dir))
    workflow.run(cfg, output, console, _given(HydraConfig.get().overrides.task))


def _tune(composed: DictConfig) -> None:
    from agent_tunix.workflows import tune as workflow

    cfg, output = validate(composed, TuneConfig), _relative(Path(HydraConfig.get().runtime.output_dir))
    workflow.run(cfg, output, console, _given(HydraConfig.get().overrides.task))


def _evaluate(composed: DictConfig) -> None:
    from agent_tunix.workflows import evaluate as workflow

    workflow.run(validate(composed, EvaluateConfig), Path(HydraConfig.get().runtime.output_dir), console)


def _export(composed: DictConfig) -> None:
    from agent_tunix.workflows import export as workflow

    workflow.run(validate(composed, ExportConfig), console)


def _on_folder(workflow: Callable[[list[str], Console], None]) -> None:
    """Runs a verb that takes a folder and no configuration."""
    try:
        workflow(sys.argv[1:], console)
    except UserError as mistake:
        _fail(mistake)


def _hydra(config_name: str, task: Callable[[DictConfig], float | None]) -> None:
    """Runs a task under Hydra; a user's mistake ends in its message and exit code 2."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come to us as they are; what is shown is decided below
    sys.argv[1:] = _arguments(sys.argv[1:])

    def job(composed: DictConfig) -> float | None:
        try:
            return task(composed)
        except DivergenceError as fault:
            if HydraConfig.get().mode == RunMode.MULTIRUN:  # one bad candidate does not end a sweep
                print(fault, file=sys.stderr)
                return 0.0
            _fail(fault)
        except UserError as mistake:
            _fail(mistake)
        finally:
            _remove_if_empty(Path(HydraConfig.get().runtime.output_dir))

    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=config_name)(job)()
    except MissingConfigException as mistake:
        group, _, option = (mistake.missing_cfg_file or "").rpartition("/")
        extra = EXTRAS.get(option)
        if extra and group in ("hydra/launcher", "hydra/sweeper"):
            _fail(UserError(f"{group}={option} needs an extra: pip install 'agent-tunix[{extra}]'"))
        hint = did_you_mean(option, mistake.options or ())
        known = f"The options of {group} are: {', '.join(mistake.options or ())}"
        _fail(UserError(f"{group}={option}: there is no such option{hint}\n{known}"))
    except UserError as mistake:
        _fail(mistake)
    except (HydraException, OmegaConfBaseException) as mistake:
        _fail(UserError(mistake))


def _arguments(given: list[str]) -> list[str]:
    """The command line as Hydra takes it: options first, a user's own `conf` folder on the search path."""
    multirun = [argument for argument in given if argument in ("--multirun", "-m")]
    arguments = multirun + [_lenient(argument) for argument in given if argument not in multirun]
    own = Path("conf").resolve()
    if own.is_dir() and own != config_folder() and not any(a.startswith(("--config-dir", "-cd")) for a in given):
        arguments = ["--config-dir", str(own), *arguments]
    return arguments


def _lenient(argument: str) -> str:
    """Makes Hydra take any single value (`++key=value`), so that all unknown keys are reported by the schema, together."""
    key, equals, _ = argument.partition("=")
    groups = [path.name for path in config_folder().iterdir() if path.is_dir()]
    plain = equals and key[:1].isalpha() and not key.startswith("hydra") and "@" not in key
    return f"++{argument}" if plain and key not in groups else argument


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _relative(path: Path) -> Path:
    return path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path


def _fail(mistake: UserError) -> NoReturn:
    print(mistake, file=sys.stderr)
    sys.exit(mistake.exit_code)
