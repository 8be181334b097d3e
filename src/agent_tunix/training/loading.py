"""What training and evaluation both start from: the device, the model and the state that a configuration names."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import threading
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agent_tunix.config.commands import value_text
from agent_tunix.config.guidance import guidance_by_size
from agent_tunix.config.load import read_saved, report, shipped_models, validate
from agent_tunix.config.mesh_shape import PARTED_BY_TP, faults, sizes_of
from agent_tunix.config.resumed import no_run
from agent_tunix.config.schema import BEST, Config, ModelSection, StepOrBest
from agent_tunix.engine import cache_folder, compile_cache, device
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.random_keys import Purpose, step_key
from agent_tunix.engine.sampler import Sampling
from agent_tunix.engine.update import evaluation_trainable, init_state
from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Architecture, Weights, fields_of
from agent_tunix.models.base import Model
from agent_tunix.models.checkpoints.hub import KAGGLE, adapter_of_hub, find_checkpoint, is_remote, repository_of
from agent_tunix.models.checkpoints.loading import open_weights, parameters, quantised, read_architecture, weight_shapes
from agent_tunix.models.checkpoints.peft import is_peft, named_base, read_adapters, settings_of
from agent_tunix.models.lora import (
    ATTENTION,
    FEED_FORWARD,
    Adapters,
    Trainable,
    init_adapters,
    masters,
    merge,
    select_modules,
    strange_words,
    unadapted,
)
from agent_tunix.models.published import of_repository
from agent_tunix.models.sharding import abstract, make_in_place, make_mesh, mesh_of_sizes, place
from agent_tunix.models.tokenizer import Tokenizer, load_tokenizer
from agent_tunix.training.best import step_of
from agent_tunix.training.data import Notice
from agent_tunix.types import TrainState

C = TypeVar("C", bound=Config)


def start_device(notice: Notice) -> None:
    """Starts the device, and keeps compiled programs in the user's cache folder: only the first run of a kind compiles."""
    cache = _cache(notice)
    jax.config.update("jax_compilation_cache_dir", None if cache is None else str(cache))
    # Small ones too: a start has dozens, each a tenth of a second to compile on a GPU and a hundredth to read.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if cache is not None:
        compile_cache.mend_cache()
        threading.Thread(target=compile_cache.make_room, args=(cache,)).start()  # of thousands of files, it takes a while
    device.wake()


def _cache(notice: Notice) -> Path | None:
    """The folder of compiled programs; None, with a word of it, where programs of others could be found there."""
    try:
        folder = cache_folder.of_user("compiled")
    except RuntimeError as fault:  # a user of a container may have no home
        notice(f"warning: compiled programs are not kept, so every start compiles: {fault} Name a folder by XDG_CACHE_HOME.")
        return None
    try:
        cache_folder.open_for_one(folder)
    except UserError as fault:
        notice(
            f"warning: compiled programs are not kept in {folder}, so every start compiles: {fault}.\n"
            "What lies there is run, so the folder and those around it must be yours, and others may not write to them.\n"
            "Mend that, and remove what it holds; or choose another place by XDG_CACHE_HOME=<folder>."
        )
        return None
    return folder


def saved_config(folder: str, key: str) -> Config:
    """The configuration of an earlier run, named by a key of this one."""
    path = Path(folder) / "config.yaml"
    if folder == "???":  # as Hydra says that a value is missing
        raise UserError(f"{key} is missing: give the folder of a run, as in {key}=runs/<time>.")
    if not path.exists():
        raise no_run(folder, key)
    if (path.parent / "lr_find.json").exists():
        raise UserError(f"{key}={folder} is a ramp of lr-find, which keeps no model; give the folder of a run.")
    return validate(read_saved(path), Config, str(path))


