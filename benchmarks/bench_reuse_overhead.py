"""What state reuse costs besides attention: planner and cache, as a share of a denoising step, at Wan's shapes.

    python benchmarks/bench_reuse_overhead.py [--out DIR] [--grid 21 45 80] [--layers 2]

Wan 2.1's self-attention at 720p x 81 frames (21 x 45 x 80 = 75,600 tokens; 1.3B: 30 layers of 12 heads x 128, 14B: 40
layers of 40), random q, k, v, timing only. A step counts as its attention alone, which is less than a step, so the true
share is smaller. Timed apart, on a stack of `--layers` layers: anchors through the policy against plain attention (what
is measured and remembered there), held steps (all they cost), and the host's planning. The overhead of a mean step
follows for an anchor every third step.

A correctness gate comes first: exact mode is bit by bit plain attention, and a held step follows the definition of the
extrapolation. Exits with 1 where the overhead is above 2 % of a step on CUDA.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from foveate import ReuseConfig, VideoGrid, attend
from foveate.attention import Layer
from foveate.reuse.policy import Reuse

BAR = 0.02
SHAPES = {"Wan-1.3B": (30, 12), "Wan-14B": (40, 40)}  # layers, heads
DIM, INTERVAL, GIB = 128, 3, 2**30


class Drift:
    """q, k, v of every layer: fixed parts plus the noise level times others, made anew a step into the same memory."""

    def __init__(self, tokens: int, heads: int, device: str, dtype: torch.dtype):
        draw = torch.Generator(device).manual_seed(0)
        self._base = [torch.randn(1, tokens, heads, DIM, generator=draw, device=device, dtype=dtype) for _ in range(4)]

    def at(self, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
        *qkv, other = self._base
        return tuple(torch.add(x, other, alpha=0.3 * sigma) for x in qkv)  # type: ignore[return-value]


def step(policy: Reuse, grid: VideoGrid, index: int, sigma: float, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    out = qkv[0]
    for layer in range(policy.layers):
        out = policy(Layer(layer, "", grid, index, "cond", sigma), *qkv)
    return out


def gate(device: str, dtype: torch.dtype) -> float:
    """Relative error of a held step against the definition, computed in float32 from two plain attentions."""
    grid = VideoGrid(4, 12, 16)
    drift = Drift(grid.tokens, 2, device, dtype)
    exact = Reuse(1, ReuseConfig(quality=1.0))
    if not torch.equal(step(exact, grid, 0, 1.0, drift.at(1.0)), attend(*drift.at(1.0)).out):
        return float("inf")
    policy = Reuse(1, ReuseConfig(interval=4, warmup=2, damping=1.0))
    for index, sigma in enumerate((1.0, 0.9)):
        step(policy, grid, index, sigma, drift.at(sigma))
    held = step(policy, grid, 2, 0.8, drift.at(0.8)).float()
    first, last = (attend(*drift.at(sigma)).out.float() for sigma in (1.0, 0.9))
    expected = 2 * last - first
    return float((held - expected).norm() / expected.norm())


def seconds(job: Callable[[], object], repeats: int, cuda: bool) -> float:
    """Median time of a job; on CUDA between events, so that only the device's time counts."""
    found = []
    for _ in range(repeats):
        if cuda:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            job()
            after.record()
            torch.cuda.synchronize()
            found.append(before.elapsed_time(after) / 1e3)
        else:
            began = time.perf_counter()
            job()
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def host_seconds(layers: int, repeats: int = 5) -> float:
    """Planning one step of a whole model on the host, measurements taken in."""
    grid = VideoGrid(1, 32, 32)
    q = torch.randn(1, grid.tokens, 1, 32)
    policy = Reuse(layers, ReuseConfig(quality=0.8, warmup=3, rows=8))
    for index in range(4):
        step(policy, grid, index, 1 - index / 50, (q, q, q))
    found = []
    for index in range(4, 4 + 2 * repeats, 2):
        began = time.perf_counter()
        policy._begin(Layer(0, "", grid, index, "cond", 1 - index / 50), q, q, q)
        found.append(time.perf_counter() - began)
        step(policy, grid, index + 1, 1 - (index + 1) / 50, (q, q, q))
    return statistics.median(found)


