"""The files that carry a checkpoint's tokenizer to transformers, vLLM and llama.cpp: its own, and those that it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent_tunix.errors import reading
from agent_tunix.files import TOKENIZER, read_bytes
from agent_tunix.models import tokenizer as tk
from agent_tunix.models.checkpoints.gguf import CONTROL, USER_DEFINED, GgufFile
from agent_tunix.models.checkpoints.orbax import is_orbax

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATES = {"chat_template.jinja", "chat_template.json"}
COPIED = (tk.JSON, tk.MODEL, CONFIG, GENERATION, "special_tokens_map.json", "added_tokens.json", *sorted(TEMPLATES))
# Gemma's turns, for a checkpoint that comes without a template: a system message before others is the head of the user's
# turn, as in `tasks.prompts.chat_prompt`, and a content may be text or, as some clients send it, a list of parts.
CHAT_TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% elif content %}"
    "{% for part in content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endmacro %}"
    "{{ bos_token }}{% for message in messages %}"
    "{% if not (loop.first and message['role'] == 'system' and not loop.last) %}"
    "<start_of_turn>{{ 'model' if message['role'] in ['assistant', 'model'] else 'user' }}\n"
    "{% if loop.index0 == 1 and messages[0]['role'] == 'system' and messages[0]['content'] %}"
    "{{ text(messages[0]['content']) + '\n\n' }}{% endif %}"
    "{{ text(message['content']) | trim }}<end_of_turn>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def tokenizer_files(checkpoint: Path) -> dict[str, bytes]:
    """Every file by its name: the checkpoint's own, completed by Gemma's chat turns where they say nothing of them."""
    files = _own_files(checkpoint)
    own = {name: _parsed(files, name, checkpoint) for name in (CONFIG, GENERATION)}
    made = {CONFIG: _lacking(files) | own[CONFIG], GENERATION: _generation(own[GENERATION], tk.load_tokenizer(checkpoint))}
    changed = {name: content for name, content in made.items() if content != own[name]}
    return files | {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in changed.items()}


def _generation(own: dict[str, Any], tokenizer: tk.Tokenizer) -> dict[str, Any]:
    """Generation stops at the end of a turn too, of which a model that was only pretrained knows nothing."""
    kept = {key: value for key, value in own.items() if key != "_from_model_config"}  # with it config.json's end counts
    ids = {"bos_token_id": tokenizer.begin_id, "eos_token_id": list(tokenizer.end_ids), "pad_token_id": tokenizer.pad_id}
    return kept | ids


def _parsed(files: dict[str, bytes], name: str, checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's own file; nothing where it has none."""
    with reading(f"{checkpoint}: {name}", "download it again"):
        found = json.loads(files.get(name, b"{}"))
        if not isinstance(found, dict):
            raise TypeError("it holds no object")
        return found


def _own_files(checkpoint: Path) -> dict[str, bytes]:
    if checkpoint.suffix == ".gguf":
        return {tk.MODEL: GgufFile(checkpoint).tokenizer_model()}
    folders = (checkpoint.parent, checkpoint) if is_orbax(checkpoint) else (checkpoint,)
    own = {name: folder / name for folder in folders for name in COPIED if (folder / name).exists()}
    return {name: _bytes(path) for name, path in own.items()}


def _bytes(path: Path) -> bytes:
    with reading(path, "download it again"):
        return read_bytes(path, TOKENIZER)


def _lacking(files: dict[str, bytes]) -> dict[str, Any]:
    """What a checkpoint's own tokenizer_config.json may lack: the template, or all, where there is no such file."""
    template = {} if TEMPLATES & files.keys() else {"chat_template": CHAT_TEMPLATE}
    if CONFIG in files:
        return template
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast" if tk.JSON in files else "GemmaTokenizer",
        "add_bos_token": True,
        "bos_token": tk.BEGIN,
        "eos_token": tk.END,
        "pad_token": tk.PAD,
        "unk_token": tk.UNKNOWN,
        **template,
    }
    return config | ({"added_tokens_decoder": _added_tokens(files[tk.MODEL])} if tk.MODEL in files else {})


def _added_tokens(model: bytes) -> dict[str, dict[str, Any]]:
    """Tokens that are found in a text before it is cut into pieces. llama.cpp's converter learns of them here only."""
    from sentencepiece import sentencepiece_model_pb2

    pb: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    special = {tk.PAD, tk.BEGIN, tk.END, tk.UNKNOWN, tk.START_OF_TURN, tk.END_OF_TURN}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        str(i): {"content": piece.piece, **flags, "special": piece.piece in special}
        for i, piece in enumerate(pb.ModelProto.FromString(model).pieces)
        if piece.type in (CONTROL, USER_DEFINED) or piece.piece in special
    }
