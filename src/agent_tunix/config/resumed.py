"""The configuration of a resumed run: its own, with single values changed; and of a run that starts from another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from agent_tunix.config.imports import Origin
from agent_tunix.config.load import escaped, leaves, read_saved, validate
from agent_tunix.config.schema import Config
from agent_tunix.errors import GOING_ON, UserError

C = TypeVar("C", bound=Config)
FIXED = {  # what a run cannot change and still be one run
    "seed": "the order of the data follows from it",
    "model.lora_alpha": "it scales what the adapters have learnt",
    "model.use_rslora": "it scales what the adapters have learnt",
    "model.use_dora": "its magnitudes are part of what it has learnt",
    "model.adapter": "it is compared with what it started from",
    "optimizer.optimizer_name": "another optimizer could not use its state",
    "training.init_from": "it is compared with what it started from",
    "training.init_step": "it is compared with what it started from",
    "training.method": "what one method has learnt would count as the other's",
    "training.train_fraction": "problems that were trained on would count as held out",
}


def begun_or_resumed(composed: DictConfig, overrides: Sequence[str]) -> tuple[Config, Origin]:
    """The configuration of a run that begins, or of the one that is resumed, and whose it is: values that are changed are
    judged beside the run's own, not beside those that are shipped.
    """
    folder = OmegaConf.select(composed, "training.resume")
    return (anchored(validate(composed, Config)), Origin()) if folder is None else resumed(str(folder), overrides)


def resumed(folder: str, overrides: Sequence[str]) -> tuple[Config, Origin]:
    """A run's own configuration, with the values that were overridden on the command line of its continuation."""
    path = Path(folder)
    if not (path / "config.yaml").exists():
        raise no_run(folder, "training.resume")
    saved = OmegaConf.create(escaped(read_saved(path / "config.yaml")))
    given = set[str]()
    began = {key: OmegaConf.select(saved, key) for key in FIXED}
    for override, parsed in zip(overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True):
        key, value = parsed.key_or_group, parsed.value()
        if key == "training.resume":
            continue
        if "." not in key and key not in ("seed", "dry_run"):
            raise UserError(
                f"{override}: a resumed run keeps its own groups; only single values, as in a.b=c, can be changed."
            )
        if parsed.is_delete():
            section, _, name = key.rpartition(".")
            (OmegaConf.select(saved, section) or {}).pop(name, None)
            continue
        OmegaConf.update(saved, key, value, force_add=True)
        given |= leaves(value, f"{key}.").keys()
        if key in FIXED and not _same(key, began[key], OmegaConf.select(saved, key)):
            kept = "null" if began[key] is None else began[key]
            raise UserError(f"{override.lstrip('+')}: a resumed run keeps {key}={kept}, as {FIXED[key]}. Start another run.")
    cfg = validate(saved, Config, f"{path / 'config.yaml'} and the command line")
    return cfg, Origin(path, frozenset(given))


def refuse_other_folder(run: Path, asked: Path) -> None:
    """Refuses the folder that was asked for, by hydra.run.dir, for what a resumed run writes: it goes on in its own."""
    if asked.resolve() != run.resolve():
        raise UserError(f"hydra.run.dir={asked}: a resumed run goes on in its own folder, {run}; leave hydra.run.dir out.")


def no_run(folder: str, key: str) -> UserError:
    """The error for a key whose folder is not that of a run; where it holds several runs, the message names one."""
    for index, runs in {"sweep.json": "*/config.yaml", "tune.json": "*/*/config.yaml"}.items():
        if (Path(folder) / index).exists() and (found := sorted(Path(folder).glob(runs))):
            again = f"\n{GOING_ON}" if key == "training.resume" else ""
            return UserError(f"{key}={folder} holds many runs; give one of them, as in {key}={found[-1].parent}.{again}")
    moved = "\nIf it was moved, write its new path into config.yaml of the run that started from it."
    return UserError(
        f"{key}={folder}: this is not the folder of a run, there is no {Path(folder).absolute() / 'config.yaml'}."
        f"{moved if key == 'training.init_from' else ''}"
    )


@contextlib.contextmanager
def made_of(run: str | None) -> Iterator[None]:
    """Around the loading of what an earlier run was made of: says where that is written, should it not be found."""
    try:
        yield
    except UserError as fault:
        if run is None:
            raise
        written = Path(run) / "config.yaml"
        raise UserError(f"{fault}\nThis is what {written} names; if it was moved, write its new path there.") from fault


def _same(key: str, before: Any, now: Any) -> bool:
    """Whether a resumed run is still the same run; the folder that it started from may have been moved. What a run of an
    earlier version does not know of was off.
    """
    moved = key in ("training.init_from", "model.adapter") and None not in (before, now)
    return before == now or (before is None and now is False) or moved


def anchored(cfg: C) -> C:
    """The configuration with the earlier run's base, and the step it starts from written down, as that run may go on."""
    folder, step = cfg.training.init_from, cfg.training.init_step
    if folder is None and step is not None:
        raise UserError(f"training.init_step={step}: a step of which run? Give training.init_from=<run folder> too.")
    if folder is None or not (Path(folder) / "config.yaml").exists():
        return cfg
    section = read_saved(Path(folder) / "config.yaml").get("model")
    weights = (section.get("weights") if isinstance(section, dict) else None) or cfg.model.weights
    step = max(saved_steps(Path(folder)), default=None) if step is None else step
    training = cfg.training.model_copy(update={"init_step": step})
    return cfg.model_copy(update={"training": training, "model": cfg.model.model_copy(update={"weights": weights})})


def saved_steps(run: Path) -> list[int]:
    """The steps of a run that have a checkpoint, by the names of their folders."""
    return [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdecimal()]
