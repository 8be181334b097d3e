"""Export: what a run has learned, in the layouts that other tools read.

    peft         a PEFT adapter folder, for PeftModel.from_pretrained and vLLM's LoRA
    merged       a whole model, for transformers and vLLM
    gguf-ready   the same, with what llama.cpp's convert_hf_to_gguf.py asks for: of Gemma, the SentencePiece model

Adapters are merged in float32, a tensor at a time; where the run held its base in fewer bits, into the base in
`model.dtype`. A folder appears whole or not at all: it is written under another name first.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from safetensors import SafetensorError

from agent_tunix.config import output_folders
from agent_tunix.config.commands import join, value_text
from agent_tunix.config.resumed import made_of, saved_steps
from agent_tunix.config.schema import Config, ExportConfig
from agent_tunix.errors import UserError
from agent_tunix.models.checkpoints import safetensors
from agent_tunix.models.checkpoints.hub import find_checkpoint, repository_of
from agent_tunix.models.checkpoints.loading import save_tensors, stacked_tensor
from agent_tunix.models.checkpoints.peft import CONFIG, write_adapters
from agent_tunix.models.lora import Adapters, Trainable, merged_matrix
from agent_tunix.models.tokenizer import MODEL, Tokenizer
from agent_tunix.models.tokenizer_files import tokenizer_files
from agent_tunix.training import hub_push, loading
from agent_tunix.training.best import step_of
from agent_tunix.training.guard import ended_as_by_interrupts
from agent_tunix.training.model_card import base_on_hub, model_card
from agent_tunix.training.progress import say
from agent_tunix.training.run_folder import claimed, read_object
from agent_tunix.types import Record

RECORD = ".export.json"
WITH_VISION = (34, 48, 62)  # layers of 4B, 12B and 27B, which Hugging Face has as multimodal models


def run(cfg: ExportConfig, console: Console) -> Path:
    """`agent-tunix export`: writes the checkpoint of a run in the format asked for, and sends it; returns the folder."""
    if cfg.push_to is not None:
        hub_push.refuse_name(cfg.push_to)
        if not cfg.dry_run:
            hub_push.refuse_stranger(cfg.push_to)
    trained = loading.saved_config(cfg.run, "run")
    step = step_of(cfg.run, trained, cfg.step, "step=best") or max(saved_steps(Path(cfg.run)), default=0)
    output, made = _place(cfg, step)
    if made:
        say(console, f"{output} is there from an earlier call, and is taken as it is.")
    else:
        _write(cfg, trained, step or None, output, console)
    if cfg.push_to is not None:
        _send(cfg, trained, step, output, console)
    return output


def _place(cfg: ExportConfig, step: int) -> tuple[Path, bool]:
    """The folder to write, and whether an earlier call has written just this there, which can then be sent."""
    output = Path(cfg.output) if cfg.output else Path(cfg.run) / "exports" / f"{cfg.format}-{step}"
    if not output.exists():
        return output, False
    if cfg.push_to is not None and read_object(output / RECORD) == _record(cfg, step):
        return output, True
    raise UserError(f"{output} exists already; delete it, or choose another folder with output=<folder>.")


def _record(cfg: ExportConfig, step: int) -> Record:
    """What an export is made of; its folder keeps it, so that a later call knows it again."""
    return {"run": str(Path(cfg.run).resolve()), "step": step, "format": cfg.format, "dtype": cfg.dtype}


def _write(cfg: ExportConfig, trained: Config, step: int | None, output: Path, console: Console) -> None:
    as_trained = trained
    if cfg.format != "peft" and trained.model.base_dtype:
        held, whole = trained.model.base_dtype, trained.model.dtype
        console.print(f"The run held its base in {held}; its adapters are merged into the base in {whole}.")
        trained = loading.held_in(trained, whole, None)
    with made_of(cfg.run):
        model, checkpoint = loading.load_trained_model(trained, console.print), find_checkpoint(trained.model.weights)
    trainable, step = loading.load_trained(cfg.run, trained, model, step)
    with _appearing_whole(output) as folder:
        if cfg.format == "peft":
            _write_peft(folder, checkpoint, trained, trainable, cfg.dtype)
            hint = f"PeftModel.from_pretrained(base, {json.dumps(str(output))})"
            hint += "" if _is_huggingface(checkpoint) else ", where base is the same model as Hugging Face has it"
        else:
            _write_merged(folder, checkpoint, model, trainable, cfg)
            hint = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(output))})"
            hint = shlex.join(["python", "convert_hf_to_gguf.py", str(output)]) if cfg.format == "gguf-ready" else hint
        (folder / hub_push.CARD).write_text(model_card(cfg, as_trained, step), encoding="utf-8")
        _write_json(folder / RECORD, _record(cfg, step))
    say(console, f"Step {step} of {cfg.run} is written to {output}\nLoad it with: {hint}")


def _send(cfg: ExportConfig, trained: Config, step: int, output: Path, console: Console) -> None:
    """Sends an export to the hub or, in a dry run, shows what would be sent and how."""
    assert cfg.push_to is not None
    if cfg.format == "peft" and base_on_hub(trained) is None:
        say(
            console,
            f"warning: {output / CONFIG} names a folder of this machine as its base; others need a name they know.",
        )
    if not cfg.dry_run:
        about = f"Step {step} of {Path(cfg.run).resolve().name}, by Agent-Tunix"
        address = hub_push.push(output, cfg.push_to, cfg.private, about, partial(say, console))
        say(console, f"Sent: {address}")
        return
    given = {key: value for key, value in cfg.model_dump().items() if value != ExportConfig.model_fields[key].default}
    given |= {"step": step, "dry_run": False}
    say(console, hub_push.shown(output, cfg.push_to, cfg.private))
    again = join([f"{key}={value_text(value)}" for key, value in given.items() if value is not None], "export")
    say(console, f"\nChange {output / hub_push.CARD} as you like, then send it with:\n  {again}")


@contextlib.contextmanager
def _appearing_whole(output: Path) -> Iterator[Path]:
    """A folder to write to, renamed to `output` when all is written, and removed when something fails."""
    temporary = output.parent / f".{output.name}.half"
    around = output_folders.missing(output.parent)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        with claimed(temporary), ended_as_by_interrupts(), contextlib.ExitStack() as ending:
            ending.callback(output_folders.remove_empty, around)
            ending.callback(shutil.rmtree, temporary, ignore_errors=True)
            for file in temporary.iterdir():  # of an export that was killed
                file.unlink()
            yield temporary
            with contextlib.suppress(OSError):  # a disk without file modes
                for file in temporary.iterdir():  # safetensors lets no one else read its files
                    file.chmod(temporary.stat().st_mode & 0o666)
            temporary.rename(output)
    except (OSError, SafetensorError) as fault:  # which is how safetensors says that a disk is full
        raise UserError(f"{output} could not be written: {fault}") from fault


def _write_peft(folder: Path, checkpoint: Path, trained: Config, trainable: Trainable, dtype: str) -> None:
    """An adapter folder for PEFT, where what was learnt are adapters of the base that the run names."""
    if not isinstance(trainable, Adapters):
        raise UserError("format=peft: this run trained all weights and has no adapters; use format=merged.")
    if changed := loading.changed_base(trained):
        raise UserError(f"format=peft: the adapters sit on weights that {changed} has changed; use format=merged.")
    if _is_huggingface(checkpoint):
        multimodal = "text_config" in safetensors.read_config(checkpoint)
    else:
        multimodal = len(next(iter(trainable.a.values()))) in WITH_VISION
    base = base_on_hub(trained) or str(checkpoint.resolve())
    revision = repository_of(trained.model.weights)[1] if base_on_hub(trained) else None
    scaled = trained.model.lora_alpha, base, multimodal, dtype, trained.model.use_rslora, revision
    write_adapters(folder, trainable, *scaled)


def _is_huggingface(checkpoint: Path) -> bool:
    return (checkpoint / "config.json").exists()


def _write_merged(folder: Path, checkpoint: Path, model: loading.Model, trainable: Trainable, cfg: ExportConfig) -> None:
    """A model that Gemma3ForCausalLM loads, with its tokenizer."""
    files = tokenizer_files(checkpoint)
    if cfg.format == "gguf-ready" and MODEL not in files and not model.tokenizer.byte_level:
        raise UserError(
            f"format=gguf-ready: {checkpoint} has no {MODEL}, which llama.cpp's converter asks for; "
            "copy the model's own there, or use format=merged."
        )
    weights = model.weights if isinstance(trainable, Adapters) else trainable

    def tensor(name: str) -> jax.Array:
        value, parts = stacked_tensor(weights, model.arch, name).astype(jnp.float32), name.split(".")
        # It is model.layers.<layer>.<block>.<module>.weight, or a bias, which no adapter changes.
        if isinstance(trainable, Adapters) and parts[-1] == "weight" and parts[-2] in trainable.a:
            return merged_matrix(trainable, parts[-2], value.T, layer=int(parts[2])).T
        return value

    save_tensors(folder, model.arch, jnp.dtype(cfg.dtype), tensor)
    config = folder / "config.json"
    _write_json(config, json.loads(config.read_text()) | _numbers_of_base(checkpoint, model.tokenizer))
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _numbers_of_base(checkpoint: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """What config.json says of a model beside its architecture: its tokens, and how long a text it was made for.

    Families without a begin token have none here either.
    """
    own = safetensors.read_config(checkpoint) if _is_huggingface(checkpoint) else {}
    longest = {**own, **(own.get("text_config") or {})}.get("max_position_embeddings")
    begin = {} if tokenizer.begin_id is None else {"bos_token_id": tokenizer.begin_id}
    tokens = {"pad_token_id": tokenizer.pad_id, **begin, "eos_token_id": tokenizer.end_ids[0]}
    return tokens | ({"max_position_embeddings": longest} if longest else {})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
