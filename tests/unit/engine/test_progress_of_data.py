from __future__ import annotations

import dataclasses

import pytest

from agent_tunix.engine.progress import Progress


def test_a_second_rollback_forgets_neither_batch_and_cuts_the_rate_again():
    saved = Progress(position=2)
    first = Progress(position=3).rolled_back(saved, 4, "the loss is nan")
    assert (first.position, first.rate_scale, first.skipped) == (2, 0.1, (3,))
    second = dataclasses.replace(first, position=5).rolled_back(saved, 6, "the loss is inf")
    assert (second.position, second.rate_scale, second.skipped) == (2, pytest.approx(0.01), (3, 5))
    assert [(event["step"], event["batch"]) for event in second.rollbacks] == [(4, 3), (6, 5)]
