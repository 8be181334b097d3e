"""What a GRPO step costs in compute, memory and traffic on 8, 64 and 1,024 accelerators: arithmetic, not measurement.

    PYTHONPATH=src python benchmarks/scale.py

prints the tables of docs/guide/scale.md. FLOPs, bytes and collective operations are counted from the shapes of a model
and from how mesh.py cuts them; memory is the plan's (workflows/memory.py). Four numbers are fitted to one measurement, an
H200 with 1B at 4 x 4 (2026-11-15-grpo-step.md), and checked against others, of 270M. Links are taken at their data
sheets' word. Nothing is assumed to overlap.
"""

from __future__ import annotations

import dataclasses

from shipped import architecture

from agent_tunix.algorithm.logprobs import LOGITS_BUDGET
from agent_tunix.lab.plan import memory
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, module_shape

MACHINE = 8  # devices that are joined by the fast links
PEAK, HBM, FAST, SLOW = 989e12, 4.3e12, 450e9, 50e9  # one H200: bf16 FLOP/s, bytes/s of memory, NVLink, 400 Gb/s of network
FAST_LATENCY, SLOW_LATENCY = 10e-6, 25e-6  # seconds of one collective operation however small: assumed, not measured
READING, UPDATING = 0.52, 0.31  # share of PEAK that the reference pass and the update reach at WIDTH: fitted
WIDTH = 1152  # that of 1B; a narrower model computes less for each byte it moves, and reaches a share as much smaller
LAYER, DRAWING = 28e-6, 25e-6  # seconds a token that a layer, and drawing it, take beside bytes and FLOPs: fitted
LOGITS_PASSES = 3  # times that the logits of a token are read or written while it is drawn
BF16, FLOAT32 = 2, 4
MODULES = ATTENTION + FEED_FORWARD
FITTED = ("1b", 4, 4)
MEASURED = {  # model, prompts, generations: seconds of rollout, of reference and update, and peak GB
    FITTED: (0.661, 0.191, 4.11),
    ("270m", 4, 4): (0.328, 0.081, 1.37),
    ("270m", 16, 8): (0.523, None, 6.26),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one device, one step: operations, bytes received from others, and seconds by part."""

    flops: float
    traffic: float
    memory_gb: float
    seconds: dict[str, float]

    @property
    def step(self) -> float:
        return sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes that a device receives, and collective operations that it waits for."""

    bytes: float = 0.0
    times: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.bytes + other.bytes, self.times + other.times)

    def seconds(self, devices: int) -> float:
        link, latency = (FAST, FAST_LATENCY) if devices <= MACHINE else (SLOW, SLOW_LATENCY)
        return self.bytes / link + self.times * latency


def shapes(size: str, prompts: int, generations: int, micro_batch: int, fsdp: int = 1, tp: int = 1) -> memory.Shapes:
    """The benchmark's lengths and rank; one device is of the Hopper kind."""
    lengths = {"prompt_length": 256, "completion_length": 512}
    one = fsdp * tp == 1
    where = {"fsdp": fsdp, "tp": tp, "kernels": one, "odds_kernel": one}
    return memory.Shapes(architecture(size), 32, MODULES, BF16, prompts, micro_batch, generations, 1, **lengths, **where)


def layers(arch: Architecture) -> float:
    """Parameters of the matrices in all layers."""
    return arch.num_layers * sum(a * b for a, b in (module_shape(arch, module) for module in MODULES))


def embedding(arch: Architecture) -> float:
    return arch.vocab_size * arch.embed_dim


