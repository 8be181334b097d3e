"""Files in place of checkpoints, tokenizers, data and run folders, and the commands that read them."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaign import hostile
from campaign.commands import REPOSITORY, apart
from campaign.files import OF_FILES

TINY = REPOSITORY / "src" / "agent_tunix" / "models" / "tiny"
OLD_RUN = REPOSITORY / "tests" / "old_runs" / "2e29ef9"
BASE = ["model=gemma3_tiny", "evaluation.num_examples=4"]
ONCE = ["training.micro_batch_size=2", "training.num_batches=1", "evaluation.sampled=false", "data.num_examples=64"]
Arguments = list[str]


def model(rng: random.Random, folder: Path) -> Arguments:
    """A checkpoint, of which one file is spoilt: its JSON, its header, its bytes, or what it is at all."""
    base = folder / "base"
    shutil.copytree(TINY, base)
    way = rng.choice(
        [_json_file, _json_file, _header, _header, _index, _tokenizer, _tokenizer, _tokenizer, _any_file, _gguf, _gguf]
    )
    source = way(base, rng)
    verb = rng.choice(["evaluate"] * 4 + ["plan", "train"])
    return [verb, *BASE, f"model.weights={source}", *(ONCE if verb != "evaluate" else [])]


def _json_file(base: Path, rng: random.Random) -> str:
    path = rng.choice([base / "config.json"] * 3 + [base / "generation_config.json", base / "tokenizer.json"])
    path.write_text(hostile.spoilt(json.loads(path.read_text()), rng))
    return "base"


def _any_file(base: Path, rng: random.Random) -> str:
    rng.choice(OF_FILES)(rng.choice(sorted(base.iterdir())), rng)
    return "base"


def _header(base: Path, rng: random.Random) -> str:
    """Of safetensors: eight bytes that say how long it is, and JSON."""
    path = base / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    raw = rng.choice(
        ["[1099511627776,1099511627776]", "[0,99999999999]", "[-5,3]", '"F8_E4M3"', '"I64"', '"BF16"', "[[]]", None, None]
    )
    text = hostile.spoilt(header, rng, raw).encode(errors="surrogatepass")
    said = rng.choice([len(text)] * 6 + [0, 1, 2**63, 2**64 - 1, 10**9, len(content)])
    path.write_bytes(struct.pack("<Q", said) + text + rest)
    return "base"


def _index(base: Path, rng: random.Random) -> str:
    """Of a checkpoint in several files."""
    (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
    whole = {"metadata": {"total_size": 1}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    files = ['"../../../../etc/passwd"', '"/dev/zero"', '"."', '"nowhere.safetensors"', None, None]
    text = rng.choice(["[" * 100_000, "[]", "", hostile.spoilt(whole, rng, rng.choice(files))])
    (base / "model.safetensors.index.json").write_text(text)
    return "base"


def _replace(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


PADDING = {
    "strategy": "BatchLongest",
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "byte_fallback": False}
BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": "x",
    "fuse_unk": False,
    "byte_fallback": True,
    "vocab": {"a": 0},
    "merges": [["a", "b"]],
}
TOKENIZERS: list[dict[str, Any]] = [
    *({"padding": PADDING | {"strategy": {"Fixed": 10**power}}} for power in (6, 9, 12, 18)),
    {"padding": PADDING | {"pad_to_multiple_of": 10**12}},
    {"padding": PADDING | {"pad_id": 2**32 - 1}},
    *({"normalizer": {"type": "Sequence", "normalizers": [_replace("a" * 100)] * count}} for count in (2, 5, 30, 1000)),
    {"normalizer": _replace("a" * 10**6, "")},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 10**5}] * 100}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" * 5000}, "behavior": "Removed", "invert": True}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "((((\\w*)*)*)*)*$"}, "behavior": "Removed", "invert": False}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
    {"decoder": _replace("a" * 10**6, "")},
    {"decoder": {"type": "Strip", "content": "<", "start": 10**12, "stop": 10**12}},
    {"post_processor": TEMPLATE | {"single": [{"SpecialToken": {"id": "none", "type_id": 0}}]}},
    {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10**9}},
    {"model": UNIGRAM},
    {"model": UNIGRAM | {"vocab": []}},
    {"model": UNIGRAM | {"unk_id": 10**9}},
    {"model": BPE},
    {"model": BPE | {"dropout": 7.5}},
    {"model": BPE | {"vocab": {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<end_of_turn>": 4}, "merges": []}},
    {
        "model": {
            "type": "WordPiece",
            "unk_token": "none",
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 1,
            "vocab": {},
        }
    },
    {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}},
    {
        "added_tokens": [
            {"id": 2**32 - 1, "content": "<pad>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ]
    },
    {"added_tokens": []},
]


def _tokenizer(base: Path, rng: random.Random) -> str:
    """By what its library can be asked for: a gigabyte of padding, chains that double, words that no model has."""
    path = base / "tokenizer.json"
    whole = json.loads(path.read_text())
    vocabulary = whole["model"]["vocab"] | {rng.choice(["zebra", hostile.text(rng)]): rng.choice([-1, 47, 2**31, 2**63])}
    others = [*TOKENIZERS, *TOKENIZERS, {"model": whole["model"] | {"vocab": vocabulary}}]
    path.write_text(json.dumps(whole | rng.choice(others)))
    return "base"


def _gguf(base: Path, rng: random.Random) -> str:
    """One file with all; a number may be given as a text there, a list as a number, and bytes may be spoilt."""
    apart(lambda: _write_gguf(base, rng.random()))
    if rng.random() < 0.4:
        rng.choice(OF_FILES)(base / "model.gguf", rng)
    return "base/model.gguf"


def _write_gguf(base: Path, seed: float) -> None:
    import gguf
    from safetensors.numpy import load_file

    rng, kinds = random.Random(seed), gguf.GGUFValueType
    counts = {"block_count": 4, "embedding_length": 128, "feed_forward_length": 256, "attention.head_count": 4}
    counts |= {"attention.head_count_kv": 1, "attention.key_length": 32, "attention.sliding_window": 32}
    rates = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.layer_norm_rms_epsilon": 1e-6}
    vocabulary = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]
    fields = {f"gemma3.{name}": (value, kinds.UINT32, None) for name, value in counts.items()}
    fields |= {f"gemma3.{name}": (value, kinds.FLOAT32, None) for name, value in rates.items()}
    fields["tokenizer.ggml.tokens"] = (list(vocabulary), kinds.ARRAY, kinds.STRING)
    fields["tokenizer.ggml.scores"] = ([0.0] * len(vocabulary), kinds.ARRAY, kinds.FLOAT32)
    fields["tokenizer.ggml.token_type"] = ([1] * len(vocabulary), kinds.ARRAY, kinds.INT32)
    strange = [
        ("text", kinds.STRING, None),
        (hostile.text(rng), kinds.STRING, None),
        (7, kinds.UINT64, None),
        (True, kinds.BOOL, None),
    ]
    strange += [
        (-1, kinds.INT64, None),
        (float("nan"), kinds.FLOAT32, None),
        (1e300, kinds.FLOAT64, None),
        (0, kinds.UINT8, None),
    ]
    strange += [
        ([1, 2], kinds.ARRAY, kinds.INT32),
        (["a"], kinds.ARRAY, kinds.STRING),
        ([[1], [2]], kinds.ARRAY, kinds.ARRAY),
    ]
    names = [*fields, "gemma3.attn_logit_softcapping", "gemma3.final_logit_softcapping", "gemma3.rope.scaling.type"]
    for name in rng.sample([*names, "gemma3.rope.scaling.factor"], rng.choice([1, 1, 2])):
        fields[name] = rng.choice(strange)
    writer = gguf.GGUFWriter(base / "model.gguf", rng.choice(["gemma3"] * 9 + ["llama", hostile.text(rng)]))
    for name, (value, kind, of) in fields.items():
        writer.add_key_value(name, value, kind, of)
    stored = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, counts["block_count"])
    for name, value in load_file(base / "model.safetensors").items():
        added = 1 if name.endswith("norm.weight") else 0
        writer.add_tensor(stored.get_name(name, (".weight",)), value.astype("float32") + added)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ROW = {"question": "Ann has 1 coins. Ben gives Ann 2. How many coins does Ann have?", "answer": "3"}
BAD_LINES = ["", "null", "[]", "3", "{", '{"question": "Ann"}', '{"question": 1, "answer": 2}', "\ufeff{}", "\x00"]
BAD_LINES += ['{"question": "Ann", "answer": NaN}']
BAD_LINES += ["[" * 200_000, '{"question":' * 50_000, '{"question": "' + "Ann " * 10**6 + '", "answer": "1"}']
BAD_LINES += ['{"question": "Ann", "answer": ' + "9" * 5000 + "}"]


def data(rng: random.Random, folder: Path) -> Arguments:
    """Rows of a user's own, of which some are strange, or the file itself is."""
    kind = rng.choice(["jsonl", "jsonl", "jsonl.gz", "csv", "csv.gz", "parquet", "parquet"])
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        apart(lambda: _write_parquet(path, rng.random()))
    else:
        text = (_jsonl if kind.startswith("jsonl") else _csv)(rng).encode(errors="surrogatepass")
        text = text if rng.random() < 0.9 else text.decode(errors="replace").encode("utf-16")
        if kind.endswith(".gz") and rng.random() < 0.2:
            text = bytes(3 * 10**8)  # which is small when it is packed
        path.write_bytes(gzip.compress(text, 1) if kind.endswith(".gz") else text)
    if rng.random() < 0.4:
        rng.choice(OF_FILES)(path, rng)
    skip = f"data.on_bad_row={rng.choice(['error', 'skip'])}"
    group = kind.partition(".")[0]
    return [
        rng.choice(["evaluate", "plan"]),
        *BASE,
        f"data={group}",
        f"data.path={path.name}",
        "data.system_prompt=''",
        skip,
    ]


