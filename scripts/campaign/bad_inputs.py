"""Bad inputs: a command is given what it cannot use.

Promised: exit code 2 and a message, without a traceback, in bounded time and memory, with nothing half-written and no
control character sent; or a legitimate success, where the input could be used after all. A reward that is no finite number
ends a run with exit code 3.
"""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from campaign import bad_files, hostile
from campaign.bad_files import BASE, ONCE, Arguments
from campaign.cases import Verdict
from campaign.commands import Outcome, Strike, run
from campaign.runs import Scene, changes, content, half_written

TURNS = ["overrides"] * 5 + ["models"] * 5 + ["data"] * 3 + ["run folders"] * 3 + ["rewards"] * 2 + ["texts", "requests"]
REAL, TERMINAL = 0.03, 0.25  # shares of processes of their own, and of those whose output is a terminal
VERBS = ["train", "plan", "lr-find", "tune", "evaluate", "export"]
OPTIONS = ["--cfg", "--cfg=job", "--help", "--info", "--info=all", "--hydra-help", "--resolve", "--package=x"]
OPTIONS += ["--config-dir=/proc", "-m", "-h", "--version"]
OPTIONS += ["--config-name=none", "--config-path=..", "--processes=0", "--processes=-1", "--process=5"]
OPTIONS += ["--coordinator=x", "--run", "-p", "--", "-", "-x"]
HYDRA = ["run.dir", "sweep.dir", "sweep.subdir", "job.chdir", "launcher.fuse", "sweeper.max_batch_size"]
HYDRA += ["output_subdir", "job.name", "verbose", "mode"]
PLACES = ["/proc/x/y", "/dev/null/x", "file/x", "new/x", "a" * 300, "''", "~", ".", "/", "\x1b[2J", "${seed}"]
PLACES += ["${hydra:job.num}", "a/b/c", "é"]
MESHES = ["[[1000000000,1],[fsdp,tp]]", "[[1,1000000000],[fsdp,tp]]", "[[0,1],[fsdp,tp]]", "[[1,1],[tp,fsdp]]"]
MESHES += ["[[1],[a]]", "[[],[]]", "[[1.5,1],[fsdp,tp]]"]
PATTERNS = ["(" * 3000, "(a+)+$", "[", "(?P<n>", "\\", ".*", "", "q_proj|" * 3000, "(?:" * 90, "x{99999999}", "\x1b[2J"]


def overrides(rng: random.Random, folder: Path) -> Arguments:
    """Of the command line: values, keys, groups, options and verbs."""
    from agent_tunix.config.load import keys
    from agent_tunix.config.schema import EvaluateConfig
    from agent_tunix.lab.tune.config import LrFindConfig, TuneConfig

    (folder / "file").touch()
    known = sorted(keys(TuneConfig) | keys(LrFindConfig) | keys(EvaluateConfig))
    sections = sorted({key.partition(".")[0] for key in known})

    def value() -> str:
        return f"{rng.choice(['', '', '+', '++'])}{rng.choice(known)}={hostile.word(rng)}"

    ways: list[Callable[[], list[str]]] = [
        lambda: [value()],
        lambda: [value()],
        lambda: [value()],
        lambda: [value() for _ in range(rng.randrange(2, 6))],
        lambda: [f"{rng.choice(sections)}={hostile.word(rng)}"],
        lambda: [f"~{rng.choice([*known, *sections])}"],
        lambda: [f"{rng.choice(known)}.{rng.choice(['x', '0', '[0]', '-1', hostile.text(rng)])}=1"],
        lambda: [f"{_misspelt(rng.choice(known), rng)}=1"],
        lambda: ["".join(rng.choices("a.=[]{}(),'\"$@+~-:/ \\\t%1é", k=rng.randrange(1, 40)))],
        lambda: [f"hydra.{rng.choice(HYDRA)}={rng.choice([*PLACES, hostile.word(rng)])}"],
        lambda: [f"hydra/{rng.choice(['launcher', 'sweeper', 'job_logging', 'x'])}={hostile.word(rng)}"],
        lambda: [f"model.mesh_shape={rng.choice(MESHES)}"],
        lambda: [f"{rng.choice(['model.lora_module_path', 'data.answer_pattern'])}='{rng.choice(PATTERNS)}'"],
        lambda: [rng.choice(OPTIONS), *([value()] if rng.random() < 0.5 else [])],
        lambda: ["--multirun", f"{rng.choice(known)}={hostile.word(rng)},{hostile.word(rng)}"],
        lambda: [f"+experiment={rng.choice(['none', 'quick_test,control', hostile.text(rng), '../x'])}"],
        lambda: ["model.weights=" + rng.choice(PLACES), "training.resume=" + rng.choice(PLACES)][rng.randrange(2) :][:1],
    ]
    given = rng.choice(ways)()
    if rng.random() < 0.03:
        return [rng.choice([*given, "trian", "", "-", hostile.text(rng)])]
    # Where a value is one that can be used, a plan ends soon, and what needs weights from the hub does not begin.
    if rng.random() < 0.7:
        return ["plan", "model=gemma3_tiny", *given]
    return [rng.choice(VERBS), *given]


