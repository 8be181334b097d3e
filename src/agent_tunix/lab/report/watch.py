"""`agent-tunix watch <folders>`: the report, served to this machine alone and kept up to date while training runs.

A thread answers each request with a page made from the folders as they are then. Of several runs there is a page of all,
with curves laid over each other, and below /1/, /2/ and so on a page of each. Only these are served, nothing is written.
Requests under another host's name are refused: a page elsewhere could have pointed its own name at this machine.
"""

from __future__ import annotations

import errno
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from agent_tunix.errors import UserError, named, said
from agent_tunix.lab.report.contents import contents, kind_of
from agent_tunix.lab.report.overview import overview
from agent_tunix.lab.report.page import data_of, page_of
from agent_tunix.lab.report.verdict import Verdict
from agent_tunix.training.guard import ended_as_by_interrupts
from agent_tunix.training.progress import counted, say
from agent_tunix.types import Record

USAGE = "usage: agent-tunix watch <run, sweep or tune folder, or folders of runs> ... [--port N]"
TURN = 0.2  # seconds
HOST, PORT, TRIES = "127.0.0.1", 8265, 20
RUN_FILES = ("config.yaml", "metrics.jsonl", "evals.jsonl", "samples.jsonl", "summary.json", "lr_find.json")
PAGE = re.compile(r"(?:/([1-9]\d{0,5}))?/(data\.json)?")
READ = (*RUN_FILES, "sweep.json", "tune.json", "best.yaml")


def main(arguments: Sequence[str], console: Console) -> None:
    """Reads the command line and serves until Ctrl-C."""
    if {"--help", "-h"} & set(arguments):
        print(USAGE)
        return
    folders, port = _parsed(list(arguments))
    with open_server(folders, port) as server:
        named = ", ".join(map(str, folders))
        say(
            console,
            f"{named} {'is' if len(folders) == 1 else 'are'} shown at http://{HOST}:{server.server_port}/ (Ctrl-C ends it)",
        )
        if missing := [str(folder) for folder in folders if not folder.exists()]:
            say(console, f"There is no such folder yet: {', '.join(missing)}. The page fills once a run begins there.")
        try:
            _serve(server)
        except KeyboardInterrupt:
            console.print("")


def _serve(server: Server) -> None:
    """Until an interrupt, which is raised while this thread sleeps: raised within the server's own work, it might count as
    the fault of a request, and be forgotten."""
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    with ended_as_by_interrupts():
        try:
            while serving.is_alive():
                time.sleep(TURN)
        finally:
            server.shutdown()


def _parsed(arguments: list[str]) -> tuple[list[Path], int | None]:
    port = None
    if "--port" in arguments:
        at = arguments.index("--port")
        value = arguments[at + 1] if at + 1 < len(arguments) else ""
        if not value.isdecimal() or not 1 <= int(value) <= 65535:
            raise UserError(f"--port {value}: a number from 1 to 65535 is needed.\n{USAGE}")
        port = int(value)
        del arguments[at : at + 2]
    if not arguments or any(argument.startswith("-") for argument in arguments):
        raise UserError(USAGE)
    folders = [Path(argument) for argument in arguments]
    if files := [folder for folder in folders if folder.exists() and not folder.is_dir()]:
        raise UserError(f"{files[0]} is not a folder.\n{USAGE}")
    return folders, port


def open_server(folders: Sequence[Path], port: int | None) -> Server:
    """A server on the port asked for, or on the first that is free."""
    for number in [port] if port is not None else range(PORT, PORT + TRIES):
        try:
            return Server(folders, number)
        except OSError as fault:
            if fault.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    tried = f"Port {port}" if port is not None else f"Every port from {PORT} to {PORT + TRIES - 1}"
    raise UserError(f"{tried} is in use or not allowed. Choose another: agent-tunix watch {folders[0]} --port <number>")