def _jsonl(rng: random.Random) -> str:
    spoilt = hostile.spoilt(ROW, rng)
    lines = [json.dumps(ROW)] * rng.randrange(30) + [rng.choice([*BAD_LINES, spoilt, spoilt, spoilt])] * rng.choice(
        [1, 1, 30]
    )
    rng.shuffle(lines)
    return "\n".join(lines)


def _csv(rng: random.Random) -> str:
    head = rng.choice(
        ["question,answer"] * 3 + ["question,question", "", "a;b", f"question,{hostile.text(rng)}", ",,,,", '"question']
    )
    bad = ["a,b,c,d", '"', ",", "Ann", hostile.text(rng), "x" * 10**6 + ",1", '"Ann\n\n",' + "1" * 5000, "\x00,\x00"]
    lines = [f"{ROW['question']},3"] * rng.randrange(30) + [rng.choice(bad)]
    return "\n".join([head, *lines])


def _write_parquet(path: Path, seed: float) -> None:
    import pyarrow
    import pyarrow.parquet

    rng = random.Random(seed)
    columns = [
        [ROW["question"]] * 9,
        [3] * 9,
        [None] * 9,
        [[1]] * 9,
        [{"a": 1}] * 9,
        [b"\xff"] * 9,
        [float("nan")] * 9,
        [hostile.text(rng)] * 9,
    ]
    table = {
        "question": rng.choice([columns[0], *columns]),
        rng.choice(["answer", "answer", hostile.text(rng)]): rng.choice(columns),
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)


LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
CONFIGS = [LAUGHS, "[" * 5000, "- a\n", "seed: 1\nseed: 2\n", "\tseed: 1", "!!python/object/apply:os.mkdir [owned]"]
CONFIGS += ["a: " + "x" * 10**7, "\xff\xfe", "*a", "? [a]\n: b"]
CONFIGS += ["seed: !!int 1e5\n", "%YAML 9.9\n---\n", "a: &a\n  b: *a\n", "<<: {a: 1}\n", "{" * 900 + "}" * 900]
CONFIGS += ["seed: 0b1\nmodel: 08\n", "a: |\n" + "  x\n" * 10**5]
EVIL = "import os\nos.mkdir('owned')\ndef mine(prompt, completion, answer):\n    return 0.0\n"


def run_folder(rng: random.Random, folder: Path) -> Arguments:
    """A folder that came from elsewhere: what it says of itself may be anything, and code in it must not be run."""
    run = folder / "run"
    shutil.copytree(OLD_RUN, run)
    ways = [_config, _config, _value, _value, _evil, *[_records] * 3, _summary, _index_of_many, _links]
    chosen = rng.choices(ways, k=rng.choice([1, 1, 2]))
    late = [_index_of_many, _links]  # what is moved, or leads elsewhere, cannot be spoilt further
    for way in sorted(chosen, key=lambda way: late.index(way) if way in late else -1):
        with contextlib.suppress(ValueError):  # of what was spoilt before
            way(run, rng)
    resumed = ["train", "training.resume=run"]
    verbs = [
        ["doctor", "run"],
        ["report", "run"],
        ["evaluate", "run=run", *BASE[1:]],
        ["export", "run=run"],
        resumed,
        ["plan", resumed[1]],
    ]
    verbs += [["plan", *BASE, *ONCE, "training.init_from=run"], ["train", *resumed[1:], f"seed={hostile.word(rng)}"]]
    return rng.choice(verbs)


