"""Reuse on the demo's model: PSNR to the exact clip over the share of model calls or attention computed.

    python benchmarks/bench_reuse_demo.py [--clips 3] [--hold output]

50 Euler steps of 8 x 64 x 64, fixed intervals and qualities (docs/reuse.md). A gate comes first: `quality=1` must give
the plain clip. A line a setting, means over clips; the last line printed is JSON. Minutes on one core.
"""

import argparse
import json
import sys
from typing import Any

import torch

import foveate as fv
from foveate.generation.builtin import load_model
from foveate.quality import psnr
from foveate.sample import generate
from foveate.training.recipes import CHECKPOINT

FIXED: list[dict[str, Any]] = [{"interval": n} for n in (2, 3, 4, 6)] + [
    {"interval": 4, "order": 0},
    {"interval": 4, "damping": 0.5},
]
PLANNED: list[dict[str, Any]] = [{"quality": q} for q in (0.98, 0.96, 0.93, 0.9, 0.8)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=3)
    parser.add_argument("--hold", choices=("output", "attention"), default="output")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    model, _ = load_model(CHECKPOINT)

    def clip(seed: int) -> torch.Tensor:
        noise = torch.randn(1, 3, 8, 64, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            return generate(model, noise, steps=options.steps, solver="euler")

    seeds = range(1, options.clips + 1)
    exact = [clip(seed) for seed in seeds]
    with fv.reuse(model, fv.ReuseConfig(quality=1.0, hold=options.hold)):
        if not torch.equal(clip(1), exact[0]):
            print("gate: quality=1 is not the plain clip")
            return 1
    rows = []
    for settings in FIXED + PLANNED:
        found, shares = [], []
        for seed, truth in zip(seeds, exact, strict=True):
            with fv.reuse(model, fv.ReuseConfig(hold=options.hold, **settings)) as handle:
                found.append(psnr(clip(seed), truth))
                shares.append(handle.report().computed)
        rows.append({**settings, "dB": sum(found) / len(found), "computed": sum(shares) / len(shares)})
        print(f"{settings!s:34s} {rows[-1]['dB']:6.2f} dB  computed {rows[-1]['computed']:.3f}", flush=True)
    print(json.dumps({"hold": options.hold, "clips": options.clips, "steps": options.steps, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