def cost(s: memory.Shapes) -> Cost:
    """One step of rollout, reference pass and update."""
    devices, sequences = s.fsdp * s.tp, s.prompts * s.generations
    read, drawn = s.prompts * s.prompt_length, sequences * s.completion_length
    matrices, vocabulary = layers(s.arch) / devices, embedding(s.arch) * s.vocabulary_share
    prompt = 2 * matrices * read
    decoding = 2 * (matrices + vocabulary) * drawn
    reference = 2 * matrices * (read + drawn) + 2 * vocabulary * drawn
    # Forwards, forwards again, and the gradient of activations, as a frozen base has none; logits and their expectation.
    update = 6 * matrices * (read + drawn) + 4 * vocabulary * drawn
    moved = {"rollout": gathers(s, 1) + decode_traffic(s), "reference": passes(s, 1), "update": passes(s, 3) + gradients(s)}
    reached = PEAK * min(1.0, s.arch.embed_dim / WIDTH)
    seconds = {
        "rollout": prompt / (reached * READING) + s.completion_length * token_seconds(s),
        "reference": reference / (reached * READING),
        "update": update / (reached * UPDATING),
    }
    seconds |= {f"{part}, links": how.seconds(devices) for part, how in moved.items()}
    flops = prompt + decoding + reference + update
    return Cost(flops, sum(how.bytes for how in moved.values()), memory.estimate(s)["peak"], seconds)


def token_seconds(s: memory.Shapes) -> float:
    """To read one token of every sequence and draw the next: bytes of memory, FLOPs, and what kernels take however small."""
    arch, devices, sequences = s.arch, s.fsdp * s.tp, s.prompts * s.generations
    parameters = layers(arch) / devices + embedding(arch) * s.vocabulary_share
    cached = s.prompts * s.prompt_length + sequences * s.completion_length / 2
    cache = cached * arch.num_layers * 2 * arch.num_kv_heads * arch.head_dim * BF16 / devices
    logits = LOGITS_PASSES * sequences * arch.vocab_size * FLOAT32 * s.vocabulary_share
    moved = (parameters * BF16 + cache + logits) / HBM
    return moved + 2 * parameters * sequences / PEAK + arch.num_layers * LAYER + DRAWING


def others(ways: int) -> float:
    """Of something cut so many ways, the part that lies elsewhere."""
    return (ways - 1) / ways


def gathers(s: memory.Shapes, times: float) -> Moved:
    """A layer's weights put together over fsdp, matrix by matrix, so many times."""
    if s.fsdp == 1:
        return Moved()
    held = layers(s.arch) * BF16 / s.tp
    return Moved(times * held * others(s.fsdp), times * s.arch.num_layers * len(MODULES))


def passes(s: memory.Shapes, times: int) -> Moved:
    """Going through all layers forwards so many times (an update: forwards, again, and back), and once through the logits.

    The prompts and completions of a micro-batch go through together, so weights are gathered once for both.
    """
    micro_batches, arch = s.prompts / s.micro_batch, s.arch
    tokens = s.prompts * (s.prompt_length + s.generations * s.completion_length) / s.fsdp
    sums = Moved()
    if s.tp > 1:  # the outputs of attention and of the feed-forward layer are summed, there and back
        each = 2 * tokens * arch.embed_dim * BF16 * others(s.tp)
        sums = Moved(times * 2 * arch.num_layers * each, times * 2 * micro_batches * arch.num_layers)
    return gathers(s, times * micro_batches) + sums + logits_traffic(s, times)


def logits_traffic(s: memory.Shapes, times: int) -> Moved:
    """The vocabulary is cut over all devices, so each must see the hidden states of all tokens, a chunk at a time."""
    devices = s.fsdp * s.tp
    if devices == 1:
        return Moved()
    drawn = s.prompts * s.generations * s.completion_length
    chunks = drawn * s.arch.vocab_size / LOGITS_BUDGET
    ways = 1 if times == 1 else 3  # the update sends the expectations of embeddings back, in float32, which is twice as much
    return Moved(ways * drawn * s.arch.embed_dim * BF16 * others(devices), (2 + ways) * chunks)


def gradients(s: memory.Shapes) -> Moved:
    """Gradients of the adapters, summed over the devices that have other rows."""
    if s.fsdp == 1:
        return Moved()
    adapters = memory.adapter_parameters(s) * FLOAT32 / s.tp
    micro_batches = s.prompts / s.micro_batch
    return Moved(2 * micro_batches * adapters * others(s.fsdp), 2 * micro_batches * len(s.modules) * s.arch.num_layers)


