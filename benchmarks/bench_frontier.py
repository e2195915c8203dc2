"""What an output error costs: time of choosing, forward and backward over the error of attention on real q, k, v.

    python benchmarks/bench_frontier.py --data real_qkv.safetensors [--out benchmarks/results]

Error: relative L2 of the output on the data's own 8,320 tokens and three heads of dim 64, each method choosing its own
tiles, against dense attention in float64. Time: the same kept tiles, repeated over 131,072 tokens and 8 heads; lists
are made inside our times and outside the peers'. Ours, flash-attn-4 and FlexAttention choose by octant means at full
rank (no predictor is trained on what it is scored on), FastVideo's VSA by tile means, as it does. The gate of
bench_attention.py comes first. Writes frontier_<card>_<yyyymm>.json and a plot. The last line printed is JSON.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from attention_gate import gate, relative
from attention_kernels import KERNELS, Case, first, is_ours, tensors
from bench_attention import GRID, dense, milliseconds
from torch import Tensor

from foveate.kernels import bits, reference, triton_select

LENGTH, HEADS, DIM = 131072, 8, 64
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3)
METHODS = {
    "foveate 64, drop": "foveate",
    "foveate 64, pool": "foveate, pooled",
    "foveate 128, drop": "foveate 128x128",
    "foveate 128, pool": "foveate 128x128, pooled",
    "foveate on fa4, drop": "foveate on fa4",
    "foveate on fa4, pool": "foveate on fa4, pooled",
    "flash-attn-4, drop": "fa4 sparse",
    "FlexAttention, drop": "flex",
    "FastVideo VSA, drop": "vsa",
}
PEER, PEER_BUDGET = "flash-attn-4, drop", 0.2
DENSE = ("cudnn dense", "fa4 dense")


def layers(path: Path) -> dict[str, tuple[Tensor, ...]]:
    """q, k, v (1, S, H, D) of each layer or step in a file, in tile order."""
    from safetensors.torch import load_file

    data = load_file(path)
    names = sorted({name.rpartition(".")[0] for name in data if name.endswith(".v")})
    order = GRID.order()
    return {name: tuple(data[f"{name}.{part}"][:, order].cuda().contiguous() for part in "qkv") for name in names}


def choose(kernel: str, q: Tensor, k: Tensor, budget: float) -> Tensor:
    """Words of the tiles that a method keeps."""
    _, query_tile, kv_tile = KERNELS[kernel]
    if kernel == "vsa":
        means = [x.transpose(1, 2).unflatten(2, (-1, 64)).mean(3) for x in (q, k)]
        scores = means[0] @ means[1].mT
        best = scores.topk(max(1, round(budget * scores.shape[-1])), -1).indices
        return bits.pack(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True))
    share = torch.full((q.shape[2],), budget, device=q.device)
    options = {"query_tile": query_tile, "kv_tile": kv_tile, "scale": q.shape[-1] ** -0.5, "budget": share}
    return triton_select.predict_words(q, k, **options)


def case_of(kernel: str, qkv: tuple[Tensor, ...], budget: float) -> Case:
    """The layer itself, with the tiles that the method chooses in it."""
    q, k, v = qkv
    _, query_tile, kv_tile = KERNELS[kernel]
    assert query_tile
    assert kv_tile
    kept = bits.unpack(choose(kernel, q, k, budget), -(-q.shape[1] // kv_tile))[0].float()
    count = kept.sum(-1).amax() / kept.shape[-1]
    mass = {(query_tile, kv_tile): kept}
    inputs = (q, k, v, torch.randn_like(q))
    return Case(q.shape[1], q.shape[2], q.shape[3], float(count), "real", inputs, mass)


def measure(method: str, layer: str, qkv: tuple[Tensor, ...], whole: Tensor, budget: float, timed: bool) -> dict:
    """One point: output error on the layer, by head too, and milliseconds at full size where `timed`."""
    kernel = METHODS[method]
    case = case_of(kernel, qkv, budget)
    row = {"method": method, "layer": layer, "budget": budget, "kept": round(case.budget, 4)}
    out = first(KERNELS[kernel][0](case)[0]())
    out = out if is_ours(kernel) or kernel.startswith("fa4") else out.transpose(1, 2)
    row |= {"error": relative(out, whole), "by_head": [relative(out[:, :, h], whole[:, :, h]) for h in range(3)]}
    if timed:
        inputs = tensors(LENGTH, HEADS, DIM)
        full = replace(case, length=LENGTH, heads=HEADS, inputs=inputs)
        forward, backward = KERNELS[kernel][0](full)
        several = partial(choose, kernel, *inputs[:2], budget)
        row["choose_ms"] = milliseconds(lambda: [several() for _ in range(4)]) / 4  # launches overlap, as in a model
        row["forward_ms"], row["backward_ms"] = milliseconds(forward), milliseconds(backward)
        row["ms"] = row["choose_ms"] + row["forward_ms"] + row["backward_ms"]
    return row


def time_at(points: list[dict], error: float) -> float | None:
    """Milliseconds at which a method reaches an error: straight lines on logarithmic axes between its points.

    Where its cheapest point is better still, that point's time; None where its best is worse.
    """
    curve = sorted((row["error"], row["ms"]) for row in points)
    if error >= curve[-1][0]:
        return curve[-1][1]
    for (e0, t0), (e1, t1) in pairwise(curve):
        if e0 <= error <= e1:
            return t0 * (t1 / t0) ** (math.log(error / e0) / math.log(e1 / e0))
    return None


def summary(rows: list[dict]) -> dict:
    """By layer: the error of flash-attn-4 dropping at 20 % kept, and each method's time there over flash-attn-4's."""
    found = {}
    for layer in dict.fromkeys(row["layer"] for row in rows):
        here = [row for row in rows if row["layer"] == layer and "ms" in row]
        peer = [row for row in here if row["method"] == PEER and row["budget"] == PEER_BUDGET]
        if not peer:
            continue
        times = {m: time_at(own, peer[0]["error"]) for m in METHODS if (own := [r for r in here if r["method"] == m])}
        ratios = {m: None if t is None else round(t / peer[0]["ms"], 3) for m, t in times.items()}
        found[layer] = {"error": round(peer[0]["error"], 4), "fa4_ms": round(peer[0]["ms"], 2), "over_fa4": ratios}
    return found


def plot(rows: list[dict], baselines: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layer = rows[0]["layer"]
    figure, axes = plt.subplots(figsize=(7, 5))
    for method in METHODS:
        points = sorted(
            (r["error"], r["ms"]) for r in rows if r["method"] == method and r["layer"] == layer and "ms" in r
        )
        if points:
            style = "-" if is_ours(METHODS[method]) else "--"
            axes.plot(*zip(*points, strict=True), style, marker="o", ms=4, label=method)
    for name, ms in baselines.items():
        axes.axhline(ms, ls=":", color="gray")
        axes.annotate(name, (axes.get_xlim()[0], ms), fontsize=8)
    title = f"real q, k, v ({layer}); {LENGTH} x {HEADS} x {DIM}"
    axes.set(
        yscale="log", xlabel="relative error of the output", ylabel="ms, choosing + forward + backward", title=title
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def write(out: Path, result: dict) -> None:
    stem = f"frontier_{torch.cuda.get_device_name().lower().split()[-1]}_{time.strftime('%Y%m')}"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result["rows"], result["dense_ms"], out / f"{stem}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="real_qkv.safetensors")
    parser.add_argument("--out", type=Path, help="folder for JSON and plot")
    parser.add_argument("--without", nargs="+", default=[], metavar="METHOD", help="methods whose names begin so")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 2
    methods = [m for m in METHODS if not m.startswith(tuple(options.without) or ("-",))]
    verdicts, green = gate([*(METHODS[m] for m in methods), *DENSE])
    if not green:
        print(f"the gate is red; no times: {verdicts}")
        return 1
    case = dense(Case(LENGTH, HEADS, DIM, inputs=tensors(LENGTH, HEADS, DIM)))
    built = {name: KERNELS[name][0](case) for name in DENSE if name not in verdicts}
    baselines = {name: sum(milliseconds(job) for job in jobs) for name, jobs in built.items()}
    rows = []
    for number, (layer, qkv) in enumerate(layers(options.data).items()):
        q, k, v = (x.double() for x in qkv)
        whole, _ = reference.forward(q, k, v, None, query_tile=64, kv_tile=64, scale=DIM**-0.5, pooled=None)
        del q, k, v
        for method in methods:
            for budget in BUDGETS if METHODS[method] not in verdicts else ():
                rows.append(measure(method, layer, qkv, whole, budget, timed=number == 0))
                torch.cuda.empty_cache()
                print({n: round(x, 3) if isinstance(x, float) else x for n, x in rows[-1].items()}, flush=True)
    facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "month": time.strftime("%Y-%m")}
    result = {**facts, "left_out": verdicts, "dense_ms": baselines, "summary": summary(rows), "rows": rows}
    if options.out:
        write(options.out, result)
    print(json.dumps({name: result[name] for name in ("left_out", "dense_ms", "summary")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