def refuse_others(folder: Path, kept: str = "") -> None:
    """Refuses a folder that holds something else than what is marked by the file `kept`.

    A ramp has the files of a run too, so it is looked for first.
    """
    kinds = {"lr_find.json": "a ramp of lr-find", "config.yaml": "a run", "sweep.json": "a sweep", "tune.json": "a search"}
    for name, kind in kinds.items():
        if name != kept and (folder / name).exists():
            raise UserError(f"{folder} holds {kind}; choose another folder.")


def load_model(cfg: Config, mesh: Mesh | None = None) -> Model:
    """The base: a checkpoint's weights, or, where all weights were or are trained, what an earlier run made of them.

    It lies on the mesh of its configuration unless another is given, in the types of its configuration.
    """
    mesh = mesh or make_mesh(cfg.model, cfg.training.micro_batch_size)
    if (folder := cfg.training.init_from) is None:
        return _open_checkpoint(cfg.model, mesh)
    earlier = saved_config(folder, "training.init_from")
    trains_all = 0 in (cfg.model.lora_rank, earlier.model.lora_rank)
    base = load_model(held_in(earlier, cfg.model.dtype, None if trains_all else cfg.model.base_dtype), mesh)
    _check_architecture(cfg.model, base.arch, f"training.init_from={folder}")
    if not trains_all:
        return base
    dtype, base_dtype = jnp.dtype(cfg.model.dtype), cfg.model.base_dtype

    def read() -> tuple[Weights, int]:
        learnt, _ = load_trained(folder, earlier, base, cfg.training.init_step)
        weights, checksum = base.read()  # rather than base.weights, which would be kept beside those made of them
        if isinstance(learnt, Adapters):
            weights = merge(weights, learnt)
        else:
            weights = jax.tree.map(lambda new, old: new.astype(old.dtype), learnt, weights)
        return place(quantised(weights, base_dtype) if base_dtype else weights, base.arch, mesh), checksum

    return dataclasses.replace(base, shapes=weight_shapes(base.arch, dtype, mesh, base_dtype), read=read)


def held_in(cfg: Config, dtype: str, base_dtype: str | None) -> Config:
    """A configuration with its base held in other types."""
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"dtype": dtype, "base_dtype": base_dtype})})


def load_trained_model(trained: Config, notice: Notice) -> Model:
    """The base of an earlier run, on the run's mesh where this machine has the devices, else on one device."""
    sizes, there = sizes_of(trained.model.mesh_shape), jax.device_count()
    if math.prod(sizes) <= there or jax.process_count() > 1:
        return load_model(trained)
    notice(f"The run was on a mesh of {math.prod(sizes)} devices; this machine has {there}, and one of them is used.")
    return load_model(trained, mesh_of_sizes())


def described(cfg: C) -> C:
    """The configuration with what its files leave to others: which step of an earlier run is its best, which commit its
    adapter of the hub is, and what its model is, by the checkpoint: family, numbers, guidance.
    """
    section = cfg.model
    if cfg.training.init_from is not None and cfg.training.init_step == BEST:
        earlier = saved_config(cfg.training.init_from, "training.init_from")
        step = step_of(cfg.training.init_from, earlier, BEST, "training.init_step=best")
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"init_step": step})})
    arch = architecture(section)
    known: dict[str, Any] = {"model_family": arch.family, "architecture": arch.numbers(), "adapter": _anchored(section)}
    if section.guidance is None or section.model_size is None:
        shipped = next((model for model in shipped_models() if of_shipped(model) == arch), None)
        of_size = guidance_by_size(parameters(arch))
        known["guidance"] = section.guidance or (shipped and shipped.guidance) or of_size
        known["model_size"] = section.model_size or (shipped and shipped.model_size) or _size(parameters(arch))
    parted = {key: known["architecture"][key] for key in PARTED_BY_TP}
    micro_batch = cfg.training.micro_batch_size if type(cfg) is Config else None
    if wrong := list(faults(sizes_of(section.mesh_shape), parted, micro_batch)):
        raise UserError(report(wrong))
    return cfg.model_copy(update={"model": section.model_copy(update=known)})


