"""How long a clip takes: Wan-1.3B's shape at 720p x 81 frames, exact with the fastest kernel, compiled, and by plans.

    python benchmarks/bench_clip_time.py [--out DIR] [--grid 21 45 80] [--layers 30] [--steps 50] [--seconds 95]

diffusers' WanTransformer3DModel with random weights, bfloat16, two calls a step (guidance). Calls of each kind are
timed one by one: exact with several kernels, plain and with compiled blocks; the dense calls that teach sparse
attention, and its sparse calls; steps that `reuse` holds. A clip is their sum over a schedule: random weights cannot be
judged by a video, so plans are given as a number of computed steps, which docs/reuse.md pairs with fidelity on a
trained model. A short loop with reuse is timed whole beside its own sum. Text encoder and decoder are not timed.

A gate comes first: all exact variants agree, and sparse attention that keeps everything is exact; or the exit code is
1. The last line printed is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import foveate as fv
from foveate.attention import Dense
from foveate.models import adapters
from foveate.quality import relative_error

ERROR = 3e-2  # relative, between kernels in bfloat16 through all layers of random weights
DENSE_STEPS = 3  # that teach sparse attention


def build(layers: int, heads: int, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=128, in_channels=16, out_channels=16,
            text_dim=4096, freq_dim=256, ffn_dim=8960 * heads // 12, num_layers=layers, rope_max_seq_len=1024,
        )  # fmt: skip
    kept = tuple(WanTransformer3DModel._keep_in_fp32_modules or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(part in kept for part in name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return model.eval().requires_grad_(False)


class Clock:
    """Calls of a model on fixed inputs, timed, until the time is over."""

    def __init__(self, model: Any, grid: tuple[int, int, int], device: str, dtype: torch.dtype, seconds: float):
        self.model, self.device, self.end = model, device, time.monotonic() + seconds
        frames, height, width = grid
        draw = torch.Generator(device).manual_seed(1)
        self.clip = torch.randn(1, 16, frames, 2 * height, 2 * width, generator=draw, device=device, dtype=dtype)
        self.text = torch.randn(1, 512, 4096, generator=draw, device=device, dtype=dtype)

    def call(self, model: Any | None = None, time_now: float = 500.0) -> Tensor:
        now = torch.tensor([time_now], device=self.device)
        return (model or self.model)(self.clip, now, self.text, return_dict=False)[0]

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], times: int = 2) -> float:
        """The median after one call that is not counted."""
        run()
        found = []
        for _ in range(times):
            self.settle()
            began = time.perf_counter()
            run()
            self.settle()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


@contextmanager
def blocks_compiled(model: Any) -> Iterator[None]:
    """Every block by one shared graph, as diffusers' `compile_repeated_blocks` does; taken back afterwards."""
    torch.compiler.reset()
    for block in model.blocks:
        block.compile()
    try:
        yield
    finally:
        for block in model.blocks:
            block._compiled_call_impl = None


def variants(clock: Clock) -> dict[str, Callable[[], Any]]:
    """Exact attention in several ways, by name: context managers."""

    def stacked(*made: Callable[[], Any]) -> Callable[[], ExitStack]:
        def enter() -> ExitStack:
            stack = ExitStack()
            for one in made:
                stack.enter_context(one())
            return stack

        return enter

    def ours() -> Any:
        return adapters.install(clock.model, Dense())

    def compiled() -> Any:
        return blocks_compiled(clock.model)

    def cudnn() -> Any:
        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)

    return {
        "foveate's dense kernel, compiled": stacked(ours, compiled), "cuDNN, compiled": stacked(cudnn, compiled),
        "torch's own choice": stacked(), "foveate's dense kernel": stacked(ours), "cuDNN": stacked(cudnn),
    }  # fmt: skip