def _misspelt(key: str, rng: random.Random) -> str:
    at = rng.randrange(len(key))
    return rng.choice(
        [key[:at] + key[at + 1 :], key[:at] + rng.choice("axz_.") + key[at:], key.upper(), key.replace("_", "-"), key + "s"]
    )


BODIES = """
return None
return "1"
return "much"
return [1.0]
return {}
return 1 + 2j
return 10 ** 5000
return -1e39
return True
return object()
return float("nan")
return float("inf")
return lambda: 1
return numpy.ones(3)
return numpy.float64("nan")
return numpy.array(1.0)
return Odd()
return Odd
return b"1"
return mine
return mine(prompt, completion, answer)
return (yield)
raise KeyError
raise Unprintable()
raise Mute
raise SystemExit
raise SystemExit(0)
raise SystemExit("enough")
raise GeneratorExit
raise BaseException("base")
raise StopIteration
raise MemoryError
raise RecursionError
raise OSError(28, "No space left on device")
raise BrokenPipeError
raise BlockingIOError
raise PermissionError(13, "Permission denied")
raise FileExistsError(17, "File exists")
raise ExceptionGroup("many", [ValueError(1), KeyError(2)])
raise ValueError("ESCAPE")
raise type("ESCAPE", (Exception,), {})("x")
raise ValueError("x" * 10 ** 7)
raise ValueError("RESOURCE_EXHAUSTED")
raise UserWarning("Config group override")
raise KeyError from Unprintable()
assert False
assert answer == "none", completion
sys.exit(3)
sys.stdout = None; return 1
sys.stdout.close(); return 1
sys.setrecursionlimit(30); return 1
os.close(1); return 1
os.chdir("/"); return 1
os.remove("rewards.py"); return 1
del sys.modules["json"]; return 1
signal.signal(signal.SIGTERM, signal.SIG_DFL); return 1
warnings.warn("ESCAPE"); return 1
logging.getLogger().error("broken"); return 1
threading.Thread(target=lambda: 1 / 0).start(); return 1
print("fine"); return 1
while True: pass
time.sleep(10 ** 6)
return sum(1 for _ in iter(int, 1))
return eval("(" * 500)
return "".join(sorted(completion))
import nothing_of_this_name
""".strip().splitlines()
SIGNATURES = ["(prompt, completion, answer)"] * 6 + [
    "(*all)",
    "(prompt, completion, answer, more=1)",
    "()",
    "(a)",
    "(a, b, c, d)",
    "(*, a)",
]
MODULES = ["", "", "", "", "", "", "raise SystemExit(3)", "raise BaseException('at import')"]
MODULES += ["raise KeyboardInterrupt.__base__('x')", "1 / 0", "(", "\0", "sys.exit()"]
MODULES += ["from nowhere import nothing", "raise Unprintable()", "import rewards", "mine = 3", "while True: break"]
MODULES += ["raise ImportError('ESCAPE')"]
MODULE = """import logging, os, random, signal, sys, threading, time, warnings
import numpy
class Unprintable(Exception):
    def __str__(self): raise ValueError("no words")
    __repr__ = __str__
class Mute(Exception):
    def __str__(self): return 3
class Odd:
    def __float__(self): raise SystemExit(5)
    def __repr__(self): raise BaseException("no words")
def mine{signature}:
    {body}
{module}
"""
NAMES = ["rewards.mine"] * 12 + [
    "rewards.none",
    "rewards",
    "",
    ".mine",
    "rewards.",
    "os.mkdir",
    "json",
    "a b.c",
    "rewards.mine.x",
    "rewards.Odd",
    "sys.exit",
]


