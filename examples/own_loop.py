"""Sparse attention in a training loop of one's own: two lines more, marked. Runs in seconds on a CPU.

python examples/own_loop.py [--steps 60]
"""

import argparse
import logging

import torch

import foveate as fv
from foveate.models.dit import DiTConfig, VideoDiT


def moving_pattern(step: int) -> torch.Tensor:
    """A random plane wave that drifts, a clip (1, C, F, Y, X) in -1 ... 1."""
    draw = torch.Generator().manual_seed(step)
    speed = torch.randn(3, 3, generator=draw)
    axes = torch.meshgrid(torch.arange(4), torch.arange(32), torch.arange(64), indexing="ij")
    return torch.sin(torch.einsum("ca,afyx->cfyx", speed, torch.stack(axes).float() / 3))[None]


def main(steps: int):
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=64, depth=2, heads=2, patch=(1, 2, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # The defaults suit runs of many thousands of steps; this one is over in a minute, so everything comes sooner.
    config = fv.SparsityConfig(tolerance=0.02, warmup=20, learn_from=10, often=5, rare=20)
    handle = fv.sparsify(model, config)  # 1: before or after wrapping; compiled whole: sparsify(torch.compile(model))
    for step in range(steps):
        clip = moving_pattern(step)
        noise, sigma = torch.randn_like(clip), torch.rand(1)
        loss = (model((1 - sigma) * clip + sigma * noise, sigma) - (noise - clip)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.step()  # 2: after the optimiser's step
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(handle)
    return handle


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
