"""Warnings about settings that are allowed but unusual: which way they may fail, and what to set instead.

The ranges are those of the optimizer reference; the learning rate's is the model's own, moved by batch size, data size
and full fine-tuning as the reference's section on interactions says. Impossible values are refused by the schema.
"""

from __future__ import annotations

import math

from agent_tunix.config.schema import Config, GuidanceSection

TYPICAL = {
    "weight_decay": (0.0, 0.1, "", "weights may be held back from learning"),
    "max_grad_norm": (0.01, 1.0, "updates may become too small to matter", "exploding gradients may get through"),
    "eps": (1e-10, 1e-6, "divisions may become unstable", "small gradients are damped away"),
    "warmup_ratio": (0.0, 0.2, "", "most of the run is spent below the peak rate"),
}
OTHERWISE = {"adafactor": ("eps", "betas"), "lion": ("eps",), "sgd": ("eps",)}  # used differently, or not at all
TYPICAL_BETAS = ((0.8, 0.95), (0.99, 0.999))
LARGE_BATCH = (2.0, 10 / 3)  # the reference runs 270M at 1e-4 with twice the usual prompts, 10/3 of its range's end
SMALL_BATCH = (0.25, 1 / 3)  # and 4B at 1e-6 with a quarter of them, a third of its range's end
FULL_FINE_TUNING = 0.1  # all weights move at once, so each should move less
RATES_BY_SIZE = ((5e8, (1e-5, 3e-5)), (2e9, (1e-6, 1e-5)), (math.inf, (1e-6, 3e-6)))  # below so many parameters
RATE_OF = {"adamw": 1.0, "schedule_free_adamw": 1.0, "adafactor": 1.0, "lion": 1 / 3}  # others have rates of their own
SMALL_DATA = (500, 1 / 3)  # below so many examples the rate goes down with them; by how much is our own choice


def guidance_by_size(parameters: int) -> GuidanceSection:
    """What is assumed of a model that nothing was measured on: what the reference says of the nearest size."""
    rates = next(rates for most, rates in RATES_BY_SIZE if parameters < most)
    return GuidanceSection(learning_rate=list(rates), prompts=4, measured=False)


def rate_range(cfg: Config, num_examples: int | None) -> tuple[float, float, list[str]]:
    """The lowest and highest rate that suit a run whose optimizer has guidance, and why they were moved."""
    guidance = cfg.model.guidance
    assert guidance  # a configuration whose model is described has one
    low, high = (RATE_OF[cfg.optimizer.optimizer_name] * rate for rate in guidance.learning_rate)
    reasons = [] if guidance.measured else ["by its size alone"]
    ratio = cfg.training.prompts_per_step / guidance.prompts
    if ratio >= LARGE_BATCH[0]:
        high *= LARGE_BATCH[1]
        reasons.append(f"{cfg.training.prompts_per_step} prompts an update allow more")
    if ratio <= SMALL_BATCH[0]:
        high *= SMALL_BATCH[1]
        reasons.append("few prompts an update ask for less")
    if cfg.model.lora_rank == 0:
        low, high = low * FULL_FINE_TUNING, high * FULL_FINE_TUNING
        reasons.append("training all weights asks for less")
    elif cfg.model.use_rslora:  # adaptive steps of B do not depend on the scale, so what they change of the matrix does
        more = math.sqrt(cfg.model.lora_rank)
        low, high = low / more, high / more
        reasons.append(f"model.use_rslora scales adapters {more:.2g} times as much, and asks for as much less")
    if num_examples is not None and num_examples < SMALL_DATA[0]:
        high *= SMALL_DATA[1]
        reasons.append(f"{num_examples} examples ask for less")
    return min(low, high), high, reasons


def middle_rate(cfg: Config) -> float:
    """The middle of the rates that suit a run, as a value to begin a search from; without guidance, the run's own rate."""
    if cfg.optimizer.optimizer_name not in RATE_OF:
        return half_decades(cfg.optimizer.learning_rate)
    low, high, _ = rate_range(cfg, None)
    return half_decades(math.sqrt(low * high))


def half_decades(rate: float, up: int = 0) -> float:
    """The nearest to a rate among 1e-6, 3e-6, 1e-5, 3e-5 ..., or the one that is `up` places above it."""
    return min(1.0, float(f"{10 ** ((round(2 * math.log10(rate)) + up) / 2):.0e}"))


