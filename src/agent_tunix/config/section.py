"""What all sections of the configuration have in common: strict types, no unknown keys, numbers that a device can hold."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema, core_schema


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Marks a text that must be a name in a table of the code, which is imported when the first one is checked.

    The configuration lies below the code that has the tables: whoever adds a row there need not tell it here.
    """

    module: str
    table: str

    def rows(self) -> Mapping[str, Any]:
        return getattr(importlib.import_module(self.module), self.table)

    def names(self) -> list[str]:
        return list(self.rows())

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, name: str) -> str:
        if name not in self.names():
            close = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"must be one of {', '.join(self.names())}{hint}")
        return name


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

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """No path may have a zero byte, and nothing that is written half a surrogate pair; YAML can spell both."""
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError("must be text, without zero bytes and halves of surrogate pairs")
        return value
