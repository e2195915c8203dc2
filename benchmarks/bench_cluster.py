"""Attention of a training step on several hosts: ours against Ulysses, ring and USP, dense and with the same tiles.

    torchrun --nproc-per-node 8 benchmarks/bench_cluster.py --data qkv.safetensors --out DIR          # GPUs, NCCL
    python benchmarks/emulated_hosts.py --hosts 2 --ranks 2 --mbit 200 -- \\
        benchmarks/bench_cluster.py --data qkv.safetensors --timed 0.5 --links links.json --out DIR   # emulated hosts

dense   ulysses (all-to-all of heads), ring, usp (both): every key
sparse  the same three with one given selection: heads in order; on rings all keys travel, kept tiles are computed
ours    heads by cost: head-wise, sequence-wise (only selected tiles travel), hybrid, and `planned`: what plan_parallel
        chooses from costs and links before anything is measured

q, k, v are real ones, half of the heads four times denser than the other half, 10 % kept on average. First comes the
gate: out, dq, dk, dv of every method by real kernels against one process, on two frames. --timed: attention is then a
wait as long as the cost table says for so many kept tiles on a device of so many TFLOP/s, and everything else is real:
what is exchanged, when, and what hides behind it. So ranks may share cores; without it kernels run.

Predictions: --measure-links FILE measures the links by plain transfers, no method runs; --links FILE with --predict
writes what that says of all methods, without measuring any; --links FILE alone measures and prints both.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

from foveate import Predictor, Selection, VideoGrid, attend, select
from foveate.costs import PASSES, Costs, Machine, here
from foveate.kernels.bits import unpack
from foveate.parallel.balance import Heads as Assigned
from foveate.parallel.balance import contiguous
from foveate.parallel.buffers import Buffers
from foveate.parallel.comm import TRAFFIC, Shards
from foveate.parallel.headwise import Heads, exchange_qkv, own_heads, return_out
from foveate.parallel.hosts import ask_hosts
from foveate.parallel.layout import RANK, LayerLoad, LayerPlan, Layout, Load, WholeLayer, lay_out
from foveate.parallel.links import measure_links
from foveate.parallel.plan import plan_parallel
from foveate.parallel.policy import Ranks
from foveate.parallel.ring import attend_ring
from foveate.parallel.sequence import Choice, Job, Kernel, attend_sequence, select_sequence
from foveate.parallel.topology import LINKS, Link, Topology
from foveate.tiles import OCTANT, TILE

FRAMES, HEIGHT, WIDTH = 16, 26, 20  # of the file's grid
GATE_FRAMES = 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
EMULATED = Machine(1e12, 0.01, 1.2, 0.04, 0.1, 0.04, 0.0)  # rate from --timed; the rest as on an H200
LINK_SIZES, LINK_REPEATS = (1 << 12, 1 << 16, 1 << 19, 1 << 20), 5  # over slow emulated links
Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Method:
    """kind: dense; ring (kept tiles, all keys travel); tiles (kept tiles travel)."""

    head: int
    kind: str
    heads: Assigned


@dataclass(frozen=True)
class Timed(Kernel):
    """Waits instead of computing. ms: forward and backward of each of this rank's heads over the whole sequence, whose
    kept pairs of tiles (in tokens squared) are `pairs`. Results are zeros."""

    ms: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    pairs: tuple[float, ...] = ()

    def wait(self, index: int, q: Tensor, k: Tensor, words: Tensor | None) -> None:
        began = time.perf_counter()
        if words is None:
            kept = torch.full((q.shape[2],), float(q.shape[1] * k.shape[1]))
        else:
            kept = unpack(words, -(-k.shape[1] // TILE))[0].sum((1, 2)) * float(TILE * TILE)
        share = kept / torch.tensor(self.pairs)
        seconds = float((share * torch.tensor(self.ms[index])).sum()) / 1e3
        time.sleep(max(0.0, began + seconds - time.perf_counter()))

    def forward(self, q, k, v, words, pooled, whole=False, **_):
        self.wait(0, q, k, words)
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, dout, q, k, v, state, words, pooled, whole=False, **_):
        self.wait(1, q, k, words)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class Bench:
    """One rank's inputs, and the attention of every method on them."""

    def __init__(self, options: argparse.Namespace, device: torch.device, frames: int, costs: Costs | None):
        self.device, self.costs = device, costs  # costs: of waits; None: kernels run
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.grid = VideoGrid(frames, HEIGHT, WIDTH)
        stored = load(options.data.read_bytes())
        whole = [
            torch.cat([stored[f"step{step}.{name}"] for step in (0, 1)], 2)[:, : self.grid.tokens] for name in "qkv"
        ]
        heads = [head % whole[0].shape[2] for head in range(options.heads)]
        q, k, v = (x[:, self.grid.order()][:, :, heads].to(device, self.dtype) for x in whole)
        self.qkv: Three = q, k, v
        self.dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).to(device, self.dtype)
        self.heads, self.dim = q.shape[2], q.shape[3]
        dense, half = 1.6 * options.budget, options.heads // 2
        self.budgets = torch.tensor([dense] * half + [dense / 4] * (options.heads - half))
        chosen: list[Any] = [None]
        if dist.get_rank() == 0:  # once: ranks may share cores
            predictor = Predictor.fit(q, k)
            selection = select(q, k, self.grid, predictor=predictor, budget=self.budgets.to(device))
            chosen = [(selection.to("cpu"), predictor.a.cpu(), predictor.b.cpu())]
        dist.broadcast_object_list(chosen, src=0, device=device if device.type == "cuda" else None)
        self.selection: Selection = chosen[0][0].to(device)
        self.predictor = Predictor(*(x.to(device) for x in chosen[0][1:]))
        self.kept = unpack(self.selection.words, self.grid.tiles())[0]  # (H, R, N)
        self.ranks = Ranks(dist.get_world_size())
        self.shards = Shards.cut(self.grid.tokens, self.ranks.count)
        me = self.ranks.context.rank
        self.mine = slice(self.shards.bounds[me], self.shards.bounds[me + 1])
        self.buffers = Buffers()
        density = self.kept.float().mean((1, 2)).tolist()
        degrees = [u for u in range(1, self.ranks.count + 1) if self.ranks.count % u == 0]
        union = {r: self.union(r) for r in degrees if r > 1}
        self.sparse, self.dense = LayerLoad(tuple(density), union=union), LayerLoad((1.0,) * self.heads)
        self.load = Load(layers=(self.sparse,), tokens=self.grid.tokens, dim=self.dim, width=q.element_size())

    def union(self, sequence: int) -> tuple[float, ...]:
        """Of each head: the part of the other shards' tiles that a shard's rows keep together, mean over shards."""
        cut = Shards.cut(self.grid.tokens, self.ranks.count).merged(self.ranks.count // sequence)
        bounds, parts = [-(-bound // TILE) for bound in cut.bounds], []
        for first, stop in itertools.pairwise(bounds):
            any_row = self.kept[:, first:stop].any(1)
            any_row[:, first:stop] = False
            parts.append(any_row.float().sum(1) / (self.grid.tiles() - (stop - first)))
        return tuple(torch.stack(parts).mean(0).tolist())

    def kernel(self, sparse: bool, mine: Tensor) -> Kernel:
        if self.costs is None:
            return Kernel(self.dim**-0.5)
        whole = WholeLayer(self.sparse if sparse else self.dense, self.load, self.costs)
        own = mine.tolist()
        pairs = (
            (self.kept.sum((1, 2)) * float(TILE * TILE)).tolist()
            if sparse
            else [float(self.grid.tokens**2)] * self.heads
        )
        ms = [tuple(float(x[h]) for h in own) for x in (whole.forward, whole.backward)]
        return Timed(self.dim**-0.5, ms=(ms[0], ms[1]), pairs=tuple(pairs[h] for h in own))

    def run(self, method: Method, leaves: Three) -> Tensor:
        """out of this rank's tokens."""
        inner, outer = self.ranks.of(method.head)
        at = outer.rank * method.head
        run = Shards(tuple(b - self.shards.bounds[at] for b in self.shards.bounds[at : at + method.head + 1]))
        merged, assigned = self.shards.merged(method.head), Heads(method.heads)
        q, k, v = exchange_qkv(*leaves, assigned, run, inner, "layer")
        mine = own_heads(assigned, 1, inner, self.device)
        kernel = self.kernel(method.kind != "dense", mine)
        first, stop = merged.bounds[outer.rank : outer.rank + 2]
        words = self.selection.words[:, mine][:, :, first // TILE : -(-stop // TILE)].contiguous()
        if method.kind == "tiles":
            self.choose(q, k, mine, merged, outer)
            out = attend_sequence(q, k, v, words, Job(outer, merged, kernel, None, "layer", self.buffers)).out
        else:
            if method.kind == "ring":
                self.choose(q, k, mine, merged, None)
            out = attend_ring(q, k, v, merged, outer, kernel, "layer", None if method.kind == "dense" else words).out
        return return_out(out, assigned, 1, run, inner, "layer")

    def choose(self, q: Tensor, k: Tensor, mine: Tensor, shards: Shards, group: Any) -> None:
        """What choosing tiles costs; the given selection is used all the same, so that all compute one thing. group:
        None where plain layouts choose: their octant keys are not counted."""
        if self.costs is not None:
            whole = WholeLayer(self.sparse, self.load, self.costs)
            time.sleep(float(whole.select[mine.tolist()].sum()) / 1e3 * q.shape[1] / self.grid.tokens)
            if group is not None:
                rows = [-(-size // OCTANT) for size in shards.sizes]
                group.gather(torch.zeros(rows[group.rank], 1, len(mine), RANK), rows, "octant keys of layer").wait()
        elif group is not None:
            budgets = self.budgets.to(self.device)[mine]
            choice = Choice(self.predictor.a[mine], self.predictor.b[mine], budgets, self.grid.video)
            select_sequence(q, k, choice, shards, group, "layer")

    def leaves(self) -> Three:
        q, k, v = (x[:, self.mine].clone().requires_grad_() for x in self.qkv)
        return q, k, v

    def truth(self, selection: Selection | None) -> list[Tensor]:
        """out, dq, dk, dv of this rank's tokens, from one process that has everything."""
        q, k, v = leaves = tuple(x.clone().requires_grad_() for x in self.qkv)
        out = attend(q, k, v, selection).out
        return [x[:, self.mine].detach() for x in (out, *torch.autograd.grad(out, leaves, self.dout))]


def methods(bench: Bench, topology: Topology, costs: Costs) -> dict[str, Method]:
    count, heads = bench.ranks.count, bench.heads
    middle = next((u for u in (2, 4) if u < count and count % u == 0), None)
    degrees = {"ulysses": count if heads >= count else None, "ring": 1, "usp": middle}
    found = {
        f"{label} {name}": Method(degree, kind, contiguous(heads, degree))
        for kind, label in (("dense", "dense"), ("ring", "sparse"))
        for name, degree in degrees.items()
        if degree
    }
    for name, degree in (("head-wise", degrees["ulysses"]), ("sequence-wise", 1), ("hybrid", middle)):
        if degree:
            plan = lay_out(bench.sparse, bench.load, topology, costs, degree)
            found[f"ours {name}"] = Method(degree, "tiles", plan.heads)
    planned = plan_parallel(bench.load, topology, costs).layers[0]
    found["ours planned"] = Method(planned.head, "tiles", planned.heads)
    return found


def predict(
    bench: Bench, method: Method, topology: Topology, costs: Costs, passes: tuple[str, ...] = PASSES
) -> LayerPlan:
    layer = bench.dense if method.kind == "dense" else bench.sparse
    whole = WholeLayer(layer, replace(bench.load, passes=passes), costs)
    return Layout(whole, topology, method.head, "tiles" if method.kind == "tiles" else "ring").plan(method.heads)


def everyone(numbers: list[float], device: torch.device) -> Tensor:
    """(ranks, numbers)."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).cpu()


def measure(bench: Bench, method: Method, repeats: int) -> dict[str, Any]:
    """Seconds of the slowest rank in the fastest repeat, after one more; waited: for communication, mean of ranks."""
    runs = []
    for _ in range(repeats + 1):
        leaves = bench.leaves()
        TRAFFIC.reset()
        dist.barrier()
        began = time.perf_counter()
        out = bench.run(method, leaves)
        _finish(bench.device)
        forward = time.perf_counter() - began
        torch.autograd.grad(out, leaves, bench.dout[:, bench.mine])
        _finish(bench.device)
        took = time.perf_counter() - began
        runs.append(everyone([forward, took, TRAFFIC.exposed_seconds(), TRAFFIC.total / 1e6], bench.device))
    best = min(runs[1:], key=lambda run: float(run[:, 1].max()))
    forward, seconds, waited = float(best[:, 0].max()), float(best[:, 1].max()), float(best[:, 2].mean())
    sent = float(runs[-1][:, 3].max())
    return {
        "seconds": seconds, "forward": forward, "backward": seconds - forward, "waited": waited, "mb_sent": sent,
        "all_seconds": [float(run[:, 1].max()) for run in runs[1:]],
    }  # fmt: skip


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def gate(options: argparse.Namespace, device: torch.device, topology: Topology, costs: Costs) -> float:
    """The largest relative error of any method's out, dq, dk, dv against one process, by real kernels."""
    bench = Bench(options, device, GATE_FRAMES, None)
    worst = 0.0
    truths = {kind: bench.truth(None if kind == "dense" else bench.selection) for kind in ("dense", "kept")}
    for method in methods(bench, topology, costs).values():
        leaves = bench.leaves()
        out = bench.run(method, leaves)
        got = [out.detach(), *torch.autograd.grad(out, leaves, bench.dout[:, bench.mine])]
        truth = truths["dense" if method.kind == "dense" else "kept"]
        error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, truth, strict=True))
        worst = max(worst, error if error == error else float("inf"))
    return float(everyone([worst], device).max())


def join() -> torch.device:
    """Join torchrun's ranks, on GPUs where there are any. This rank's device."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        TRAFFIC.timed = True
    torch.set_num_threads(1)
    return device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="safetensors with step0.q ... step1.v in raster order")
    parser.add_argument("--out", type=Path, help="folder for the JSON result")
    parser.add_argument("--name", default="", help="of the result, besides ranks and month")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--frames", type=int, default=FRAMES, help="of 520 tokens each, at most 16")
    parser.add_argument("--timed", type=float, help="TFLOP/s of an emulated device: waits instead of kernels")
    parser.add_argument("--measure-links", type=Path, help="measure links as `foveate plan --measure`, here, and stop")
    parser.add_argument("--links", type=Path, help="links that --measure-links has written")
    parser.add_argument("--predict", action="store_true", help="write predictions and stop, nothing is measured")
    options = parser.parse_args()
    code = report(options, join())
    dist.barrier()
    dist.destroy_process_group()
    return code


def report(options: argparse.Namespace, device: torch.device) -> int:
    first = dist.get_rank() == 0
    if options.measure_links:
        found = measure_links(LINK_SIZES if options.timed else (), LINK_REPEATS)
        if first:
            options.measure_links.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps({kind: found[kind] for kind in ("intra", "inter")}, indent=1))
        return 0
    timed = options.timed and Costs(
        f"emulated device of {options.timed} TFLOP/s", machine=replace(EMULATED, rate=options.timed * 1e12)
    )
    costs = timed or here(device)
    count = dist.get_world_size()
    topology = Topology(ranks=count, hosts=ask_hosts().of_replica(count), intra=LINKS["nvlink"], inter=LINKS["ib400"])
    if options.links:
        given = json.loads(options.links.read_text())
        topology = replace(topology, intra=Link(**given["intra"]), inter=Link(**given["inter"]))
    bench = Bench(options, device, options.frames, timed or None)
    table = methods(bench, topology, costs)
    predicted = {name: predict(bench, method, topology, costs).ms / 1e3 for name, method in table.items()}
    result: dict[str, Any] = {
        "what": f"attention of one layer, forward + backward, {bench.grid.tokens} real tokens, {bench.heads} heads x "
        f"{bench.dim}, {options.budget:.0%} kept on average, half of the heads four times denser",
        "ranks": bench.ranks.count, "hosts": topology.host_of, "costs": costs.source, "timed": bool(timed),
        "links": {"intra": asdict(topology.intra), "inter": asdict(topology.inter)}, "month": time.strftime("%Y-%m"),
        "union": {k: sum(v) / len(v) for k, v in bench.sparse.union.items()},  # type: ignore
        "layouts": {name: {"head": m.head, "kind": m.kind, "heads": m.heads} for name, m in table.items()},
        "predicted": predicted,
    }  # fmt: skip
    if not options.predict:
        error = gate(options, device, topology, costs)
        result["gate_relative_error"] = error
        if not error <= TOLERANCE[bench.dtype]:
            if first:
                print(f"the gate is red, no measurements: relative error {error:.1e}")
            return 1
        result["rows"] = {name: measure(bench, method, options.repeats) for name, method in table.items()}
    if first:
        show(result)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            stem = f"{'predicted' if options.predict else 'cluster'}_{options.name or device.type}"
            file = options.out / f"{stem}_{count}_{time.strftime('%Y%m')}.json"
            file.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))
    return 0


def show(result: dict[str, Any]) -> None:
    rows, misses = result.get("rows", {}), []
    print(f"{'seconds':20}{'predicted':>10}{'measured':>10}{'off':>8}{'forward':>9}{'waited':>8}{'MB sent':>9}")
    for name, told in result["predicted"].items():
        line = f"{name:20}{told:10.3f}"
        if name in rows:
            row = rows[name]
            misses.append(abs(told / row["seconds"] - 1))
            line += f"{row['seconds']:10.3f}{told / row['seconds'] - 1:+8.1%}"
            line += f"{row['forward']:9.3f}{row['waited']:8.3f}{row['mb_sent']:9.1f}"
        print(line)
    if rows:
        plain = min(row["seconds"] for name, row in rows.items() if not name.startswith("ours"))
        ratio = plain / rows["ours planned"]["seconds"]
        print(f"predictions off by {statistics.median(misses):.1%} (median), {max(misses):.1%} (most)")
        print(f"planned {ratio:.2f} times faster than the best plain layout")


if __name__ == "__main__":
    sys.exit(main())
