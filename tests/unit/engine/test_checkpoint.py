from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.progress import Progress
from agent_tunix.engine.update import init_state
from agent_tunix.errors import UserError
from agent_tunix.models.lora import Adapters
from agent_tunix.types import TrainState


def state_at(step: int, rank: int = 2, modules=("q_proj", "v_proj")) -> TrainState:
    """A state whose every number is random, as after `step` updates."""
    rng = np.random.default_rng(step)
    trainable = Adapters(
        {m: jnp.asarray(rng.normal(size=(2, 4, rank)), jnp.float32) for m in modules},
        {m: jnp.asarray(rng.normal(size=(2, rank, 4)), jnp.float32) for m in modules},
        2.0,
    )
    state = init_state(trainable)
    moments = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32) if x.ndim else jnp.asarray(step, x.dtype),
        state.optimizer,
    )
    return TrainState(trainable, moments, jnp.asarray(step, jnp.int32))


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


def test_what_is_restored_is_what_was_saved_to_the_bit(checkpoints):
    saved = state_at(7)
    checkpoints.save(saved, Progress(3))
    restored, progress = checkpoints.restore(state_at(0))
    assert progress == Progress(3)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["proj [v2]", "x[ab]y", "betas=[0.9,0.95]", "a**b", "what?", "*", "50%"])
def test_a_folder_may_have_any_name(tmp_path, name):
    with contextlib.closing(Checkpoints(tmp_path / name / "checkpoints", keep=2)) as checkpoints:
        checkpoints.save(state_at(7), Progress(3))
        checkpoints.settle()
    with contextlib.closing(Checkpoints(tmp_path / name / "checkpoints")) as checkpoints:
        restored, _ = checkpoints.restore(state_at(0))
    jax.tree.map(np.testing.assert_array_equal, restored, state_at(7))


def test_a_backslash_is_refused_at_once(tmp_path):
    """Tensorstore takes it for a slash, and would write elsewhere."""
    with pytest.raises(UserError, match="with a backslash in its name"):
        Checkpoints(tmp_path / "back\\slash", keep=2)


@pytest.mark.parametrize("keep", [None, 2])
def test_a_folder_that_is_a_link_to_itself_is_refused(tmp_path, keep):
    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(UserError, match="checkpoints is a link that leads back to itself"):
        Checkpoints(tmp_path / "checkpoints", keep)


@pytest.mark.parametrize("keep", [None, 2])
def test_what_is_no_folder_is_refused_before_anything_is_dropped(tmp_path, keep):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="checkpoints is not a folder"):
        Checkpoints(tmp_path / "checkpoints", keep)


def test_the_last_that_was_due_is_told_from_one_that_an_interruption_made(checkpoints):
    assert checkpoints.last_due() is None
    checkpoints.save(state_at(2), Progress(2, midway=True))
    assert checkpoints.last_due() is None
    checkpoints.save(state_at(4), Progress(4))
    checkpoints.save(state_at(5), Progress(5, midway=True))
    assert checkpoints.last_due() == 4
    assert checkpoints.restore(state_at(0))[1].midway


def test_interruptions_do_not_push_out_the_last_that_was_due(tmp_path):
    """By however many processes the checkpoints between were made."""
    for step, midway in {3: False, 4: False, 5: True, 6: True}.items():
        saved = Checkpoints(tmp_path / "checkpoints", keep=1)
        saved.save(state_at(step), Progress(step, midway=midway))
        saved.settle()
        assert saved.steps() == {3: [3], 4: [4], 5: [4, 5], 6: [4, 6]}[step]
        assert saved.last_due() == min(step, 4)
        saved.close()
    saved = Checkpoints(tmp_path / "checkpoints", keep=1)
    saved.save(state_at(8), Progress(8))
    saved.settle()
    assert saved.steps() == [8]
    saved.close()


def test_the_best_stays_until_a_better_one_comes(tmp_path):
    """By however many processes the checkpoints between were made."""
    stays = {2: (2, [2]), 4: (2, [2, 4]), 6: (2, [2, 6]), 8: (8, [8]), 10: (8, [8, 10]), 12: (None, [12])}
    for step, (best, kept) in stays.items():
        saved = Checkpoints(tmp_path / "checkpoints", keep=1)
        saved.save(state_at(step), Progress(step), best=best)
        saved.settle()
        assert saved.steps() == kept
        saved.close()


