"""The card of an exported model, README.md: what it is, how well it does, how it was made, as the run has recorded it."""

from __future__ import annotations

import json
import platform
import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import yaml

import agent_tunix
from agent_tunix.config.commands import own_overrides
from agent_tunix.config.schema import Config, ExportConfig
from agent_tunix.environments.tables import REPOSITORY
from agent_tunix.models.checkpoints.hub import KAGGLE, is_remote, repository_of
from agent_tunix.training.data import set_name
from agent_tunix.training.intervals import interval_text, is_share
from agent_tunix.training.loggers.base import Labels
from agent_tunix.training.progress import counted
from agent_tunix.training.run_folder import finite, read_object, read_records
from agent_tunix.types import Record

ROWS = 10  # of the learning curve, at most
# Licences of published models by their names on the hub; of one that is not here, nothing is said.
LICENCES = {
    r"google/gemma-3(n|-).*": "gemma",
    r"Qwen/Qwen3-.*": "apache-2.0",
    r"Qwen/Qwen2\.5-(Coder-)?(0\.5B|1\.5B|7B|14B|32B).*": "apache-2.0",
    r"meta-llama/Llama-3\.2-.*": "llama3.2",
    r"meta-llama/Llama-3\.1-.*": "llama3.1",
    r"meta-llama/Meta-Llama-3-.*": "llama3",
    r"HuggingFaceTB/SmolLM2-.*": "apache-2.0",
}


def model_card(cfg: ExportConfig, trained: Config, step: int) -> str:
    """The card of what a run had learnt by a step, in the Markdown and with the metadata that the hub reads."""
    run, base = Path(cfg.run), base_on_hub(trained)
    labels = Labels.of(run, trained.model_dump(mode="json"))
    evals, metrics = read_records(run / "evals.jsonl"), read_records(run / "metrics.jsonl")
    sections = [
        f"# {cfg.push_to.partition('/')[2] if cfg.push_to else labels.name}",
        _what_it_is(cfg, trained, base, step),
        labels.description,
        f"## Use\n\n```python\n{_usage(cfg, base)}\n```",
        _evaluation(evals, trained, step),
        _curve(evals, metrics, step),
        _training(trained, step),
        f"## Command\n\n    {_command(run, trained)}",
        f"## Versions\n\n{_versions()}",
        _licence(base),
    ]
    return "\n\n".join([_metadata(cfg, trained, base, labels.tags), *filter(None, sections)]) + "\n"


def base_on_hub(trained: Config) -> str | None:
    """The repository of the base, where it is of the hub."""
    weights = trained.model.weights
    return repository_of(weights)[0] if is_remote(weights) and not weights.startswith(KAGGLE) else None


def licence_of(base: str | None) -> str | None:
    return next((name for pattern, name in LICENCES.items() if base and re.fullmatch(pattern, base)), None)


def _metadata(cfg: ExportConfig, trained: Config, base: str | None, tags: Iterable[str]) -> str:
    adapter, data = cfg.format == "peft", trained.data
    of_hub = data.source == "table" and data.path and REPOSITORY.fullmatch(data.path) and not Path(data.path).exists()
    how = "lora" if trained.model.lora_rank else "full-training"
    fields = {
        "base_model": base,
        "base_model_relation": ("adapter" if adapter else "finetune") if base else None,
        "license": licence_of(base),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "datasets": [data.path] if of_hub else None,
        "tags": list(dict.fromkeys(["agent-tunix", trained.training.method, how, *tags])),
    }
    text = yaml.safe_dump({key: value for key, value in fields.items() if value}, sort_keys=False, allow_unicode=True)
    return f"---\n{text}---"


def _what_it_is(cfg: ExportConfig, trained: Config, base: str | None, step: int) -> str:
    model = trained.model
    named = f"[{base}](https://huggingface.co/{base})" if base else f"{model.model_family} {model.model_size}"
    kind = f"{_adapter(trained)} for {named}" if cfg.format == "peft" else f"{named}, trained further"
    return f"{kind}: {_method(trained)} on {set_name(trained.data)}, {counted(step, 'update')}, by Agent-Tunix."


def _adapter(trained: Config) -> str:
    model = trained.model
    kind = "DoRA" if model.use_dora else "rsLoRA" if model.use_rslora else "LoRA"
    return f"{kind} adapters of rank {model.lora_rank}, alpha {model.lora_alpha:g}"


def _method(trained: Config) -> str:
    if trained.training.method == "supervised":
        return "supervised learning"
    return f"reinforcement learning ({trained.grpo.objective})"


def _usage(cfg: ExportConfig, base: str | None) -> str:
    here, head = json.dumps(cfg.push_to or "<this folder>"), "from transformers import AutoModelForCausalLM\n\n"
    if cfg.format != "peft":
        return f"{head}model = AutoModelForCausalLM.from_pretrained({here})"
    kept = json.dumps(base or "<the base>")
    return (
        f"from peft import PeftModel\n{head}base = AutoModelForCausalLM.from_pretrained({kept})\n"
        f"model = PeftModel.from_pretrained(base, {here})"
    )


