"""What a person reads of a run while it trains and at its end, and the commands that are to be copied from there."""

from __future__ import annotations

import io
import os
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from rich.console import Console

from agent_tunix import cli
from agent_tunix.config.commands import shell_command
from agent_tunix.console import Output, Screen
from agent_tunix.training.progress import Bars, counted, print_summary


def test_text_of_the_user_is_shown_as_it_is(tmp_path, capsys):
    summary = {"status": "completed", "steps": 1, "seconds": 1.0, "first_eval": None, "final_eval": None, "advice": []}
    texts = {"question": "[INST] two of [x] :x:? [/INST]", "answer": "[/b]", "completion": "[bold] :b:"}
    print_summary(cli.console, Path("runs/[a]:100:"), summary, [texts], [texts])
    shown = capsys.readouterr().out
    assert all(text in shown for text in (*texts.values(), "runs/[a]:100:"))


def test_an_episode_is_shown_turn_by_turn(capsys):
    summary = {"status": "completed", "steps": 1, "seconds": 1.0, "advice": []}
    evaluations = {"first_eval": {"step": 0, "episode/calling": 0.5}, "final_eval": {"step": 1, "episode/calling": 1.0}}
    before = {"question": "1+1?", "answer": "2", "completion": "3", "turns": [("assistant", "3")]}
    turns = [("assistant", "<calculator>1+1</calculator>"), ("calculator", "2"), ("assistant", "It is 2.")]
    after = before | {"turns": turns}
    print_summary(Console(width=100), Path("run"), summary | evaluations, [before], [after])
    shown = capsys.readouterr().out
    lines = [line.strip("│ ").rstrip() for line in shown.splitlines()]
    told = ["before  3", "after   <calculator>1+1</calculator>", "calculator: 2", "It is 2.", "truth   2"]
    assert "\n".join(told) in "\n".join(lines)
    assert ["calling", "a", "tool", "50.0%", "100.0%"] in [line.replace("│", " ").split() for line in lines]


def test_the_line_says_how_many_episodes_call_a_tool():
    console = Console(file=io.StringIO(), width=200)
    record = {"step": 1, "reward/mean": 0.5, "lr": 1e-5, "kl": 0.25, "tokens_per_second": 1234.0, "episode/calling": 0.625}
    with Bars(console) as bars:
        display = bars.display("training", 1)
        display.evaluation({"step": 0, "accuracy": 0.375, "n": 8, "episode/calling": 0.5})
        display.step(record)
    first, line = console.file.getvalue().splitlines()
    assert first == "step 0: held-out accuracy 37.5%, 50% call a tool (8 problems)"
    assert "reward 0.50  calling 62%  held-out 37.5%" in line


def test_where_there_is_no_terminal_a_run_is_told_in_a_dozen_lines():
    console = Console(file=io.StringIO(), width=200)
    record = {"reward/mean": 0.5, "lr": 1e-5, "kl": 0.25, "tokens_per_second": 1234.0}
    with Bars(console) as bars:
        display = bars.display("training", 36)
        display.evaluation({"step": 0, "accuracy": 0.375, "n": 8})
        display.guard("rolled back 1x")
        for step in range(1, 37):
            display.step({"step": step, **record})
    first, *lines = console.file.getvalue().splitlines()
    assert first == "step 0: held-out accuracy 37.5% (8 problems)"
    assert [line.split()[1] for line in lines] == [f"{step}/36" for step in range(3, 37, 3)]
    told = "step  3/36  reward 0.50  held-out 37.5%  lr 1.0e-05  kl 0.250  1,234 tok/s  [rolled back 1x]  eta 0:00"
    assert lines[0] == told


def test_the_time_left_follows_from_the_updates_after_the_first(monkeypatch):
    """Which had to wait for programs."""
    console = Console(file=io.StringIO(), width=200)
    record = {"reward/mean": 0.5, "lr": 1e-5, "kl": 0.25, "tokens_per_second": 1234.0}
    times = iter([100.0, 110.0, 120.0, 130.0])
    with Bars(console) as bars:
        display = bars.display("training", 400)
        monkeypatch.setattr("agent_tunix.training.progress.time", types.SimpleNamespace(monotonic=lambda: next(times)))
        for step in (1, 2, 3, 33):
            display.step({"step": step, **record})
    assert console.file.getvalue().splitlines()[-1].endswith("eta 5:44")  # 367 updates of 30 s / 32


