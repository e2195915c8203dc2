"""What attention costs on this machine, measured once: `foveate doctor --measure`.

The table is kept for this card and these versions of torch, triton and flash-attn-4, and every later run here goes by
it (`costs.py`): which tiles and kernels are taken, where sparse attention pays, how a plan is made. Runs never time
anything themselves, so they repeat; ranks of several hosts want the same table (FOVEATE_COSTS names one).

Every kernel must first agree with the oracle in float64. Lists are random, which no kernel can profit from.

Shapes: B batch = 1, S tokens, H heads, D head dim, R query tiles, N key tiles.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveate import costs
from foveate.attention import unavailable
from foveate.kernels import bits, reference
from foveate.sparsity.select import select
from foveate.tiles import VideoGrid

HEADS = 8
LENGTHS = {"cpu": (2048, 8192), "cuda": (16384, 65536)}
DIMS = {"cpu": (64,), "cuda": (64, 128)}
DENSITIES = (0.05, 0.2)
CHECKED = 700  # tokens of the comparison with the oracle: a short last tile
BARS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
Say = Callable[[str], object]
Engine = tuple[str, str, int, bool]  # name in the table, backend, tile (0: dense), whether the periphery is pooled


def measure(device: torch.device, say: Say = print, *, lengths: Sequence[int] = (), heads: int = HEADS) -> Path:
    """Measure, save and return the file. RuntimeError where a kernel is wrong: nothing is saved then."""
    rows: list[dict[str, Any]] = []
    for dim in DIMS[device.type]:
        running = [engine for engine in engines(device) if runs(device, dim, engine, say)]
        for length in lengths or LENGTHS[device.type]:
            rows += measure_length(device, length, heads, dim, running, say)
    about = {"card": costs.name_of(device), "month": time.strftime("%Y-%m"), "versions": costs.versions()}
    path = costs.own_table(device.type, costs.name_of(device))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "half_mass": costs.HALF_MASS, "rows": rows}, indent=1) + "\n")
    costs.load(path)
    costs.for_device.cache_clear()
    return path


def engines(device: torch.device) -> list[Engine]:
    """Kernels to measure."""
    if device.type == "cpu":
        found = [
            ("torch dense", "torch", 0, False),
            ("torch", "torch", 64, False),
            ("torch, pooled", "torch", 64, True),
        ]
    else:
        found = [("cudnn dense", "torch", 0, False), ("foveate", "triton", 64, False)]
        found += [("foveate, pooled", "triton", 64, True), ("fa4 dense", "fa4", 0, False)]
        found += [(costs.ON_128, "fa4", 128, False), (f"{costs.ON_128}, pooled", "fa4", 128, True)]
    return [engine for engine in found if unavailable(engine[1], device.type) is None]


def runs(device: torch.device, dim: int, engine: Engine, say: Say) -> bool:
    """Whether a kernel serves this card and head dim; RuntimeError where it does, wrongly."""
    name, backend, tile, pooled = engine
    try:
        error = check(device, dim, backend, tile, pooled)
    except (ValueError, ImportError) as refused:
        say(f"left out: {name}, head dim {dim}: {refused}")
        return False
    if error > BARS[dtype_of(device)]:
        raise RuntimeError(f"{name}, head dim {dim}: differs from the oracle by {error:.1e}; no table is made")
    return True


def measure_length(
    device: torch.device, length: int, heads: int, dim: int, running: Sequence[Engine], say: Say
) -> list[dict[str, Any]]:
    """Rows of one length and head dim."""
    rows = []
    chosen = {tile: select_ms(device, length, heads, dim, tile) for tile in {e[2] for e in running} if tile}
    for name, backend, tile, pooled in running:
        for density in DENSITIES if tile else (1.0,):
            forward, backward = jobs(device, length, heads, dim, backend, tile, pooled, density)
            row = {"kernel": name, "length": length, "heads": heads, "dim": dim, "density": density, "tile": tile or 64}
            row |= {"lists": "random" if tile else "all", "periphery": "pool" if pooled else "drop"}
            row |= {"forward_ms": milliseconds(forward, device), "backward_ms": milliseconds(backward, device)}
            rows.append(row | {"select_ms": chosen.get(tile, 0.0)})
            times = f"{row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms"
            say(f"{name}, {length} x {heads} x {dim}, {density:.0%}: {times}")
    return rows


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def tensors(device: torch.device, length: int, heads: int, dim: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, (1, S, H, D)."""
    draw = torch.Generator(device).manual_seed(0)
    shape = 1, length, heads, dim
    return [torch.randn(shape, device=device, generator=draw).to(dtype_of(device)) for _ in range(4)]


def random_words(device: torch.device, length: int, heads: int, tile: int, density: float) -> Tensor | None:
    """Words of random lists, as many tiles in every row; None where `tile` is 0."""
    if not tile:
        return None
    count = -(-length // tile)
    lots = torch.rand(1, heads, count, count, device=device, generator=torch.Generator(device).manual_seed(1))
    best = lots.topk(max(1, round(density * count)), -1).indices
    return bits.pack(torch.zeros_like(lots, dtype=torch.bool).scatter_(-1, best, True))


def jobs(
    device: torch.device, length: int, heads: int, dim: int, backend: str, tile: int, pooled: bool, density: float
) -> tuple[Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]:
    """Forward and backward, as attention runs them."""
    q, k, v, dout = tensors(device, length, heads, dim)
    words = random_words(device, length, heads, tile, density)
    rest = (words, torch.zeros(heads, device=device) if pooled else None, backend, tile or 64, tile or 64, dim**-0.5)
    ops = torch.ops.foveate
    out, lse = ops.attend(q, k, v, *rest, False)
    backward = partial(ops.attend_backward, dout, None, q, k, v, out, lse, *rest)
    return partial(ops.attend, q, k, v, *rest, False), backward


def check(device: torch.device, dim: int, backend: str, tile: int, pooled: bool) -> float:
    """The largest relative error of output and gradients against the oracle in float64."""
    forward, backward = jobs(device, CHECKED, 2, dim, backend, tile, pooled, 0.4)
    q, k, v, dout = (x.double() for x in tensors(device, CHECKED, 2, dim))
    leaves = q, k, v = [x.requires_grad_() for x in (q, k, v)]
    words, tiles = random_words(device, CHECKED, 2, tile, 0.4), {"query_tile": tile or 64, "kv_tile": tile or 64}
    far = torch.zeros(2, device=device) if pooled else None
    out, _ = reference.forward(q, k, v, words, **tiles, scale=dim**-0.5, pooled=far)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    pairs = zip([forward()[0], *backward()], expected, strict=True)
    return max(float(((a.double() - b).norm() / b.norm()).nan_to_num(torch.inf)) for a, b in pairs)


def select_ms(device: torch.device, length: int, heads: int, dim: int, tile: int) -> float:
    q, k, *_ = tensors(device, length, heads, dim)
    return milliseconds(
        partial(select, q, k, VideoGrid(1, 1, length), budget=0.1, query_tile=tile, kv_tile=tile), device
    )


def milliseconds(job: Callable[[], object], device: torch.device) -> float:
    """The shortest of three runs after a warm-up: other load only adds."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    return min(times[1:])
