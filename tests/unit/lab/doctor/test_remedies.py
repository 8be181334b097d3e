"""The command that a remedy is."""

from __future__ import annotations

from made_up_runs import FLAT_REWARD, changed, run_of

from agent_tunix.lab.doctor import doctor, optimizer, remedies
from agent_tunix.lab.doctor.examination import examine
from agent_tunix.lab.doctor.records import RunRecords
from agent_tunix.lab.doctor.remedies import rerun, scaled_rate


def test_the_remedy_is_the_run_s_own_command_with_the_reference_s_change(config):
    high = changed(config, optimizer__learning_rate=1e-4, training__num_batches=12)
    finding = optimizer.collapsed(run_of(high, accuracies=(0.4, 0.1), **FLAT_REWARD))
    assert finding.remedy.endswith("+experiment=quick_test training.num_batches=12 optimizer.learning_rate=1e-05")


def test_a_rate_below_lr_min_takes_lr_min_with_it(config):
    run = RunRecords(changed(config, optimizer__learning_rate=2e-7))
    assert rerun(run, scaled_rate(run, 0.1)).endswith("optimizer.learning_rate=2e-08 scheduler.lr_min=2e-09")


def test_overrides_are_not_sought_for_a_run_that_nothing_is_said_of(config, tmp_path, monkeypatch, write_run):
    sought = []
    monkeypatch.setattr(remedies, "own_overrides", lambda config: sought.append(config) or ["+experiment=quick_test"])
    run = doctor.read(write_run(tmp_path / "run"))
    assert examine(run).verdict == "healthy"
    assert sought == []
    assert rerun(run, {"seed": 7}).endswith(" +experiment=quick_test seed=7")
    assert (list(run.overrides), len(sought)) == (["+experiment=quick_test"], 1)