class Server(ThreadingHTTPServer):
    """Knows the folders and remembers what it last said of each page."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int):
        self._folders, self._lock = folders, threading.Lock()
        self._seen: dict[int, object] = {}
        self._records: dict[int, Record] = {}
        super().__init__((HOST, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no fault."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def record(self, number: int = 0) -> Record | None:
        """What a page says now: 0 is the first, of all folders, and those from 1 on are of the runs that it lists.

        None where there is no such page. Read anew only when a file has changed, and by one thread at a time.
        """
        with self._lock:
            runs = several(self._folders)
            if number > len(runs):
                return None
            shown = [runs[number - 1]] if number else runs or self._folders[:1]
            seen = [_footprint(folder) for folder in shown]
            if number not in self._records or seen != self._seen.get(number):
                self._records[number] = _told(overview, runs) if runs and not number else latest(shown[0])
                self._seen[number] = seen
            return self._records[number]


def several(folders: Sequence[Path]) -> list[Path]:
    """The runs, sweeps and tunes that are listed on a page of all: none where one folder is given that is one of them, or
    holds none yet. New ones join while it is watched.
    """
    if len(folders) == 1 and _holds_one(folders[0]):
        return []
    found = [[folder] if _holds_one(folder) else list(filter(_holds_one, _folders(folder))) for folder in folders]
    return list(dict.fromkeys(path for some in found for path in some))


def _holds_one(folder: Path) -> bool:
    """Whether it is a run, a sweep or a tune, as far as it can be read."""
    try:
        return kind_of(folder) is not None
    except Exception:  # it may be moved meanwhile, and hold anything
        return False


def latest(folder: Path) -> Record:
    """The report's record, or one that says what is waited for."""
    return _told(_contents, folder)


def _contents(folder: Path) -> Record:
    if kind_of(folder) is not None:
        return contents(folder)
    text = f"There is no run, sweep or tune in {folder} yet. This page fills when training begins to write there."
    return _waiting(folder.name, text)


def _told(make: Callable[[Any], Record], place: Any) -> Record:
    """What is made of a place, or a record that says why it cannot be, as the next look may find it mended."""
    try:
        return make(place)
    except (UserError, OSError) as mistake:  # a folder may be moved while it is read
        text = f"It cannot be read yet: {mistake}"
    except Exception as fault:  # it may hold anything
        text = f"It cannot be read yet: {named(fault)}"
    return _waiting(place.name if isinstance(place, Path) else counted(len(place), "run"), text)


def _waiting(name: str, text: str) -> Record:
    waiting = Verdict("going", "Waiting", text)
    return {"kind": "folder", "name": name, "verdict": vars(waiting), "tiles": [], "sections": [], "settings": []}


def _footprint(folder: Path) -> object:
    """Times and sizes of the files that a report reads: of a run, of a sweep's jobs, of the jobs of a tune's stages."""
    below = _folders(folder)
    jobs = [job for stage in below for job in _folders(stage)]
    return [_stat(place / name) for place in [folder, *below, *jobs] for name in READ]


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in ("checkpoints", "tensorboard"))
    except OSError:  # it is not there yet, or no more
        return []


def _stat(path: Path) -> tuple[str, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return str(path), stat.st_mtime_ns, stat.st_size


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "agent-tunix", ""

    def do_GET(self) -> None:
        try:
            path = urlsplit(self.path).path
        except ValueError as fault:
            return self._answer(HTTPStatus.BAD_REQUEST, "text/plain", f"{said(fault)}.\n")
        page = PAGE.fullmatch(path)
        if (self.headers.get("Host") or "").partition(":")[0].lower() not in (HOST, "localhost"):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "This page is served to this machine alone.\n")
        elif page is None or (record := self.server.record(int(page[1] or 0))) is None:
            self._answer(
                HTTPStatus.NOT_FOUND, "text/plain", "Only / and /data.json are served, and /1/ and so on of runs.\n"
            )
        elif page[2]:
            self._answer(HTTPStatus.OK, "application/json", data_of(record | {"live": True}))
        else:
            self._answer(HTTPStatus.OK, "text/html", page_of(record, live=True))

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests come every two seconds; a line for each would bury what matters."""