@torch.inference_mode()
def exact(clock: Clock, skip: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a call, and the relative difference from torch's own kernel, by variant."""
    expected, took, errors = clock.call(), {}, {}
    for name, enter in variants(clock).items():
        if "compiled" in name and skip:
            continue
        if took and clock.left < 25 + 4 * max(took.values()):
            print(f"out of time: {name}", flush=True)
            continue
        with enter():
            errors[name] = relative_error(clock.call(), expected)
            took[name] = clock.seconds(clock.call)
        print(f"{name:36} {took[name]:8.3f} s a call, differs by {errors[name]:.1e}", flush=True)
    return took, errors


@torch.inference_mode()
def sparse(clock: Clock, share: float, skip: bool) -> dict[str, float]:
    """Seconds of a dense call that teaches, and of a sparse one, compiled unless skipped."""
    expected = clock.call()
    config = fv.SparsityConfig(budget=share, training_free_steps=DENSE_STEPS, force=True)
    handle = fv.sparsify(clock.model, config)
    found = {}

    def at(step: int) -> Tensor:
        handle.installed.set_context(step=step)
        return clock.call()

    at(0)
    at(1)
    clock.settle()
    began = time.perf_counter()
    at(1)
    clock.settle()
    found["teaching call"] = time.perf_counter() - began
    found["sparse call"] = clock.seconds(lambda: at(9))
    if not skip and clock.left > 40:
        with blocks_compiled(clock.model):
            found["sparse call, compiled"] = clock.seconds(lambda: at(9))
    for index in range(len(handle.policy.learners)):
        handle.policy.assign(index, [1.0] * handle.policy.heads, [False] * handle.policy.heads, True)
    found["keeps all, differs by"] = relative_error(at(9), expected)
    handle.remove()
    for name, value in found.items():
        print(f"{share:.0%} kept: {name:28} {value:8.3g}", flush=True)
    return found


@torch.inference_mode()
def held(clock: Clock, steps: int, interval: int) -> dict[str, float]:
    """A loop of two branches with reuse at a fixed interval: its time, its computed calls, and a held call's time."""
    times: dict[bool, list[float]] = {True: [], False: []}
    levels = torch.linspace(1, 0, steps + 1).tolist()
    with fv.reuse(clock.model, fv.ReuseConfig(interval=interval, warmup=2)) as handle:
        clock.settle()
        began = time.perf_counter()
        for step in range(steps):
            for branch in ("cond", "uncond"):
                start = time.perf_counter()
                place = {"step": step, "sigma": levels[step], "then": levels[step + 1], "steps": steps}
                with handle.during(branch=branch, **place):
                    clock.call(time_now=1000 * levels[step])
                clock.settle()
                times[handle.report().steps[-1].hits > 0].append(time.perf_counter() - start)
        whole = time.perf_counter() - began
    assert times[True], "nothing was held"
    return {
        "whole loop": whole, "steps": steps, "computed calls": len(times[False]), "held calls": len(times[True]),
        "computed call": statistics.median(times[False]), "held call": statistics.median(times[True]),
    }  # fmt: skip


def clips(steps: int, call: float, rest: dict[str, float], sparse_calls: dict[str, float]) -> dict[str, float]:
    """Seconds of a clip by plan: two calls a computed step."""
    gap = rest["held call"]
    found = {"exact": 2 * steps * call}
    for share in (0.45, 0.4, 0.32, 0.24):
        computed = round(share * steps)
        found[f"{share:.0%} of the steps computed"] = 2 * (computed * call + (steps - computed) * gap)
    fast = min(value for name, value in sparse_calls.items() if name.startswith("sparse call"))
    teach = sparse_calls["teaching call"]
    found["sparse, every step"] = 2 * (DENSE_STEPS * teach + (steps - DENSE_STEPS) * fast)
    computed = round(0.4 * steps)
    found["sparse, 40% of the steps computed"] = 2 * (
        DENSE_STEPS * teach + (computed - DENSE_STEPS) * fast + (steps - computed) * gap
    )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--grid", type=int, nargs=3, default=(21, 45, 80), help="tokens: frames, height, width")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sparse", type=float, default=0.15, help="share of the tiles kept")
    parser.add_argument("--seconds", type=float, default=95.0, help="what does not fit is left out, and named")
    parser.add_argument("--plain", action="store_true", help="without torch.compile")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build(options.layers, options.heads, device, dtype)
    clock = Clock(model, tuple(options.grid), device, dtype, options.seconds)
    took, errors = exact(clock, options.plain)
    kept = sparse(clock, options.sparse, options.plain)
    best = min(took, key=lambda name: took[name])
    loop = held(clock, 8, 3)
    predicted = loop["computed calls"] * loop["computed call"] + loop["held calls"] * loop["held call"]
    green = max(errors.values()) < ERROR and kept["keeps all, differs by"] < ERROR
    table = clips(options.steps, took[best], loop, kept)
    for name, value in table.items():
        print(f"{name:36} {value:9.2f} s a clip  {value / table['exact']:7.1%}", flush=True)
    card = torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
    record = {
        "machine": card, "torch": torch.__version__, "dtype": str(dtype), "grid": list(options.grid),
        "layers": options.layers, "heads": options.heads, "steps": options.steps, "gate": {"green": green, **errors},
        "exact call": took, "fastest": best, "sparse": {"kept": options.sparse, **kept},
        "loop": loop | {"sum of its calls": predicted}, "clip": table,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"clip_time_{card}_{time.strftime('%Y%m')}.json").write_text(json.dumps(record, indent=1))
    print(json.dumps(record))
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
