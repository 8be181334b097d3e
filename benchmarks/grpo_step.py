"""One GRPO step of Agent-Tunix, google-tunix and TRL, side by side: same random weights, prompts, shapes and sampling.

    python benchmarks/grpo_step.py --model 270m                      one GPU; 4 prompts x 4 completions, 256 + 512 tokens
    python benchmarks/grpo_step.py --model 270m --prompts 16 --generations 8
    python benchmarks/grpo_step.py --model tiny                      a CPU; the shapes of +experiment=quick_test

Needs `pip install google-tunix==0.1.7 trl==1.16.0 peft` for the peers; one that is not there is reported, not hidden.

All do what a step of GRPO asks for: completions of every prompt by the adapted policy, a reward for each (chance), log-
probabilities under the reference (the KL term has a weight), one update of the adapters, which are on all projections. None
ends a completion early. Each contestant runs in a process of its own, since the peak of memory is a process's. On
a GPU they run one after the other: two do not share a card. Without one they take turns, step by step, so that whatever
else the machine has to do slows all of them alike.

`step` is a median, after two steps to warm up; `update` is what of a step is not rollout; `processor` is the time a step
takes of all cores together, which other work on the machine changes little. The first step counts from the
start of the process, so imports, loading and compiling are in it; ours has its cache of compiled programs empty, then
full. Peak memory is what the device's allocator handed out, or without a GPU the resident memory of the process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from race import Race

HERE = Path(__file__).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # products of a tiny model are too small to share between threads
CONTESTANTS = {
    "ours": ("ours.py", {}),
    "google-tunix": ("google_tunix.py", {}),
    "trl": ("trl.py", {}),
    "trl-one-thread": ("trl.py", ONE_THREAD),
}
WARM_UP = 2
BIG = {"prompts": 4, "generations": 4, "prompt_length": 256, "completion_length": 512, "rank": 32}
BIG |= {"temperature": 0.9, "top_k": 50, "beta": 0.08, "dtype": "bfloat16"}
TINY = {"prompts": 16, "generations": 8, "prompt_length": 28, "completion_length": 16, "rank": 16}
TINY |= {"temperature": 1.0, "top_k": None, "beta": 0.02, "dtype": "float32"}
SHAPES = {"270m": BIG, "1b": BIG, "tiny": TINY}
COLUMNS = ("step s", "rollout s", "update s", "decode tok/s", "processor s", "peak GB", "first step s")
FORMS = ("{:.3f}", "{:.3f}", "{:.3f}", "{:,.0f}", "{:.2f}", "{:.2f}", "{:.1f}")


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a contestant: medians in the order of COLUMNS, or why there are none."""

    name: str
    numbers: tuple[float, ...] = ()
    steps: int = 0
    remark: str = ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--contestants", help=f"by default all of {','.join(CONTESTANTS)}; the last one without a GPU only")
    for name in ("prompts", "generations", "prompt-length", "completion-length", "rank", "micro-batch"):
        parser.add_argument(f"--{name}", type=int, help="default: see SHAPES" if name != "micro-batch" else "in prompts")
    parser.add_argument("--steps", type=int, default=5, help="steps to take the median of, after two to warm up")
    parser.add_argument("--timeout", type=int, default=900, help="seconds that a contestant may take")
    parser.add_argument(
        "--logs", type=Path, help="an empty folder for what the contestants print; default: it is thrown away"
    )
    parser.add_argument("--no-warm-cache", action="store_true", help="leave out our second run, with programs cached")
    return parser.parse_args()


def make_race(given: argparse.Namespace, folder: Path) -> Race:
    chosen = {key: value for key, value in vars(given).items() if key in BIG and value is not None}
    shape = SHAPES[given.model] | chosen
    steps = given.steps + WARM_UP
    return Race(model=given.model, **shape, steps=steps, micro_batch=given.micro_batch, folder=str(folder), results="")


def environment(cache: Path, **more: str) -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    room = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}  # of the card; the usual 0.75 would run out of memory earlier
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(cache)} | offline | room | more


def prepare(race: Race) -> None:
    """Writes checkpoint and prompts. On the CPU, so that the card is untouched when the first contestant comes."""
    command = [sys.executable, "-P", str(HERE / "random_checkpoint.py"), race.model, str(race.checkpoint)]
    subprocess.run(command, check=True, env=environment(Path(race.folder), JAX_PLATFORMS="cpu"))
    race.write_prompts(json.loads((race.checkpoint / "config.json").read_text())["vocab_size"])