def _anchored(section: ModelSection) -> str | None:
    """The adapter, with the commit where it is of the hub: its owner may change it while runs that began with it go on."""
    given = section.adapter
    if given is None or not is_remote(given) or given.startswith(KAGGLE):
        return given
    repository, _ = repository_of(given)
    return f"{repository}@{adapter_folder(given).name}"


def architecture(section: ModelSection) -> Architecture:
    """The architecture of a model: by its weights where they are here; else as it is published or a run has recorded it."""
    if is_remote(section.weights):
        if (arch := of_repository(section.weights)) is not None:
            _check_architecture(section, arch, f"model.weights={section.weights}")
            return arch
        if "norm_eps" in (section.architecture or {}):  # a run records all numbers
            return Architecture(**_given(section))
    return _fitting(section, find_checkpoint(section.weights))  # which downloads them


def _fitting(section: ModelSection, checkpoint: Path) -> Architecture:
    """The architecture of a checkpoint, which must be the one that the configuration gives, as far as it gives one."""
    arch = read_architecture(checkpoint, _given(section), section.model_family)
    _check_architecture(section, arch, f"model.weights={section.weights}")
    return arch


def _given(section: ModelSection) -> dict[str, Any]:
    try:
        return fields_of(section.architecture or {})
    except (ValueError, TypeError) as fault:
        raise UserError(f"model.architecture: {fault}.") from fault


def fitting_checkpoint(section: ModelSection) -> tuple[Path, Architecture]:
    """The checkpoint that a configuration names, and its architecture."""
    checkpoint = find_checkpoint(section.weights)
    return checkpoint, _fitting(section, checkpoint)


def _open_checkpoint(section: ModelSection, mesh: Mesh) -> Model:
    checkpoint, arch = fitting_checkpoint(section)
    held = (arch, jnp.dtype(section.dtype), mesh, section.base_dtype)
    return Model(arch, load_tokenizer(checkpoint), weight_shapes(*held), open_weights(checkpoint, *held))


def usual_dtype(arch: Architecture) -> str:
    """The type in which `conf/model` holds a model of that architecture."""
    return next((model.dtype for model in shipped_models() if of_shipped(model) == arch), "bfloat16")


def of_shipped(model: ModelSection) -> Architecture | None:
    """The architecture of a model that `conf/model` names."""
    remote = is_remote(model.weights)
    return of_repository(model.weights) if remote else read_architecture(find_checkpoint(model.weights), {})


def _size(parameters: int) -> str:
    """A number of parameters as people say it, as in 135m or 1.5b."""
    return f"{parameters / 1e6:.0f}m" if parameters < 1e9 else f"{parameters / 1e9:.1f}b"


def _check_architecture(section: ModelSection, found: Architecture, source: str) -> None:
    if differing := _differing(section, found):
        raise UserError(
            f"{source} is not the model that model.architecture describes:\n  "
            + "\n  ".join(differing)
            + "\nLeave these keys out, or give the weights that they describe."
        )


def _differing(section: ModelSection, found: Architecture) -> list[str]:
    """The numbers in which a checkpoint is not what a configuration describes."""
    numbers, given = found.numbers(), section.architecture or {}
    _given(section)  # refuses names that there are not

    def same(name: str, value: Any) -> bool:
        numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (value, numbers[name]))
        return math.isclose(numbers[name], value) if numeric else numbers[name] == value

    return [
        f"{name}: {numbers[name]} in the checkpoint, {value} in the configuration"
        for name, value in given.items()
        if not same(name, value)
    ]


def new_state(cfg: Config, model: Model) -> TrainState:
    """The state before the first update, in its place on the mesh of the model."""
    optimizer = cfg.optimizer.optimizer_name
    return make_in_place(init_state, model.arch, model.mesh, new_trainable(cfg, model), optimizer=optimizer)