def rewards(rng: random.Random, folder: Path) -> Arguments:
    """Functions of the user's own that go wrong, in every way that Python allows."""
    escape = rng.choice(hostile.ESCAPES).encode("unicode_escape").decode()
    parts = {"signature": rng.choice(SIGNATURES), "body": rng.choice(BODIES).replace("ESCAPE", escape)}
    text = MODULE.format(**parts, module=rng.choice(MODULES).replace("ESCAPE", escape))
    (folder / "rewards.py").write_bytes(text.encode())
    name = rng.choice(NAMES)
    hangs = any(words in parts["body"] for words in ("while True", "sleep", "iter(int"))
    limit = ["reward.timeout=2"] if hangs or rng.random() < 0.5 else []
    return ["train", *BASE, *ONCE, f"+reward.functions.mine={name}", *limit, "hydra.run.dir=out"]


def texts(rng: random.Random, folder: Path) -> Arguments:
    """Sequences that a terminal would obey, wherever a text is read."""
    bad = hostile.text(rng)
    row = {"question": bad, "answer": "1"} if rng.random() < 0.5 else {bad: bad, "question": "Ann", "answer": "1"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({bad: 1}))
    (folder / f"{bad}.csv").write_text(f"{bad}\n{bad},{bad}")
    (folder / "conf" / "optimizer").mkdir(parents=True)
    (folder / "conf" / "optimizer" / "mine.yaml").write_text(f"{json.dumps(bad)}: 1\n# {bad}")
    read = ["data=jsonl", "data.path=rows.jsonl", f"data.on_bad_row={rng.choice(['skip', 'error'])}"]
    ways = [
        ["evaluate", *BASE, *read],
        ["plan", *BASE, *read, f"data.question_field={bad}"],
        ["plan", *BASE, "data=csv", f"data.path={bad}.csv"],
        ["plan", *BASE, f"data.system_prompt='{bad}'"],
        ["train", *BASE, *ONCE, f"data.system_prompt='{bad}'"],
        ["plan", *BASE, "optimizer=mine"],
        ["plan", *BASE, f"optimizer.'{bad}'=1"],
        ["plan", *BASE, f"{bad}"],
        ["plan", *BASE, f"+{bad}=1"],
        ["train", f"training.resume={bad}"],
        ["train", *BASE, f"model.weights='{bad}'"],
        ["train", *BASE, f"hydra.run.dir='/proc/{bad}'"],
        ["evaluate", f"run={bad}"],
        ["export", f"run={bad}"],
        ["doctor", bad],
        ["report", bad],
        ["watch", f"{bad}.csv"],
        ["watch", ".", "--port", bad],
        ["doctor", f"--{bad}"],
        [bad],
        ["plan", *BASE, f"+reward.functions.mine={bad}.x"],
        ["train", "--multirun", *BASE, f"optimizer.learning_rate='{bad}',1"],
    ]
    return rng.choice(ways)


FAMILIES = {**bad_files.MAKERS, "overrides": overrides, "rewards": rewards, "texts": texts}
LINES = ["GET / HTTP/1.1", "GET http://[::1/ HTTP/1.1", "GET /%00 HTTP/1.1", "GET /../../etc/passwd HTTP/1.1"]
LINES += ["GET // HTTP/1.1", "GET", "", "\x00" * 99, "POST / HTTP/1.1"]
LINES += ["HEAD / HTTP/1.1", "GET /data.json HTTP/9.9", "GET / HTTP/0.9", "G" * 70_000]
LINES += ["GET /" + "a" * 70_000 + " HTTP/1.1", "GET /\x1b[2J HTTP/1.1", "\x16\x03\x01\x02", "GET //[ HTTP/1.1"]
LINES += ["OPTIONS * HTTP/1.1", "GET http://h:x/ HTTP/1.1", "GET /data.json?" + "&a" * 9000 + " HTTP/1.1"]
LINES += ["PRI * HTTP/2.0", "GET / HTTP/1.1 HTTP/1.1", "GET / HTTP/-1.0"]
HEADERS = ["Host: 127.0.0.1", "Host: localhost:1", "Host: evil.example", "Host: [::1", "Host: \x1b[2J"]
HEADERS += ["Content-Length: -1", "Content-Length: 999999999999", "X: " + "a" * 70_000, "Host"]
HEADERS += [f"X-{number}: 1" for number in range(3)] + [
    "Transfer-Encoding: chunked",
    "Expect: 100-continue",
    ": x",
    "Connection: keep-alive",
    "Range: bytes=0-,0-,0-",
    "\xff: \xff",
]


