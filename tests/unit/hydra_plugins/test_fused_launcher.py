"""Hydra asks for every job of a sweep twice, and changes what it is given the second time."""

from __future__ import annotations

import errno
import os

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf

from agent_tunix import cli
from agent_tunix.config.load import config_folder
from hydra_plugins.fused_launcher import CloseSweep, FusedLauncher


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


SWEEP = [
    ["++optimizer.learning_rate=1e-05", "++seed=1", "optimizer=conservative"],
    ["++optimizer.learning_rate=3e-05", "++seed=null", "optimizer=conservative"],
    ["++optimizer.learning_rate=3e-05", "++seed=2", "optimizer=adafactor"],
    ["++data.system_prompt='a, b=c'", "++optimizer.betas=[0.8,0.9]", "++no.such.key=1", "++seed=1", "++seed=2"],
    ["++data.system_prompt=${seed}", "++optimizer.betas=[0.7,0.9]", "++no.such.key=2", "++seed=3", "++seed=4"],
    ["++reward.weights={answer_exact: 2}"],
    ["++reward.weights={format_exact: 1}"],
]


def test_jobs_that_differ_in_values_are_what_hydra_would_compose():
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", ["hydra.sweep.dir=here"], RunMode.MULTIRUN)
        context = HydraContext(config_loader=loader, callbacks=None)
        FusedLauncher("auto").setup(hydra_context=context, task_function=print, config=master)
        asked = []
        with pytest.MonkeyPatch.context() as patch:
            compose = loader.load_sweep_config
            patch.setattr(loader, "load_sweep_config", lambda *given: asked.append(given[1]) or compose(*given))
            found = [context.config_loader.load_sweep_config(master, job) for job in SWEEP]
        for job, composed in zip(SWEEP, found, strict=True):
            wanted = loader.load_sweep_config(master, job)
            assert OmegaConf.to_container(composed) == OmegaConf.to_container(wanted), job
    assert len(asked) == 5


def test_what_a_sweeper_found_has_the_keys_as_they_were_written(tmp_path):
    (tmp_path / "optimization_results.yaml").write_text("best_params:\n  ++optimizer.eps: 1e-8\n  optimizer: a++b\n")
    CloseSweep().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    found = (tmp_path / "optimization_results.yaml").read_text()
    assert found == "best_params:\n  optimizer.eps: 1e-8\n  optimizer: a++b\n"


def test_a_sweep_that_cannot_be_summed_up_ends_in_a_message_and_not_well(monkeypatch, capsys):
    """Hydra makes a warning of what a callback raises, and ends with exit code 0."""

    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "sweep.json"))

    monkeypatch.setattr(cli, "close_sweep", full)
    with pytest.raises(SystemExit) as ended:
        CloseSweep().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": "swept"}}}))
    assert ended.value.code == 2
    assert "No space left on device" in capsys.readouterr().err
