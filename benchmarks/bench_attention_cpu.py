"""The `torch` backend against torch's own flash kernel on the CPU, one thread, forward and backward.

    python benchmarks/bench_attention_cpu.py [--out benchmarks/results]

Both on contiguous inputs, in one process, in turn. A correctness gate comes first: on two heads' worth of query tiles
the sparse result must equal the float64 oracle, or no time is printed. Exits with 1 where sparse is not 3 times faster.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from foveate import Selection, VideoGrid, attend

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
BAR = 3.0


def inputs(grid: VideoGrid, heads: int, dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, grid.tokens, dim).requires_grad_() for _ in range(3)]


def random_selection(grid: VideoGrid, heads: int, budget: float) -> Selection:
    tiles = grid.tiles()
    kept = torch.rand(1, heads, tiles, tiles).topk(max(1, round(budget * tiles)), -1).indices
    return Selection.from_dense(torch.zeros(1, heads, tiles, tiles, dtype=torch.bool).scatter_(-1, kept, True), grid)


def gate(budget: float) -> float:
    """Largest relative error of out, dq, dk, dv against the float64 oracle on a smaller grid of the same kind."""
    grid = VideoGrid(5, 15, 21)
    q, k, v = (x.transpose(1, 2) for x in inputs(grid, 2, 64))
    selection, dout = random_selection(grid, 2, budget), torch.randn_like(q)

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, selection=selection, periphery="pool", backend=backend).out
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    pairs = zip(run(torch.float32, "torch"), run(torch.float64, "reference"), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def timed(attention, leaves: list[Tensor], dout: Tensor) -> float:
    """Seconds of one forward and backward."""
    began = time.perf_counter()
    torch.autograd.grad(attention(*leaves), leaves, dout)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON result")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    error = gate(options.budget)
    if not error <= 1e-5:
        print(f"the gate is red: relative error {error:.1e}; no times")
        return 1
    grid, heads, dim = VideoGrid(16, 32, 32), 4, 64
    leaves, dout = inputs(grid, heads, dim), torch.randn(1, heads, grid.tokens, dim)
    selection = random_selection(grid, heads, options.budget)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def sparse(q: Tensor, k: Tensor, v: Tensor, periphery: str = "drop") -> Tensor:
        state = attend(
            *(x.transpose(1, 2) for x in (q, k, v)), selection=selection, periphery=periphery, backend="torch"
        )
        return state.out.transpose(1, 2)

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        flash(*(x[:, :, :256] for x in leaves))
    assert FLASH in {event.key for event in seen.key_averages()}, "torch did not take its flash kernel"
    jobs = {"flash": flash, "drop": sparse, "pool": lambda *x: sparse(*x, periphery="pool")}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(options.repeats):
        for name, job in jobs.items():
            times[name].append(timed(job, leaves, dout))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["flash"] / medians["drop"]
    result = {
        "what": f"{grid.tokens} tokens, {heads} heads x {dim}, float32, {options.budget:.0%} kept, forward + backward",
        "threads": 1,
        "seconds": medians, "times_faster": ratio, "times_faster_pool": medians["flash"] / medians["pool"],
        "gate_relative_error": error, "torch": torch.__version__, "machine": platform.processor() or platform.machine(),
        "month": time.strftime("%Y-%m"),
    }  # fmt: skip
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"attention_cpu_{time.strftime('%Y%m')}.json"
        (options.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
