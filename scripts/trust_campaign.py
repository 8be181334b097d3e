"""A campaign of kills, damages and bad inputs against this checkout: not one may end otherwise than was promised.

    make campaign                                       all of it, in about 40 minutes on 2 cores
    python scripts/trust_campaign.py --share 0.02       a fiftieth
    python scripts/trust_campaign.py --only kills:137 --seed 5      one case again

What a case does follows from the seed and its number; the moment of a signal also depends on the machine. Each kind of case
has its page beside this one, in `campaign/`: it says what is promised, makes the cases and judges them.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib
import math
import multiprocessing
import os
import pkgutil
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COUNTS = {"kills": 200, "damages": 300, "inputs": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each kind")
    parser.add_argument("--kinds", default=",".join(COUNTS), help="kinds of cases, parted by commas")
    parser.add_argument("--only", default="", help="single cases, as in kills:137,inputs:5")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="where to work, instead of a temporary folder; failed cases stay there")
    args = parser.parse_args()
    if args.only:
        chosen = [(kind, int(number)) for kind, number in (one.split(":") for one in args.only.split(","))]
    else:
        kinds = args.kinds.split(",")
        chosen = [(kind, number) for kind in kinds for number in range(math.ceil(COUNTS[kind] * args.share))]
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="campaign-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = campaign(chosen, args.seed, args.workers, folder)
    if not args.folder and not failed:
        shutil.rmtree(folder)
    sys.exit(1 if failed else 0)


def campaign(chosen: list[tuple[str, int]], seed: int, workers: int, folder: Path) -> int:
    """Runs the cases and prints the table; returns how many failed."""
    began = time.monotonic()
    prepare_for_forks(folder)
    from campaign.runs import Scene, make_scene

    of_runs = any(kind != "inputs" for kind, _ in chosen)
    scene = make_scene(folder / "undisturbed") if of_runs else Scene(folder / "undisturbed", {}, {}, {}, {})
    print(f"{len(chosen)} cases, seed {seed}, {workers} at a time, in {folder}", flush=True)
    tried, good, signals = (collections.Counter() for _ in range(3))
    failed: list[str] = []
    forks = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=forks) as pool:
        verdicts = pool.map(judge, [(kind, number, seed, scene) for kind, number in chosen])
        for (kind, number), (name, verdict) in zip(chosen, verdicts, strict=True):
            row = f"{kind}: {name}"
            tried[row] += 1
            signals[row] += verdict.struck
            if not verdict.faults:
                good[row, verdict.outcome] += 1
                continue
            failed.append(row)
            again = f"python scripts/trust_campaign.py --only {kind}:{number} --seed {seed}"
            print(f"FAILED {row}\n  " + "\n  ".join([*verdict.faults, again]), flush=True)
    print(table(tried, good, collections.Counter(failed)))
    print(f"\n{sum(tried.values())} cases, {sum(signals.values())} signals, {len(failed)} failures, ", end="")
    print(f"{(time.monotonic() - began) / 60:.0f} minutes")
    return len(failed)


def prepare_for_forks(folder: Path) -> None:
    """Imports once what every command needs, and keeps compiled programs in one place; no device is started here."""
    (folder / "cache").mkdir(mode=0o700, exist_ok=True)
    os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["PYTHONPATH"] = str(REPOSITORY / "src")
    sys.path.insert(0, os.environ["PYTHONPATH"])
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
    import agent_tunix

    for module in pkgutil.walk_packages(agent_tunix.__path__, "agent_tunix."):
        importlib.import_module(module.name)


def judge(given: tuple):
    """One case, in a folder of its own, which is kept where it failed."""
    kind, number, seed, scene = given
    from campaign import bad_inputs, damages, kills
    from campaign.cases import Verdict

    module = {"kills": kills, "damages": damages, "inputs": bad_inputs}[kind]
    case = module.case(number, random.Random(f"{seed} {kind} {number}"))
    folder = scene.folder.parent / f"{kind}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        verdict = module.judged(case, scene, folder)
    except Exception:  # what was found is so odd that the judge fell over it
        verdict = Verdict("", [traceback.format_exc()])
    if not verdict.faults:
        shutil.rmtree(folder)
    return case.kind, verdict


def table(tried: collections.Counter, good: collections.Counter, failed: collections.Counter) -> str:
    """In Markdown: each kind of case, how many ended in which of the promised ways, and how many did not."""
    lines = ["| case | tried | as promised | failures |", "|---|---|---|---|"]
    for row, count in tried.items():
        ways = ", ".join(f"{number} {way}" for (of, way), number in sorted(good.items()) if of == row)
        lines.append(f"| {row} | {count} | {ways} | {failed[row]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
