"""What the lab says of a run while it trains and when it closes: warnings, the commands to try next, its report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from agent_tunix.config.commands import join, less, overrides_without_experiment, value_text
from agent_tunix.config.schema import Config
from agent_tunix.environments.rewards import is_fault_of_reward
from agent_tunix.errors import UserError
from agent_tunix.lab.doctor.doctor import read
from agent_tunix.lab.doctor.examination import early_warnings
from agent_tunix.lab.doctor.remedies import GUARD, past_bad_rewards, with_lr_min
from agent_tunix.lab.plan.plan import too_large
from agent_tunix.lab.report.page import report_on
from agent_tunix.training import loading
from agent_tunix.training.advisor import Advisor

HOW_TO_LEARN = (
    "training",
    "optimizer",
    "scheduler",
    "grpo",
    "model.adapter",
)  # not carried over from a warm start, but for what is
SAME_HERE = ("training.train_fraction", "training.micro_batch_size", "training.batch_size")  # held out, and what fits

DEMOS = {  # the shipped checkpoints, and what to try after a run of theirs
    "package:tiny": (
        ["+experiment=control"],
        ["+experiment=quick_test", "--multirun", "optimizer.learning_rate=1e-7,1e-6,1e-5,1e-4"],
    ),
    "package:tiny_tool": (["+experiment=tool_control"],),
}


class LabAdvisor(Advisor):
    """Says what plan, doctor and report would say."""

    def before(self, cfg: Config, prompt_width: int) -> list[str]:
        return too_large(cfg, prompt_width)

    def midway(self, folder: Path) -> list[tuple[str, str]]:
        found = early_warnings(read(folder))
        return [(f.illness, f"{f.illness}, {f.evidence}\n  try: {f.remedy}") for f in found]

    def after_divergence(self, cfg: Config, overrides: Sequence[str], fault: str, rolled_back: bool) -> str:
        if is_fault_of_reward(fault):
            other = past_bad_rewards(cfg.training.on_divergence)
            to = {"ignore": "To drop such batches instead", "stop": "No batch was left. To stop at the first such"}[other]
            again = _again(cfg, overrides, GUARD, other)
            return f"Mend the function: a reward must be a finite number. {to}:\n  {again}"
        tries: dict[str, float | str] = {
            "optimizer.learning_rate": cfg.optimizer.learning_rate / 10,
            "optimizer.max_grad_norm": min(0.01, cfg.optimizer.max_grad_norm / 10),
            GUARD: "rollback",
        }
        if rolled_back:  # it has been tried
            del tries[GUARD]
        again = "\n".join(f"  {_again(cfg, overrides, key, value)}" for key, value in tries.items())
        return f"Most often the learning rate is too high. Try, in this order:\n{again}"

    def at_close(self, cfg: Config, overrides: Sequence[str], folder: Path, status: str, fault: str) -> list[str]:
        if is_fault_of_reward(fault):
            return [_again(cfg, overrides, GUARD, past_bad_rewards(cfg.training.on_divergence))]
        if status == "diverged":
            return [_again(cfg, overrides, "optimizer.learning_rate", cfg.optimizer.learning_rate / 10)]
        if status != "completed":
            return [join([f"training.resume={value_text(str(folder))}"])]
        run = f"run={value_text(str(folder))}"
        evaluate = join([run, "inference_config=standard", "num_passes=8"], "evaluate")
        examine = join([str(folder)], "doctor")
        whole = "format=peft" if _has_adapters_of_its_base(cfg) else "format=merged"
        export = join([run, whole, *(["step=best"] if cfg.training.keep_best else [])], "export")
        if cfg.training.method == "supervised":
            all_own = overrides_without_experiment(cfg.model_dump(mode="json"))
            kept = [o for o in all_own if o.startswith(SAME_HERE) or o in less(all_own, *HOW_TO_LEARN)]
            best = ["training.init_step=best"] if cfg.training.keep_best else []
            return [join([*kept, f"training.init_from={value_text(str(folder))}", *best]), evaluate, export, examine]
        if cfg.model.weights in DEMOS and cfg.data.source == "arithmetic":
            of_best = [export] if cfg.training.keep_best else []
            return [evaluate, *of_best, examine, *map(join, DEMOS[cfg.model.weights])]
        return [evaluate, export, examine]

    def report(self, folder: Path, notice: Callable[[str], None]) -> None:
        report_on(folder, notice)


def _again(cfg: Config, overrides: Sequence[str], key: str, value: float | str) -> str:
    """The command of a run with another value."""
    changes = with_lr_min({key: value}, cfg.scheduler.lr_min)
    given = (f"{k}={v if isinstance(v, str) else f'{v:g}'}" for k, v in changes.items())
    return join([*less(overrides, *changes), *given])


def _has_adapters_of_its_base(cfg: Config) -> bool:
    """Whether what was learnt are adapters of the base that model.weights names; not known where an earlier run is gone."""
    with contextlib.suppress(UserError):
        return cfg.model.lora_rank > 0 and loading.changed_base(cfg) is None
    return False
