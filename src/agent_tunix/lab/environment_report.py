"""`agent-tunix env`: what a report of a bug should say of the machine.

Nothing secret is printed: of the environment only variables that are known to hold none, the home folder as ~, and of tokens
nothing at all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import agent_tunix
from agent_tunix.engine import cache_folder
from agent_tunix.errors import UserError, said
from agent_tunix.training.progress import say

USAGE = "usage: agent-tunix env [--json]"
VARIABLES = (
    *("JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "LIBTPU_INIT_ARGS"),
    *("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
)
PLUGINS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
NAME = re.compile(r"[\w.-]+")
Said = dict[str, str]


def main(arguments: Sequence[str], console: Console) -> None:
    if {"--help", "-h"} & set(arguments):
        print(USAGE)
        return
    if set(arguments) - {"--json"}:
        raise UserError(USAGE)
    found = collected()
    if "--json" in arguments:
        print(json.dumps(found, indent=2))
        return
    for title, lines in found.items():
        say(console, title)
        width = max(map(len, lines), default=0)
        for name, value in lines.items():
            say(console, f"  {name:{width}}  {value}")


def collected() -> dict[str, Said]:
    parts = {"agent-tunix": _ours(), "machine": _machine(), "devices": _devices(), "libraries": _libraries()}
    parts |= {"caches": _caches(), "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ}}
    return {title: {name: _without_home(value) for name, value in lines.items()} for title, lines in parts.items()}


def _ours() -> Said:
    place = Path(agent_tunix.__file__).parent
    kind = "a checkout" if (place.parents[1] / "pyproject.toml").is_file() else "installed"
    return {"version": agent_tunix.__version__, "from": f"{place} ({kind})", "python": f"{sys.version} at {sys.executable}"}


def _machine() -> Said:
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = shutil.disk_usage(os.getcwd()).free
    return {
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {cores} cores for this process",
        "memory": f"{pages / 1e9:.1f} GB",
        "disk": f"{free / 1e9:.1f} GB free in the working directory",
    }


def _devices() -> Said:
    try:
        import jax

        found = {}
        for device in jax.devices():
            stats = device.memory_stats() or {}
            memory = f", {stats['bytes_limit'] / 1e9:.1f} GB for JAX" if "bytes_limit" in stats else ""
            found[str(device.id)] = f"{device.platform}, {device.device_kind}{memory}"
    except Exception as fault:  # that no device starts is what the report is for
        return {"fault": said(fault)}
    return found


def _libraries() -> Said:
    """All that Agent-Tunix asks for, of the extras those that are installed; and what gives JAX its devices."""
    asked = importlib.metadata.requires("agent-tunix") or []
    found = {}
    for requirement in [*asked, *PLUGINS]:
        if name := NAME.match(requirement):
            try:
                found[name[0]] = importlib.metadata.version(name[0])
            except importlib.metadata.PackageNotFoundError:
                if "extra" not in requirement and requirement not in PLUGINS:
                    found[name[0]] = "missing"
    found.pop("agent-tunix", None)
    return found


def _caches() -> Said:
    places = {"models and data": Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")}
    try:
        places |= {name: cache_folder.of_user(name) for name in ("compiled", "solve-rates")}
    except RuntimeError as fault:
        return {"fault": said(fault)}
    return {name: f"{place}, {_size(place)}" for name, place in places.items()}


def _size(folder: Path) -> str:
    if not folder.is_dir():
        return "not there"
    sizes = [os.lstat(Path(place) / name).st_size for place, _, names in os.walk(folder) for name in names]
    return f"{len(sizes)} files, {sum(sizes) / 1e9:.2f} GB"


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return " ".join(text.replace(home, "~").split()) if len(home) > 1 else " ".join(text.split())
