"""Hydra asks for every job of a sweep twice, and changes what it is given the second time."""

from __future__ import annotations

from hydra.types import HydraContext
from omegaconf import OmegaConf

from hydra_plugins.fused_launcher import FusedLauncher


class Loader:
    """Hydra's loader, as far as a sweep asks it."""

    calls = 0
    search_path = "conf"

    def load_sweep_config(self, master_config, sweep_overrides):
        self.calls += 1
        return OmegaConf.from_dotlist([*master_config, *sweep_overrides])


def test_a_job_is_composed_once_to_be_checked_and_run_and_one_given_twice_is_two():
    loader, jobs = Loader(), (["rate=1"], ["rate=2"], ["rate=1"])
    context = HydraContext(config_loader=loader, callbacks=None)
    FusedLauncher("auto").setup(hydra_context=context, task_function=print, config=OmegaConf.create())
    composer = context.config_loader
    for _ in range(2):
        checked = [composer.load_sweep_config(master_config=["seed=0"], sweep_overrides=job) for job in jobs]
        run = [composer.load_sweep_config(["seed=0"], job) for job in jobs]
        assert run == checked == [{"seed": 0, "rate": 1}, {"seed": 0, "rate": 2}, {"seed": 0, "rate": 1}]
        run[0].rate = 5
        assert run[2].rate == 1
    assert loader.calls == 2
    assert composer.search_path == "conf"
