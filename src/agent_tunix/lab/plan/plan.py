"""`agent-tunix plan`: what a run would do, without loading weights.

Parameters, prompts, tokens and the true number of updates; the learning rate at every one of them; peak memory by part,
whether it fits, and the largest micro-batch that does; and all warnings.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from agent_tunix.algorithm.objectives import OBJECTIVES, clipped, soft_gate
from agent_tunix.config.guidance import warnings
from agent_tunix.config.imports import OWN, Origin
from agent_tunix.config.mesh_shape import shown, sizes_of
from agent_tunix.config.schema import Config, ModelSection
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.environments import rewards, world
from agent_tunix.errors import UserError
from agent_tunix.kernels import device
from agent_tunix.kernels.vocabulary_odds import kernel_is_known
from agent_tunix.lab.plan import memory
from agent_tunix.lab.plan.plot import as_svg, in_characters
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.hub import is_remote
from agent_tunix.models.checkpoints.loading import open_tensors, parameters
from agent_tunix.models.families.table import family_of
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.training import loading, solve_rates
from agent_tunix.training.best import step_of
from agent_tunix.training.data import load_splits, load_task, refuse_unknown_tokens, with_demonstrations
from agent_tunix.training.horizon import Plan, coefficients, make_plan, too_few
from agent_tunix.training.progress import say
from agent_tunix.training.run_folder import replace_text
from agent_tunix.types import Record

USABLE = 0.92  # of a card's memory; the rest goes to the runtime and to fragments
POINTS = 1200  # of the learning rate's curve, at most


def run(cfg: Config, output: Path, console: Console, origin: Origin = OWN) -> Record:
    """Shows the plan and saves the learning rate's picture; returns what was shown."""
    if (begun := cfg.training.init_from) is not None:
        earlier = loading.saved_config(begun, "training.init_from")
        with contextlib.closing(Checkpoints(Path(begun) / "checkpoints")) as checkpoints:
            checkpoints.chosen(step_of(begun, earlier, cfg.training.init_step, "training.init_step=best"))
    functions = rewards.foreseen(cfg.reward.functions, origin, cfg.data.scorer)
    for line in (*functions, *world.foreseen(cfg.environment, origin)):
        say(console, line)
    count, width, notes = _examples(cfg, console)
    plan = make_plan(cfg, count or cfg.training.prompts_per_step * (cfg.training.num_batches or 0))
    points = min(plan.total_steps, POINTS)
    rates = [plan.schedule(1 + n * (plan.total_steps - 1) // max(points - 1, 1)) for n in range(points)]
    sizes = shapes(cfg, width)
    parts, (device, limit) = memory.estimate(sizes), card()
    usable = USABLE * limit
    notes += [
        *loading.unusual_adapters(cfg, sizes.arch),
        *too_few(cfg, plan),
        *_notes_on_mesh(sizes),
        *_notes_on_evaluation(sizes, usable),
        *_notes_on_base(sizes, usable),
        *_notes_on_kernels(cfg, sizes),
    ]
    record: Record = {
        "parameters": _parameters(cfg, sizes),
        "counts": _counts(cfg, plan),
        "objective": _objective(cfg),
        "learning_rate": _landmarks(plan),
        "memory_gb": {name: round(size, 3) for name, size in parts.items()},
        "devices": sizes.fsdp * sizes.tp,
        "device": {"name": device, "memory_gb": round(limit, 1), "fits": parts["peak"] <= usable},
        "largest_micro_batch_size": memory.largest_micro_batch(
            sizes, usable, cfg.training.batch_size, count or memory.LARGEST_MICRO_BATCH
        ),
        "warnings": [*notes, *warnings(cfg, count)],
    }
    output.mkdir(parents=True, exist_ok=True)
    picture = output / "learning_rate.svg"
    title = f"{cfg.scheduler.scheduler_name}, peak {cfg.optimizer.learning_rate:g}"
    replace_text(picture, as_svg(rates, title, plan.total_steps))
    _show(record, rates, picture, console)
    return record


def _checkpoint(section: ModelSection) -> tuple[Path, Architecture] | None:
    """The checkpoint that the run would read, if it is here, and its architecture; refuses one that the run would refuse."""
    if is_remote(section.weights):
        return None
    checkpoint, arch = loading.fitting_checkpoint(section)
    open_tensors(checkpoint, arch)
    return checkpoint, arch


def _examples(cfg: Config, console: Console) -> tuple[int | None, int, list[str]]:
    """Number of training examples (None: out of reach), width of their prompts, and notes on what is not known here."""
    longest, notice = cfg.generation.max_prompt_length, partial(say, console)
    found = _checkpoint(cfg.model)
    tokenizer = load_tokenizer(found[0]) if found else None
    try:
        task = load_task(cfg, tokenizer, notice) if tokenizer else None
        rows = task.train if task else load_splits(cfg, notice)["train"]
    except UserError as fault:
        here = cfg.data.path is None or os.path.exists(os.path.expanduser(cfg.data.path))
        if cfg.training.num_batches is None or here:  # data that is here but unreadable must be mended
            raise
        why = str(fault).splitlines()[0]
        return None, longest, [f"the data is out of reach, so training.num_batches is assumed to be right ({why})"]
    if found is None or tokenizer is None or task is None:
        unknown = ", and those that data.solve_rate leaves out" if cfg.data.solve_rate else ""
        return len(rows), longest, [f"the tokenizer is not here: prompts that are too long are counted too{unknown}"]
    refuse_unknown_tokens([example.prompt_ids for example in task.all()], found[1])
    if cfg.training.method == "supervised":
        rows = with_demonstrations(task.train, tokenizer, found[1], cfg.generation.max_generation_steps, notice)
    if cfg.data.solve_rate is None:
        return len(rows), task.prompt_width, []
    if (solved := solve_rates.known(cfg, task, tokenizer)) is not None:
        return len(solve_rates.kept_of(cfg, task.train, solved)), task.prompt_width, []
    unknown = "how many problems data.solve_rate keeps is known only when the run starts; all are counted here"
    return len(rows), task.prompt_width, [unknown]


def shapes(cfg: Config, width: int) -> memory.Shapes:
    arch, (fsdp, tp) = loading.architecture(cfg.model), sizes_of(cfg.model.mesh_shape)
    supervised = cfg.training.method == "supervised"
    return memory.Shapes(
        arch=arch,
        lora_rank=cfg.model.lora_rank,
        modules=loading.adapters_of(cfg, arch)["modules"] if cfg.model.lora_rank else (),
        bytes_per_weight=jnp.dtype(cfg.model.dtype).itemsize,
        prompts=cfg.training.prompts_per_step,
        micro_batch=cfg.training.micro_batch_size,
        generations=1 if supervised else cfg.grpo.num_generations,
        evaluated=min(cfg.evaluation.batch_size, cfg.evaluation.num_examples),
        prompt_length=width,
        completion_length=cfg.generation.max_generation_steps,
        fsdp=fsdp,
        tp=tp,
        base_dtype=cfg.model.base_dtype,
        kernels=_has_kernels(cfg) and family_of(arch).kernels,
        odds_kernel=_has_kernels(cfg) and kernel_is_known(),
        limit=device.memory_limit(),
        optimizer=cfg.optimizer.optimizer_name,
        use_dora=cfg.model.use_dora,
    )


def too_large(cfg: Config, width: int) -> list[str]:
    """What to say where a run needs more memory than there is."""
    sizes, (device, limit) = shapes(cfg, width), card()
    if (peak := memory.estimate(sizes)["peak"]) <= limit:
        return []
    largest = memory.largest_micro_batch(sizes, USABLE * limit, cfg.training.batch_size)
    advice = f"training.micro_batch_size={largest} would fit" if largest else "`agent-tunix plan` shows what needs it"
    return [f"this run needs {peak:,.1f} GB of memory by the plan's count, and {device} has {limit:,.1f}; {advice}"]


def _notes_on_mesh(s: memory.Shapes) -> list[str]:
    needed, there, vocabulary = s.fsdp * s.tp, jax.device_count(), s.arch.vocab_size
    asked, notes = f"model.mesh_shape={shown((s.fsdp, s.tp))}", []
    if needed > there:
        notes.append(f"{asked} needs {needed} devices; this machine has {there}, and would not run it")
    if round(s.vocabulary_share * needed) > 1:
        notes.append(f"{asked} does not divide the vocabulary of {vocabulary}, so devices hold parts of it in common")
    return notes


def _notes_on_evaluation(s: memory.Shapes, limit_gb: float) -> list[str]:
    """How many problems to evaluate at once, where it is the evaluation that does not fit."""

    def peak(problems: int) -> float:
        return memory.estimate(dataclasses.replace(s, evaluated=problems))["peak"]

    if peak(s.evaluated) <= limit_gb or peak(1) > limit_gb:
        return []
    most = bisect.bisect_left(range(1, s.evaluated), True, key=lambda problems: peak(problems) > limit_gb)
    return [f"evaluation.batch_size={most} takes {peak(most):.1f} GB, which fits"]


def _notes_on_base(s: memory.Shapes, limit_gb: float) -> list[str]:
    """The widest type in which a frozen base fits, if it does not fit as it is."""
    peaks = {
        held: memory.estimate(dataclasses.replace(s, base_dtype=held))["peak"] for held in (s.base_dtype, "int8", "nf4")
    }
    if s.lora_rank == 0 or peaks[s.base_dtype] <= limit_gb:
        return []
    fitting = [
        f"model.base_dtype={held} takes {peak:.1f} GB, which fits" for held, peak in peaks.items() if peak <= limit_gb
    ]
    return fitting[:1]


def _notes_on_kernels(cfg: Config, s: memory.Shapes) -> list[str]:
    """Which of a GPU's kernels do not serve this run."""
    if not _has_kernels(cfg):
        return []
    if not family_of(s.arch).kernels:
        return [f"the kernels that read a token are none for {s.arch.family}: it takes the plain path, which is slower"]
    slower = (
        "model.use_dora=true: the kernels that read a token do not know magnitudes, so rollouts take longer without them"
    )
    return [slower] if s.use_dora else []


def _has_kernels(cfg: Config) -> bool:
    """Whether the device has kernels for the type in which the base is held."""
    return math.prod(sizes_of(cfg.model.mesh_shape)) == 1 and device.one_hopper(cfg.model.dtype)


def card() -> tuple[str, float]:
    """The device found, and its memory in GB; a CPU's is the machine's."""
    limit = device.memory_limit()
    if math.isinf(limit):
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return jax.local_devices()[0].device_kind, limit / memory.GIGABYTE


def _parameters(cfg: Config, shapes: memory.Shapes) -> Record:
    total = parameters(shapes.arch)
    adapters = memory.adapter_parameters(shapes)
    return {"total": total + adapters, "trainable": adapters if cfg.model.lora_rank else total}


def _counts(cfg: Config, plan: Plan) -> Record:
    prompts = plan.total_batches * cfg.training.prompts_per_step
    completions = prompts * (cfg.grpo.num_generations if cfg.training.method == "grpo" else 1)
    return {
        "prompts": prompts,
        "completions": completions,
        "tokens at most": completions * cfg.generation.max_generation_steps,
        "batches": plan.total_batches,
        "micro-batches an update": cfg.training.prompts_per_step // cfg.training.micro_batch_size,
        "updates": plan.total_steps,
    }


def _objective(cfg: Config) -> Record:
    """What is maximised, in words."""
    if cfg.training.method == "supervised":
        return {"maximised": "the probability of worked answers"}
    g, c, row = cfg.grpo, coefficients(cfg), OBJECTIVES[cfg.grpo.objective]
    bounds = {clipped: f"clipped to {1 - g.epsilon:g} ... {1 + c.epsilon_high:g}", soft_gate: "weighed by a soft gate"}
    ratio = bounds.get(row.surrogate, f"a weight of at most {1 + c.epsilon_high:g}")
    against = "the mean of the others in a group" if row.baseline == "leave_one_out" else "the mean of a group"
    scale = {"none": "not scaled"}.get(g.scale_rewards, f"over the standard deviation of the {g.scale_rewards}")
    found = {
        "maximised": g.objective,
        "ratio": f"{row.ratio.__name__.replace('_', ' ')}, {ratio}",
        "weight of tokens": row.weights.__name__.replace("_", " "),
        "advantage": f"reward minus {against}, {scale}",
        "divergence": f"{g.beta:g} x {g.kl_estimator}{' x ratio' if g.kl_correction else ''}" if g.beta else "none",
    }
    if row.surrogate is clipped and g.delta is not None:
        found["ratio"] += f", by {g.delta:g} where the advantage is negative"
    if g.importance_correction != "none":
        found["correction of the sampler"] = f"{g.importance_correction} at {g.importance_cap:g}"
    if g.overlong != "keep":
        found["overlong completions"] = g.overlong
    if g.resample_rounds:
        found["groups without a spread"] = f"drawn anew, at most {g.resample_rounds} times"
    return found


def _landmarks(plan: Plan) -> dict[str, float]:
    """The rate at the updates that a reader would ask about."""
    last = plan.total_steps
    places = {"first": 1, "end of warm-up": max(plan.warmup_steps, 1), "middle": (last + 1) // 2, "last": last}
    return {f"{name} (update {t})": plan.schedule(t) for name, t in places.items()}


def _show(record: Record, rates: list[float], picture: Path, console: Console) -> None:
    forms = {"parameters": "{:,}", "counts": "{:,}", "objective": "{}", "learning_rate": "{:.3g}", "memory_gb": "{:.2f}"}
    for section, form in forms.items():
        table = Table(title=section.replace("_", " "), show_header=False, title_justify="left")
        for name, value in record[section].items():
            table.add_row(name, form.format(value))
        console.print(table)
        if section == "learning_rate":
            say(console, f"{in_characters(rates, record['counts']['updates'])}\npicture: {picture}")
    if record["devices"] > 1:
        console.print(f"The memory is that of each of {record['devices']} devices.")
    device = record["device"]
    verdict = "fits" if device["fits"] else "does NOT fit"
    largest = record["largest_micro_batch_size"]
    advice = f"the largest training.micro_batch_size that fits is {largest}" if largest else "nor does a smaller micro-batch"
    console.print(f"It {verdict} {device['name']} ({device['memory_gb']} GB); {advice}.")
    for line in record["warnings"]:
        console.print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)
