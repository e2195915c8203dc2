"""Reuse alone, sparse attention alone, and both, on the small trained Wan: fidelity over attention and over time.

    python benchmarks/bench_sparse_reuse.py [--out DIR] [--steps 16] [--frames 12] [--videos 1] [--minutes 60]

All without training: predictors get their closed form in the first dense steps, then each layer keeps a share of its
key tiles, the rest pooled, and `reuse` leaves whole calls out at fixed intervals. Beside them tiles as two peers choose
them, the others dropped: the nearest in space and time (as sliding tile attention, STA), and those whose mean key has
the largest product with the mean query (as SpargeAttn's first filter and VSA); their own kernels want a GPU. A video is
judged against the exact one of the same noise (PSNR, SSIM). Attention is counted where kernels are called, in
query-key pairs over the exact run's: kept tiles of sparse calls, and a pair for each query and pooled tile; what
choosing and lessons cost is in the time alone, which on a CPU is processor time. Settings are fixed beforehand, none is
chosen by its result.

The gate, first, on short clips: quality 1 beside sparse attention that keeps everything is the exact video; and the
exact run's attention is what the model's shape says; or the exit code is 1.
Writes sparse_reuse_<machine>_<yyyymm>.json; the last line printed is JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import study_peers
import tiny_wan
import torch
from bench_generate import Bench, counting
from generation_methods import Method
from generation_summary import Outcome
from torch import Tensor

import foveate as fv
import foveate.attention
from foveate.models import adapters

DENSE_STEPS, GATE_DB = 3, 60.0
INTERVALS, BUDGETS = (2, 3, 4, 6), (0.7, 0.5, 0.3, 0.15)


def method(family: str, interval: int, budget: float | None, peer: Any = None) -> Method:
    """interval 1: nothing is held. budget None: attention is dense. peer: what chooses tiles, in place of ours."""

    @contextmanager
    def install(pipe: Any) -> Iterator[Any]:
        sparse = None
        if peer is not None:
            sparse = adapters.install(pipe.transformer, DenseFirst(budget, peer))
        elif budget is not None:
            config = fv.SparsityConfig(budget=budget, training_free_steps=DENSE_STEPS, force=True)
            sparse = fv.sparsify(pipe.transformer, config)
        with fv.reuse(pipe, fv.ReuseConfig(interval=interval)) as handle:
            yield handle
        if sparse is not None:
            sparse.remove()

    parts = "" if interval == 1 else f"every {interval}", "" if budget is None else f"{budget:.0%} kept"
    return Method(family, ", ".join(filter(None, parts)), install)


class DenseFirst:
    """A peer's tiles after the first steps."""

    def __init__(self, budget: Any, choose: Any):
        self.keys: Any = None
        self.given = study_peers.Given(budget, 64, lambda given, layer, q: choose(given, layer, q, self.keys))

    def __call__(self, layer: fv.Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer.step is not None and layer.step < DENSE_STEPS:
            return fv.attend(q, k, v).out
        self.keys = k
        return self.given(layer, q, k, v)


def nearest(policy: Any, layer: fv.Layer, q: Tensor, _: Tensor) -> fv.Selection:
    return study_peers.window(policy, layer, q)


def by_means(policy: Any, layer: fv.Layer, q: Tensor, k: Tensor) -> fv.Selection:
    """The key tiles whose mean has the largest product with a query tile's mean."""
    means = [
        torch.stack([part.mean(1) for part in x.split(policy.tile, 1)], 2) for x in (q, policy.keys)
    ]  # (B, H, N, D)
    scores = means[0] @ means[1].transpose(-1, -2)
    best = scores.topk(max(1, round(policy.budget * scores.shape[-1])), -1).indices
    kept = torch.zeros(scores.shape, dtype=torch.bool, device=q.device).scatter_(-1, best, True)
    return fv.Selection.from_dense(kept, layer.grid)


def methods() -> list[Method]:
    """In turn by family, so that a time limit leaves something of each."""
    reuse = [method("reuse", interval, None) for interval in INTERVALS]
    sparse = [method("sparse", 1, budget) for budget in BUDGETS]
    both = [method("both", interval, budget) for interval in INTERVALS[:3] for budget in BUDGETS[:3]]
    peers = [
        method(name, 1, budget, choose)
        for budget in BUDGETS[1:3]
        for name, choose in (("nearest tiles, as STA", nearest), ("tile means, as SpargeAttn", by_means))
    ]
    rest = [*sparse[1:3], *both[:2], *peers[2:], *both[3:5], sparse[0], *both[6:8], sparse[3], *peers[:2]]
    return [*reuse, *rest, both[2], both[5], both[8]]


def above(results: list[Outcome], family: str, others: str) -> dict[str, int]:
    """How many settings of a family no setting of the others beats in both cost and fidelity, by either of two each."""
    mine = [one for one in results if one.family == family]
    rest = [one for one in results if one.family == others]
    found = []
    for cost in (lambda x: x.attention, lambda x: x.seconds):
        for worth in (lambda x: x.db, lambda x: sum(x.ssim)):
            free = [one for one in mine if not any(cost(x) <= cost(one) and worth(x) >= worth(one) for x in rest)]
            found.append(len(free))
    return dict(zip(("attention, PSNR", "attention, SSIM", "time, PSNR", "time, SSIM"), found, strict=True)) | {
        "of": len(mine)
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--frames", type=int, default=tiny_wan.FRAMES)
    parser.add_argument("--videos", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="settings that do not fit are left out, and named")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    end = time.monotonic() + 60 * options.minutes
    prompts, seeds = tiny_wan.GAMES[::2][: options.videos], range(options.videos)
    results, left_out = list[Outcome](), list[str]()
    with counting() as counter:
        model, size = tiny_wan.load(device=device), (tiny_wan.HEIGHT, tiny_wan.WIDTH)
        short = Bench(model, 5, (2, *size), counter)
        gate = short.judge(method("gate", 1, 1.0), prompts, seeds)
        bench = Bench(model, options.steps, (options.frames, *size), counter)
        clips, exact = bench.generate(method("exact", 1, None), prompts, seeds)
        bench.exact[tuple(prompts), tuple(seeds)] = clips
        green = min(gate.psnr) >= GATE_DB and exact.attention == bench.whole(len(prompts))
        for one in methods() if green else []:
            if time.monotonic() > end:
                left_out.append(one.name)
                continue
            results.append(bench.judge(one, prompts, seeds))
    seconds = exact.seconds
    for one in results:
        one.attention, one.seconds = one.attention / exact.attention, one.seconds / seconds
    said = {
        f"{family} that no setting of {other} beats": above(results, family, other)
        for family, other in (("both", "reuse"), ("both", "sparse"), ("reuse", "both"), ("sparse", "both"))
    }  # fmt: skip
    card = torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
    record = {
        "machine": card, "torch": torch.__version__, "steps": options.steps, "frames": options.frames,
        "tokens": bench.shape[0] * (bench.shape[1] // 4) * (bench.shape[2] // 4), "videos": options.videos,
        "gate": {"green": green, "all kept, nothing held, dB": min(gate.psnr)}, "exact, seconds": seconds,
        "left out": left_out, "summary": said,
        "results": [{**vars(one), "dB": one.db} for one in results],
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1).replace("Infinity", '"inf"')
    (options.out / f"sparse_reuse_{card}_{time.strftime('%Y%m')}.json").write_text(text)
    print(json.dumps(said | {"green": green}))
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
