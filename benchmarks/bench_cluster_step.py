"""Whole training steps on several GPUs or hosts: ours against dense Ulysses and ring, from the same weights.

    torchrun --nproc-per-node 8 benchmarks/bench_cluster_step.py --width 1536 --depth 12 --heads 12 \\
        --clip 21 90 160 --out DIR                                                           # GPUs, NCCL
    python benchmarks/emulated_hosts.py --hosts 2 --ranks 2 --mbit 50 -- benchmarks/bench_cluster_step.py --out DIR

foveate's own video DiT with random weights, a flow-matching loss, AdamW; a step is forward, backward, the mean of
gradients over ranks and the optimiser. `dense ulysses` and `dense ring` are foveate's exact layouts, `ours` is
`sparsify` at --budget with `parallelize` at every degree that divides the ranks. On a GPU attention is the fastest
kernel there; on emulated hosts everything is computed for real on the shared cores, which is slow but no guess.

Gate, before anything is timed: loss and gradients of every layout, dense and sparse at a budget of all tiles, against
one rank's own dense step. The sparse runs count their sparse calls.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_cluster import everyone, join
from torch import Tensor, nn

import foveate as fv
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.parallel.comm import TRAFFIC
from foveate.parallel.hosts import ask_hosts
from foveate.tiles import CUBE

TOLERANCE = {"cpu": 1e-4, "cuda": 3e-2}  # of gradients, relative; bfloat16 on a GPU
NEVER = 1 << 30


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=options.width, depth=options.depth, heads=options.heads))
    for weight in model.parameters():  # gates begin at 0, and attention behind them would reach nothing
        if not weight.any():
            nn.init.normal_(weight, std=0.02)
    return model.to(device)


def batch(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    clip, noise = (torch.randn(1, 3, *options.clip, generator=draw).to(device) for _ in range(2))
    return clip, noise, torch.tensor([0.5], device=device)


def loss_of(model: nn.Module, clip: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    with torch.autocast(clip.device.type, torch.bfloat16, enabled=clip.is_cuda):
        found = model((1 - sigma) * clip + sigma * noise, sigma)
    return (found.float() - (noise - clip)).square().mean()


def layouts(ranks: int) -> dict[str, tuple[bool, int]]:
    """Of each method whether it is sparse, and its head-wise degree."""
    degrees = [head for head in range(1, ranks + 1) if ranks % head == 0]
    return {"dense ulysses": (False, ranks), "dense ring": (False, 1)} | {
        f"ours {head} x {ranks // head}": (True, head) for head in degrees
    }


@contextmanager
def laid_out(model: nn.Module, head: int, ranks: int, budget: float | None) -> Iterator[tuple[Any, Any]]:
    """The model on these ranks; with a budget sparse from its next step on."""
    sparse = None
    if budget is not None:
        config = fv.SparsityConfig(
            budget=budget, warmup=1, learn_from=1, often=NEVER, rare=NEVER, tile_shape=CUBE, force=True
        )
        sparse = fv.sparsify(model, config)
    parallel = fv.parallelize(model, fv.ParallelConfig(head=head, sequence=ranks // head))
    yield sparse, parallel
    parallel.remove()
    if sparse is not None:
        sparse.remove()


def gradients(model: nn.Module, data: tuple[Tensor, ...], reduce: Callable[[], None]) -> tuple[float, list[Tensor]]:
    loss = loss_of(model, *data)
    loss.backward()
    reduce()
    found = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return loss.item(), found


def gate(model: nn.Module, data: tuple[Tensor, ...], ranks: int) -> float:
    """The largest relative difference of a gradient, over all layouts and ranks, to a rank's own dense step."""
    loss, truth = gradients(model, data, lambda: None)
    worst = 0.0
    for sparse, head in layouts(ranks).values():
        twin = copy.deepcopy(model)
        with laid_out(twin, head, ranks, 1.0 if sparse else None) as (handle, parallel):
            steps = 2 if sparse else 1  # the first one of a sparse run is dense
            for _ in range(steps):
                found = gradients(twin, data, parallel.reduce_gradients)
                if handle is not None:
                    handle.step()
            if handle is not None:
                count_sparse(handle, model)
        worst = max(worst, abs(found[0] / loss - 1))
        for one, other in zip(found[1], truth, strict=True):
            worst = max(worst, float((one - other).norm() / other.norm().clamp_min(1e-12)))
    return float(everyone([worst], data[0].device).max())


def count_sparse(handle: Any, model: nn.Module, steps: int = 1) -> int:
    calls, least = handle.policy.computed["sparse"], steps * len(model.blocks)  # pyright: ignore[reportArgumentType]
    if calls < least:
        raise RuntimeError(f"{calls} sparse calls of at least {least}: the run was not sparse")
    return calls


def timed(model: nn.Module, data: tuple[Tensor, ...], head: int, budget: float | None, steps: int) -> dict[str, Any]:
    """Seconds of the slowest rank, the median of `steps`, after those that warm up."""
    ranks, device = dist.get_world_size(), data[0].device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with laid_out(model, head, ranks, budget) as (handle, parallel):
        took = []
        for step in range(steps + 2):
            dist.barrier()
            TRAFFIC.reset()
            began = time.perf_counter()
            loss_of(model, *data).backward()
            parallel.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if handle is not None:
                handle.step()
            parallel.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if step >= 2:
                took.append(float(everyone([time.perf_counter() - began], device).max()))
        waited, sent = (
            everyone([TRAFFIC.exposed_seconds(), TRAFFIC.total / 1e6], device).reshape(ranks, 2).max(0).values
        )
        found = {"seconds": statistics.median(took), "waited": float(waited), "mb_sent": float(sent)}
        if handle is not None:
            found["sparse_calls"] = count_sparse(handle, model, steps)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--clip", type=int, nargs=3, default=(8, 64, 64), help="frames, height, width")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the JSON result")
    options = parser.parse_args()
    device = join()
    code = report(options, device)
    dist.barrier()
    dist.destroy_process_group()
    return code


def report(options: argparse.Namespace, device: torch.device) -> int:
    ranks, hosts = dist.get_world_size(), len(set(ask_hosts().of))
    model, data = build(options, device), batch(options, device)
    error = gate(model, data, ranks)
    if error > TOLERANCE[device.type]:
        if dist.get_rank() == 0:
            print(f"the gate is red: a gradient is off by {error:.1e}")
        return 1
    rows = {
        name: timed(copy.deepcopy(model), data, head, options.budget if sparse else None, options.steps)
        for name, (sparse, head) in layouts(ranks).items()
    }
    if dist.get_rank() == 0:
        best = {
            kind: min(row["seconds"] for name, row in rows.items() if name.startswith(kind))
            for kind in ("dense", "ours")
        }
        result = {
            "what": f"training step, own DiT {options.width} x {options.depth}, {options.heads} heads, clip "
            f"{'x'.join(map(str, options.clip))}, {100 * options.budget:g}% kept", "device": device.type,
            "ranks": ranks, "hosts": hosts, "gate": error, "rows": rows,
            "times_faster": best["dense"] / best["ours"], "month": time.strftime("%Y-%m"),
        }  # fmt: skip
        for name, row in rows.items():
            print(f"{name:16} {row['seconds']:7.2f} s  waited {row['waited']:6.2f} s  sent {row['mb_sent']:8.1f} MB")
        print(json.dumps(result))
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            file = options.out / f"cluster_step_{device.type}_{hosts}x{ranks // hosts}_{time.strftime('%Y%m')}.json"
            file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