def test_a_bar_fits_eighty_columns():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    record = {"reward/mean": 0.5, "lr": 1e-5, "kl": 0.25, "tokens_per_second": 123456.0}
    with Bars(console) as bars:
        display = bars.display("training", 1000)
        display.evaluation({"step": 0, "accuracy": 0.375, "n": 8})
        for step in range(1, 4):
            display.step({"step": step, **record})
    drawn = re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", console.file.getvalue())
    assert any("reward 0.50  held-out 37.5%" in line for line in drawn)
    assert all(len(line) <= 80 for line in drawn)


@pytest.fixture
def notebook(monkeypatch) -> list[object]:
    """What a notebook would show, whose libraries are not needed for that."""
    shown: list[object] = []

    class Widget:
        def __enter__(self): ...
        def __exit__(self, *_): ...
        def clear_output(self, wait): ...

    modules = {"IPython": {}, "IPython.display": {"display": shown.append}, "ipywidgets": {"Output": Widget}}
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return shown


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_draws_a_bar_where_it_can_and_has_a_dozen_lines_where_not(notebook, monkeypatch, widgets):
    if not widgets:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    record = {"reward/mean": 0.5, "lr": 1e-5, "kl": 0.25, "tokens_per_second": 1234.0}
    with Bars(Screen()) as bars:
        display = bars.display("training", 36)
        for step in range(1, 37):
            display.step({"step": step, **record})
        display.end("completed")
    if widgets:
        assert "Widget" in {type(part).__name__ for part in notebook}
    else:
        assert len(notebook) == 12
        assert "step  3/36" in notebook[0].text


def test_the_streams_of_a_program_are_left_to_it(monkeypatch):
    """A command has its own over them, which show control characters; they are put over a bar's again."""
    monkeypatch.setattr(sys, "stdout", own := io.StringIO())
    with Bars(Console(file=io.StringIO())):
        assert sys.stdout is own
    monkeypatch.setattr(sys, "stdout", Output(own))
    with Bars(Console(file=own, force_terminal=True)):
        assert isinstance(sys.stdout, Output)


def test_the_close_of_a_run_sets_its_start_beside_its_end(capsys):
    first, final = ({"step": step, "accuracy": share, "format_accuracy": share} for step, share in ((0, 0.25), (7, 0.75)))
    summary = {"status": "completed", "steps": 7, "seconds": 3.0, "first_eval": first, "advice": ["do this"]}

    def shown(final_eval: dict) -> list[list[str]]:
        print_summary(cli.console, Path("runs/mine"), summary | {"final_eval": final_eval}, [], [])
        return [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]

    lines = shown(final)
    assert ["completed:", "7", "updates", "in", "3", "s"] in lines
    assert ["accuracy", "25.0%", "75.0%"] in lines
    assert ["format", "accuracy", "25.0%", "75.0%"] in lines
    assert lines[-1] == ["do", "this"]
    summary["tokens"] = 6000
    assert ["Tokens:", "6,000", "of", "completions,", "2,000", "a", "second"] in shown(final)
    assert ["accuracy", "25.0%", "-"] in shown(first), "what a run was before it trained is not what it came to"
    fewer = shown({"step": 7, "accuracy": 0.75})
    assert not any("format" in line for line in fewer), "a run may be continued with fewer measures"


def test_one_is_not_counted_as_many():
    assert [counted(number, "update") for number in (0, 1, 2)] == ["0 updates", "1 update", "2 updates"]


@pytest.mark.parametrize("name", ["python", "python3"])
def test_python_is_called_so_where_that_is_the_one_at_work(tmp_path, monkeypatch, name):
    """Installed commands are run by python3, which lies beside python."""
    for folder in ("bin", "other"):
        (tmp_path / folder).mkdir()
        for link in ("python", "python3"):
            (tmp_path / folder / link).symlink_to(sys.executable)
    (tmp_path / "run_training.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / name))
    assert shell_command("train") == "python run_training.py"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "other" / name))
    assert shell_command("train") == f"{os.path.join('other', name)} run_training.py"
