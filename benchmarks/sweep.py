"""A sweep over learning rates in one process against the same runs as separate processes, side by side.

    python benchmarks/sweep.py --jobs 8 --steps 10 +experiment=quick_test
    python benchmarks/sweep.py --jobs 8 --steps 20 model.weights=<folder> data.path=<folder> ...

Each side starts with an empty cache of compiled programs: the first separate process compiles, the others find its
programs; the sweep compiles its own. A step is its rollout, its rewards and its update, the median over the
second half of the run; of the sweep, that of its first job, which begins each step and waits for all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAPS = ("time/rollout", "time/reward", "time/update")


def train(folder: Path, *arguments: str) -> float:
    """Wall-clock seconds of `run_training.py`, with the compilation cache of `folder`."""
    started = time.monotonic()
    command = [sys.executable, "run_training.py", *arguments]
    done = subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": str(folder)}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return time.monotonic() - started


def step_seconds(run: Path) -> float:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(sum(record[lap] for lap in LAPS) for record in records[len(records) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lowest", type=float, default=1e-6, help="the lowest rate; each next is 1.5 times the last")
    given, overrides = parser.parse_known_args()
    rates = [f"{given.lowest * 1.5**k:.3g}" for k in range(given.jobs)]
    common = [*overrides, f"training.num_batches={given.steps}"]
    with tempfile.TemporaryDirectory() as scratch:
        apart, fused = Path(scratch) / "apart", Path(scratch) / "fused"
        separate = [
            train(apart, *common, f"optimizer.learning_rate={rate}", f"hydra.run.dir={apart / str(k)}")
            for k, rate in enumerate(rates)
        ]
        together = train(
            fused, *common, "--multirun", f"optimizer.learning_rate={','.join(rates)}", f"hydra.sweep.dir={fused}"
        )
        mode = json.loads((fused / "sweep.json").read_text())["mode"]
        one, all_ = step_seconds(apart / str(given.jobs - 1)), step_seconds(fused / "0")
        print(f"{given.jobs} separate processes  {sum(separate):8.1f} s  (first {separate[0]:.1f}, last {separate[-1]:.1f})")
        print(f"one sweep, {mode:18}{together:8.1f} s  {sum(separate) / together:.2f} times faster")
        print(f"a step of one run          {one:8.3f} s")
        print(f"a step of the sweep        {all_:8.3f} s  {all_ / one:.2f} times that of one")


if __name__ == "__main__":
    main()