def state_shapes(cfg: Config, model: Model) -> TrainState:
    """The shapes of a state and their places."""
    of = adapters_of(cfg, model.arch) | {"seed": 0} if cfg.model.lora_rank > 0 else {}
    return abstract(_outline, model.arch, model.mesh, model.shapes, optimizer=cfg.optimizer.optimizer_name, **of)


def _outline(weights: Weights, optimizer: str, **of: Any) -> TrainState:
    return init_state(_fresh_adapters(weights, **of) if of else masters(weights), optimizer)


def new_trainable(cfg: Config, model: Model) -> Trainable:
    """What is trained, before the first update: adapters that are fresh or learnt before, or all weights in float32."""
    if cfg.model.lora_rank == 0:
        return masters(model.weights)
    weights = model.weights if cfg.model.use_dora else None
    fresh = make_in_place(_fresh_adapters, model.arch, model.mesh, weights, **adapters_of(cfg, model.arch))
    learnt = earlier_adapters(cfg, model)
    if learnt is None:
        return fresh
    if jax.tree.map(jnp.shape, learnt) != jax.tree.map(jnp.shape, fresh):
        raise UserError(
            f"training.init_from={cfg.training.init_from}: its adapters do not fit model.lora_rank, model.lora_alpha, "
            "model.use_rslora, model.use_dora and model.lora_module_path of this run; set the same ones."
        )
    return learnt


def earlier_adapters(cfg: Config, model: Model) -> Adapters | None:
    """The adapters that this run starts from, which are its reference too; None where it starts from the base."""
    if cfg.model.adapter is not None:
        return place(read_adapters(adapter_folder(cfg.model.adapter), model.arch), model.arch, model.mesh)
    if cfg.training.init_from is None or cfg.model.lora_rank == 0:
        return None
    earlier = saved_config(cfg.training.init_from, "training.init_from")
    if earlier.model.lora_rank == 0:
        return None
    learnt, _ = load_trained(cfg.training.init_from, earlier, model, cfg.training.init_step)
    return learnt if isinstance(learnt, Adapters) else None


def adapter_folder(given: str) -> Path:
    """The folder that model.adapter names, which must be one of PEFT's; a repository of the hub is downloaded."""
    if is_remote(given) and not given.startswith(KAGGLE):
        return adapter_of_hub(given)
    folder = Path(os.path.expanduser(given))
    if (folder / "config.yaml").exists() and not is_peft(folder):
        raise UserError(
            f"model.adapter={given} is the folder of a run; training.init_from={given} starts from what it learnt."
        )
    if not is_peft(folder):
        raise UserError(
            f"model.adapter={given}: there is no {folder.absolute() / 'adapter_config.json'}; give the folder of an adapter "
            "that PEFT, or agent-tunix export, has saved, or a repository of the hub (owner/name)."
        )
    return folder


def _unlike_adapter(cfg: Config, arch: Architecture) -> list[str]:
    """Refuses a run with other keys than the adapter that it starts from; what to say where that is one of another base."""
    if cfg.model.adapter is None:
        return []
    folder = adapter_folder(cfg.model.adapter)
    settings, there = settings_of(folder), read_adapters(folder, arch).a
    others = [f"model.{key}={value_text(value)}" for key, value in settings.items() if getattr(cfg.model, key) != value]
    if {*adapters_of(cfg, arch)["modules"]} != there.keys():
        others.append(f"model.lora_module_path={'|'.join(name for name in ATTENTION + FEED_FORWARD if name in there)}")
    if others:
        raise UserError(
            f"model.adapter={cfg.model.adapter} is of another kind than this run's adapters. To train it, give\n"
            f"  {shlex.join(others)}"
        )
    base, own = named_base(folder), cfg.model.weights
    if base is None or Path(base).name.lower() in own.lower():
        return []
    return [f"model.adapter={cfg.model.adapter} names {base} as its base, and this run's is model.weights={own}"]


