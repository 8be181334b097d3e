"""Files that would exhaust the machine, or keep it waiting, are refused before they are read."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_tunix import files
from agent_tunix.models.checkpoints.hub import find_checkpoint


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def sparse(path: Path, size: int) -> Path:
    """A file of many zeros that takes no room."""
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def test_only_a_regular_file_is_opened(tmp_path):
    (file := tmp_path / "file").write_bytes(b"{}")
    (link := tmp_path / "link").symlink_to(file)
    assert files.read_json(link) == {}
    (device := tmp_path / "device").symlink_to("/dev/null")
    other = pipe(tmp_path / "pipe")
    kept = os.open(other, os.O_RDWR)  # with it, even a wrong way of opening the pipe does not wait
    for strange in (other, device, tmp_path):
        with pytest.raises(ValueError, match="is no regular file"):
            files.open_regular(strange)
    os.close(kept)


def test_a_file_that_is_too_large_for_its_kind_is_not_read(tmp_path):
    file = sparse(tmp_path / "config.json", files.JSON + 1)
    with pytest.raises(ValueError, match=f"it has {files.JSON + 1:,} bytes, where {files.JSON:,} are the most"):
        files.read_json(file)
    assert files.read_bytes(sparse(file, 3), 3) == bytes(3)


def test_a_line_that_is_too_long_is_refused_or_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE", 10)
    text = "short\n" + "x" * 25 + "\n" + "x" * 10 + "\nlast"
    with pytest.raises(ValueError, match="line 2 is longer than 10 characters"):
        list(files.lines(io.StringIO(text)))
    assert list(files.lines(io.StringIO("a\nb"))) == ["a\n", "b"]
    (tmp_path / "records").write_text(text)
    assert list(files.short_lines(tmp_path / "records")) == [b"short", b"last"]


def test_a_folder_for_a_library_has_no_pipes_dead_links_and_endless_descriptions(tmp_path):
    (inner := tmp_path / "state").mkdir()
    (inner / "_METADATA").write_text("{}")
    sparse(inner / "data", files.JSON + 1)
    files.refuse_traps(tmp_path)
    (inner / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="'link' is a link that leads nowhere"):
        files.refuse_traps(tmp_path)
    (inner / "link").unlink()
    sparse(inner / "_METADATA", files.JSON + 1)
    with pytest.raises(ValueError, match=r"'_METADATA' has .* bytes"):
        files.refuse_traps(tmp_path)
    (inner / "_METADATA").unlink()
    pipe(inner / "_METADATA")
    with pytest.raises(ValueError, match="'_METADATA' is no regular file"):
        files.refuse_traps(tmp_path)


HOSTILE = """
import json, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30,) * 2)  # of which JAX alone reserves some
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from agent_tunix.config.load import read_saved
from agent_tunix.environments.tables import RowFormat, read_rows
from agent_tunix.errors import UserError
from agent_tunix.lab.doctor.records import read_run
from agent_tunix.models.checkpoints.safetensors import SafetensorsFolder, read_architecture
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.models.tokenizer_files import tokenizer_files

def rows(folder):
    return read_rows(str(folder), None, "train", 1.0, RowFormat("question", "answer", None, False))

for name, reader in json.loads(sys.argv[1]).items():
    try:
        eval(reader)(Path(name))
        print(name, "read", flush=True)
    except UserError as fault:
        print(name, "refused:", fault, flush=True)
"""


def test_hostile_files_are_answered_in_little_time_and_memory(tmp_path):
    """In a process of its own, with limits, as each of them would take gigabytes, abort or wait for ever."""

    def place(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    whole = json.loads((find_checkpoint("package:tiny") / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"String": "n"}, "content": "n" * 10}
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    padded = whole | {"padding": padding | {"strategy": {"Fixed": 10**12}}}
    chain = whole | {"normalizer": {"type": "Sequence", "normalizers": [replace] * 20}}
    (place("padded") / "tokenizer.json").write_text(json.dumps(padded))
    (place("chain") / "tokenizer.json").write_text(json.dumps(chain))
    pipe(place("tokenizer_pipe") / "tokenizer.json")
    pipe(place("model_pipe") / "tokenizer.model")
    pipe(place("copied_pipe") / "tokenizer_config.json")
    pipe(place("config_pipe") / "config.json")
    sparse(place("config_large") / "config.json", 2**36)
    pipe(place("weights_pipe") / "model.safetensors")
    pipe(place("index_pipe") / "model.safetensors.index.json")
    pipe(place("rows_pipe") / "train.jsonl")
    (place("rows_endless") / "train.csv").symlink_to("/dev/zero")
    sparse(place("rows_large") / "train.jsonl", 2**36)
    pipe(place("run_pipe") / "config.yaml")
    sparse(place("run_large") / "config.yaml", 2**36)
    laughs = "".join(
        f"{after}: &{after} [{','.join([f'*{name}'] * 10)}]\n" for name, after in itertools.pairwise("abcdefghi")
    )
    (place("run_laughs") / "config.yaml").write_text("a: &a [x,x]\n" + laughs)
    (place("records_pipe") / "config.yaml").write_text("seed: 1\n")
    pipe(tmp_path / "records_pipe" / "metrics.jsonl")
    saved = "lambda folder: read_saved(folder / 'config.yaml')"
    readers = {
        **dict.fromkeys(("padded", "chain", "tokenizer_pipe", "model_pipe"), "load_tokenizer"),
        "copied_pipe": "tokenizer_files",
        **dict.fromkeys(("config_pipe", "config_large"), "read_architecture"),
        **dict.fromkeys(("weights_pipe", "index_pipe"), "lambda folder: SafetensorsFolder(folder, True)"),
        **dict.fromkeys(("rows_pipe", "rows_endless", "rows_large"), "rows"),
        **dict.fromkeys(("run_pipe", "run_large", "run_laughs"), saved),
        "records_pipe": "read_run",
    }
    program = [sys.executable, "-c", HOSTILE, json.dumps(readers)]
    ran = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    said = dict(line.split(" ", 1) for line in ran.stdout.splitlines())
    assert said.keys() == readers.keys(), ran.stderr[-2000:]
    read = {name for name, outcome in said.items() if outcome == "read"}
    assert read == {"padded", "records_pipe"}, said
