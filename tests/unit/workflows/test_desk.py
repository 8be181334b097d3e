"""Steps are written when the device has work again; whoever needs them sooner finds them."""

from __future__ import annotations

import dataclasses

import pytest

from agent_tunix.engine.guard import Progress
from agent_tunix.engine.metrics import RunFolder, read_records
from agent_tunix.workflows.desk import NEVER, Desk, Pause

STEP = {"step": 1, "loss": 0.5}
SAMPLE = {"step": 1, "completion": "4"}


class Seen:
    """A display and a folder of checkpoints that note what they are given, and what had been written by then."""

    def __init__(self, folder: RunFolder):
        self.folder, self.shown, self.saved = folder, [], []

    def step(self, record):
        self.shown.append(record)

    def save(self, state, progress):
        self.saved.append((state, read_records(self.folder.path / "metrics.jsonl")))


@pytest.fixture
def seen(tmp_path):
    folder = RunFolder(tmp_path)
    yield Seen(folder)
    folder.close()


def desk_of(seen, pause=NEVER) -> Desk:
    desk = Desk(seen.folder, seen, seen, None, pause, None, [])
    desk.write(STEP)
    desk.write_samples([SAMPLE])
    return desk


def test_a_step_is_written_and_shown_once_there_is_time(seen):
    desk = desk_of(seen)
    assert not (seen.folder.path / "metrics.jsonl").exists()
    assert not seen.shown
    for _ in range(2):
        desk.catch_up()
        assert read_records(seen.folder.path / "metrics.jsonl") == [STEP]
        assert read_records(seen.folder.path / "samples.jsonl") == [SAMPLE]
        assert seen.shown == [STEP]


def test_a_checkpoint_comes_after_the_steps_that_led_to_it(seen):
    desk_of(seen).save("state", Progress())
    assert seen.saved == [("state", [STEP])]


@pytest.mark.parametrize("by_folder", [True, False])
def test_who_looks_into_the_folder_to_pause_a_run_finds_its_last_step(seen, by_folder):
    def due(step):
        return step == 1 and read_records(seen.folder.path / "metrics.jsonl") == [STEP]

    assert desk_of(seen, Pause(due, by_folder)).rests(1) is by_folder


def test_what_takes_a_while_goes_on_by_one_with_each_step(seen):
    reached = []
    desk = dataclasses.replace(desk_of(seen), by_steps=map(reached.append, range(2)))
    for steps in range(1, 4):
        desk.write(STEP)
        desk.catch_up()
        assert reached == list(range(min(steps, 2)))
