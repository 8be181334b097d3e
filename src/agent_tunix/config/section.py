"""What all sections of the configuration have in common: strict types, no unknown keys, numbers that a device can hold."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

LEAST, GREATEST, MOST = 1.2e-38, 3.4e38, 2**31 - 1


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _fits_a_device(cls, value: Any) -> Any:
        """Numbers have 32 bits there: a greater one would become infinite or fail, and a smaller one become 0."""
        if isinstance(value, float) and value and not LEAST <= abs(value) <= GREATEST:
            raise ValueError(f"must be of a size from {LEAST:g} to {GREATEST:g}, as the device counts in 32 bits")
        if isinstance(value, int) and value > MOST:
            raise ValueError(f"must be at most {MOST}, as the device counts in 32 bits")
        return value
