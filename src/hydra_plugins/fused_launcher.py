"""How Hydra runs a sweep of ours: `hydra/launcher=fused`, the default, hands all jobs to one process at once.

Hydra finds this module by the name of its folder. It is imported at every start, so what is heavy is imported where used.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_tunix.config import output_folders
from agent_tunix.errors import UserError

BEST_OF_SWEEPERS = "optimization_results.yaml"
LAUNCHER = {"_target_": "hydra_plugins.fused_launcher.FusedLauncher", "fuse": "auto"}
ConfigStore.instance().store(group="hydra/launcher", name="fused", node=LAUNCHER, provider="agent-tunix")


class FusedLauncher(BasicLauncher):
    """Has Hydra compose every job, and trains them all in one process; plans and continued runs go one by one.

    `fuse` is `auto` (as the device gains by it), `always` or `never`.
    """

    def __init__(self, fuse: str) -> None:
        super().__init__()
        self.fuse = fuse

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        hydra_context.config_loader = _Composer(hydra_context.config_loader)  # type: ignore[assignment]
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        from agent_tunix.engine import device

        device.wake()  # while Hydra composes

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        if not job_overrides:
            raise UserError("There is no job to run: a range, glob or choice on the command line has no value.")
        task, self.task_function = self.task_function, lambda composed: None
        composed = super().launch(job_overrides, initial_job_idx)
        try:
            _refuse_shared([job.cfg for job in composed])  # type: ignore[misc]
            if any(OmegaConf.select(job.cfg, key) for job in composed for key in ("dry_run", "training.resume")):  # type: ignore[arg-type]
                self.task_function = task
                return super().launch(job_overrides, initial_job_idx)
            from agent_tunix.cli import run_sweep

            accuracies = run_sweep(composed, Path(self.config.hydra.sweep.dir), self.fuse)  # type: ignore[union-attr]
        finally:
            made = [Path(job.hydra_cfg.hydra.runtime.output_dir) for job in composed]  # type: ignore[union-attr]
            output_folders.remove_empty([*made, *(folder.parent for folder in made)])
        for job, accuracy in zip(composed, accuracies, strict=True):
            job.return_value = accuracy
        return composed


def _refuse_shared(jobs: Sequence[DictConfig]) -> None:
    """Refuses jobs that would resume the same folder, one after another: the second would begin where the first ended."""
    folders_of = [OmegaConf.select(job, "training.resume") for job in jobs if not OmegaConf.select(job, "dry_run")]
    goes_on = [Path(str(folder)).resolve() for folder in folders_of if folder]
    if len(set(goes_on)) < len(goes_on):
        raise UserError(
            f"training.resume={goes_on[0]}: several jobs cannot go on in one folder: each would change what the others "
            "begin with.\nTo try values from what a run has learnt, start new ones: training.init_from=<run>."
        )


class _Composer:
    """Composes once what jobs have in common that differ in single values alone, where Hydra would read all files for each,
    and twice: to see whether it can be done, and to run it. Jobs are copies of the first, with their own values set.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._first: dict[tuple[str, ...], DictConfig] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(sweep_overrides)
        single = [override for override in parsed if override.is_force_add() and not isinstance(override.value(), dict)]
        kind = tuple(override.key_or_group if override in single else str(override.input_line) for override in parsed)
        if kind not in self._first:
            self._first[kind] = self._loader.load_sweep_config(master_config, sweep_overrides)
        cfg = copy.deepcopy(self._first[kind])
        for override in single:
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True, force_add=True)
        if single:
            cfg.hydra.overrides.task = list(sweep_overrides)
            cfg.hydra.job.override_dirname = get_overrides_dirname(parsed, **cfg.hydra.job.config.override_dirname)
        return cfg


class NoteFolders(Callback):
    """Notes what Hydra is about to make, so that a command that is refused leaves none of it."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        with contextlib.suppress(OmegaConfBaseException):  # a name may follow from what the job alone knows
            output_folders.note(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with contextlib.suppress(OmegaConfBaseException):
            folder = Path(config.hydra.sweep.dir)
            output_folders.note(folder / output_folders.MULTIRUN)
            if folder.is_dir():
                from agent_tunix.cli import answering
                from agent_tunix.lab.sweep.sweep_folder import read_index
                from agent_tunix.training.loading import refuse_others

                with answering():  # Hydra would only warn of a fault
                    refuse_others(folder, "sweep.json")
                    read_index(folder)


class CloseSweep(Callback):
    """Sums a sweep up when all its jobs have ended, whatever launched them."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from agent_tunix.cli import answering, close_sweep
        from agent_tunix.training.run_folder import replace_text

        with answering():  # Hydra would only warn of a fault, and exit with 0
            found = Path(config.hydra.sweep.dir) / BEST_OF_SWEEPERS
            if found.exists():
                as_written = re.sub(r"^( *)\+\+", r"\1", found.read_text(), flags=re.MULTILINE)  # as the user wrote keys
                replace_text(found, as_written)
            close_sweep(Path(config.hydra.sweep.dir))