def load_trained(folder: str, cfg: Config, model: Model, step: StepOrBest | None = None) -> tuple[Trainable, int]:
    """What a run has learnt by a step (default: the last), and that step."""
    step = step_of(folder, cfg, step, "step=best")
    with contextlib.closing(Checkpoints(Path(folder) / "checkpoints")) as checkpoints:
        state, progress = checkpoints.restore(state_shapes(cfg, model), step)
    model.serve(folder, progress.base)
    return evaluation_trainable(state, cfg.optimizer.optimizer_name), int(state.step)


def learnt_by(folder: str, cfg: Config, model: Model, step: StepOrBest | None) -> tuple[Trainable | None, int]:
    """As `load_trained`, where step 0 is what the run began with; None stands for the base itself."""
    if step == 0:
        refuse_other_base(folder, model)
        return earlier_adapters(cfg, model), 0
    return load_trained(folder, cfg, model, step)


def refuse_other_base(folder: str, model: Model) -> None:
    """Refuses a model that is not the one a run began with, where a checkpoint can tell."""
    with contextlib.closing(Checkpoints(Path(folder) / "checkpoints")) as checkpoints:
        saved = [progress for step in checkpoints.steps() if (progress := checkpoints.progress(step))]
    for progress in saved[-1:]:
        model.serve(folder, progress.base)


def changed_base(trained: Config) -> str | None:
    """The run that trained all weights among those that this one started from; the base is then not the published one."""
    while folder := trained.training.init_from:
        trained = saved_config(folder, "training.init_from")
        if trained.model.lora_rank == 0:
            return folder
    return None


def unusual_adapters(cfg: Config, arch: Architecture) -> list[str]:
    """What to say where a new run adapts only a part of the modules, or starts from an adapter of another base; refuses
    words that choose no module, and an adapter that is not of the run's kind.

    An earlier run is evaluated and exported whatever its pattern is, as it has the adapters that it has.
    """
    if cfg.model.lora_rank == 0:
        return []
    unlike = _unlike_adapter(cfg, arch)
    pattern, chosen = cfg.model.lora_module_path, adapters_of(cfg, arch)["modules"]
    given, adapted = f"model.lora_module_path={pattern}", ", ".join(chosen)
    if strange := strange_words(pattern):
        raise UserError(
            f"{given}: no module's name has {' or '.join(strange)} in it.\n"
            f"The modules are {', '.join(ATTENTION + FEED_FORWARD)}. To adapt {adapted} and no other, give "
            f"'model.lora_module_path={'|'.join(chosen)}'."
        )
    left = [f"not {', '.join(modules)} of {block}" for block, modules in unadapted(chosen).items()]
    return [*unlike, *([f"{given} adapts {adapted}, but {' and '.join(left)}"] if left else [])]


def adapters_of(cfg: Config, arch: Architecture) -> dict[str, Any]:
    """The arguments from which a run's adapters are made before its first update."""
    section = cfg.model
    try:
        modules = select_modules(section.lora_module_path, arch.num_layers)
    except ValueError as fault:
        raise UserError(f"model.lora_module_path={section.lora_module_path}: {fault}.") from fault
    scaled = {"rank": section.lora_rank, "alpha": section.lora_alpha, "use_rslora": section.use_rslora}
    return {"seed": cfg.seed, "arch": arch, "modules": modules, "use_dora": section.use_dora, **scaled}


def _fresh_adapters(weights: Weights | None, seed: int, use_dora: bool, **of: Any) -> Adapters:
    return init_adapters(step_key(seed, 0, Purpose.INIT), **of, dora_over=weights if use_dora else None)


def training_sampling(cfg: Config, tokenizer: Tokenizer) -> Sampling:
    g = cfg.generation
    return Sampling(
        top_k=g.top_k,
        top_p=g.top_p,
        max_steps=g.max_generation_steps,
        num_generations=cfg.grpo.num_generations,
        end_ids=tokenizer.end_ids,
        pad_id=tokenizer.pad_id,
    )