def _config(run: Path, rng: random.Random) -> None:
    text = (run / "config.yaml").read_text()
    said = rng.choice(CONFIGS)
    (run / "config.yaml").write_text(
        rng.choice([said, text + said, said + text]), encoding="latin-1" if said[0] == "\xff" else "utf-8"
    )


def _value(run: Path, rng: random.Random) -> None:
    """One value of it."""
    lines = (run / "config.yaml").read_text().splitlines()
    at = rng.choice([number for number, line in enumerate(lines) if ": " in line])
    key = lines[at].partition(": ")[0]
    raw = rng.choice([hostile.word(rng), json.dumps(hostile.text(rng)), "9" * 5000, "&a [*a]", "!!binary x", "|"])
    lines[at] = f"{key}: {raw}"
    (run / "config.yaml").write_text("\n".join(lines), errors="surrogateescape")


def _evil(run: Path, rng: random.Random) -> None:
    """A reward function that lies in the folder itself."""
    (run / "evil.py").write_text(EVIL)
    text = (run / "config.yaml").read_text()
    name = rng.choice(["evil.mine", "run.evil.mine", "run.evil.mine"])
    (run / "config.yaml").write_text(text.replace("agent_tunix.environments.rewards.format_exact", name))


def _records(run: Path, rng: random.Random) -> None:
    path = run / rng.choice(["metrics.jsonl", "evals.jsonl", "samples.jsonl"])
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = rng.choice([hostile.spoilt(json.loads(lines[at]), rng), hostile.json_value(rng), hostile.text(rng)])
    path.write_text("\n".join(lines) + "\n" * rng.randrange(2), errors="surrogatepass")


def _summary(run: Path, rng: random.Random) -> None:
    path = run / "summary.json"
    path.write_text(hostile.spoilt(json.loads(path.read_text()), rng), errors="surrogatepass")


def _index_of_many(run: Path, rng: random.Random) -> None:
    """What makes it another kind of folder."""
    job = {
        "job": "0",
        "overrides": ["seed=1"],
        "status": "completed",
        "steps": 2,
        "final_eval": {"step": 2, "accuracy": 0.5},
    }
    whole = {"mode": "fused", "groups": [{"jobs": ["0"], "until": None, "at_once": 1, "prompt_width": 9}], "jobs": [job]}
    name = rng.choice(["sweep.json", "sweep.json", "tune.json", "lr_find.json", "best.yaml"])
    (run / name).write_text(rng.choice([hostile.spoilt(whole, rng), hostile.json_value(rng)]), errors="surrogatepass")
    if rng.random() < 0.5:
        (run / "config.yaml").rename(run / "moved.yaml")
        (run / "0").mkdir()
        (run / "moved.yaml").rename(run / "0" / "config.yaml")


def _links(run: Path, rng: random.Random) -> None:
    """Something in the folder leads elsewhere, or is no file."""
    path = rng.choice(sorted(run.iterdir()))
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    way = rng.randrange(3)
    if way == 0:
        path.symlink_to(rng.choice([path.name, "/dev/zero", "/", "nowhere", "..", "/proc/self/fd/0"]))
    elif way == 1:
        os.mkfifo(path)
    else:
        path.mkdir()


MAKERS: dict[str, Callable[[random.Random, Path], Arguments]] = {"models": model, "data": data, "run folders": run_folder}
