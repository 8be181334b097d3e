"""The files that carry a checkpoint's tokenizer to transformers, vLLM and llama.cpp: its own, and those that it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent_tunix.errors import reading
from agent_tunix.models import tokenizer as tk
from agent_tunix.models.checkpoints.gguf_tokenizer import added_tokens


def tokenizer_files(checkpoint: Path) -> dict[str, bytes]:
    """Every file by its name: the checkpoint's own, completed by its chat turns where they say nothing of them."""
    files, tokenizer = tk.own_files(checkpoint), tk.load_tokenizer(checkpoint)
    own = {name: _parsed(files, name, checkpoint) for name in (tk.CONFIG, tk.GENERATION)}
    made = {
        tk.CONFIG: _lacking(files, own[tk.CONFIG], tokenizer) | own[tk.CONFIG],
        tk.GENERATION: _generation(own[tk.GENERATION], tokenizer),
    }
    changed = {name: content for name, content in made.items() if content != own[name]}
    return files | {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in changed.items()}


def _generation(own: dict[str, Any], tokenizer: tk.Tokenizer) -> dict[str, Any]:
    """Generation stops at the end of a turn too, of which a model that was only pretrained knows nothing."""
    kept = {key: value for key, value in own.items() if key != "_from_model_config"}  # with it config.json's end counts
    begin, ends = {} if tokenizer.begin_id is None else {"bos_token_id": tokenizer.begin_id}, list(tokenizer.end_ids)
    return begin | {"eos_token_id": ends, "pad_token_id": tokenizer.pad_id} | kept | {"eos_token_id": ends}


def _parsed(files: dict[str, bytes], name: str, checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's own file; nothing where it has none."""
    with reading(f"{checkpoint}: {name}", "download it again"):
        found = json.loads(files.get(name, b"{}"))
        if not isinstance(found, dict):
            raise TypeError("it holds no object")
        return found


def _lacking(files: dict[str, bytes], own: dict[str, Any], tokenizer: tk.Tokenizer) -> dict[str, Any]:
    """What a checkpoint's own tokenizer_config.json may lack: the template, or all, where there is no such file."""
    has_template = {tk.TEMPLATE, tk.TEMPLATE_IN_JSON} & files.keys() or "chat_template" in own
    template = {} if has_template else {"chat_template": tokenizer.chat.template.source}
    if tk.CONFIG in files:
        return template
    of_gemma = {tk.PAD, tk.END_OF_TURN} <= tokenizer.special.keys()
    kind = "PreTrainedTokenizerFast" if tk.JSON in files else "GemmaTokenizer" if of_gemma else "LlamaTokenizer"
    config = {"tokenizer_class": kind, "add_bos_token": tokenizer.begins, **tokenizer.names, **template}
    return config | ({"added_tokens_decoder": added_tokens(files[tk.MODEL], tokenizer.special)} if tk.MODEL in files else {})
