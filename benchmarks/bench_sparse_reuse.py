"""Reuse alone, sparse attention alone, and both, on the small trained Wan: fidelity over counted attention.

    python benchmarks/bench_sparse_reuse.py [--out DIR] [--steps 20] [--frames 6] [--videos 2] [--minutes 20]

All without training: predictors get their closed form in the first dense steps, then each layer keeps a share of its
key tiles, the rest pooled, and `reuse` leaves whole calls out by its measured error. Every video is judged against the
exact one of the same noise (PSNR, SSIM). Attention is counted where kernels are called, in query-key pairs over the
exact run's: kept tiles of sparse calls, and a pair for each query and pooled tile; what choosing and lessons cost is in
the time alone. Settings are fixed beforehand, none is chosen by its result.

The gate, first: quality 1 beside sparse attention that keeps everything is the exact video; or the exit code is 1.
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

import tiny_wan
import torch
from bench_generate import Bench, counting
from generation_methods import Method
from generation_summary import Outcome

import foveate as fv
import foveate.attention

DENSE_STEPS, GATE_DB = 3, 60.0
QUALITIES, BUDGETS = (0.98, 0.95, 0.9, 0.7), (0.5, 0.3, 0.15)


def method(family: str, quality: float, budget: float | None) -> Method:
    """quality 1: nothing is held. budget None: attention is dense."""

    @contextmanager
    def install(pipe: Any) -> Iterator[Any]:
        sparse = None
        if budget is not None:
            config = fv.SparsityConfig(budget=budget, training_free_steps=DENSE_STEPS, force=True)
            sparse = fv.sparsify(pipe.transformer, config)
        with fv.reuse(pipe, fv.ReuseConfig(quality=quality)) as handle:
            yield handle
        if sparse is not None:
            sparse.remove()

    parts = "" if quality == 1 else f"quality {quality:g}", "" if budget is None else f"{budget:.0%} kept"
    return Method(family, ", ".join(filter(None, parts)), install)


def methods() -> list[Method]:
    """In turn by family, so that a time limit leaves something of each."""
    reuse = [method("reuse", quality, None) for quality in QUALITIES]
    sparse = [method("sparse", 1.0, budget) for budget in BUDGETS]
    both = [method("both", quality, budget) for budget in BUDGETS[:2] for quality in QUALITIES[:3]]
    return [*reuse, *sparse, *both]


def above(results: list[Outcome], family: str, others: str) -> str:
    """How many settings of a family no setting of the others beats in both attention and PSNR."""
    mine = [one for one in results if one.family == family]
    rest = [one for one in results if one.family == others]
    free = [one for one in mine if not any(x.attention <= one.attention and x.db >= one.db for x in rest)]
    return f"{len(free)} of {len(mine)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--frames", type=int, default=6)
    parser.add_argument("--videos", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20.0, help="settings that do not fit are left out, and named")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    end = time.monotonic() + 60 * options.minutes
    prompts, seeds = tiny_wan.GAMES[::2][: options.videos], range(options.videos)
    results, left_out = list[Outcome](), list[str]()
    with counting() as counter:
        shape = options.frames, tiny_wan.HEIGHT, tiny_wan.WIDTH
        bench = Bench(tiny_wan.load(device=device), options.steps, shape, counter)
        exact = bench.judge(method("exact", 1.0, None), prompts, seeds)
        gate = bench.judge(method("gate", 1.0, 1.0), prompts, seeds)
        green = min(*exact.psnr, *gate.psnr) >= GATE_DB and exact.attention == bench.whole(len(prompts))
        for one in methods() if green else []:
            if time.monotonic() > end:
                left_out.append(one.name)
                continue
            results.append(bench.judge(one, prompts, seeds))
    for one in results:
        one.attention, one.seconds = one.attention / exact.attention, one.seconds / exact.seconds
    said = {
        f"{family} that no setting of {other} beats": above(results, family, other)
        for family in ("reuse", "sparse", "both") for other in ("reuse", "sparse", "both") if family != other
    }  # fmt: skip
    card = torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
    record = {
        "machine": card, "torch": torch.__version__, "steps": options.steps, "frames": options.frames,
        "tokens": bench.shape[0] * (bench.shape[1] // 4) * (bench.shape[2] // 4), "videos": options.videos,
        "gate": {"green": green, "exact again, dB": min(exact.psnr), "all kept, quality 1, dB": min(gate.psnr)},
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
