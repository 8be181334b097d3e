"""The kernel's own source, compiled for the CPU with a machine made of fibers (host/): so its indices, its layouts and what
its threads wait for are tested where there is no GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learnt_adapters import learnt

from agent_tunix.kernels import device, nvrtc
from agent_tunix.kernels.token import token_kernel
from agent_tunix.models import decoding, lora
from agent_tunix.models.architecture import Architecture, Segment
from agent_tunix.models.checkpoints.loading import init_weights

HOST = Path(__file__).parent / "host"
HEAD, VOCABULARY = token_kernel.HEAD, 100
FLAGS = ["-std=c++17", "-O1", "-finline-small-functions", "-w", "-fno-strict-aliasing", "-fvisibility=hidden"]

no_compiler = sys.platform != "linux" or shutil.which("g++") is None
pytestmark = pytest.mark.skipif(no_compiler, reason="no g++ on Linux here to compile the kernel for the CPU with")


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model, with a local layer and then a global one, and what is asked of it."""

    policies: int
    prompts: int
    group: int
    blocks: int  # of all teams
    shows: tuple[str, ...]  # macros that it is there for
    tokens: int = 2
    longest: int = 30  # of prompts
    embed_dim: int = 512
    heads: int = 2
    kv_heads: int = 1
    hidden_dim: int = 256
    window: int = 24
    most_pieces: int = token_kernel.MOST_PIECES
    narrows_at: int = 0  # the token from which on a third of the sequences go on alone; 0: none

    def architecture(self) -> Architecture:
        rope = {"rope_local_base": 1e4, "rope_global_base": 1e6, "rope_global_factor": 1.0}
        sizes = {"embed_dim": self.embed_dim, "hidden_dim": self.hidden_dim, "head_dim": HEAD, "vocab_size": VOCABULARY}
        heads = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "query_scale": 1 / 16, "norm_eps": 1e-6}
        return Architecture(num_layers=2, sliding_window=self.window, global_every=2, **sizes, **heads, **rope)


CASES = {
    "past a tile and the window": Case(
        1, 3, 5, 4, ("SHARES=1", "DOWN_Z=1", "OWN_TILES=2"), tokens=18, window=2, heads=1, narrows_at=17
    ),
    "three teams, a sum in shares": Case(1, 9, 4, 12, ("TEAMS=3", "DOWN_Z=3"), longest=33, hidden_dim=768, most_pieces=1),
    "two policies of two teams, two heads of keys": Case(
        2, 3, 6, 20, ("TEAMS=4", "TEAMS_EACH=2", "KV_HEADS=2"), longest=141, embed_dim=640, kv_heads=2, narrows_at=1
    ),
    "so wide that slots are few, units of two sizes": Case(
        1, 2, 4, 13, ("RING=5", "GATED_SUB=2", "DOWN_Z=2"), embed_dim=1152, heads=4, hidden_dim=1024, most_pieces=2
    ),
    "keys in two shares": Case(1, 4, 3, 33, ("SHARES=2",), longest=70, heads=4),
    "keys in eight shares, for five heads": Case(1, 2, 2, 128, ("SHARES=8",), longest=150, heads=5),
}


@dataclasses.dataclass
class Host:
    """In place of NVRTC the compiler of the CPU's programs, which runs meanwhile, and in place of XLA's call a plain one."""

    folder: Path
    calls: int = 0  # each has blocks take turns in an order of its own

    def compiled(self, source, macros, includes) -> str:
        del source  # is included
        self.macros, library = macros, str(self.folder / f"token{len(list(self.folder.iterdir()))}.so")
        flags = [*FLAGS, f"-I{HOST}", f"-I{includes}", *(f"-D{name}={value}" for name, value in macros.items())]
        self.compiler = subprocess.Popen(["g++", "-shared", "-fPIC", *flags, str(HOST / "run.cpp"), "-o", library])
        return library

    def call(self, name, library, given, made, aliases, *, grid, threads, shared_bytes) -> list[np.ndarray]:
        assert self.compiler.wait() == 0
        assert (name, shared_bytes) == ("token", self.macros["SHARED_BYTES"])
        made = [np.zeros(x.shape, x.dtype) for x in made]
        for n, kept in aliases.items():
            made[kept][...] = given[n]
        arrays = [*map(np.asarray, given), *made]
        pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
        sizes = (ctypes.c_size_t * len(arrays))(*(x.nbytes for x in arrays))
        run = ctypes.CDLL(library).run
        run.restype = ctypes.c_char_p
        self.calls += 1
        fault = run(pointers, sizes, len(arrays), grid, threads, self.calls)
        assert fault is None, fault.decode()
        return made


