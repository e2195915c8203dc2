"""Generation with a flow-matching model: integrate from noise to a clip. Shapes as in `models/dit.py`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def schedule(steps: int, shift: float = 1.0, start: float = 1.0) -> Tensor:
    """Noise levels (steps + 1,) from `start` to 0; `shift` > 1 spends more of the steps at high noise."""
    if steps < 1:
        raise ValueError(f"generation needs at least 1 step, got {steps}")
    if not 0 < start <= 1:
        raise ValueError(f"start is a noise level above 0 and at most 1, got {start}")
    sigma = start / (shift + (1 - shift) * start) * torch.linspace(1, 0, steps + 1)
    return shift * sigma / (1 + (shift - 1) * sigma)


@torch.no_grad()
def generate(
    model: nn.Module,
    noise: Tensor,
    *,
    steps: int = 20,
    shift: float = 1.0,
    start: float = 1.0,
    condition: Tensor | None = None,
    guidance: float = 1.0,
    solver: str = "heun",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """A clip from `noise` (B, C, F, Y, X), float32; or from a clip with noise of level `start` on it.

    solver: `heun`, second-order steps with an Euler last one, or `euler`, one model call a step.
    guidance: 1 uses the conditional prediction alone; other values extrapolate from the unconditional one
    (classifier-free guidance, two model calls a step). progress: told (steps done, steps).
    """
    if solver not in ("heun", "euler"):
        raise ValueError(f"solver must be heun or euler, got {solver!r}")
    levels = schedule(steps, shift, start).tolist()
    x = noise.float()

    def call(branch: str, x: Tensor, index: int, level: float, condition: Tensor | None) -> Tensor:
        then = levels[index + 1] if solver == "euler" else None
        with _context(model, branch, step_index=index, sigma=level, num_inference_steps=steps, then=then):
            return model(x, torch.full((len(x),), level, device=x.device), condition)

    def velocity(x: Tensor, index: int, level: float, stage: str = "") -> Tensor:
        wanted = call(f"cond{stage}", x, index, level, condition).float()
        if guidance == 1.0 or condition is None:
            return wanted
        plain = call(f"uncond{stage}", x, index, level, None).float()
        return plain + guidance * (wanted - plain)

    for index, (now, then) in enumerate(pairwise(levels)):
        slope = velocity(x, index, now)
        if solver == "heun" and then > 0:
            ahead = x + (then - now) * slope
            # A trajectory of its own: at the same noise level as the next step's first call, but not at its x.
            slope = (slope + velocity(ahead, index, then, "-ahead")) / 2
        x = x + (then - now) * slope
        progress(index + 1, steps)
    return x


def _context(model: Any, branch: str, **where: Any) -> AbstractContextManager:
    """diffusers' protocol: a model that wants to know where the denoising loop stands has a `cache_context`."""
    return model.cache_context(branch, **where) if hasattr(model, "cache_context") else nullcontext()