def warnings(cfg: Config, num_examples: int | None = None) -> list[str]:
    """One line for each unusual setting."""
    return [
        line
        for line in (
            _rate(cfg, num_examples),
            *_optimizer(cfg),
            _betas(cfg),
            _rewards(cfg),
            *_objective(cfg),
            _unwatched(cfg),
        )
        if line
    ]


def _rate(cfg: Config, num_examples: int | None) -> str | None:
    if cfg.optimizer.optimizer_name not in RATE_OF:
        return None
    rate = cfg.optimizer.learning_rate
    low, high, reasons = rate_range(cfg, num_examples)
    suitable = f"{low:.2g} to {high:.2g} suit" if low < high else f"{high:.2g} suits"
    whom = f"{suitable} {cfg.model.model_size}" + (f" ({'; '.join(reasons)})" if reasons else "")
    if rate > high * 1.0001:
        return (
            f"optimizer.learning_rate={rate:g} is high: {whom}. The run may diverge (loss NaN, KL rising); "
            f"set optimizer.learning_rate={high:.2g}"
        )
    if rate < low * 0.9999:
        return (
            f"optimizer.learning_rate={rate:g} is low: {whom}. The run may learn very slowly; "
            f"set optimizer.learning_rate={low:.2g}"
        )
    return None


def _optimizer(cfg: Config) -> list[str]:
    lines = []
    other = OTHERWISE.get(cfg.optimizer.optimizer_name, ())
    for key, (low, high, if_low, if_high) in TYPICAL.items():
        if key in other:
            continue
        value = getattr(cfg.optimizer, key)
        if value < low or value > high:
            fails, limit = (if_low, low) if value < low else (if_high, high)
            typical = f"is outside the typical {low:g} to {high:g}"
            lines.append(f"optimizer.{key}={value:g} {typical}: {fails}; set optimizer.{key}={limit:g}")
    return lines


def _betas(cfg: Config) -> str | None:
    if "betas" in OTHERWISE.get(cfg.optimizer.optimizer_name, ()):
        return None
    outside = [not low <= beta <= high for beta, (low, high) in zip(cfg.optimizer.betas, TYPICAL_BETAS, strict=True)]
    if not any(outside):
        return None
    shown = ",".join(f"{beta:g}" for beta in cfg.optimizer.betas)
    return (
        f"optimizer.betas=[{shown}] are unusual: the averages may follow noise (low) or lag behind (high); "
        "set 'optimizer.betas=[0.9,0.999]'"
    )


def _rewards(cfg: Config) -> str | None:
    weighty = any(cfg.reward.weights.get(name, 1.0) for name in cfg.reward.functions)
    of_environment = cfg.environment.name is not None  # whose rewards are known when it is played
    if weighty or of_environment or cfg.training.method == "supervised":
        return None
    return "reward.weights are all 0: no completion is better than another, and nothing can be learnt; give one a weight"


def _objective(cfg: Config) -> list[str]:
    """Keys that are set and do nothing, and what is easily overlooked when one objective's settings meet another."""
    g, found = cfg.grpo, []
    if cfg.training.method == "supervised":
        return []
    no_clip = g.objective in ("cispo", "sapo")
    if no_clip and g.delta is not None:
        found.append(f"grpo.delta={g.delta:g} does nothing: grpo.objective={g.objective} does not clip; set grpo.delta=null")
    if g.objective == "sapo" and g.epsilon_high is not None:
        found.append("grpo.epsilon_high does nothing: grpo.objective=sapo does not clip; set grpo.epsilon_high=null")
    if g.objective.startswith("gspo") and g.epsilon >= 0.05:
        found.append(
            f"grpo.epsilon={g.epsilon:g} is wide for ratios of whole sequences, which stay near 1, and nothing is clipped; "
            "grpo=gspo sets 3e-4"
        )
    if g.epsilon_high is not None and g.epsilon_high < g.epsilon:
        found.append(
            f"grpo.epsilon_high={g.epsilon_high:g} is below grpo.epsilon={g.epsilon:g}: good completions are held back more "
            "than bad ones, and the policy soon says one thing only; set grpo.epsilon_high=null"
        )
    if g.overlong != "penalty" and g.overlong_buffer is not None:
        found.append("grpo.overlong_buffer does nothing without grpo.overlong=penalty")
    return found


def _unwatched(cfg: Config) -> str | None:
    if cfg.grpo.beta or cfg.training.method == "supervised":
        return None
    return (
        "grpo.beta=0: the reference is not read, so that no KL is known, and none above training.max_kl is seen; "
        "set grpo.beta=1e-6 to have it measured"
    )
