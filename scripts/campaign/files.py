"""What may become of a file or a folder that a command is to read: each function does one thing to one path."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from campaign.runs import HALFWAY, SAVED

Act = Callable[[Path, random.Random], None]


def flip_a_bit(path: Path, rng: random.Random) -> None:
    _flip(path, rng, 1)


def flip_bits(path: Path, rng: random.Random) -> None:
    _flip(path, rng, rng.randrange(2, 100))


def _flip(path: Path, rng: random.Random, flips: int) -> None:
    content = bytearray(path.read_bytes())
    for bit in rng.sample(range(8 * len(content)), min(flips, 8 * len(content))):
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def zero_a_block(path: Path, rng: random.Random) -> None:
    """A block that a disk has lost."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(max(1, len(content)))
    length = min(rng.choice([1, 16, 512, 4096]), len(content) - start)
    content[start : start + length] = bytes(length)
    path.write_bytes(content)


def cut_short(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(max(1, path.stat().st_size)))


def empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def lengthen(path: Path, rng: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 5000)))


def repeat(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() * 2)


def remove(path: Path, rng: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def swap(path: Path, rng: random.Random) -> None:
    """With another file of the run, of its own kind where there is one: of an earlier checkpoint, or beside it."""
    earlier = Path(str(path).replace(f"checkpoints/{HALFWAY}", f"checkpoints/{SAVED[0]}", 1))
    beside = [other for other in sorted(path.parent.iterdir()) if other.is_dir() == path.is_dir() and other != path]
    others = [*([earlier] if earlier != path and earlier.exists() else []), *beside]
    if not others:
        return remove(path, rng)
    other, aside = rng.choice(others), path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def copy_from_earlier(path: Path, rng: random.Random) -> None:
    """What an earlier checkpoint has in its place."""
    earlier = Path(str(path).replace(f"checkpoints/{HALFWAY}", f"checkpoints/{SAVED[0]}", 1))
    if earlier == path or not earlier.exists():
        return flip_bits(path, rng) if path.is_file() else remove(path, rng)
    remove(path, rng)
    shutil.copytree(earlier, path) if earlier.is_dir() else shutil.copy(earlier, path)


def make_a_link(path: Path, rng: random.Random) -> None:
    target = rng.choice([path.name, "nowhere", "/dev/zero", "/dev/null", "/dev/urandom", "..", "/proc/self/mem"])
    remove(path, rng)
    path.symlink_to(target)


def make_a_pipe(path: Path, rng: random.Random) -> None:
    remove(path, rng)
    os.mkfifo(path)


def make_a_folder(path: Path, rng: random.Random) -> None:
    remove(path, rng)
    path.mkdir()


def make_a_file(path: Path, rng: random.Random) -> None:
    remove(path, rng)
    path.write_bytes(rng.randbytes(100))


OF_FILES: list[Act] = [flip_a_bit] * 4 + [
    flip_bits,
    zero_a_block,
    cut_short,
    cut_short,
    empty,
    lengthen,
    repeat,
    remove,
    swap,
    copy_from_earlier,
]
OF_FILES += [make_a_link, make_a_pipe, make_a_folder]
OF_FOLDERS: list[Act] = [remove, swap, copy_from_earlier, make_a_link, make_a_pipe, make_a_folder, make_a_file]
