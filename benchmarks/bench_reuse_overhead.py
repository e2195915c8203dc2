"""What state reuse costs besides attention: planner and cache, as a share of a denoising step, at Wan's shapes.

    python benchmarks/bench_reuse_overhead.py [--out DIR] [--grid 21 45 80] [--layers 4]

diffusers' Wan 2.1 with random weights, `--layers` of its blocks (1.3B: 30 of 12 heads x 128, 14B: 40 of 40), at
720p x 81 frames (21 x 45 x 80 = 75,600 tokens), one branch, timing only. An anchor is compared with an exact step, a
held step with one whose self-attention is not there at all: what is left is what reuse costs, on the device and, where
the device waits for it, on the host. Planning is timed apart, for the whole model. The overhead of a mean step follows
for an anchor every third step.

A correctness gate comes first: exact mode is bit by bit plain attention, and a held step follows the definition of the
extrapolation. Exits with 1 where the overhead is above 2 % of a step on CUDA.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from foveate import ReuseConfig, VideoGrid, attend, reuse
from foveate.attention import Dense, Layer, Policy
from foveate.held.around import saying
from foveate.held.attention.budget import Budget
from foveate.held.attention.mode import Course
from foveate.held.attention.policy import HoldStates
from foveate.held.places import Place
from foveate.held.tracker import RUNNING, Branch, Forward, Inputs, Request
from foveate.models import adapters

TARGET = 0.02


class Shape(NamedTuple):
    layers: int
    heads: int
    ffn: int


SHAPES = {"Wan-1.3B": Shape(30, 12, 8960), "Wan-14B": Shape(40, 40, 13824)}
DIM, INTERVAL, GIB = 128, 3, 2**30


class Drift:
    """q, k, v of every layer: fixed parts plus the noise level times others, made anew a step into the same memory."""

    def __init__(self, tokens: int, heads: int, device: str, dtype: torch.dtype):
        draw = torch.Generator(device).manual_seed(0)
        self._base = [torch.randn(1, tokens, heads, DIM, generator=draw, device=device, dtype=dtype) for _ in range(4)]

    def at(self, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
        *qkv, other = self._base
        return tuple(torch.add(x, other, alpha=0.3 * sigma) for x in qkv)  # type: ignore[return-value]


class Driven:
    """The policy of held states with one request and branch, called layer by layer."""

    def __init__(self, layers: int, config: ReuseConfig):
        self.layers, warmup = layers, config.warmup or 5
        config = replace(config, warmup=warmup)
        self.policy = HoldStates(layers, config, Budget(config, list), None, None)
        self.branch = Branch(0, "cond", "cond", None, {})
        self.request = Request(1, Place(0, 1.0), (), state=Course(), warm_until=warmup)

    def forward(self, layer: Layer) -> Forward:
        """The one that a layer is part of."""
        place = Place(layer.step or 0, layer.sigma or 0.0, layer.branch)
        return Forward(self.request, self.branch, place, Inputs((), {}, None, None, {}))

    def __call__(self, layer: Layer, *qkv: Tensor) -> Tensor:
        with saying(RUNNING, self.forward(layer)):
            return self.policy(layer, *qkv)


def step(policy: Driven, grid: VideoGrid, index: int, sigma: float, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    out = qkv[0]
    for layer in range(policy.layers):
        out = policy(Layer(layer, "", grid, index, "cond", sigma), *qkv)
    return out


def gate(device: str, dtype: torch.dtype) -> float:
    """Relative error of a held step against the definition, computed in float32 from two plain attentions."""
    grid = VideoGrid(4, 12, 16)
    drift = Drift(grid.tokens, 2, device, dtype)
    exact = Driven(1, ReuseConfig(hold="attention", quality=1.0))
    if not torch.equal(step(exact, grid, 0, 1.0, drift.at(1.0)), attend(*drift.at(1.0)).out):
        return float("inf")
    policy = Driven(1, ReuseConfig(hold="attention", interval=4, warmup=2, damping=1.0))
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
    policy = Driven(layers, ReuseConfig(hold="attention", quality=0.8, warmup=3, rows=8))
    for index in range(4):
        step(policy, grid, index, 1 - index / 50, (q, q, q))
    found = []
    for index in range(4, 4 + 2 * repeats, 2):
        layer = Layer(0, "", grid, index, "cond", 1 - index / 50)
        began = time.perf_counter()
        policy.policy._begin(policy.forward(layer), layer, q)
        found.append(time.perf_counter() - began)
        step(policy, grid, index + 1, 1 - (index + 1) / 50, (q, q, q))
    return statistics.median(found)


def wan(name: str, layers: int, device: str, dtype: torch.dtype) -> WanTransformer3DModel:
    """Blocks of that model, random weights."""
    with torch.device(device):
        model = WanTransformer3DModel(
            num_attention_heads=SHAPES[name].heads, attention_head_dim=DIM, ffn_dim=SHAPES[name].ffn, num_layers=layers
        )
    for part in (
        model.patch_embedding,
        model.condition_embedder,
        model.blocks,
        model.proj_out,
    ):  # not rope
        part.to(dtype)
    return model.eval()


def without_attention(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v


class Steps:
    """Forwards of one model, timed, at noise levels that fall."""

    def __init__(self, model: WanTransformer3DModel, grid: VideoGrid, device: str, dtype: torch.dtype):
        self.model, self.cuda, self.grid = model, device == "cuda", grid
        latent = torch.randn(1, 16, grid.frames, 2 * grid.height, 2 * grid.width, device=device, dtype=dtype)
        text = torch.randn(1, 512, 4096, device=device, dtype=dtype)
        self._inputs = {"hidden_states": latent, "encoder_hidden_states": text, "return_dict": False}
        self._time = torch.ones(1, device=device, dtype=torch.int64)

    def forward(self, index: int = 0) -> None:
        self.model(**self._inputs, timestep=1000 * self._time - index)

    def plain(self, policy: Policy, repeats: int) -> float:
        """Seconds of a step by a policy that remembers nothing."""
        installed = adapters.install(self.model, policy)
        try:
            self.forward()
            return seconds(self.forward, repeats, self.cuda)
        finally:
            installed.remove()

    def reused(self, config: ReuseConfig, repeats: int) -> tuple[float, float, float]:
        """Seconds of an anchor and of a held step, and GiB held a layer."""
        handle = reuse(self.model, config)
        bend = iter(range(10**6))
        try:
            anchors, held = [], []
            for index in range(4 + INTERVAL * repeats):
                if config.interval is None and len(held) >= repeats:
                    assert handle._tracker.newest is not None
                    handle._tracker.newest.guidance = (next(bend),)  # guidance bends: an anchor by order
                with handle.during(step=index, sigma=1 - index / 1000, branch="cond"):
                    took = seconds(lambda index=index: self.forward(index), 1, self.cuda)
                if index >= 3:  # everything is compiled, and remembered
                    (anchors if bool(handle.report().steps[-1].fresh.all()) else held).append(took)
            gib = handle.bytes_held() / len(self.model.blocks) / GIB
        finally:
            handle.remove()
        return statistics.median(anchors), statistics.median(held), gib


def measure(name: str, grid: VideoGrid, stack: int, device: str, dtype: torch.dtype, repeats: int) -> dict:
    layers, heads = SHAPES[name].layers, SHAPES[name].heads
    steps = Steps(wan(name, stack, device, dtype), grid, device, dtype)
    result: dict = {"layers": layers, "heads": heads, "tokens": grid.tokens, "stack": stack}
    with torch.no_grad():
        exact = steps.plain(Dense(), repeats)
        bare = steps.plain(without_attention, repeats)
        for label, config in (
            ("interval", ReuseConfig(hold="attention", interval=INTERVAL, warmup=3, memory_gib=1e6)),
            ("quality", ReuseConfig(hold="attention", quality=1e-9, warmup=3, memory_gib=1e6, max_hold=10**6)),
        ):
            anchor, held, gib = steps.reused(config, repeats)
            more = max(anchor - exact, 0.0) + (INTERVAL - 1) * max(held - bare, 0.0)
            result[label] = {
                "anchor_ms": 1e3 * anchor / stack, "held_ms": 1e3 * held / stack,
                "overhead": more / INTERVAL / exact, "overhead_of_attention": more / INTERVAL / (exact - bare),
                "held_gib_per_layer": gib,
            }  # fmt: skip
    result |= {"exact_ms": 1e3 * exact / stack, "without_attention_ms": 1e3 * bare / stack}
    result["plan_ms"] = 1e3 * host_seconds(layers)
    result["plan_share"] = result["plan_ms"] / (layers * result["exact_ms"])
    state = grid.tokens * heads * (DIM * 2 + 4) / GIB
    result["whole_model_gib"] = {ranks: 2 * layers * state / ranks for ranks in (1, 4, 8)}
    result["share_of_layers_held_in_32_gib"] = {ranks: min(1.0, 32 / (layers * state / ranks)) for ranks in (1, 4, 8)}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON result")
    parser.add_argument("--grid", type=int, nargs=3, default=(21, 45, 80), help="latent tokens: frames, height, width")
    parser.add_argument("--layers", type=int, default=4, help="layers of the timed stack")
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
                f"{name}, {label}: a layer {found['exact_ms']:.2f} ms, anchor {part['anchor_ms']:.2f}; without "
                f"attention {found['without_attention_ms']:.2f}, held {part['held_ms']:.2f}; overhead "
                f"{part['overhead']:.2%} of a step, {part['overhead_of_attention']:.2%} of its attention"
            )
        print(f"{name}: planning {found['plan_ms']:.2f} ms a step, {found['plan_share']:.2%} of it")
    worst = max(
        m[label]["overhead"] + m["plan_share"] for m in result["models"].values() for label in ("interval", "quality")
    )
    result |= {"worst_overhead": worst, "target": TARGET, "month": time.strftime("%Y-%m")}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"reuse_overhead_{device}_{time.strftime('%Y%m')}.json"
        (options.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if device == "cpu" or worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