class Contestant:
    """A process that makes a step when it is told to."""

    def __init__(self, name: str, label: str, race: Race, given: argparse.Namespace):
        self.label, self._left = label, given.timeout
        self._results, self._log = ((given.logs or Path(race.folder)) / f"{label}.{ending}" for ending in ("jsonl", "log"))
        self._results.unlink(missing_ok=True)
        self._race = dataclasses.replace(race, results=str(self._results))
        script, setting = CONTESTANTS[name]
        # -P keeps the folder of the script off the search path: `import trl` there must not find trl.py
        command = [sys.executable, "-P", str(HERE / "contestants" / script), json.dumps(dataclasses.asdict(self._race))]
        env = environment(Path(race.folder) / name, **setting)
        self._started, self._allowed, self.stopped = time.time(), 1, False  # the first step is free
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def steps(self) -> list[dict]:
        lines = self._results.read_text().splitlines() if self._results.exists() else []
        return [json.loads(line) for line in lines]

    def advance(self, to: int) -> None:
        """Lets it go on until it has made so many steps in all, has ended, or has used up its time."""
        begun = time.monotonic()
        while (done := len(self.steps())) < to and self._process.poll() is None:
            if time.monotonic() - begun > self._left:
                self.stopped = True
                self.end()
                return
            if done and done == self._allowed:
                self._allow()
            time.sleep(0.01)
        self._left -= time.monotonic() - begun

    def _allow(self) -> None:
        self._allowed += 1
        assert self._process.stdin
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def end(self) -> Result:
        """Ends it and says what came of it."""
        if self._process.poll() is None and len(self.steps()) == self._race.steps:
            self._process.communicate(timeout=60)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        failed = self._process.wait() and not self.stopped
        remark = reason(self._log.read_text(errors="replace")) if failed else ""
        return judge(self.label, self._race, self._started, self.steps(), "ran out of time" if self.stopped else remark)


def compete(names: list[str], race: Race, given: argparse.Namespace, suffix: str = "") -> list[Result]:
    """Runs contestants beside each other, each making a step in turn once all are warm."""
    runners: list[Contestant] = []
    try:
        for name in names:
            runners.append(Contestant(name, name + suffix, race, given))
            runners[-1].advance(WARM_UP)
        for count in range(WARM_UP + 1, race.steps + 1):
            for runner in runners:
                runner.advance(count)
    finally:  # an interruption must leave no process behind, and what was measured is said
        results = [runner.end() for runner in runners]
        print(*results, sep="\n", flush=True)
    return results


def judge(label: str, race: Race, started: float, steps: list[dict], remark: str) -> Result:
    """Medians over the steps after the warm-up; of a contestant that was stopped, over what there is."""
    if not steps:
        return Result(label, remark=remark or "ended without a step")
    first, peak = steps[0]["end"] - started, max(step["peak_gb"] for step in steps)
    timed = steps[WARM_UP:] or steps[1:]
    if not timed:
        return Result(label, (*[float("nan")] * 5, peak, first), 0, remark)
    if any(step["tokens"] != race.sequences * race.completion_length for step in steps):
        remark = remark or "some completions ended early: not comparable"
    seconds, rollout, cpu = (statistics.median(step[key] for step in timed) for key in ("seconds", "rollout", "cpu"))
    rate = race.sequences * race.completion_length / rollout
    return Result(label, (seconds, rollout, seconds - rollout, rate, cpu, peak, first), len(timed), remark)


JAX_NOTE = "For simplicity, JAX has removed its internal frames"  # which it puts after an error's own last line


def reason(log: str) -> str:
    """The last line of an error, or that memory ran out, whatever the last line says."""
    lines = [line for line in map(str.strip, log.splitlines()) if line.strip("-") and not line.startswith(JAX_NOTE)]
    memory = [line for line in lines if "out of memory" in line.lower() or "RESOURCE_EXHAUSTED" in line]
    found = ["out of memory: " + memory[-1]] if memory else lines[-1:]
    return (found or ["failed without a word"])[0][:200]


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(results: list[Result]) -> str:
    lines = [row(["", *COLUMNS, "steps", "remark"]), row(["---"] * (len(COLUMNS) + 3))]
    for result in results:
        cells = [form.format(number) for form, number in zip(FORMS, result.numbers, strict=False)]
        cells = cells or ["-"] * len(COLUMNS)
        lines.append(row([result.name, *cells, str(result.steps), result.remark]))
    ours = next((r for r in results if r.name == "ours" and r.numbers), None)
    for result in results:
        if ours and result.numbers and not result.name.startswith("ours"):
            ratios = [b / a for a, b in zip(ours.numbers, result.numbers, strict=True)]
            lines.append(row([f"**{result.name} / ours**", *(f"{r:.2f}" for r in ratios), "", ""]))
    return "\n".join(lines)


def device() -> str:
    """The GPU by nvidia-smi's word, or the processor's cores."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{len(os.sched_getaffinity(0))} cores of {platform.processor() or platform.machine()}, no GPU"


def commit() -> str:
    found = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def versions() -> str:
    def of(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"

    return ", ".join(map(of, ("jax", "google-tunix", "flax", "qwix", "trl", "transformers", "peft", "torch")))


def main() -> None:
    given = arguments()
    machine = device()
    no_gpu = machine.endswith("no GPU")
    usual = [name for name in CONTESTANTS if no_gpu or name != "trl-one-thread"]
    names = given.contestants.split(",") if given.contestants else usual
    if unknown := set(names) - set(CONTESTANTS):
        sys.exit(f"--contestants: {', '.join(sorted(unknown))} is none of {', '.join(CONTESTANTS)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        race = make_race(given, folder)
        print(f"{machine}; Python {platform.python_version()}, {versions()}; commit {commit()}")
        print("python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
        print({k: v for k, v in dataclasses.asdict(race).items() if k not in ("folder", "results")}, flush=True)
        if given.logs:
            given.logs.mkdir(parents=True, exist_ok=True)
        prepare(race)
        groups = [names] if no_gpu else [[name] for name in names]
        results = [result for group in groups for result in compete(group, race, given)]
        if "ours" in names and not given.no_warm_cache:
            short = dataclasses.replace(race, steps=WARM_UP + 1)
            results += compete(["ours"], short, given, " again")
        print("\n" + table(results))


if __name__ == "__main__":
    main()
