"""How time and memory of our rollout and update grow with prompts, completions a prompt, length, rank and vocabulary.

    python benchmarks/scaling.py --model 270m --pictures benchmarks/scaling      one GPU, about half a minute a point
    python benchmarks/scaling.py --model tiny --pictures benchmarks/scaling      a CPU

One factor varies at a time, the others stay at the middle. Each point is a process of its own, since a device's peak is
never reset. On a GPU memory is the peak that the device reports, weights included. Without one it is what XLA says the
compiled programs need beside their inputs and outputs, and time is that of all cores together, which other work on the
machine changes little. Times are medians of three, after a first call.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT, LEFT, BOTTOM = 320, 220, 52, 40
COLOURS = {"rollout": "#2266cc", "update": "#cc5522"}


@dataclasses.dataclass(frozen=True)
class Point:
    """The shape of one step; `length` is that of a completion, and that of a prompt is half of it."""

    model: str
    prompts: int
    generations: int
    length: int
    rank: int
    vocabulary: int


MIDDLE = {
    "tiny": Point("tiny", prompts=8, generations=4, length=32, rank=16, vocabulary=16384),
    "270m": Point("270m", prompts=4, generations=4, length=256, rank=32, vocabulary=65536),
}
FACTORS = (1 / 4, 1 / 2, 1, 2, 4)
AXES = {
    "prompts": "prompts, all in one slice",
    "generations": "completions a prompt",
    "length": "tokens a completion",
    "rank": "rank of the adapters",
    "vocabulary": "vocabulary",
}


def measure(point: Point) -> dict:
    """Seconds and bytes of the rollout and of the update, at one point; runs in a process of its own."""
    import jax
    import step_programs

    programs = step_programs.build(point)
    peaks = jax.local_devices()[0].memory_stats() is not None
    found = {}
    for name, (function, arguments, static) in programs.items():
        program = function.lower(*arguments(), **static).compile()
        seconds, clock = [], time.perf_counter if peaks else time.process_time
        for _ in range(4):
            given = jax.block_until_ready(arguments())
            begun = clock()
            jax.block_until_ready(program(*given))
            seconds.append(clock() - begun)
        temporary = program.memory_analysis().temp_size_in_bytes
        peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] if peaks else temporary
        found[name] = {"seconds": statistics.median(seconds[1:]), "bytes": peak}
    return found


@functools.cache  # the middle is on every axis
def in_own_process(point: Point) -> dict | str:
    paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, __file__, "--point", json.dumps(dataclasses.asdict(point))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed without a word"])[-1][:160]
    return json.loads(done.stdout.splitlines()[-1])


def picture(title: str, across: list[float], lines: dict[str, list[float]], unit: str) -> str:
    """Lines over a logarithmic axis, each from zero; a line that is straight in the factor is curved here."""
    top = max(value for line in lines.values() for value in line) or 1.0
    step, room = (WIDTH - LEFT - 16) / (len(across) - 1), HEIGHT - BOTTOM - 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="16" font-weight="bold">{title}</text>',
        f'<path d="M{LEFT} 36V{HEIGHT - BOTTOM}H{WIDTH - 12}" fill="none" stroke="#888"/>',
        f'<text x="{LEFT - 4}" y="40" text-anchor="end">{top:.3g} {unit}</text>',
        f'<text x="{LEFT - 4}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>',
    ]
    for i, value in enumerate(across):
        parts.append(f'<text x="{LEFT + i * step:.0f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{value:g}</text>')
    for row, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{LEFT + i * step:.1f},{HEIGHT - BOTTOM - v / top * room:.1f}" for i, v in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 70 * row}" y="{HEIGHT - 6}" fill="{COLOURS[name]}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def sweep(middle: Point, axis: str) -> tuple[list[int], list[dict]]:
    """The values of one factor that could be measured, and what was found there; prints a line for each."""
    values, found = [], []
    for factor in FACTORS:
        point = dataclasses.replace(middle, **{axis: int(getattr(middle, axis) * factor)})
        value, result = getattr(point, axis), in_own_process(point)
        if isinstance(result, str):
            print(f"| {axis} | {value} | {result} |", flush=True)
            continue
        cells = [f"{result[n]['seconds']:.3f} | {result[n]['bytes'] / 1e6:,.1f}" for n in COLOURS]
        print(f"| {axis} | {value} | {' | '.join(cells)} |", flush=True)
        values.append(value)
        found.append(result)
    return values, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MIDDLE, default="tiny")
    parser.add_argument("--axes", default=",".join(AXES), help="separated by commas")
    parser.add_argument("--pictures", type=Path, help="the folder to write SVG pictures to")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print(json.dumps(measure(Point(**json.loads(given.point)))))
        return
    print("| factor | value | rollout s | rollout MB | update s | update MB |\n|---|---|---|---|---|---|")
    for axis in given.axes.split(","):
        values, found = sweep(MIDDLE[given.model], axis)
        if given.pictures and len(values) > 1:
            given.pictures.mkdir(parents=True, exist_ok=True)
            for quantity, unit, scale in (("seconds", "s", 1), ("bytes", "MB", 1e6)):
                lines = {name: [point[name][quantity] / scale for point in found] for name in COLOURS}
                drawn = picture(f"{quantity} over {AXES[axis]}", values, lines, unit)
                (given.pictures / f"{given.model}-{axis}-{quantity}.svg").write_text(drawn)


if __name__ == "__main__":
    main()
