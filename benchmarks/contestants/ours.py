"""Agent-Tunix: its own training loop, without the evaluations before and after.

Its settings are those of the configuration files; the batch is one slice unless the race says otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from race import LEARNING_RATE, Race, reward

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.progress import Progress
from agent_tunix.training import loading
from agent_tunix.training.guard import Interruption
from agent_tunix.training.loop import Outputs, train_loop
from agent_tunix.training.progress import Display
from agent_tunix.training.run_folder import RunFolder
from agent_tunix.training.setup import Loaded, compile_ahead, prepare
from agent_tunix.types import Record


def chance(prompt: str, completion: str, answer: str) -> float:
    return reward()


class Stopwatch(Display):
    """Stands where a run's display would stand."""

    def __init__(self, race: Race):
        self._race = race

    def step(self, record: Record) -> None:
        tokens = round(record["completion/length"] * self._race.sequences)
        self._race.step_done(record["time/rollout"], tokens, record["memory/peak_gb"])

    def notice(self, text: str) -> None:
        print(text)


def configuration(race: Race) -> Config:
    settings = {
        "model.weights": race.checkpoint,
        "model.dtype": race.dtype,
        "model.lora_rank": race.rank,
        "data.path": race.prompts_file,
        "data.system_prompt": "",
        "generation.max_prompt_length": race.prompt_length,
        "generation.max_generation_steps": race.completion_length,
        "generation.temperature": race.temperature,
        "generation.top_k": "null" if race.top_k is None else race.top_k,
        "grpo.num_generations": race.generations,
        "grpo.beta": race.beta,
        "optimizer.learning_rate": LEARNING_RATE,
        "training.batch_size": race.prompts,
        "training.micro_batch_size": race.micro_batch or race.prompts,
        "training.num_batches": race.steps,
        "training.train_fraction": 0.75,
        "training.eval_every_n_steps": "null",
        "training.save_interval_steps": "null",
        "evaluation.num_examples": 1,
    }
    overrides = [f"model=gemma3_{race.model}", "data=jsonl", *(f"{key}={value}" for key, value in settings.items())]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        container: Any = OmegaConf.to_container(compose("config", overrides), resolve=True)
    container["reward"] = {"functions": {"chance": f"{__name__}.chance"}, "weights": {}}
    return validate(container, Config)


def main() -> None:
    race = Race.given()
    loading.start_device(print)
    cfg = configuration(race)
    watch = Stopwatch(race)
    run = prepare(cfg, Loaded(), watch.notice)
    never = dataclasses.replace(run.sampling, end_ids=(-1,))  # no token has this number
    run = dataclasses.replace(run, sampling=never)
    path = Path(race.folder) / "run"
    with Interruption() as interruption, contextlib.closing(RunFolder(path)) as folder:
        compile_ahead(run)
        out = Outputs(folder, Checkpoints(path / "checkpoints", 1), watch, rollbacks=[])
        train_loop(run, loading.new_state(run.cfg, run.model), Progress(), out, interruption)


if __name__ == "__main__":
    main()
