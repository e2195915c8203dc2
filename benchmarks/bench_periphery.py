"""Constants of the periphery, one a head: every backend against the oracle, then what they cost beside plain pooling.

    python benchmarks/bench_periphery.py [--length 131072] [--out DIR]      # an NVIDIA GPU; fa4 where flash-attn-4 is
    python benchmarks/bench_periphery.py --device cpu --length 1024

Parity: output, gradients of q, k, v and of the constants, against the oracle in float64, with short last tiles, shared
key/value heads, and heads that are dropped, pooled and weighed beside each other; float32 and the 16-bit dtype. Only
what passed is timed: forward + backward at 10 % kept, 8 heads x 128, random lists. Exit code 1 where parity fails.
The last line is JSON.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveate import attend
from foveate.attention import unavailable
from foveate.kernels import reference
from foveate.tiles import Selection, VideoGrid
from foveate.training.measure import milliseconds, random_words, tensors

BARS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
MIXED = (-torch.inf, -4.0, -2.0, -1.0, -0.5, 0.0, 0.5, -0.25)
WEIGHED = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, -0.25, -1.0)  # no head is dropped: as much work as plain pooling
HEADS, DIM, DENSITY = 8, 128, 0.1


ENGINES = ("torch:64", "triton:64", "triton:128", "fa4:128")  # backend and tokens of a tile
CASES = {torch.float32: (1111, 4, 64), torch.bfloat16: (1500, HEADS, DIM)}  # length, key/value heads, head dim


def parity(backend: str, tile: int, dtype: torch.dtype, device: str) -> float:
    """Largest relative error of the output and of all gradients."""
    length, groups, dim = CASES[dtype]
    draw = torch.Generator(device).manual_seed(length)
    shapes = (1, length, HEADS, dim), (1, length, groups, dim), (1, length, groups, dim), (1, length, HEADS, dim)
    q, k, v, dout = (torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes)
    words = random_words(torch.device(device), length, HEADS, tile, 0.3)
    assert words is not None
    constants = torch.tensor(MIXED, device=device)
    ours = a, b, c, far = tuple(x.clone().requires_grad_() for x in (q, k, v, constants))
    out = attend(a, b, c, Selection(words, VideoGrid(1, 1, length), tile, tile), periphery=far, backend=backend).out
    found = [out.detach(), *torch.autograd.grad(out, ours, dout)]
    theirs = a, b, c, far = tuple(x.double().requires_grad_() for x in (q, k, v, constants))
    out, _ = reference.forward(a, b, c, words, query_tile=tile, kv_tile=tile, scale=dim**-0.5, pooled=far)
    expected = [out.detach(), *torch.autograd.grad(out, theirs, dout.double())]
    pairs = zip(found, expected, strict=True)
    return max(float(((one.double() - truth).norm() / truth.norm()).nan_to_num(torch.inf)) for one, truth in pairs)


def times(backend: str, tile: int, length: int, device: str) -> dict[str, float]:
    """Milliseconds of forward + backward by periphery, the least of three rounds that take turns."""
    where = torch.device(device)
    q, k, v, dout = tensors(where, length, HEADS, DIM)
    words = random_words(where, length, HEADS, tile, DENSITY)
    kinds = {"drop": None, "pool": torch.zeros(HEADS, device=where), "constants": torch.tensor(WEIGHED, device=where)}
    found: dict[str, float] = {}
    ops = torch.ops.foveate
    for _ in range(3):
        for name, constants in kinds.items():
            rest = (words, constants, backend, tile, tile, DIM**-0.5)
            out, lse = ops.attend(q, k, v, *rest, False)

            def both(rest: Any = rest, out: Tensor = out, lse: Tensor = lse) -> None:
                ops.attend(q, k, v, *rest, False)
                ops.attend_backward(dout, None, q, k, v, out, lse, *rest)

            found[name] = min(found.get(name, torch.inf), milliseconds(partial(both), where))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Constants of the periphery: parity, and what they cost.")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows, failed = [], False
    for engine in asked.engines:
        backend, tile = engine.split(":")[0], int(engine.split(":")[1])
        if missing := unavailable(backend, asked.device):
            print(f"left out: {backend} {missing}")
            continue
        row: dict[str, Any] = {"backend": backend, "tile": tile}
        for dtype in BARS:
            if backend == "fa4" and dtype == torch.float32:
                continue  # takes 16 bits only
            error = parity(backend, tile, dtype, asked.device)
            row[f"error_{str(dtype).removeprefix('torch.')}"] = error
            failed |= not error <= BARS[dtype]
            print(f"{backend} {tile}, {dtype}: {error:.1e} against the oracle, bar {BARS[dtype]:.0e}", flush=True)
        if not failed and (backend != "torch" or asked.device == "cpu"):
            row |= times(backend, tile, asked.length, asked.device)
            print(f"{backend} {tile}: {row['pool']:.2f} ms pooled, {row['constants']:.2f} with constants", flush=True)
        rows.append(row)
    print(f"\n{asked.length} x {HEADS} x {DIM}, {DENSITY:.0%} kept, forward + backward, ms")
    for row in rows:
        if "pool" in row:
            extra = 100 * (row["constants"] / row["pool"] - 1)
            shown = "  ".join(f"{name} {row[name]:8.2f}" for name in ("drop", "pool", "constants"))
            print(f"{row['backend']:>6} {row['tile']:>3}  {shown}  constants over pool {extra:+.1f} %")
    card = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    report = {"device": card, "torch": torch.__version__, "month": time.strftime("%Y-%m"), "length": asked.length}
    report |= {"heads": HEADS, "dim": DIM, "density": DENSITY, "rows": rows, "passed": not failed}
    if asked.out:
        hardware = "h200" if "H200" in card else card.split()[-1].lower()
        file = asked.out / f"periphery_{hardware}_{time.strftime('%Y%m')}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