def test_what_was_saved_after_a_step_can_be_forgotten(checkpoints):
    for step in (2, 4):
        checkpoints.save(state_at(step), Progress(step))
    checkpoints.forget_after(2)
    assert checkpoints.steps() == [2]
    checkpoints.save(state_at(3), Progress(9))
    checkpoints.save(state_at(4), Progress(5))
    assert checkpoints.restore(state_at(0))[1] == Progress(5), "a step that comes again is saved again"


def test_the_last_few_are_kept_and_the_last_is_the_default(checkpoints):
    for step in (2, 4, 10):
        checkpoints.save(state_at(step), Progress(step * 10))
    assert checkpoints.steps() == [4, 10]
    assert checkpoints.restore(state_at(0))[1] == Progress(100)
    assert checkpoints.restore(state_at(0), step=4)[1] == Progress(40)


def test_a_state_may_be_used_up_as_soon_as_it_was_saved(checkpoints):
    """Updates take over the memory of the state that they are given, while it is still being written."""
    next_state = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = next_state(state_at(1, rank=256, modules=tuple("abcdefgh")))
    expected = [np.array(x, copy=True) for x in jax.tree.leaves(state)]
    checkpoints.save(state, Progress(1))
    for _ in range(20):
        state = next_state(state)
    restored, _ = checkpoints.restore(state)
    for a, b in zip(jax.tree.leaves(restored), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_last_state_comes_back_as_any_other(checkpoints):
    """Of the same kinds and in the same place, though it is fetched for saving."""
    state = state_at(3)
    checkpoints.save(state, Progress(3), used_up=False)
    restored, progress = checkpoints.restore(state_at(0))
    assert progress == Progress(3)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (type(a), a.dtype, a.shape, a.sharding) == (type(b), b.dtype, b.shape, b.sharding)
        np.testing.assert_array_equal(a, b)


def test_another_process_finds_them_once_they_are_on_disk(checkpoints, tmp_path):
    checkpoints.save(state_at(5), Progress(1))
    checkpoints.settle()
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert again.steps() == [5]
    again.close()


def test_a_step_is_saved_once(checkpoints):
    checkpoints.save(state_at(5), Progress(1))
    checkpoints.save(state_at(5), Progress(2))
    assert checkpoints.restore(state_at(0))[1] == Progress(1)


def test_a_save_cut_short_is_no_checkpoint_and_can_be_made_again(checkpoints, tmp_path):
    checkpoints.save(state_at(5), Progress(1))
    checkpoints.settle()
    (tmp_path / "checkpoints" / "6.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    reader = Checkpoints(tmp_path / "checkpoints")
    assert (reader.steps(), len(list((tmp_path / "checkpoints").iterdir()))) == ([5], 2), "a reader removes nothing"
    reader.close()
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["5"], "what was cut short is gone"
    again.save(state_at(6), Progress(2))
    assert again.restore(state_at(0))[1] == Progress(2)
    again.close()


def test_a_file_in_the_place_of_a_checkpoint_is_found_before_anything_is_written(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "4").write_text("")
    with pytest.raises(UserError, match=r"checkpoints/4 is not a folder"):
        Checkpoints(tmp_path / "checkpoints", keep=2)


def test_a_full_disk_is_found_before_anything_is_written(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(OSError, match="No space left on device") as found:
        checkpoints.save(state_at(5), Progress(1))
    assert found.value.filename == str(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_fault_of_the_disk_while_writing_is_raised_as_the_systems_own(tmp_path):
    """A limit on the size of files, in a process of its own, stands for a disk that fills up."""
    script = f"""
import pathlib, resource, sys
import jax
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.progress import Progress
from agent_tunix.engine.update import init_state
from agent_tunix.models.lora import Adapters
a, b = (jax.random.normal(jax.random.key(0), shape) for shape in ((4, 512, 64), (4, 64, 512)))
modules = "abcdefgh"
state = init_state(Adapters(dict.fromkeys(modules, a), dict.fromkeys(modules, b), 1.0))
checkpoints = Checkpoints(pathlib.Path({str(tmp_path)!r}), keep=2)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    checkpoints.save(state, Progress(1))
    checkpoints.settle()
except OSError as fault:
    sys.exit(fault.errno)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == errno.EFBIG, done.stderr
    assert "Traceback" not in done.stderr, "of orbax's other writers, which nobody waits for any more"


def test_a_folder_that_cannot_be_made_is_told_and_leaves_nobody_waiting_for_it(tmp_path):
    """Orbax's threads would wait for it five minutes, and keep Python from ending, which has said why it ends."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    checkpoints.save(state_at(1), Progress())
    with pytest.raises(NotADirectoryError):
        checkpoints.settle()
    assert not [thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")]
    checkpoints.close()


def test_a_folder_that_was_removed_meanwhile_says_so(checkpoints, tmp_path):
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=f"checkpoints was removed .* training.resume={tmp_path} begins it again"):
        checkpoints.save(state_at(1), Progress())


def test_an_empty_folder_and_an_unknown_step_say_so(checkpoints):
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoints.restore(state_at(0))
    checkpoints.save(state_at(5), Progress(1))
    with pytest.raises(UserError, match="has no checkpoint of step 4; the steps kept are 5"):
        checkpoints.restore(state_at(0), step=4)


@pytest.mark.parametrize("other", [{"rank": 3}, {"modules": ("q_proj",)}, {"modules": ("q_proj", "k_proj")}], ids=str)
def test_adapters_of_another_kind_are_refused_with_a_message(checkpoints, other):
    checkpoints.save(state_at(5), Progress(1))
    with pytest.raises(UserError, match="does not fit this configuration"):
        checkpoints.restore(state_at(0, **other))
    gc.collect()  # a warning of reads that nobody waits for would come here


def test_other_shapes_are_refused_before_an_array_is_read(checkpoints, monkeypatch):
    """Orbax gives up at the first that does not fit, and what its threads then say would stand around our message."""
    checkpoints.save(state_at(5), Progress(1))
    monkeypatch.setattr(checkpoints._manager, "restore", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(UserError, match=r"6 arrays of shape \(2, 4, 2\) in it, 0 in the run"):
        checkpoints.restore(state_at(0, rank=3))


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves its other reads unawaited
@pytest.mark.parametrize("damaged", ["state/ocdbt.process_0/d/*", "state/d/*", "state/_METADATA", "progress/metadata"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(checkpoints, tmp_path, damaged, monkeypatch):
    cries: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: cries.append(str(found.exc_value)))
    for step in (4, 5):
        checkpoints.save(state_at(step, rank=64), Progress(step))
    checkpoints.settle()
    for path in (tmp_path / "checkpoints" / "5").glob(damaged):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with pytest.raises(UserError, match=r"step 5 (cannot be read; it may be|is) damaged .*\nWhole: step 4\.") as raised:
        checkpoints.restore(state_at(0, rank=64))
    assert "tensorstore" not in str(raised.value).lower(), "the pages that it has to say"
    assert "Event loop is closed" not in cries
    subprocess.run(str(raised.value).splitlines()[2].partition(" go on from step 4: ")[2], shell=True, check=True)
    again = Checkpoints(tmp_path / "checkpoints")
    assert again.restore(state_at(0, rank=64))[1] == Progress(4)
    again.close()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_number_that_is_none_is_a_damaged_checkpoint(checkpoints, number):
    """No run saves one; a bit that has changed on a disk may."""
    state = state_at(5)
    hit = state.trainable.b["v_proj"].at[1, 0, 2].set(number)
    trainable = Adapters(state.trainable.a, {**state.trainable.b, "v_proj": hit}, state.trainable.scale)
    checkpoints.save(TrainState(trainable, state.optimizer, state.step), Progress(1))
    with pytest.raises(UserError, match=r"step 5 is damaged \(NaN or infinity among its numbers\)"):
        checkpoints.restore(state_at(0))


def rewritten(record: Path, change: Callable[[dict], object]) -> None:
    """Changes a record of progress, which lies in the file of JSON given."""
    found = json.loads(record.read_text())
    change(found)
    record.write_text(json.dumps(found))


def as_of_an_earlier_version(record: Path, **change: object) -> None:
    """Takes from a record of progress what versions without checksums did not save."""
    rewritten(record, lambda found: [*map(found.pop, ("step", "arrays", "checksum")), found.update(change)])


@pytest.mark.parametrize("change", [{"position": "4"}, {"rate_scale": None}, {"skipped": 3}], ids=str)
def test_a_record_of_progress_that_is_none_is_a_damaged_checkpoint(checkpoints, tmp_path, change):
    checkpoints.save(state_at(5), Progress(1))
    checkpoints.settle()
    as_of_an_earlier_version(tmp_path / "checkpoints" / "5" / "progress" / "metadata", **change)
    with pytest.raises(UserError, match=r"step 5 cannot be read; it may be damaged"):
        checkpoints.restore(state_at(0))


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000, "9" * 5000, '{"checksum": "", "position": 1}', ""], ids=len)
@pytest.mark.parametrize("name", ["progress/metadata", "state/_METADATA"])
def test_json_of_another_kind_is_a_damaged_checkpoint(checkpoints, tmp_path, name, text):
    checkpoints.save(state_at(5), Progress(1))
    checkpoints.settle()
    (tmp_path / "checkpoints" / "5" / name).write_text(text)
    with pytest.raises(UserError, match=r"step 5 .*damaged .*\nRemove it to have .* begin from the start: rm -r .*5"):
        checkpoints.restore(state_at(0))


@pytest.mark.parametrize("text", ["[]", "1", '{"item_handlers": 3}', "[" * 100_000], ids=len)
def test_what_orbax_says_of_a_checkpoint_keeps_no_other_from_use(checkpoints, tmp_path, text):
    for step in (4, 5):
        checkpoints.save(state_at(step), Progress(step))
    checkpoints.settle()
    (tmp_path / "checkpoints" / "5" / "_CHECKPOINT_METADATA").write_text(text)
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=2)) as again:
        assert again.restore(state_at(0), step=4)[1] == Progress(4)
        again.save(state_at(6), Progress(6))
        again.settle()
        assert again.steps() == [5, 6]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(checkpoints, tmp_path):
    checkpoints.save(state_at(5), Progress(1))
    checkpoints.settle()
    for name in ("_CHECKPOINT_METADATA", "state/_METADATA", "progress/metadata"):
        path = tmp_path / "checkpoints" / "5" / name
        path.unlink()
        os.mkfifo(path)
        again = Checkpoints(tmp_path / "checkpoints")
        with (
            contextlib.closing(again),
            pytest.raises(UserError, match=f"step 5 .* damaged .'{path.name}' is no regular"),
        ):
            again.restore(state_at(0))
        path.unlink()
        path.write_text("{}")


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_no_flipped_bit_restores_to_other_numbers(checkpoints, tmp_path):
    """Orbax notices only some of them."""
    rng, wanted = random.Random(0), jax.tree.leaves(state_at(5, rank=64))
    checkpoints.save(state_at(5, rank=64), Progress(1, data="of these"))
    checkpoints.settle()
    largest = sorted(
        (path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    refused = 0
    for path in largest[-6:] * 4:
        before = path.read_bytes()
        place = rng.randrange(len(before))
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << rng.randrange(8)]) + before[place + 1 :])
        with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as again:
            try:
                state, progress = again.restore(state_at(0, rank=64))
            except UserError:
                refused += 1
            else:
                assert progress == Progress(1, data="of these")
                jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), wanted)
        path.write_bytes(before)
    assert refused > 8