def measure(name: str, tokens: VideoGrid, stack: int, device: str, dtype: torch.dtype, repeats: int) -> dict:
    layers, heads = SHAPES[name]
    drift, cuda = Drift(tokens.tokens, heads, device, dtype), device == "cuda"
    qkv = drift.at(1.0)
    result: dict = {"layers": layers, "heads": heads, "tokens": tokens.tokens, "stack": stack}
    with torch.no_grad():
        attend(*qkv)  # compiled, tuned and warm
        plain = seconds(lambda: [attend(*qkv).out for _ in range(stack)], repeats, cuda) / stack
        for label, config in (
            ("interval", ReuseConfig(interval=INTERVAL, warmup=3, memory_gib=1e6)),
            ("quality", ReuseConfig(quality=1e-9, warmup=3, memory_gib=1e6, max_hold=10**6)),
        ):
            policy = Reuse(stack, config)
            counter = iter(range(10**6))

            def one(policy: Reuse = policy, counter: object = counter) -> None:
                index = next(counter)  # type: ignore[call-overload]
                step(policy, tokens, index, 1 - index / 1000, qkv)

            warm = [seconds(one, 1, cuda) for _ in range(3)]  # noqa: F841 - the last of them remembers everything
            anchors, held = [], []
            for _ in range(INTERVAL * repeats):
                took = seconds(one, 1, cuda) / stack
                record = policy.records[-1]
                (anchors if bool(record.fresh.all()) else held).append(took)
            branch = policy.requests[""].branches["cond"]
            anchor = statistics.median(anchors) if anchors else seconds_of_anchor(policy, tokens, qkv, cuda) / stack
            mean_held = statistics.median(held)
            result[label] = {
                "anchor_ms": 1e3 * anchor, "held_ms": 1e3 * mean_held,
                "overhead": (max(anchor - plain, 0.0) + (INTERVAL - 1) * mean_held) / INTERVAL / plain,
                "held_gib_per_layer": branch.bytes() / stack / GIB,
            }  # fmt: skip
            del policy, branch
    result["plain_ms"] = 1e3 * plain
    result["plan_ms"] = 1e3 * host_seconds(layers)
    result["plan_share"] = result["plan_ms"] / (layers * result["plain_ms"])
    state = tokens.tokens * heads * (DIM * 2 + 4) / GIB
    result["whole_model_gib"] = {ranks: 2 * layers * state / ranks for ranks in (1, 4, 8)}
    result["share_of_layers_held_in_32_gib"] = {ranks: min(1.0, 32 / (layers * state / ranks)) for ranks in (1, 4, 8)}
    return result


def seconds_of_anchor(policy: Reuse, grid: VideoGrid, qkv: tuple[Tensor, Tensor, Tensor], cuda: bool) -> float:
    """An anchor of a policy that has made none: the guidance bends."""
    request = policy.requests[""]
    index, sigma = request.steps["cond"]
    policy._guidance = lambda: "other"
    return seconds(lambda: step(policy, grid, index + 1, sigma - 1e-3, qkv), 1, cuda)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON result")
    parser.add_argument("--grid", type=int, nargs=3, default=(21, 45, 80), help="latent tokens: frames, height, width")
    parser.add_argument("--layers", type=int, default=2, help="layers of the timed stack")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    error = gate(device, dtype)
    if not error <= (1e-2 if dtype == torch.bfloat16 else 1e-5):
        print(f"the gate is red: relative error {error:.1e}; no times")
        return 1
    grid = VideoGrid(*options.grid)
    machine = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    result: dict = {"gate_relative_error": error, "machine": machine, "torch": torch.__version__, "models": {}}
    for name in options.models:
        found = result["models"][name] = measure(name, grid, options.layers, device, dtype, options.repeats)
        for label in ("interval", "quality"):
            part = found[label]
            print(
                f"{name}, {label}: attention {found['plain_ms']:.2f} ms a layer, anchor {part['anchor_ms']:.2f}, "
                f"held {part['held_ms']:.3f}, overhead {part['overhead']:.2%} of attention a step"
            )
        print(f"{name}: planning {found['plan_ms']:.2f} ms a step, {found['plan_share']:.2%} of it")
    worst = max(
        m[label]["overhead"] + m["plan_share"] for m in result["models"].values() for label in ("interval", "quality")
    )
    result |= {"worst_overhead": worst, "bar": BAR, "month": time.strftime("%Y-%m")}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"reuse_overhead_{device}_{time.strftime('%Y%m')}.json"
        (options.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if device == "cpu" or worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
