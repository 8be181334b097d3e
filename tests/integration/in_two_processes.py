"""Run twice by test_two_processes.py, as two processes of two devices each: what they hold, and how they agree.

NUMBER=<process> python in_two_processes.py <what> <port>
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from agent_tunix.config.launch import Launch
from agent_tunix.engine import distributed
from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.checksum import summed
from agent_tunix.engine.progress import Progress
from agent_tunix.environments.rewards import score
from agent_tunix.environments.stream import Example
from agent_tunix.errors import DivergenceError, UserError
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import load_weights
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.sharding import lay, lay_rows, mesh_of_sizes
from agent_tunix.types import TrainState

VALUES = np.arange(24, dtype=np.float32).reshape(8, 3)
EXAMPLES = [Example(f"question {i}", str(i), ()) for i in range(4)]


class Pay:
    """A scorer that remembers what it was asked, and can be told to fail."""

    fault: Exception | None = None

    def of_problems(self, problems: list) -> dict[str, np.ndarray]:
        completions = self.asked = [problem.completion for problem in problems]
        if self.fault:
            raise self.fault
        return {"half": np.array([float(text) / 2 for text in completions], np.float32)}

    def total(self, values: dict[str, np.ndarray]) -> np.ndarray:
        return values["half"]


def agreement(index: int) -> None:
    assert (jax.process_index(), jax.process_count(), jax.device_count()) == (index, 2, 4)
    assert distributed.first() == (index == 0)
    assert distributed.any_of(index == 1)
    assert not distributed.any_of(False)
    assert distributed.everyones("ä" * index) == ["", "ä"]
    assert distributed.agreed(lambda: index) == index
    distributed.refuse_differences(lambda: {"seed": 1, "betas": [0.9, 0.99]})
    with pytest.raises(UserError, match="differ in seed, other"):
        distributed.refuse_differences(lambda: {"same": 0, "seed": index, "other": [index]})
    for mistake in (UserError("one\ntwo"), DivergenceError("three")):

        def work(mistake: UserError = mistake) -> None:
            if index == 1:
                raise mistake

        with pytest.raises(UserError) as raised:
            distributed.agreed(work)
        assert (raised.type, str(raised.value)) == (type(mistake), str(mistake)), "the mistake of one is that of all"


def rows_of(mesh: Mesh) -> list[int]:
    """The rows that are this process's; whatever the mesh, all processes together have each of them once."""
    asked: list[slice] = []

    def rows(wanted: slice) -> np.ndarray:
        asked.append(wanted)
        return VALUES[wanted]

    array = lay_rows(rows, VALUES.shape, mesh)
    own = distributed.own_rows(array)
    assert all(np.array_equal(row, VALUES[i]) for i, row in own.items())
    held = {i for wanted in asked for i in range(8)[wanted]}
    assert own.keys() <= held, "a process lays down no more than its devices hold"
    np.testing.assert_array_equal(distributed.whole(array), VALUES)
    np.testing.assert_array_equal(distributed.whole(lay(VALUES.T, NamedSharding(mesh, P(None, "fsdp")))), VALUES.T)
    doubled = distributed.gather_rows(list(own), {"x": np.array([2 * row for row in own.values()]).reshape(-1, 3)}, 8)
    np.testing.assert_array_equal(doubled["x"], 2 * VALUES)
    return list(own)


def rows(index: int) -> None:
    half = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows_of(mesh_of_sizes((4, 1))) == half[index]
    assert rows_of(mesh_of_sizes((2, 2))) == half[index]
    assert rows_of(mesh_of_sizes((1, 4))) == [list(range(8)), []][index], "heads are cut over processes: one scores"
    crossed = np.array(jax.devices()).reshape(2, 2).T
    assert rows_of(Mesh(crossed, ("fsdp", "tp"))) == [list(range(8)), []][index], "both hold all rows"


def scoring(index: int) -> None:
    pay, texts = Pay(), {row: str(row) for row in range(4 * index, 4 * index + 4)}
    scored = score(pay, EXAMPLES, texts, 2)
    assert pay.asked == list(texts.values()), "a process scores the completions that it holds"
    np.testing.assert_array_equal(scored.rewards_PG, np.arange(8, dtype=np.float32).reshape(4, 2) / 2)


def checkpoint(index: int) -> None:
    """Each writes its part of a state; all find the whole of it again."""
    mesh = mesh_of_sizes((2, 2))
    cut, everywhere = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    state = TrainState({"a": lay(VALUES, cut)}, {"a": lay(VALUES + 1, cut)}, lay(np.array(3), everywhere))
    checkpoints = Checkpoints(Path("checkpoints"), 2)
    checkpoints.save(state, Progress(position=5))
    found, progress = checkpoints.restore(state)
    checkpoints.close()
    assert (int(found.step), progress.position) == (3, 5)
    np.testing.assert_array_equal(distributed.whole(found.trainable["a"]), VALUES)
    np.testing.assert_array_equal(distributed.whole(found.optimizer["a"]), VALUES + 1)
    record = json.loads(Path("checkpoints/3/progress/metadata").read_text())
    assert {"a": record["arrays"]["trainable.a"]} == summed({"a": VALUES}), "the parts add up to the whole"
    if index == 0:
        Path("checkpoints/3/progress/metadata").write_text(json.dumps(record | {"position": 6}))
    distributed.any_of(False)  # waits for it
    again = Checkpoints(Path("checkpoints"))
    with contextlib.closing(again), pytest.raises(UserError, match="step 3 is damaged"):
        again.restore(state)


def weights(index: int) -> None:
    """Of a checkpoint that is another on one machine, each would lay down its part."""
    tiny, own = find_checkpoint("package:tiny"), Path(f"weights of process {index}")
    values = load_file(tiny / "model.safetensors")
    values["model.layers.3.mlp.up_proj.weight"] += index
    own.mkdir()
    save_file(values, own / "model.safetensors")
    common = (read_architecture(tiny), jnp.float32, mesh_of_sizes((4, 1)))
    load_weights(tiny, *common)
    with pytest.raises(UserError, match="differ in the weights"):
        load_weights(own, *common)


def disk(index: int) -> None:
    distributed.make_shared(Path("shared"))
    distributed.SHARED_SECONDS = 1
    with pytest.raises(UserError, match="not seen by process 1"):
        distributed.make_shared(Path(f"disk of process {index}"))


def fault(index: int) -> None:
    """Process 1 fails in a way that no one foresaw, while process 0 waits for it."""
    if index == 1:
        raise ValueError("unforeseen")
    distributed.any_of(True)


if __name__ == "__main__":
    what, port, number = sys.argv[1], sys.argv[2], int(os.environ["NUMBER"])
    with distributed.joined(Launch("--coordinator", f"localhost:{port}", 2, number)):
        for name in what.split(","):
            globals()[name](number)
            print(name, flush=True)
