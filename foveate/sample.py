"""Generation with a flow-matching model: integrate from noise to a clip. Shapes as in `models/dit.py`."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


def schedule(steps: int, shift: float = 1.0) -> Tensor:
    """Noise levels (steps + 1,) from 1 to 0; `shift` > 1 spends more of the steps at high noise."""
    if steps < 1:
        raise ValueError(f"generation needs at least 1 step, got {steps}")
    sigma = torch.linspace(1, 0, steps + 1)
    return shift * sigma / (1 + (shift - 1) * sigma)


@torch.no_grad()
def generate(
    model: nn.Module,
    noise: Tensor,
    *,
    steps: int = 20,
    shift: float = 1.0,
    condition: Tensor | None = None,
    guidance: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """A clip from `noise` (B, C, F, Y, X) by Heun's second-order steps with an Euler last one; float32.

    guidance: 1 uses the conditional prediction alone; other values extrapolate from the unconditional one
    (classifier-free guidance, two model calls a step). progress: told (steps done, steps).
    """
    levels = schedule(steps, shift).tolist()
    x = noise.float()

    def velocity(x: Tensor, level: float) -> Tensor:
        sigma = torch.full((len(x),), level, device=x.device)
        wanted = model(x, sigma, condition).float()
        if guidance == 1.0 or condition is None:
            return wanted
        plain = model(x, sigma, None).float()
        return plain + guidance * (wanted - plain)

    for index, (now, then) in enumerate(pairwise(levels)):
        slope = velocity(x, now)
        ahead = x + (then - now) * slope
        if then > 0:
            slope = (slope + velocity(ahead, then)) / 2
        x = x + (then - now) * slope
        progress(index + 1, steps)
    return x