def test_no_flipped_bit_changes_the_record_of_progress(checkpoints, tmp_path):
    saved = Progress(7, 0.1, (3,), ({"step": 4, "reason": "the loss is nan"},), "0f3a", midway=True, base=12345)
    checkpoints.save(state_at(5), saved)
    checkpoints.settle()
    path = tmp_path / "checkpoints" / "5" / "progress" / "metadata"
    before = path.read_bytes()
    for place in range(0, len(before), 5):
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << place % 8]) + before[place + 1 :])
        assert checkpoints.progress(5) in (None, saved)
    path.write_bytes(before)
    assert checkpoints.progress(5) == saved


def flip_a_number(checkpoint: Path) -> None:
    """Changes one bit of the arrays that lie in the largest file of a checkpoint."""
    path = max((checkpoint / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_those_that_are_whole_are_listed_and_all_damaged_ones_after_them_are_to_go(tmp_path):
    saved = Checkpoints(tmp_path / "checkpoints", keep=4)
    for step in (2, 3, 5, 6):
        saved.save(state_at(step, rank=64), Progress(step))
    saved.settle()
    for step in (3, 5, 6):
        flip_a_number(tmp_path / "checkpoints" / str(step))
    with pytest.raises(UserError) as raised:
        saved.restore(state_at(0, rank=64))
    folders = [str(tmp_path / "checkpoints" / str(step)) for step in (3, 5, 6)]
    _, *advice = str(raised.value).splitlines()
    assert advice == [
        "Whole: step 2.",
        f"Remove it to have training.resume={tmp_path} go on from step 2: {shlex.join(['rm', '-r', *folders])}",
        "evaluate and export take step=2; training.init_from takes training.init_step=2.",
    ]
    saved.close()


def test_a_damaged_one_that_was_asked_for_is_refused_though_a_later_one_is_whole(tmp_path):
    saved = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (2, 3, 5):
        saved.save(state_at(step, rank=64), Progress(step))
    saved.settle()
    flip_a_number(tmp_path / "checkpoints" / "3")
    with pytest.raises(
        UserError, match=r"(?s)step 3 .*damaged .*Whole: steps 2, 5\..*go on from step 5: rm -r .*3\n.*step=5"
    ):
        saved.restore(state_at(0, rank=64), step=3)
    saved.close()
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as again:
        assert again.restore(state_at(0, rank=64))[1] == Progress(5)


def test_a_rollback_does_not_pass_over_a_damaged_one_that_was_due(checkpoints, tmp_path):
    """It would go back to other numbers than a run of whole checkpoints, and say nothing."""
    checkpoints.save(state_at(4), Progress(4))
    checkpoints.save(state_at(5), Progress(5, midway=True))
    checkpoints.settle()
    rewritten(tmp_path / "checkpoints" / "4" / "progress" / "metadata", lambda found: found.update(midway=True))
    assert checkpoints.last_due() == 4
    with pytest.raises(
        UserError, match=r"step 4 is damaged \(its record of progress is not what was saved\)\.\nWhole: step 5"
    ):
        checkpoints.restore(state_at(0), checkpoints.last_due())


@pytest.mark.parametrize("taken", ["progress", "state"])
def test_parts_of_another_checkpoint_are_damage(checkpoints, tmp_path, taken):
    for step in (4, 5):
        checkpoints.save(state_at(step), Progress(step))
    checkpoints.settle()
    shutil.rmtree(tmp_path / "checkpoints" / "5" / taken)
    shutil.copytree(tmp_path / "checkpoints" / "4" / taken, tmp_path / "checkpoints" / "5" / taken)
    with pytest.raises(UserError, match=r"step 5 is damaged \(.*not what was saved\)"):
        checkpoints.restore(state_at(0))


def test_a_checkpoint_without_checksums_is_read(checkpoints, tmp_path):
    checkpoints.save(state_at(5), Progress(1, midway=True))
    checkpoints.settle()
    as_of_an_earlier_version(tmp_path / "checkpoints" / "5" / "progress" / "metadata")
    restored, progress = checkpoints.restore(state_at(0))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(state_at(5)))
    assert progress == Progress(1, midway=True)
    with pytest.raises(UserError, match="does not fit this configuration"):
        checkpoints.restore(state_at(0, rank=3))


def test_arrays_of_the_same_shapes_and_other_names_do_not_fit(checkpoints):
    checkpoints.save(state_at(5), Progress(1))
    with pytest.raises(UserError, match=r"does not fit this configuration \(trainable\.a\.v_proj is not the same array"):
        checkpoints.restore(state_at(0, modules=("q_proj", "o_proj")))


def test_what_the_system_refuses_is_not_called_damaged(checkpoints, monkeypatch):
    """Nobody is to remove a checkpoint because too many files are open."""
    for step in (4, 5):
        checkpoints.save(state_at(step), Progress(step))
    checkpoints.settle()

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "state")

    monkeypatch.setattr(checkpoints._manager, "restore", none_left)
    with pytest.raises(UserError, match=r"step 5 could not be read .*Too many open files") as raised:
        checkpoints.restore(state_at(0))
    assert "rm -r" not in str(raised.value)


