"""Code that a configuration names by its import path, as reward functions are: here alone is it imported.

What users name, on the command line or in files of configuration, is their own, and may lie in the working directory. What
the saved configuration of a run names may be a stranger's choice, as may all that lies around it. So it is imported only
where it is found without the run's folder and without the one around that, and it is said before that happens.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from agent_tunix.config.output_folders import of_a_run, whole
from agent_tunix.errors import UserError, calling, named

SHIPPED = "agent_tunix."
PYTHONS = {*map(os.path.realpath, (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix))}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Who has named the code of a configuration: its user or, where a run goes on, that run's folder.

    `given` are the keys that the user has given anew for a run that goes on.
    """

    run: Path | None = None
    given: frozenset[str] = frozenset()

    def saved_in(self, key: str, path: str) -> Path | None:
        """The file that names this, where it is neither ours nor named by the user."""
        ours = path.startswith(SHIPPED)
        return None if self.run is None or ours or key in self.given else self.run / "config.yaml"


OWN = Origin()


def load(key: str, path: str, wanted: str, origin: Origin, notice: Callable[[str], None]) -> Any:
    """What lies at the import path `package.module.name` that a key has for its value; `wanted` says what it should be."""
    allow(key, path, origin, notice)
    module, _, name = path.rpartition(".")
    remedy = f"Give the import path of {wanted}, where my_module.py lies in the working directory or is installed."
    with calling(lambda fault: UserError(f"{key}={path}: {named(fault)}.\n{remedy}")):
        return getattr(importlib.import_module(module), name)


def allow(key: str, path: str, origin: Origin, notice: Callable[[str], None]) -> None:
    """Refuses what may not be imported; says what a run's folder names; lets the user's own lie in the working directory."""
    if file := origin.saved_in(key, path):
        find_elsewhere(key, path, file)
        notice(f"imports {path}, named by {file}")
    elif not path.startswith(SHIPPED) and "" not in sys.path:
        sys.path.insert(0, "")


def find_elsewhere(key: str, path: str, file: Path) -> None:
    """Refuses what is not found without the folder of the run whose file names it; runs no code of it.

    From then on the process imports nothing from there: neither what the module imports in turn, nor what it imports later.
    """
    run, module = whole(file.parent), path.rpartition(".")[0]
    if "" not in sys.path:
        sys.path.insert(0, "")
    sys.path[:] = [place for place in sys.path if not _barred(place, run)]
    if module.partition(".")[0] in sys.stdlib_module_names:
        why = "it is a part of Python, which has nothing of the kind"
    elif not _is_elsewhere(module, run):
        why = f"no module {module} is found outside of the run's folder and of the one around it, which may be a stranger's"
    else:
        return
    raise UserError(f"{key}={path}, named by {file}, is not imported: {why}.\nIf you trust it, give {key}={path} yourself.")


def _is_elsewhere(module: str, run: Path) -> bool:
    """Whether a module and the packages that it lies in are all found in places that are not barred."""
    if not all(module.split(".")):
        return False
    within = None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        spec = _spec(name, within)
        if spec is None:
            return False
        within = spec.submodule_search_locations or []
        origin = [spec.origin] if spec.has_location and spec.origin else []
        places = [os.path.realpath(place) for place in (*within, *origin)]
        if any(_barred(place, run) or _barred(os.path.dirname(place), run) for place in places):
            return False
    return True


def _spec(name: str, within: Any) -> ModuleSpec | None:
    """As importlib finds it, which would import the packages around it."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    found = (finder.find_spec(name, within) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next(filter(None, found), None)


def _barred(place: str, run: Path) -> bool:
    """Whether a place lies in a run's folder, or is the one around this run's; Python itself may, as that of a project."""
    real = Path(os.path.realpath(place))
    if any(real.is_relative_to(python) for python in PYTHONS if not run.is_relative_to(python)):
        return False
    return real == run.parent or of_a_run(real) or real.is_relative_to(run)
