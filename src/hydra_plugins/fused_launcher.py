"""How Hydra runs a sweep of ours: `hydra/launcher=fused`, the default, hands all jobs to one process at once.

Hydra finds this module by the name of its folder. It is imported at every start, so what is heavy is imported where used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

LAUNCHER = {"_target_": "hydra_plugins.fused_launcher.FusedLauncher", "fuse": "auto"}
ConfigStore.instance().store(group="hydra/launcher", name="fused", node=LAUNCHER, provider="agent-tunix")


class FusedLauncher(BasicLauncher):
    """Has Hydra compose every job, and trains them all in one process; plans and continued runs go one by one.

    `fuse` is `auto` (as the device gains by it), `always` or `never`.
    """

    def __init__(self, fuse: str) -> None:
        super().__init__()
        self.fuse = fuse

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        task, self.task_function = self.task_function, lambda composed: None
        composed = super().launch(job_overrides, initial_job_idx)
        if any(job.cfg.dry_run or job.cfg.training.resume for job in composed):  # type: ignore[union-attr]
            self.task_function = task
            return super().launch(job_overrides, initial_job_idx)
        from agent_tunix.cli import run_sweep

        for job, accuracy in zip(composed, run_sweep(composed, self.fuse), strict=True):
            job.return_value = accuracy
        return composed


class CloseSweep(Callback):
    """Sums a sweep up when all its jobs have ended, whatever launched them."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from agent_tunix.cli import close_sweep

        close_sweep(Path(config.hydra.sweep.dir))