@pytest.fixture
def host(tmp_path, monkeypatch) -> Host:
    host = Host(tmp_path)
    monkeypatch.setattr(nvrtc, "compiled", host.compiled)
    monkeypatch.setattr(nvrtc, "call", host.call)
    return host


def random_like(shapes, rng: np.random.Generator):
    """Numbers for all weights, those of norms too, which are zeros in a fresh model."""

    def filled(path, shape):
        return jnp.asarray(rng.normal(0, 0.3 if "norm" in jax.tree_util.keystr(path) else 0.05, shape.shape), shape.dtype)

    return jax.tree_util.tree_map_with_path(filled, shapes)


def random_prompts(case: Case, rng: np.random.Generator) -> Segment:
    """Keys and values of prompts of several lengths, padded on their left with what is not to be seen."""
    shape = (2, case.policies * case.prompts, case.longest, case.kv_heads, HEAD)
    keys, values = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(2))
    lengths_P1 = case.longest - 4 * (np.arange(shape[1])[:, None] % 5)
    positions_PS = np.arange(case.longest) - case.longest + lengths_P1
    return Segment(keys, values, jnp.asarray(np.maximum(positions_PS, -1)))


@partial(jax.jit, static_argnames="case")
def by_forward(weights, adapters, prompt, tokens_CB, case: Case) -> jax.Array:
    cache, read, *_ = decoding._by_forward(weights, adapters, case.architecture(), prompt, case.group, case.tokens)

    def next_token(cache, of_slot):
        hidden_BD, cache = read(cache, *of_slot, jnp.zeros(tokens_CB.shape[1], bool))
        return cache, hidden_BD.astype(jnp.float32)

    return jax.lax.scan(next_token, cache, (tokens_CB, jnp.arange(case.tokens)))[1]


SHORT = ("past a tile and the window", "keys in two shares")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[] if name in SHORT else [pytest.mark.parity]) for name, case in CASES.items()],
)
def test_hidden_states_are_those_of_the_forward_pass_without_a_gpu(case, host, monkeypatch):
    """Token by token, by fibers that take turns at random and are told of copies late."""
    monkeypatch.setattr(device, "multiprocessors", lambda: case.blocks)
    monkeypatch.setattr(token_kernel, "MOST_PIECES", case.most_pieces)
    arch, rng = case.architecture(), np.random.default_rng(0)
    weights = random_like(jax.eval_shape(lambda: init_weights(jax.random.key(0), arch, jnp.bfloat16)), rng)
    own = jax.eval_shape(lambda: lora.stack([learnt(arch, seed) for seed in range(case.policies)]))
    adapters, prompt = random_like(own, rng), random_prompts(case, rng)
    tokens_CB = rng.integers(0, VOCABULARY, (case.tokens, case.policies * case.prompts * case.group))
    cache, read, narrowed = decoding.by_token_kernel(weights, adapters, arch, prompt, case.group, case.tokens)
    want_CBD = by_forward(weights, adapters, prompt, tokens_CB, case)
    assert set(case.shows) <= {f"{name}={value}" for name, value in host.macros.items()}
    rows_B = np.arange(tokens_CB.shape[1])
    for slot, (tokens_B, want_BD) in enumerate(zip(tokens_CB, want_CBD, strict=True)):
        if slot and slot == case.narrows_at:
            rows_B = rows_B.reshape(case.policies, -1)[:, 1::3].reshape(-1)
            cache, read, _ = narrowed(cache, jnp.asarray(rows_B), slot)
        hidden_BD, cache = read(cache, jnp.asarray(tokens_B[rows_B]), slot, None)
        apart_B = np.linalg.norm(hidden_BD - want_BD[rows_B], axis=-1) / np.linalg.norm(want_BD[rows_B], axis=-1)
        assert apart_B.max() < 0.03