def test_checkpoints_that_are_only_read_make_no_folder(tmp_path):
    reader = Checkpoints(tmp_path / "checkpoints")
    assert reader.steps() == []
    reader.close()
    assert not (tmp_path / "checkpoints").exists()


def test_what_the_guard_did_is_remembered(checkpoints):
    progress = Progress(4, 0.1, (7,), ({"step": 8, "batch": 7, "reason": "the loss is nan", "rate_scale": 0.1},))
    checkpoints.save(state_at(5), progress)
    assert checkpoints.restore(state_at(0))[1] == progress


def test_a_run_goes_on_while_orbax_takes_a_state_over(checkpoints, monkeypatch):
    may_save, save = threading.Event(), checkpoints._manager.save
    monkeypatch.setattr(checkpoints._manager, "save", lambda *args, **more: may_save.wait(60) and save(*args, **more))
    checkpoints.save(state_at(3), Progress(1))
    may_save.set()
    assert checkpoints.steps() == [3]


def test_a_fault_of_taking_a_state_over_is_raised_by_the_next_save_and_once(checkpoints, monkeypatch):
    def full(*_, **__):
        raise ValueError("[os_error_code='28']")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "save", full)
        checkpoints.save(state_at(3), Progress(1))
        with pytest.raises(OSError, match="No space left on device"):
            checkpoints.save(state_at(4), Progress(2))
    checkpoints.save(state_at(5), Progress(3))
    assert checkpoints.steps() == [5]