class Conversation:
    """What strangers send to `watch`; afterwards the page must still be served, and Ctrl-C end it."""

    def __init__(self, rng: random.Random):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.requests = [self._request(rng) for _ in range(rng.randrange(1, 4))]
        self.faults: list[str] = []

    def _request(self, rng: random.Random) -> bytes:
        lines = [rng.choice(LINES), *rng.sample(HEADERS, rng.randrange(5)), *(["X: 1"] * 300 if rng.random() < 0.1 else [])]
        return ("\r\n".join(lines) + rng.choice(["\r\n\r\n", "\r\n", ""])).encode("latin-1", errors="replace")

    def held(self, now: float) -> bool:
        """Whether it is over; it begins when the server answers."""
        try:
            self._answer(b"")
        except ConnectionError:
            return False
        for request in self.requests:
            if b" 500 " in self._answer(request)[:40]:
                self.faults.append(f"{request[:80]!r} was answered with an internal error")
        for path in ("/", "/data.json"):
            answer = self._answer(f"GET {path} HTTP/1.1\r\nHost: localhost:{self.port}\r\n\r\n".encode())
            if b" 200 " not in answer[:40]:
                self.faults.append(f"then {path} was answered with {answer[:80]!r}")
        return True

    def _answer(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: connection.recv(65536), b""))
            except (ConnectionError, TimeoutError):  # it need not hear a stranger to the end
                return b""


@dataclasses.dataclass(frozen=True)
class BadInput:
    kind: str
    seed: float
    real: bool
    terminal: bool


def case(number: int, rng: random.Random) -> BadInput:
    return BadInput(TURNS[number % len(TURNS)], rng.random(), rng.random() < REAL, rng.random() < TERMINAL)


def judged(bad: BadInput, scene: Scene | None, folder: Path) -> Verdict:
    rng = random.Random(bad.seed)
    if bad.kind == "requests":
        return _judged_requests(rng, folder)
    arguments = FAMILIES[bad.kind](rng, folder)
    before = content(folder)
    outcome = run(arguments, folder, real=bad.real, terminal=bad.terminal)
    faults = [*outcome.faults(), *_faults_of_end(outcome, bad, folder), *half_written(folder)]
    if outcome.code == 2:
        own = {"rewards.py"} if bad.kind == "rewards" else set()  # which a function of it may remove
        written = set(changes(before, content(folder))) - own
        faults += [f"a refusal changed {path}" for path in written if not _of_a_run_that_failed(path, folder)]
    ways = {0: "used", 2: "refused", 3: "diverged"}
    told = [] if not faults else [f"agent-tunix {' '.join(map(repr, arguments))[:2000]}", *faults, outcome.said()[-600:]]
    return Verdict(ways.get(outcome.code, ""), told)


def _faults_of_end(outcome: Outcome, bad: BadInput, folder: Path) -> Iterator[str]:
    if (folder / "owned").exists():
        yield "code from a folder was run"
    if outcome.code == 0 or (outcome.code == 3 and bad.kind == "rewards"):
        return
    yield from outcome.refusal_faults()


def _of_a_run_that_failed(path: str, folder: Path) -> bool:
    """Whether it belongs to a run that had begun, and says how it ended."""
    summary = folder / "out" / "summary.json"
    return path.startswith("out") and summary.exists() and json.loads(summary.read_text())["status"] == "failed"


def _judged_requests(rng: random.Random, folder: Path) -> Verdict:
    bad_files.run_folder(rng, folder)
    talk = Conversation(rng)
    outcome = run(["watch", "run", "--port", str(talk.port)], folder, [Strike(signal.SIGINT, talk.held)])
    faults = [*outcome.faults(), *talk.faults]
    if outcome.code == 2 and not outcome.struck:
        return Verdict("refused", faults)
    if outcome.code:
        faults.append(f"it ended with exit code {outcome.code}")
    return Verdict(
        "answered", [*(map(repr, talk.requests) if faults else ()), *faults, *([outcome.said()[-600:]] if faults else [])]
    )
