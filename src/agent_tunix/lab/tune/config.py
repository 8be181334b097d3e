"""The configurations of the verbs that look for optimizer settings: a training configuration, and how to look."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator

from agent_tunix.config.schema import Config, Positive, Share
from agent_tunix.config.section import Section

TIME = re.compile(r"\d+(\.\d+)?[smh]")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
MOST_RATES = 9  # which reach four decades either way
Rate = Annotated[float, Field(gt=0, le=1)]


class LrFindSection(Section):
    num_steps: int = Field(ge=12, description="Updates of the ramp; more of them show smaller gains.")
    lr_low: Rate | None = Field(description="Rate of the first update; null: a hundredth of the model's guidance.")
    lr_high: Rate | None = Field(description="Rate of the last update; null: a hundred times the model's guidance.")


class LrFindConfig(Config):
    """The configuration of `agent-tunix lr-find`."""

    lr_find: LrFindSection


class TuneSection(Section):
    budget: int | str = Field(description="What the search may take: a time, as 30m or 2h, or a number of updates in all.")
    seeds: Annotated[int, Field(ge=1, le=10)] = Field(description="Seeds that the finalists are trained with.")
    finalists: Positive = Field(description="Settings, at most, that are trained with several seeds.")
    rates: Annotated[int, Field(ge=2, le=MOST_RATES)] = Field(description="Coarse learning rates, ten times apart.")
    warmup_ratios: list[Share] = Field(description="Values of optimizer.warmup_ratio to try beside the run's own.")
    weight_decays: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        description="Values of optimizer.weight_decay to try beside the run's own."
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _is_a_time_or_a_count(cls, budget: Any) -> Any:
        if isinstance(budget, float) and budget.is_integer():  # as in 1e3
            return cls._is_a_time_or_a_count(int(budget))
        counts = isinstance(budget, int) and not isinstance(budget, bool) and budget > 0
        if not counts and not (isinstance(budget, str) and TIME.fullmatch(budget) and float(budget[:-1]) > 0):
            raise ValueError("must be a time such as 30m or 2h, or a number of updates such as 400")
        return budget

    @property
    def seconds(self) -> float | None:
        """The budget where it is a time."""
        return float(self.budget[:-1]) * SECONDS[self.budget[-1]] if isinstance(self.budget, str) else None


class TuneConfig(Config):
    """The configuration of `agent-tunix tune`."""

    tune: TuneSection
