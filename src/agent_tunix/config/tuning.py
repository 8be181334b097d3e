"""The configurations of the verbs that look for optimizer settings: a training configuration, and how to look."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agent_tunix.config.schema import Config, Section

Rate = Annotated[float, Field(gt=0, le=1)]


class LrFindSection(Section):
    num_steps: int = Field(ge=12, description="Updates of the ramp; more of them show smaller gains.")
    lr_low: Rate | None = Field(description="Rate of the first update; null: a hundredth of the model's guidance.")
    lr_high: Rate | None = Field(description="Rate of the last update; null: a hundred times the model's guidance.")


class LrFindConfig(Config):
    """The configuration of `agent-tunix lr-find`."""

    lr_find: LrFindSection
