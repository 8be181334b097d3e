"""Composes a configuration by Hydra without its command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig


def compose_config(name: str, overrides: Sequence[str], folders: Sequence[Path], *, hydra: bool = False) -> DictConfig:
    """The configuration `name` with overrides; files are looked for in `folders`, first to last.

    With `hydra`, it has Hydra's own section, which says where a run's folder is to be. Hydra, if it is at work, is left
    as it was.
    """
    at_work = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            searched = GlobalHydra.instance().config_loader().get_search_path()
            for folder in folders[1:]:
                searched.append("command-line", f"file://{folder}", SearchPathQuery("main"))
            GlobalHydra.instance().hydra.config_loader = ConfigLoaderImpl(searched)  # type: ignore[union-attr]
            return compose(name, list(overrides), return_hydra_config=hydra)
    finally:
        GlobalHydra.instance().hydra = at_work
