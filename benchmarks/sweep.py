"""A sweep over learning rates in one process against the same runs as separate processes, side by side.

    python benchmarks/sweep.py --jobs 8 --steps 10 +experiment=quick_test
    python benchmarks/sweep.py --jobs 8 --steps 20 model.weights=<folder> data.path=<folder> ...

Each side starts with an empty cache of compiled programs: the first separate process compiles, the others find its
programs; the sweep compiles its own. Then the sweep runs again with its programs found, against separate processes that all
find theirs (those after the first). A step is its rollout, its rewards and its update, the median over the
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
    if given.jobs < 2:
        parser.error("--jobs must be at least 2: a sweep is set against several processes")
    rates = [f"{given.lowest * 1.5**k:.3g}" for k in range(given.jobs)]
    common = [*overrides, f"training.num_batches={given.steps}"]
    with tempfile.TemporaryDirectory() as scratch:
        apart, fused = Path(scratch) / "apart", Path(scratch) / "fused"
        separate = [
            train(apart, *common, f"optimizer.learning_rate={rate}", f"hydra.run.dir={apart / str(k)}")
            for k, rate in enumerate(rates)
        ]
        print("separate processes, s:", *(f"{seconds:.1f}" for seconds in separate), flush=True)
        swept = ["--multirun", f"optimizer.learning_rate={','.join(rates)}"]
        cold, warm = (train(fused, *common, *swept, f"hydra.sweep.dir={fused / name}") for name in ("cold", "warm"))
        mode = json.loads((fused / "warm" / "sweep.json").read_text())["mode"]
        one, all_ = step_seconds(apart / str(given.jobs - 1)), step_seconds(fused / "warm" / "0")
        others = given.jobs * statistics.fmean(separate[1:])
        print(f"{given.jobs} jobs, run {mode}        separate s  sweep s  times faster")
        print(f"nothing compiled before     {sum(separate):10.1f}  {cold:7.1f}  {sum(separate) / cold:6.2f}")
        print(f"all compiled before         {others:10.1f}  {warm:7.1f}  {others / warm:6.2f}")
        if mode == "fused":
            print(f"a step of one {one:.3f} s, of the sweep {all_:.3f} s: {all_ / one:.2f} times that of one")


if __name__ == "__main__":
    main()
