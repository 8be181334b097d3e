from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent_tunix.config import imports
from agent_tunix.config.imports import OWN, Origin
from agent_tunix.errors import UserError

WANTED = "a function"
MODULE = """
from my_traces import traces
traces.append(__name__)
def reward(prompt, completion, answer):
    return 1.0
"""


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """The names of the modules that were run, and what was said, in order; all that is imported is forgotten at the end."""
    found: list[str] = []
    before = {*sys.modules}
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for name in ("mine", "theirs"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # another test may have left it
    monkeypatch.setitem(sys.modules, "my_traces", type(sys)("my_traces"))
    sys.modules["my_traces"].traces = found
    yield found
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run in a project, whose folder is the working directory."""
    place = tmp_path / "project" / "runs" / "x"
    (place / "checkpoints").mkdir(parents=True)
    (place / "config.yaml").touch()
    monkeypatch.chdir(tmp_path / "project")
    return Path("runs/x")


def put(file: Path, text: str = MODULE) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def load(path: str, origin: Origin, traces: list[str]):
    return imports.load("reward.functions.mine", path, WANTED, origin, traces.append)


def test_what_a_run_names_and_the_project_has_is_said_and_then_imported(run, traces):
    put(Path("mine.py"))
    assert load("mine.reward", Origin(run), traces)("", "", "") == 1.0
    assert traces == ["imports mine.reward, named by runs/x/config.yaml", "mine"]


def test_ours_and_the_users_own_need_no_word(run, traces):
    put(Path("mine.py"))
    load("mine.reward", OWN, traces)
    load("mine.reward", Origin(run, frozenset({"reward.functions.mine"})), traces)
    load("agent_tunix.environments.rewards.answer_correct", Origin(run), traces)
    assert traces == ["mine"]


@pytest.mark.parametrize(
    ("cwd", "file", "path"),
    [
        ("runs/x", "runs/x/theirs.py", "theirs.reward"),
        ("runs/x/deep/in", "runs/x/deep/in/theirs.py", "theirs.reward"),
        ("runs/x", "runs/x/theirs/of/many.py", "theirs.of.many.reward"),
        ("runs", "runs/theirs.py", "theirs.reward"),
        (".", "runs/x/theirs.py", "runs.x.theirs.reward"),
        (".", "runs/theirs.py", "runs.theirs.reward"),
        (".", "runs/theirs/__init__.py", "runs.theirs.reward"),
        ("runs/y", "runs/y/theirs.py", "theirs.reward"),
        (".", "nowhere.py", "theirs.reward"),
    ],
)
def test_nothing_of_a_runs_folder_or_beside_it_is_run(run, traces, monkeypatch, cwd, file, path):
    put(Path(file))
    for other in ("config.yaml", "metrics.jsonl"):  # beside it, another run that came with it
        put(Path("runs/y") / other, "")
    folder = run.absolute()
    Path(cwd).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(cwd)
    for again in (sys.path, ["", *sys.path]):
        monkeypatch.setattr(sys, "path", [*again])
        with pytest.raises(UserError, match=rf"reward\.functions\.mine={path}, named by .*x/config\.yaml, is not imported"):
            load(path, Origin(folder), traces)
    assert traces == []


@pytest.mark.parametrize("place", ["runs/x", "runs", "link", "runs/x/lib"])
def test_a_place_that_python_searches_is_left_out_where_it_is_the_runs(run, traces, monkeypatch, place):
    Path("link").symlink_to("runs/x")
    put(Path(place) / "theirs.py")
    monkeypatch.setattr(sys, "path", [str(Path(place).absolute()), *sys.path])
    with pytest.raises(UserError, match="is not imported"):
        load("theirs.reward", Origin(run), traces)
    assert traces == []


def test_a_run_that_is_named_by_a_link_is_the_same_run(run, traces, monkeypatch):
    put(run / "theirs.py")
    Path("latest").symlink_to(run)
    monkeypatch.chdir("latest")
    with pytest.raises(UserError, match="is not imported"):
        load("theirs.reward", Origin(Path("../../latest")), traces)
    assert traces == []


def test_a_file_that_is_a_link_into_the_run_is_the_runs(run, traces):
    Path("mine.py").symlink_to(put(run / "theirs.py").absolute())
    with pytest.raises(UserError, match="is not imported"):
        load("mine.reward", Origin(run), traces)
    assert traces == []


@pytest.mark.parametrize("cwd", ["sweeps", "sweeps/a", "sweeps/a/0", "search", "search/1-coarse-rate"])
def test_what_lies_around_a_job_is_what_lies_around_its_sweep_or_search(tmp_path, traces, monkeypatch, cwd):
    for index in ("sweeps/a/sweep.json", "search/tune.json", "search/1-coarse-rate/sweep.json"):
        put(tmp_path / index, "")
    job = tmp_path / ("sweeps/a/0" if cwd.startswith("sweeps") else "search/1-coarse-rate/0")
    put(job / "config.yaml", "")
    put(tmp_path / cwd / "theirs.py")
    monkeypatch.chdir(tmp_path / cwd)
    with pytest.raises(UserError, match="is not imported"):
        load("theirs.reward", Origin(job), traces)
    assert traces == []


def test_what_is_installed_is_found_though_the_run_has_something_of_that_name(run, tmp_path, traces, monkeypatch):
    put(tmp_path / "installed" / "mine.py")
    put(run / "mine.py", "raise AssertionError('run')")
    folder = run.absolute()
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path / "installed")])
    load("mine.reward", Origin(folder), traces)
    assert traces[-1] == "mine"


def test_nor_does_what_is_imported_find_its_own_imports_there(run, tmp_path, traces, monkeypatch):
    put(tmp_path / "installed" / "mine.py", f"{MODULE}\ndef late():\n    import theirs\n")
    put(tmp_path / "installed" / "hasty.py", f"import theirs\n{MODULE}")
    put(run / "theirs.py")
    folder = run.absolute()
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path / "installed")])
    late = load("mine.late", Origin(folder), traces)
    with pytest.raises(UserError, match="No module named 'theirs'"):
        load("hasty.reward", Origin(folder), traces)
    with pytest.raises(ModuleNotFoundError):
        late()


def test_a_module_of_the_runs_that_was_imported_before_is_still_the_runs(run, traces, monkeypatch):
    put(run / "theirs.py")
    folder = run.absolute()
    monkeypatch.chdir(run)
    load("theirs.reward", OWN, traces)
    with pytest.raises(UserError, match="is not imported"):
        load("theirs.reward", Origin(folder), traces)


def test_a_project_that_is_a_runs_folder_too_keeps_its_python(tmp_path, traces, monkeypatch):
    """As with hydra.run.dir=."""
    put(tmp_path / "config.yaml", "")
    put(tmp_path / "metrics.jsonl", "")
    put(tmp_path / ".venv" / "lib" / "mine.py")
    monkeypatch.setattr(imports, "PYTHONS", {str(tmp_path / ".venv")})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / ".venv" / "lib")])
    load("mine.reward", Origin(tmp_path), traces)
    assert traces[-1] == "mine"


@pytest.mark.parametrize("path", ["cProfile.run", "os.system", "builtins.exec", "idlelib.idle.x"])
def test_nothing_of_python_itself_is_imported(run, traces, path):
    with pytest.raises(UserError, match="is not imported"):
        load(path, Origin(run), traces)
    assert traces == []


@pytest.mark.parametrize("path", ["", "f", ".f", "..a.f", "a..f", "a\0b.f", "runs.", "mine.py.f"])
def test_what_is_no_import_path_is_refused(run, traces, path):
    put(Path("mine.py"))
    with pytest.raises(UserError):
        load(path, Origin(run), traces)
    assert traces == []
