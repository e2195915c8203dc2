"""Attention kernels on one NVIDIA GPU, side by side: the same tensors, the same kept tiles, one process.

    python benchmarks/bench_attention.py [--out benchmarks/results] [--data real_qkv.safetensors] [--quick] [--large]

Ours (sparse forward, backward, selection; on Triton and on flash-attn-4), cuDNN, flash in torch, FlexAttention,
flash-attn-4 dense and block-sparse (128-token tiles), FastVideo's VSA; those not installed are left out, and named. A
correctness gate comes first (attention_gate.py): ours must be right or nothing is timed; a peer that is wrong is not
timed. Kernels of 128-token tiles get lists of the same density, and, at equal recall, the budget that their tiles need
for half of the true mass.

Times are medians of CUDA events in milliseconds, after a warm-up, under steady load; rows with `rest_s` idle before
each timing, so that the card is cool and clocks higher. Lists are built inside our times and outside the
peers'. The limit is the kept work (4 D operations a pair forward, 10 D backward) at 789 TFLOP/s, the rate of a bf16
matrix product on an H200. Writes attention_<card>_<yyyymm>.json, two plots, and kernels_<card>_<yyyymm>.json, the table
that predictions of a training step are made from. The last line printed is JSON. Exits with 1 if the gate is red.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from attention_gate import gate
from attention_kernels import KERNELS, Case, Job, tensors
from torch import Tensor

from foveate.kernels import triton_select
from foveate.tiles import VideoGrid

RATE = 789e12  # operations a second
GRID = VideoGrid(16, 26, 20)  # of real_qkv
BUDGETS = (0.026, 0.2, 0.6)


# Timing


def milliseconds(job: Job, rest: float = 0.0) -> float:
    """Median of CUDA-event timings: at least 3, as many as fit into a third of a second, 15 at most.

    rest: seconds of idling before each of 3 timings: the card has cooled then, and clocks as high as in a short test.
    """
    job()
    times: list[float] = []
    while len(times) < 3 or (not rest and sum(times) < 330 and len(times) < 15):
        time.sleep(rest)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        job()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


class Bench:
    """Rows of results, and the time that is left."""

    def __init__(self, seconds: float, verdicts: dict[str, str]):
        self.deadline = time.monotonic() + seconds
        self.verdicts = verdicts
        self.rows: list[dict] = []

    def run(self, name: str, case: Case, rest: float = 0.0, **note: object) -> None:
        if name in self.verdicts:
            return
        row = {"kernel": name, "length": case.length, "heads": case.heads, "dim": case.dim, "budget": case.budget}
        row |= {"lists": case.lists, **note} | ({"rest_s": rest} if rest else {})
        if time.monotonic() > self.deadline:
            row["skipped"] = "out of time"
        else:
            try:
                build, query_tile, kv_tile = KERNELS[name]
                if query_tile and kv_tile:  # real lists cannot keep every share exactly
                    row["kept"] = round(float(case.mask(query_tile, kv_tile).float().mean()), 4)
                forward, backward = build(case)
                row["forward_ms"], row["backward_ms"] = (milliseconds(job, rest) for job in (forward, backward))
            except Exception as error:
                row["skipped"] = f"{type(error).__name__}: {str(error)[:200]}"
        self.add(row)

    def select(self, length: int, heads: int, dim: int, tile: int = 64) -> None:
        q, k, *_ = tensors(length, heads, dim)
        a, b = (torch.randn(heads, dim, 16, device="cuda") * 0.3 for _ in "ab")
        for rule, value in (("budget", 0.1), ("mass_target", 0.5)):
            options = {"scale": dim**-0.5, rule: torch.full((heads,), value, device="cuda")}
            row = {"kernel": "select", "length": length, "heads": heads, "dim": dim, "budget": 0.1, "rule": rule}
            # Several in a row, so that launches overlap with work, as they do in a model.
            job = partial(triton_select.predict_words, q, k, a, b, **options, query_tile=tile, kv_tile=tile)
            row |= {"tile": tile, "forward_ms": milliseconds(lambda job=job: [job() for _ in range(8)]) / 8}
            self.add(row)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        torch.cuda.empty_cache()
        print(line(row), flush=True)


def line(row: dict) -> str:
    times = row.get("skipped") or " + ".join(f"{row[n]:8.3f}" for n in ("forward_ms", "backward_ms") if n in row)
    size = f"{row['length']:7d} x {row['heads']} x {row['dim']:3d}"
    what = f"{size}  {row['budget']:6.1%} {row.get('lists', row.get('rule'))}"
    return f"{row['kernel']:24s} {what:44s} {times} {row.get('recall', '')}{' rested' * ('rest_s' in row)}"


# What is run


def true_mass(path: Path) -> dict[tuple[int, int], Tensor]:
    """Attention mass float32 (H, R, N) of real queries and keys by (query tile, key tile), in tile order."""
    from safetensors.torch import load_file

    data = load_file(path)
    q, k = (data[f"step0.{n}"][0, GRID.order()].cuda().float().transpose(0, 1) for n in "qk")
    masses: dict[tuple[int, int], list[Tensor]] = {(64, 64): [], (128, 64): [], (128, 128): []}
    for queries, keys in zip(q, k, strict=True):
        shares = (queries @ keys.T * q.shape[-1] ** -0.5).softmax(-1)
        for (query_tile, kv_tile), found in masses.items():
            found.append(shares.unflatten(0, (-1, query_tile)).mean(1).unflatten(-1, (-1, kv_tile)).sum(-1))
    return {tiles: torch.stack(found) for tiles, found in masses.items()}


def budget_for(mass: Tensor, recall: float) -> float:
    """The smallest budget at which the best tiles hold `recall` of the mass, on average over rows and heads."""
    reached = mass.sort(-1, descending=True).values.cumsum(-1).mean((0, 1))
    return (int((reached < recall).sum()) + 1) / mass.shape[-1]


SPARSE = ("foveate", "foveate, query tile 128", "foveate on fa4", "fa4 sparse")
POOLED = ("foveate, pooled", "foveate on fa4, pooled")


def run_all(bench: Bench, mass: dict, quick: bool, large: bool) -> None:
    for length in (131072, 32768):
        for dim in (128, 64):
            case = Case(length, 8, dim, 0.1, inputs=tensors(length, 8, dim), mass=mass)
            for name in [*SPARSE, *POOLED, "foveate 128x128", "foveate 128x128, pooled", "vsa"]:
                bench.run(name, case)
            for name in ("cudnn dense", "fa4 dense"):
                bench.run(name, dense(case))
            if mass:
                for name in (*SPARSE, *POOLED):
                    bench.run(name, with_lists(case, 0.1, "real"))
            for tile in (64, 128):
                bench.select(length, 8, dim, tile)
            if mass and (length, dim) == (131072, 128):
                equal_recall(bench, case, mass)
        if quick:
            return
    for length in (131072, 32768):
        case = Case(length, 8, 128, inputs=tensors(length, 8, 128))
        for budget in BUDGETS:
            for name in (*SPARSE, *POOLED):
                bench.run(name, with_lists(case, budget, "random"))
    if large:
        bench.run("foveate", Case(524288, 12, 128, 0.1, inputs=tensors(524288, 12, 128)))
        bench.select(524288, 12, 128)
    for length in (32768, 131072):
        case = Case(length, 8, 128, 0.1, inputs=tensors(length, 8, 128))
        bench.run("flash dense", dense(case))
        bench.run("flex", case)


def equal_recall(bench: Bench, case: Case, mass: dict) -> None:
    """At half of the true mass: each kernel with the budget that its own tiles need."""
    for name in SPARSE:
        tiles = KERNELS[name][1:]
        for lists in ("random", "real"):
            bench.run(name, with_lists(case, budget_for(mass[tiles], 0.5), lists), recall=0.5)


def with_lists(case: Case, budget: float, lists: str) -> Case:
    return Case(case.length, case.heads, case.dim, budget, lists, case.inputs, case.mass)


def dense(case: Case) -> Case:
    return Case(case.length, case.heads, case.dim, 1.0, "all", case.inputs)


# Results


def limit_ms(row: dict) -> float:
    return 14 * row["length"] ** 2 * row["dim"] * row["heads"] * row["budget"] / RATE * 1e3


PRICED = ("foveate", "foveate, pooled", "foveate on fa4", "foveate on fa4, pooled", "cudnn dense", "fa4 dense")


def cost_table(rows: list[dict]) -> list[dict]:
    """Rows of length x heads x dim x density x tile -> ms of the kernels there are for training, and of selection."""
    selects = {
        (r["length"], r["heads"], r["dim"], r["tile"]): r["forward_ms"] for r in rows if r.get("rule") == "budget"
    }
    table = []
    for row in rows:
        name = row["kernel"]
        if "forward_ms" not in row or {"recall", "rest_s"} & row.keys() or name not in PRICED:
            continue
        tile = KERNELS[name][2] or 64
        key = (row["length"], row["heads"], row["dim"])
        table.append({
            "kernel": name, "length": key[0], "heads": key[1], "dim": key[2], "density": row["budget"], "tile": tile,
            "lists": row["lists"], "periphery": "pool" if "pooled" in name else "drop",
            "forward_ms": row["forward_ms"], "backward_ms": row["backward_ms"],
            "select_ms": 0.0 if row["lists"] == "all" else selects.get((*key, tile)),
        })  # fmt: skip
    return table


def plot(rows: list[dict], x: str, fixed: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    plain = [r for r in rows if "backward_ms" in r and not {"recall", "rest_s"} & r.keys()]
    chosen = [r for r in plain if all(r[n] == v for n, v in fixed.items())]
    dense_rows = [r for r in plain if r["lists"] == "all" and r["dim"] == 128]
    figure, axes = plt.subplots(figsize=(7, 5))
    for name in dict.fromkeys(r["kernel"] for r in chosen):
        points = sorted((r[x], r["forward_ms"] + r["backward_ms"]) for r in chosen if r["kernel"] == name)
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    limits = sorted({(r[x], limit_ms(r)) for r in chosen})
    if limits:
        axes.plot(*zip(*limits, strict=True), "k--", label="limit at 789 TFLOP/s")
    for row in dense_rows:
        total = row["forward_ms"] + row["backward_ms"]
        if x == "budget" and row["length"] == fixed["length"]:
            axes.axhline(total, ls=":", color="gray")
            axes.annotate(row["kernel"], (axes.get_xlim()[0], total), fontsize=8)
    title = ", ".join(f"{name} {value}" for name, value in fixed.items())
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel="ms, forward + backward", title=title)
    axes.set_xticks([place for place, _ in limits], [f"{place:g}" for place, _ in limits], minor=False)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def write(out: Path, rows: list[dict], verdicts: dict[str, str]) -> None:
    card = torch.cuda.get_device_name().lower().split()[-1]
    stamp = f"{card}_{time.strftime('%Y%m')}"
    facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "month": time.strftime("%Y-%m")}
    out.mkdir(parents=True, exist_ok=True)
    result = {**facts, "limit_flops": RATE, "left_out": verdicts, "rows": rows}
    (out / f"attention_{stamp}.json").write_text(json.dumps(result, indent=1) + "\n")
    half = {str(KERNELS[r["kernel"]][2]): r["budget"] for r in rows if "recall" in r and r["kernel"] in PRICED}
    table = {**facts, "half_mass": half, "rows": cost_table(rows)}
    (out / f"kernels_{stamp}.json").write_text(json.dumps(table, indent=1) + "\n")
    fixed = {"lists": "random", "dim": 128}
    plot(rows, "budget", {**fixed, "length": 131072}, out / f"attention_budget_{stamp}.png")
    plot(rows, "length", {**fixed, "budget": 0.1}, out / f"attention_length_{stamp}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for JSON and plots")
    parser.add_argument("--data", type=Path, help="real_qkv.safetensors: lists with real structure, equal recall")
    parser.add_argument("--seconds", type=float, default=540, help="start no measurement after this many seconds")
    parser.add_argument(
        "--only", nargs="+", metavar="KERNEL", help="kernels whose names begin so, 'foveate cudnn', say"
    )
    parser.add_argument("--quick", action="store_true", help="131,072 tokens, 10 %% kept only")
    parser.add_argument("--large", action="store_true", help="also 524,288 tokens x 12 heads")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU; benchmarks/bench_attention_cpu.py runs without one")
        return 2
    began = time.monotonic()
    chosen = [name for name in KERNELS if name.startswith(tuple(options.only or [""]))]
    verdicts, green = gate(chosen)
    verdicts |= {name: "not asked for" for name in KERNELS if name not in chosen}
    for name, verdict in verdicts.items():
        print(f"left out: {name}: {verdict}")
    if not green:
        print("the gate is red; no times")
        return 1
    bench = Bench(options.seconds - (time.monotonic() - began), verdicts)
    mass = true_mass(options.data) if options.data else {}
    try:
        run_all(bench, mass, options.quick, options.large)
    finally:
        if options.out:
            write(options.out, bench.rows, verdicts)
    print(json.dumps({"left_out": verdicts, "rows": bench.rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
