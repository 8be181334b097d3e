"""`agent-tunix report <folder>`: one self-contained page on a run, a sweep or a tune.

The page holds its style, its program and its data, and asks for nothing: a content security policy forbids every request
and every program but its own. Completions are text that nobody has checked, so data reaches the page as JSON with
no `<` in it, and the program puts it in as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from agent_tunix.config.commands import join
from agent_tunix.errors import UserError
from agent_tunix.lab.report.contents import contents
from agent_tunix.training.progress import say
from agent_tunix.training.run_folder import replace_text
from agent_tunix.types import Record

USAGE = "usage: agent-tunix report <run, sweep or tune folder>"
HERE = Path(__file__).parent
PROGRAM = ("scale.js", "chart.js", "page.js")


def main(arguments: Sequence[str], console: Console) -> None:
    """Reads the command line, writes the page and says where it is."""
    if {"--help", "-h"} & set(arguments):
        print(USAGE)
        return
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError(USAGE)
    folder = Path(arguments[0])
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder.\n{USAGE}")
    say(console, str(write_report(folder)))


def write_report(folder: Path) -> Path:
    """Writes report.html atomically, so that nobody opens half a page."""
    path = folder / "report.html"
    replace_text(path, render(folder))
    return path


def report_on(folder: Path, say: Callable[[str], None]) -> None:
    """Writes the page at the end of a run, a sweep or a tune; if that fails, it warns and lets the run end well."""
    try:
        write_report(folder)
    except Exception as fault:  # the result stands; the command below shows the fault whole
        say(f"warning: no report.html ({type(fault).__name__}: {fault}); see: {join([str(folder)], 'report')}")


def render(folder: Path) -> str:
    return page_of(contents(folder), live=False)


def page_of(record: Record, live: bool) -> str:
    """The page of a record; a live one asks its server, and only that, for newer data."""
    program = "\n".join((HERE / name).read_text(encoding="utf-8") for name in PROGRAM)
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    verdict, source = record["verdict"], "'self'" if live else "'none'"
    parts = {
        "policy": f"default-src 'none'; connect-src {source}; script-src 'sha256-{digest}'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
        "title": _escaped(f"{record['name']}: {verdict['lead']}"),
        "verdict": _escaped(f"{verdict['lead']}: {verdict['text']}"),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "data": data_of(record | {"live": live}).replace("<", "\\u003c"),
        "program": program,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], (HERE / "page.html").read_text(encoding="utf-8"))


def _escaped(text: str) -> str:
    """As HTML; a folder's name may hold bytes that are no text, which have no encoding."""
    return html.escape(text.encode("utf-8", "replace").decode())


def data_of(record: Record) -> str:
    """ASCII alone, so that half of a surrogate pair in a completion cannot break the encoding."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False)
