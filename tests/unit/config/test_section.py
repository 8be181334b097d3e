from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from agent_tunix.config.section import Section


class Some(Section):
    rate: float | None = Field(default=None, ge=0)
    steps: int | None = Field(default=None, ge=1)


@pytest.mark.parametrize("value", [{"rate": 1e300}, {"rate": 1e-300}, {"steps": 10**11}], ids=str)
def test_what_a_device_would_make_another_number_of_is_refused(value):
    with pytest.raises(ValidationError, match="as the device counts in 32 bits"):
        Some(**value)


@pytest.mark.parametrize("value", [{"rate": 0.0}, {"rate": 3e38}, {"rate": 1e-30}, {"steps": 2**31 - 1}], ids=str)
def test_what_it_can_hold_is_taken(value):
    assert Some(**value).model_dump(exclude_none=True) == value
