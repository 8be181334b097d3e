"""The examples that users are shown do what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent_tunix.config.schema import EnvironmentSection
from agent_tunix.environments.world import load_world, rewards_of


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3] / "examples"), *sys.path])


def test_the_number_game_is_won_by_its_number(examples):
    game = load_world(EnvironmentSection(name="number_game.NumberGame", settings={"largest": 9})).make()
    transcript = [*game.reset({"answer": 7})]
    for said, reply in {"It is 5?": "It is larger.", "8": "It is smaller.", "no idea": "Answer with a number."}.items():
        transcript.append({"role": "assistant", "content": said})
        transcript.append(game.reply(transcript))
        assert transcript[-1] == {"role": "user", "content": reply}
    transcript.append({"role": "assistant", "content": "7"})
    assert game.reply(transcript) is None
    assert rewards_of(game, transcript) == ({"found": 1.0, "quick": 0.25}, 1.0)
