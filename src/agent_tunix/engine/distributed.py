"""Several processes as one run: how they join, what each holds, and how they come to the same decisions.

Every process runs the same program over one mesh of all their devices. Rows of a batch lie on devices; a process decodes and
scores those it holds, and only numbers are exchanged. Whatever decides how a run goes on (rewards, faults, a request to
stop, what is in the folder) is agreed upon first: processes that decided differently would wait for each other for ever.
Process 0 alone writes files and prints. With one process all of this does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import clusters, distributed  # its service and key-value store have no public name
from jax.experimental import multihost_utils

from agent_tunix import signals
from agent_tunix.config.launch import Launch
from agent_tunix.engine import heartbeat
from agent_tunix.errors import DivergenceError, UserError

Found = TypeVar("Found")
JOIN_SECONDS = 300
HEARTBEAT_SECONDS = 50  # JAX's own watch, should ours fail: it ends a process too, but says little
SHARED_SECONDS = 60  # until all must see a folder that one has made: network disks cache that it was not there
KEY = "agent-tunix/heartbeat"


@contextlib.contextmanager
def joined(launch: Launch) -> Iterator[None]:
    """Within this context all processes of a launch work together, and end together, whatever ends one of them."""
    line = heartbeat.current = _join(launch)
    try:
        yield
    except SystemExit as end:
        if end.code:
            line.fail("It ended by itself; its own output says why.", end.code if isinstance(end.code, int) else 1)
    except Exception as fault:
        told = traceback.format_exception(fault) if line.index == 0 else traceback.format_exception_only(fault)
        line.fail("".join(told).rstrip(), 1, unexpected=True)
    line.part()
    heartbeat.current = None
    jax.distributed.shutdown()


def _join(launch: Launch) -> heartbeat.Heartbeat:
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from us
    waiting = threading.Timer(JOIN_SECONDS, _give_up, [launch])
    waiting.daemon = True
    waiting.start()
    try:
        with _stopped_by_a_thread():
            _initialize(launch)
            state = distributed.global_state
            peers = _connect(state.process_id, state.num_processes, str(state.coordinator_address), state.client)
    except Exception as fault:  # what a launcher has set may be wrong in many ways
        raise UserError(_not_found(launch, fault)) from fault
    waiting.cancel()
    return heartbeat.Heartbeat(state.process_id, state.num_processes, peers)


@contextlib.contextmanager
def _stopped_by_a_thread() -> Iterator[None]:
    """A thread hears signals: JAX waits for other processes in C, where the main thread hears none."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def listen() -> None:
        if number := os.read(reader, 1)[0]:
            signals.leave(number)

    (thread := threading.Thread(target=listen, daemon=True)).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)


