"""Context-parallel attention of one layer, forward and backward: ours against Ulysses, ring and USP.

    torchrun --nproc-per-node 4 benchmarks/bench_parallel.py --data ../shared/data/real_qkv.safetensors [--out DIR]

Any number of ranks; NCCL with GPUs, gloo without. q, k, v are real ones (rank 0 reads nothing the others do not): the
heads of the file, both steps, repeated up to --heads. One in two heads is four times denser than the other, --budget on
average.

dense      every key:        ulysses (all-to-all of heads), ring, usp (both, 2-D)
selected   the same tiles:   ulysses, ring (all keys travel, kept tiles are computed), usp; heads in order
           ours:             head-wise with heads by cost, sequence-wise (only selected tiles travel), hybrid

Baselines are this library's own dense layouts: its exchange is the plain one where heads are in order and everything is
selected. What choosing tiles costs (octant keys, one exchange more) is counted for ours and not for the others; all
then compute one given selection. Correctness comes first: out, dq, dk, dv of every row against one process.

Columns, all of forward + backward and by rank: seconds (median of --repeats, slowest rank), compute (CPU seconds of the
computing thread, or GPU seconds, without waiting), exposed (seconds that computing waited for communication), MB sent,
balance (slowest rank's compute over the mean). Where ranks share cores seconds are no claim about speed: bytes and
balance are what carries over.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

from foveate import Predictor, Selection, VideoGrid, attend, select
from foveate.attention import choose_backend
from foveate.costs import here
from foveate.kernels.bits import unpack
from foveate.parallel.balance import imbalance
from foveate.parallel.buffers import Buffers
from foveate.parallel.comm import TRAFFIC, Shards
from foveate.parallel.headwise import Heads, exchange_qkv, own_heads, return_out
from foveate.parallel.plan import LayerLoad, Load, Topology, contiguous, lay_out, plan_parallel
from foveate.parallel.policy import Ranks
from foveate.parallel.ring import attend_ring
from foveate.parallel.sequence import Choice, Job, Kernel, attend_sequence, select_sequence
from foveate.sparsity.sight import true_mass

GRID = VideoGrid(16, 26, 20)  # of the file
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
FETCH_CAP = 0.3
COLUMNS = ("seconds", "compute", "exposed", "mb_sent", "balance")
BYTES_TARGETS = {2: 0.55, 4: 0.52, 8: 0.35}


Three = tuple[Tensor, Tensor, Tensor]


def three(tensors: Iterable[Tensor]) -> Three:
    q, k, v = tensors
    return q, k, v


class Bench:
    """One rank's inputs, and the attention of every method."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.device, self.dtype = device, torch.bfloat16 if device.type == "cuda" else torch.float32
        stored = load(options.data.read_bytes())  # into memory: a mapped file would be read again and again
        whole = [torch.cat([stored[f"step{step}.{name}"] for step in (0, 1)], 2) for name in "qkv"]
        heads = [head % whole[0].shape[2] for head in range(options.heads)]
        self.qkv = three(x[:, GRID.order()][:, :, heads].to(device, self.dtype) for x in whole)
        draw = torch.Generator().manual_seed(0)
        self.dout = torch.randn(self.qkv[0].shape, generator=draw).to(device, self.dtype)
        self.heads, self.dim, self.budget = options.heads, whole[0].shape[3], options.budget
        self.layer = min(options.heads, whole[0].shape[2] // 2)  # heads of the real layer at one step, none repeated
        dense = 1.6 * options.budget
        self.budgets = torch.tensor([dense] * (options.heads // 2) + [dense / 4] * (options.heads - options.heads // 2))
        q, k, _ = self.qkv
        self.predictor = Predictor.fit(q, k)
        self.selection = select(q, k, GRID, predictor=self.predictor, budget=self.budgets.to(device))
        self.ranks = Ranks(dist.get_world_size())
        self.shards = Shards.cut(GRID.tokens, self.ranks.count)
        me = self.ranks.context.rank
        self.mine = slice(self.shards.bounds[me], self.shards.bounds[me + 1])
        self.buffers, self.flips = Buffers(), 0

    def run(self, head: int, kind: str, heads: tuple, leaves: Three) -> Tensor:
        """out of this rank's tokens. kind: dense, ring (selected tiles, all keys travel), tiles (they alone travel)."""
        inner, outer = self.ranks.of(head)
        at = outer.rank * head
        run = Shards(tuple(b - self.shards.bounds[at] for b in self.shards.bounds[at : at + head + 1]))
        merged, assigned = self.shards.merged(head), Heads(heads)
        q, k, v = exchange_qkv(*leaves, assigned, run, inner, "layer")
        kernel = Kernel(self.dim**-0.5)
        mine = own_heads(assigned, 1, inner, self.device)
        first, stop = merged.bounds[outer.rank : outer.rank + 2]
        words = self.selection.words[:, mine][:, :, first // 64 : -(-stop // 64)].contiguous()
        if kind == "dense":
            out = attend_ring(q, k, v, merged, outer, kernel, "layer").out
        elif kind == "ring":
            out = attend_ring(q, k, v, merged, outer, kernel, "layer", words).out
        else:
            budgets = self.budgets.to(self.device)[mine]
            choice = Choice(self.predictor.a[mine], self.predictor.b[mine], budgets, GRID.video)
            chosen = select_sequence(q, k, choice, merged, outer, "layer")
            self.flips = (unpack(chosen, GRID.tiles()) != unpack(words, GRID.tiles())).sum()  # ties; stays on device
            out = attend_sequence(q, k, v, words, Job(outer, merged, kernel, None, "layer", self.buffers)).out
        return return_out(out, assigned, 1, run, inner, "layer")

    def step(self, attention: Callable[[Three], Tensor]) -> list[Tensor]:
        """out, dq, dk, dv of this rank's tokens."""
        leaves = three(x[:, self.mine].clone().requires_grad_() for x in self.qkv)
        out = attention(leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout[:, self.mine])]

    def truth(self, selection: Selection | None) -> list[Tensor]:
        """The same from one process, which has everything."""
        leaves = three(x.clone().requires_grad_() for x in self.qkv)
        out = attend(*leaves, selection).out
        return [x[:, self.mine].detach() for x in (out, *torch.autograd.grad(out, leaves, self.dout))]


def methods(bench: Bench) -> dict[str, tuple[int, str, tuple]]:
    """Name -> head degree, kind, heads by rank."""
    count, heads = bench.ranks.count, bench.heads
    middle = next((u for u in (2, 4) if u < count and count % u == 0), None)
    found: dict[str, tuple[int, str, tuple]] = {}
    for kind, label in (("dense", "dense"), ("ring", "selected")):
        if heads >= count:
            found[f"{label} ulysses"] = (count, kind, contiguous(heads, count))
        found[f"{label} ring"] = (1, kind, contiguous(heads, 1))
        if middle:
            found[f"{label} usp"] = (middle, kind, contiguous(heads, middle))
    load = layer_load(bench)
    for name, degree in (("head-wise", count), ("sequence-wise", 1), ("hybrid", middle)):
        if degree and heads >= degree:
            plan = lay_out(load.layers[0], load, topology(bench), here(bench.device), degree)
            found[f"ours {name}"] = (degree, "tiles", plan.heads)
    return found


def layer_load(bench: Bench) -> Load:
    layer = LayerLoad(tuple(bench.budgets.tolist()))
    return Load(layers=(layer,), tokens=GRID.tokens, dim=bench.dim, width=bench.qkv[0].element_size())


def topology(bench: Bench) -> Topology:
    return Topology(ranks=bench.ranks.count)


def relative(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True))


def slowest(numbers: list[float], device: torch.device) -> Tensor:
    """(ranks, numbers) of all ranks."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).cpu()


def measure(bench: Bench, method: tuple, repeats: int) -> dict[str, float]:
    head, kind, heads = method
    runs = []
    for _ in range(repeats):
        TRAFFIC.reset()
        dist.barrier()
        began, worked = time.perf_counter(), time.thread_time()
        bench.step(lambda leaves: bench.run(head, kind, heads, leaves))
        exposed = TRAFFIC.exposed_seconds()  # waits for the device
        took = time.perf_counter() - began
        compute = took - exposed if bench.device.type == "cuda" else time.thread_time() - worked
        runs.append(slowest([took, compute, exposed, TRAFFIC.total], bench.device))
    middle = sorted(runs, key=lambda run: float(run[:, 0].max()))[len(runs) // 2]
    compute = torch.stack([run[:, 1] for run in runs]).median(0).values
    return {
        "seconds": statistics.median(float(run[:, 0].max()) for run in runs),
        "compute": float(compute.max()), "balance": float(compute.max() / compute.mean()),
        "exposed": float(middle[:, 2].mean()), "mb_sent": float(middle[:, 3].mean()) / 1e6,
    }  # fmt: skip


def exchange(bench: Bench, cap: float | None) -> tuple[float, float]:
    """Of the real layer's heads in bfloat16, --budget of the tiles for each: bytes to choose and fetch them, over those
    of a dense exchange of keys and values; and the recall, the attention mass that is kept."""
    _, group = bench.ranks.of(1)
    q, k, v = three(x[:, bench.mine, : bench.layer].bfloat16() for x in bench.qkv)
    budget = torch.full((bench.layer,), bench.budget, device=bench.device)
    a, b = (x[: bench.layer] for x in (bench.predictor.a, bench.predictor.b))
    choice = Choice(a, b, budget, GRID.video, fetch_cap=cap)
    TRAFFIC.reset()
    words = select_sequence(q, k, choice, bench.shards, group, "layer")
    with torch.no_grad():
        job = Job(group, bench.shards, Kernel(bench.dim**-0.5), None, "layer", bench.buffers)
        attend_sequence(q, k, v, words, job)
    dense = (group.size - 1) * 2 * k.numel() * k.element_size()
    kept = unpack(words, GRID.tiles())
    rows = torch.arange(bench.mine.start // 64, -(-bench.mine.stop // 64), device=bench.device)
    queries, keys, _ = three(x[:, :, : bench.layer] for x in bench.qkv)
    mass = true_mass(queries, keys, rows.expand(bench.layer, -1), bench.dim**-0.5)
    total = slowest([TRAFFIC.total, dense, float((mass * kept[0]).sum()), float(mass.sum())], bench.device).sum(0)
    return float(total[0] / total[1]), float(total[2] / total[3])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="safetensors with step0.q ... step1.v in raster order")
    parser.add_argument("--out", type=Path, help="folder for the JSON result and the plot")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        TRAFFIC.timed = True
    else:
        torch.set_num_threads(1)
    code = report(Bench(options, device), options)
    dist.destroy_process_group()
    return code


def report(bench: Bench, options: argparse.Namespace) -> int:
    first, table = dist.get_rank() == 0, methods(bench)
    truths = {kind: bench.truth(None if kind == "dense" else bench.selection) for kind in ("dense", "tiles")}
    errors, flips = {}, 0
    for name, (head, kind, heads) in table.items():
        got = bench.step(lambda leaves, m=(head, kind, heads): bench.run(*m, leaves))
        error = relative(got, truths["dense" if kind == "dense" else "tiles"])
        flipped = float(bench.flips) if kind == "tiles" else 0.0
        worst = slowest([error, flipped], bench.device)
        errors[name], flips = float(worst[:, 0].max()), max(flips, int(worst[:, 1].sum()))
    red = {name: error for name, error in errors.items() if not error <= TOLERANCE[bench.dtype]}
    if red:
        if first:
            print(f"the gate is red, no measurements: relative errors {red}")
        return 1
    rows = {name: measure(bench, method, options.repeats) for name, method in table.items()}
    share, recall = exchange(bench, None)
    share_capped, recall_capped = exchange(bench, FETCH_CAP)
    count, costs = bench.ranks.count, here(bench.device)
    prices = bench.budgets.tolist()
    plan = plan_parallel(layer_load(bench), topology(bench), costs).layers[0]
    result: dict[str, Any] = {
        "what": f"one layer, {GRID.tokens} real tokens, {bench.heads} heads x {bench.dim}, forward + backward, "
        f"{bench.budget:.0%} kept, half the heads four times denser",
        "ranks": count, "backend": dist.get_backend(), "dtype": str(bench.dtype),
        "machine": torch.cuda.get_device_name() if bench.device.type == "cuda" else platform.machine(),
        "cores": torch.get_num_threads() if bench.device.type == "cpu" else None,
        "kernel": choose_backend(bench.device.type)[0], "torch": torch.__version__, "month": time.strftime("%Y-%m"),
        "gate_relative_error": max(errors.values()), "tiles_chosen_otherwise_than_by_one_process": flips,
        "rows": rows,
        "exchange": f"the {bench.layer} heads of one step in bfloat16, {bench.budget:.0%} kept by each",
        "selected_bytes_over_dense_exchange": share, "target": BYTES_TARGETS.get(count),
        "fetch_cap": {"cap": FETCH_CAP, "bytes": share_capped, "recall": recall_capped, "recall_uncapped": recall,
                      "kept_recall": recall_capped / recall},
        "predicted_balance_of_heads": {
            "by cost": imbalance(prices, table["ours head-wise"][2]) if "ours head-wise" in table else None,
            "in order": imbalance(prices, contiguous(bench.heads, count)) if bench.heads >= count else None,
        },
        "planner_would_take": f"head {plan.head} x sequence {plan.sequence}",
    }  # fmt: skip
    if first:
        print(f"gate: relative error at most {max(errors.values()):.1e}; {flips} tiles chosen otherwise (ties)")
        print(f"{'':22}" + "".join(f"{column:>9}" for column in COLUMNS))
        for name, row in rows.items():
            print(
                f"{name:22}"
                + "".join(f"{row[c]:9.3f}" for c in ("seconds", "compute", "exposed", "mb_sent", "balance"))
            )
        if options.out:
            save(result, options.out)
        print(json.dumps(result))
    return 0


def save(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    where = "cpu" if result["backend"] == "gloo" else result["machine"].split()[-1].lower()
    stem = f"parallel_cp{result['ranks']}_{where}_{time.strftime('%Y%m')}"
    (out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, out / f"{stem}.png")


def plot(result: dict[str, Any], path: Path) -> None:
    """Bytes, and balance, by method."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    names = list(rows)
    colors = ["#1a9a9a" if name.startswith("ours") else "#9a9a9a" for name in names]
    parts = (("mb_sent", "MB sent by a rank, forward + backward"), ("balance", "slowest rank's compute / mean"))
    for place, (column, label) in enumerate(parts):
        axes = figure.add_subplot(1, 2, place + 1)
        bars = axes.barh(names, [rows[name][column] for name in names], color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        if place:
            axes.set_yticklabels([])
    figure.suptitle(f"{result['ranks']} ranks, {result['what']}", fontsize=9)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