def decode_traffic(s: memory.Shapes) -> Moved:
    """Weights stay and the activations of all sequences travel, token by token; each row of logits goes to one device."""
    arch, devices, sequences = s.arch, s.fsdp * s.tp, s.prompts * s.generations
    if devices == 1:
        return Moved()
    wide = {module: module_shape(arch, module)[1] * sequences * BF16 / s.tp for module in MODULES}
    into_o = module_shape(arch, "o_proj")[0] * sequences * BF16 / s.tp
    layer = Moved()
    if s.fsdp > 1:  # q, k, v summed where their rows are; rows gathered for o; gate and up summed everywhere; four norms
        scattered = wide["q_proj"] + wide["k_proj"] + wide["v_proj"] + into_o + 2 * (wide["gate_proj"] + wide["up_proj"])
        layer += Moved(scattered * others(s.fsdp), 3 + 1 + 2 + 4)
    if s.tp > 1:
        layer += Moved(2 * 2 * sequences * arch.embed_dim / s.fsdp * BF16 * others(s.tp), 2)
    drawing = sequences * arch.embed_dim * BF16 + sequences * arch.vocab_size * FLOAT32 / devices
    a_token = Moved(arch.num_layers * layer.bytes + drawing, arch.num_layers * layer.times + 4)
    return Moved(s.completion_length * a_token.bytes, s.completion_length * a_token.times)


def predicted(size: str, prompts: int, generations: int) -> tuple[float, float, float]:
    """What `MEASURED` has, as the calculator gives it; the update is one micro-batch."""
    found = cost(shapes(size, prompts, generations, prompts))
    return found.seconds["rollout"], found.seconds["reference"] + found.seconds["update"], found.memory_gb


def check_table() -> str:
    rows = ["| one H200 | rollout | reference and update | memory |", "|---|---|---|---|"]
    for shape, measured in MEASURED.items():
        both = zip(predicted(*shape), measured, ("s", "s", "GB"), strict=True)
        cells = ["not measured" if m is None else f"{p:.3g} / {m:.3g} {unit} = {p / m:.2f}" for p, m, unit in both]
        size, prompts, generations = shape
        use = "fitted here" if shape == FITTED else "not fitted"
        rows.append(f"| {size.upper()}, {prompts} x {generations} ({use}) | {' | '.join(cells)} |")
    return "\n".join(rows)


def scale_table() -> str:
    """Four prompts of eight completions for every device, the update in one micro-batch."""
    rows = [
        "| model | devices | completions | PFLOP | traffic | memory | rollout (links) | reference and update (links) | step "
        "| step with replicas |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size in ("1b", "4b", "27b"):
        for devices in (8, 64, 1024):
            s = shapes(size, 4 * devices, 8, 4 * devices, devices)
            c = cost(s)
            rollout, learning = _both(c, "rollout"), _both(c, "reference", "update")
            cells = [
                size.upper(),
                f"{devices:,}",
                f"{s.prompts * s.generations:,}",
                f"{c.flops / 1e15:.2f}",
                f"{c.traffic / 1e9:,.0f} GB",
                f"{c.memory_gb:.0f} GB",
                f"{rollout[0]:,.1f} s ({rollout[1]:,.1f})",
                f"{learning[0]:,.1f} s ({learning[1]:,.1f})",
                f"{c.step:,.1f} s",
                f"{replicated(size, devices):,.1f} s",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def replicated(size: str, devices: int) -> float:
    """A step of machines that each hold the whole model and their own rows, and only sum the adapters' gradients."""
    s = shapes(size, 4 * MACHINE, 8, 4 * MACHINE, MACHINE)
    if devices <= MACHINE:
        return cost(s).step
    adapters = memory.adapter_parameters(s) * FLOAT32 / MACHINE
    return cost(s).step + Moved(2 * adapters, 2 * len(s.modules)).seconds(devices)


def _both(c: Cost, *parts: str) -> tuple[float, float]:
    """Seconds of parts of a step, and those of them that are spent on links."""
    links = sum(c.seconds[f"{part}, links"] for part in parts)
    return sum(c.seconds[part] for part in parts) + links, links


if __name__ == "__main__":
    print(check_table(), scale_table(), sep="\n\n")