def _initialize(launch: Launch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `_not_found` says what is missing
        if (port := _port_of_first(launch)) is not None:
            _serve(port).close()  # raises if the port is taken, where JAX would abort
        jax.distributed.initialize(
            *(launch.coordinator, launch.processes, launch.process),
            cluster_detection_method="deactivate" if launch.coordinator else None,
            initialization_timeout=JOIN_SECONDS + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )


def _port_of_first(launch: Launch) -> int | None:
    """The port at which this process is to serve JAX, if it is process 0: by its options, or as JAX will find it."""
    address, index = launch.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"), launch.process
    if not launch.coordinator:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(address, None, None, (), None, JOIN_SECONDS)
        address, _, index, _ = found
    return int(address.rpartition(":")[2]) if address and index == 0 else None


def _connect(index: int, count: int, coordinator: str, store: Any) -> dict[int, socket.socket]:
    """Connects to process 0 at JAX's coordinator; JAX's store gives the port, and a token that keeps strangers out."""
    if index == 0:
        server = _serve(0, count)
        token = secrets.token_hex(16)
        store.key_value_set(KEY, f"{server.getsockname()[1]} {token}")
        return heartbeat.host(server, count, token, JOIN_SECONDS)
    port, token = store.blocking_key_value_get(KEY, JOIN_SECONDS * 1000).split()
    return heartbeat.call((coordinator.rpartition(":")[0].strip("[]"), int(port)), index, token, JOIN_SECONDS)


def _serve(port: int, backlog: int = 1) -> socket.socket:
    """Listens to all that can reach this machine; a port of 0 is any that is free."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


def _give_up(launch: Launch) -> NoReturn:
    where = f" at {launch.coordinator}" if launch.coordinator else ""
    said = f"The processes that {launch.launcher} names did not all meet{where} within {JOIN_SECONDS} s."
    print(f"{said}\nStart all of them, with the same coordinator, which all must be able to reach.", file=sys.stderr)
    os._exit(UserError.exit_code)


def _not_found(launch: Launch, fault: Exception) -> str:
    if launch.launcher == "Kubernetes":
        return (
            f"This pod is one of an indexed Job, but the others cannot be found ({fault}).\n"
            "Give --coordinator, --processes and --process \"$JOB_COMPLETION_INDEX\", or install 'jax[k8s]' and let the "
            "service account read pods and jobs.\nFor a run of this pod alone: --processes 1."
        )
    return (
        f"The processes that {launch.launcher} names cannot be joined ({fault}).\n"
        "The coordinator is process 0, where its port must be free. For a run of this process alone: --processes 1."
    )


def first() -> bool:
    """Whether this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def any_of(flag: bool) -> bool:
    """Whether it holds for any process."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).any())


def everyones(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    if jax.process_count() == 1:
        return [text]
    said = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(said.size)).reshape(-1)
    if not lengths.any():
        return [""] * lengths.size
    padded = np.pad(said, (0, lengths.max() - said.size))
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def agreed(work: Callable[[], Found]) -> Found:
    """The result of this process's own work; a mistake that any process comes upon is raised in all."""
    mistake, found = None, None
    try:
        found = work()
    except UserError as fault:
        mistake = fault
    letter = "D" if isinstance(mistake, DivergenceError) else "U"  # what is sent begins with the kind of mistake
    for said in everyones(f"{letter}{mistake}" if mistake else ""):
        if said:
            raise (DivergenceError if said[0] == "D" else UserError)(said[1:]) from mistake
    return found  # type: ignore[return-value]


def refuse_differences(own: Callable[[], Mapping[str, Any]]) -> None:
    """Refuses processes whose values differ under any name: each would train a run of its own, and call it everyone's."""
    if jax.process_count() == 1:
        return
    all_ = [json.loads(said) for said in everyones(json.dumps(own()))]
    names = dict.fromkeys(name for one in all_ for name in one)
    if differing := [name for name in names if any(one.get(name) != all_[0].get(name) for one in all_)]:
        raise UserError(
            f"The processes differ in {', '.join(differing)}.\nStart all of them with the same command, on the same data."
        )


def make_shared(folder: Path) -> None:
    """Makes the folder of a run; refuses one that not all processes see, for each writes its part of a checkpoint there."""
    if first():
        folder.mkdir(parents=True, exist_ok=True)
    if jax.process_count() == 1:
        return
    any_of(False)  # waits for process 0, which has made it

    def look() -> None:
        deadline = time.monotonic() + SHARED_SECONDS
        while not folder.is_dir():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder} was made by process 0 and is not seen by process {jax.process_index()}.\n"
                    "The folder of a run must lie on a disk that all processes share; choose it with hydra.run.dir=<folder>."
                )
            time.sleep(0.2)

    agreed(look)


def whole(array: jax.Array) -> np.ndarray:
    """The whole array on the host, whichever processes hold its parts."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def own_rows(array: jax.Array) -> dict[int, np.ndarray]:
    """The rows of an array that this process works on; a row that several hold is the first one's."""
    owner: dict[int, int] = {}
    where: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
    for device, (rows, *_) in where.items():
        start = rows.start or 0
        owner[start] = min(device.process_index, owner.get(start, device.process_index))
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    mine = [(start, part) for start, part in sorted(parts.items()) if owner[start] == jax.process_index()]
    return {start + offset: row for start, part in mine for offset, row in enumerate(np.asarray(part))}


def gather_rows(rows: Sequence[int], values: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The values of all rows, from each process's own; every row has one owner, so a sum puts them together."""
    if jax.process_count() == 1:
        return dict(values)
    spread = {name: np.zeros((count, *value.shape[1:]), value.dtype) for name, value in values.items()}
    for name, value in values.items():
        spread[name][list(rows)] = value
    return {name: parts.sum(axis=0, dtype=parts.dtype) for name, parts in multihost_utils.process_allgather(spread).items()}
