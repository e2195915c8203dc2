"""Damage that clips take on the way: what the feature net learned to tell apart, and the Fréchet distance's control.

Shapes: T frames, H height, W width; a window is float32 (3, T, H, W) in [-1, 1]. Every treatment takes a window, a
strength in (0, 1] and a generator, and gives a window of the same shape.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Treatment = Callable[[Tensor, float, torch.Generator], Tensor]


def untouched(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    return window


def blurred(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """By a Gaussian, sigma 0.5 ... 2.5 pixels."""
    sigma = 0.5 + 2 * strength
    place = torch.arange(-7, 8)
    weight = torch.exp(-(place**2) / (2 * sigma**2))
    weight = weight / weight.sum()
    frames = F.pad(window.transpose(0, 1), (7, 7, 7, 7), mode="replicate").reshape(
        -1, 1, *(s + 14 for s in window.shape[2:])
    )
    rows = F.conv2d(frames, weight.view(1, 1, 1, -1))
    return F.conv2d(rows, weight.view(1, 1, -1, 1)).view(window.transpose(0, 1).shape).transpose(0, 1)


def noisy(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """New noise in every frame."""
    return window + 0.3 * strength * torch.randn(window.shape, generator=draw)


def coarse(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """Cosine coefficients of 8 x 8 pixels rounded, as a codec does that lacks bits."""
    k = torch.arange(8.0)
    basis = torch.cos(math.pi * (2 * k[None] + 1) * k[:, None] / 16) * torch.where(k == 0, 8**-0.5, 0.5)[:, None]
    height, width = window.shape[2:]
    padded = F.pad(window, (0, -width % 8, 0, -height % 8), mode="replicate")
    blocks = padded.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)
    found = basis @ blocks @ basis.T
    step = (0.1 + 0.9 * strength) * (1 + (k[:, None] + k[None]) / 4) / 2
    back = basis.T @ ((found / step).round() * step) @ basis
    return back.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :height, :width]


def pixelated(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """Half to a quarter of the pixels a side, shown as squares."""
    size = [max(1, round(side / (1.5 + 2.5 * strength))) for side in window.shape[2:]]
    return F.interpolate(F.interpolate(window, size=size, mode="area"), size=window.shape[2:], mode="nearest")


def flickering(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """Every frame brighter or darker by its own amount."""
    gain = 0.4 * strength * torch.randn(1, window.shape[1], 1, 1, generator=draw)
    return window + gain


def stuttering(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """Each frame shown two to four times, the others left out."""
    hold = 2 + round(2 * strength)
    return window[:, torch.arange(window.shape[1]) // hold * hold]


def shuffled(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """Some frames in each other's place."""
    order = torch.arange(window.shape[1])
    moved = torch.randperm(len(order), generator=draw)[: 2 + round(strength * (len(order) - 2))]
    order[moved] = order[moved.roll(1)]
    return window[:, order]


def ghosted(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """The frame before shines through."""
    share = 0.25 + 0.25 * strength
    return torch.cat([window[:, :1], (1 - share) * window[:, 1:] + share * window[:, :-1]], 1)


def washed_out(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """Less contrast around the mean, less colour."""
    grey = window.mean(0, keepdim=True)
    pale = grey + (1 - 0.8 * strength) * (window - grey)
    return pale.mean() + (1 - 0.5 * strength) * (pale - pale.mean())


def trembling(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """Every frame moved by a few pixels of its own."""
    most = 1 + round(3 * strength)
    moves = torch.randint(-most, most + 1, (window.shape[1], 2), generator=draw).tolist()
    padded = F.pad(window, (most,) * 4, mode="replicate")
    height, width = window.shape[2:]
    cut = [padded[:, t, most + y : most + y + height, most + x : most + x + width] for t, (y, x) in enumerate(moves)]
    return torch.stack(cut, 1)


def wobbling(window: Tensor, strength: float, draw: torch.Generator) -> Tensor:
    """Places pulled about smoothly, in every frame otherwise, as generated shapes melt."""
    frames = window.transpose(0, 1)
    count, _, height, width = frames.shape
    field = F.interpolate(torch.randn(count, 2, 5, 5, generator=draw), size=(height, width), mode="bicubic")
    scale = torch.tensor([2 / width, 2 / height]) * (0.5 + 2.5 * strength)
    grid = F.affine_grid(torch.eye(2, 3).expand(count, 2, 3), [count, 1, height, width], align_corners=False)
    moved = F.grid_sample(frames, grid + field.permute(0, 2, 3, 1) * scale, padding_mode="border", align_corners=False)
    return moved.transpose(0, 1)


TREATMENTS: tuple[Treatment, ...] = (
    untouched, blurred, noisy, coarse, pixelated, flickering, stuttering, shuffled, ghosted, washed_out, trembling,
    wobbling,
)  # fmt: skip
