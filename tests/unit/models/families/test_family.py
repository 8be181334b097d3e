from __future__ import annotations

import pytest

from agent_tunix.errors import UserError
from agent_tunix.models.families.family import Family
from agent_tunix.models.families.table import FAMILIES


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_setting_without_code_is_named_however_long_it_is(family: Family):
    key = "hidden_activation" if family.name == "gemma3" else "hidden_act"
    with pytest.raises(UserError, match=key) as refused:
        family.from_config({key: "x" * 10**6})
    assert len(str(refused.value)) < 300