def _evaluation(evals: Sequence[Record], trained: Config, step: int) -> str:
    """Shares of held-out problems that are solved, at this step and before training, each with its interval."""
    rows = []
    for record in evals:
        if record.get("step") != step or not finite(record.get("n")):
            continue
        before = next((one for one in evals if one.get("step") == 0 and _asked(one) == _asked(record)), {})
        for name, value in record.items():
            if is_share(name) and finite(value):
                ends = [_with_interval(one.get(name), one.get("n")) for one in (before, record)]
                asked = f"{record['split']}, {record.get('set') or set_name(trained.data)}{_way(record)}"
                rows.append([asked, str(record["n"]), name.replace("_", " "), *ends])
    if not rows:
        return f"## Evaluation\n\nThe run was not evaluated at step {step}."
    note = "Problems that were not trained on; 95 % intervals (Wilson's) in parentheses."
    heads = ("set", "problems", "measure", "before training", f"after {counted(step, 'update')}")
    return f"## Evaluation\n\n{note}\n\n{_table(heads, rows)}"


def _asked(record: Record) -> list[object]:
    keys = ("split", "set", "num_passes", "inference/temperature", "inference/top_k", "inference/top_p")
    return [record.get(key) for key in keys]


def _way(record: Record) -> str:
    if "inference/temperature" not in record:
        return ""
    temperature = record["inference/temperature"]
    return f", temperature {temperature:g}, {record.get('num_passes', 1)} passes" if temperature else ", greedy"


def _with_interval(share: object, n: object) -> str:
    if not isinstance(share, float) or not isinstance(n, int) or n < 1:
        return "-"
    return f"{100 * share:.1f} % ({interval_text(share, n)})"


def _curve(evals: Sequence[Record], metrics: Sequence[Record], step: int) -> str:
    """Held-out accuracy over the run, with the mean reward and divergence of the updates since the row before."""
    own = [one for one in evals if one.get("split") == "validation" and "set" not in one and finite(one.get("accuracy"))]
    points = sorted((one for one in own if one["step"] <= step), key=lambda one: one["step"])
    if len(points) < 2:
        return ""
    chosen = sorted({round(i * (len(points) - 1) / (ROWS - 1)) for i in range(ROWS)})
    rows, last = [], -1
    for point in (points[i] for i in chosen):
        since = [one for one in metrics if finite(one.get("step")) and last < one["step"] <= point["step"]]
        means = [[one[key] for one in since if finite(one.get(key))] for key in ("reward/mean", "kl")]
        shown = [f"{statistics.fmean(values):.3g}" if values else "-" for values in means]
        rows.append([str(point["step"]), f"{100 * point['accuracy']:.1f} %", *shown])
        last = point["step"]
    return f"## Learning curve\n\n{_table(('update', 'held-out accuracy', 'reward', 'KL from the start'), rows)}"


def _training(trained: Config, step: int) -> str:
    grpo, optimizer, training = trained.grpo, trained.optimizer, trained.training
    prompts = training.prompts_per_step
    reinforced = training.method == "grpo"
    rows = [
        ["method", _method(trained)],
        ["data", set_name(trained.data)],
        ["updates", str(step)],
        ["prompts an update", f"{prompts} x {grpo.num_generations} completions" if reinforced else str(prompts)],
        ["longest completion", f"{trained.generation.max_generation_steps} tokens"],
        ["rewards", ", ".join(trained.reward.functions) or "those of the environment"] if reinforced else [],
        ["weight of the KL divergence", f"{grpo.beta:g}"] if reinforced else [],
        ["optimizer", f"{optimizer.optimizer_name}, betas {optimizer.betas}, weight decay {optimizer.weight_decay:g}"],
        ["learning rate", f"{optimizer.learning_rate:g}, {trained.scheduler.scheduler_name}"],
        ["trained", _adapter(trained) if trained.model.lora_rank else "all weights"],
        ["type of the base", trained.model.base_dtype or trained.model.dtype],
        ["seed", str(trained.seed)],
    ]
    return f"## Training\n\n{_table(('setting', 'value'), [row for row in rows if row])}"


def _versions() -> str:
    packages = ["jax", "jaxlib", "numpy", "optax"]
    found = [f"agent-tunix {agent_tunix.__version__}", *(f"{name} {version(name)}" for name in packages)]
    return ", ".join([*found, f"Python {platform.python_version()}"]) + ", where it was exported."


def _licence(base: str | None) -> str:
    if (name := licence_of(base)) is None:
        return ""
    return f"## Licence\n\nThe base, {base}, is published under the licence `{name}`."


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _command(run: Path, trained: Config) -> str:
    """As it was given; for a run that has not ended, the shortest that leads to its configuration."""
    given = read_object(run / "summary.json").get("overrides")
    overrides = given if isinstance(given, list) else own_overrides(trained.model_dump(mode="json"))
    return shlex.join(["agent-tunix", "train", *map(str, overrides)])
