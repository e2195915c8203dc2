"""How far a video is from another: PSNR, SSIM, relative error.

Two layouts, told apart by type: uint8 (..., H, W, 3) as files hold it, levels 0 ... 255; or floats (..., H, W) as
`Clips` gives it, levels -1 ... 1. Arrays or tensors; both of one shape. Everything is computed in float64.
"""

import math

import numpy as np
import torch
from torch import Tensor

Video = Tensor | np.ndarray
WINDOW, SIGMA = 11, 1.5  # Wang, Bovik, Sheikh, Simoncelli 2004, "Image quality assessment", section III.B


def psnr(video: Video, reference: Video) -> float:
    """Peak signal-to-noise ratio in dB over all pixels together; inf when equal, nan when one holds NaN."""
    a, b, span = _pair(video, reference)
    error = (a - b).square().mean().item()
    return 10 * math.log10(span**2 / error) if error else math.inf


def ssim(video: Video, reference: Video) -> float:
    """Mean structural similarity of single pictures and colours, -1 ... 1; 1 when equal.

    Gaussian window of 11 x 11 pixels, sigma 1.5, k1 = 0.01, k2 = 0.03, windows that lie inside the picture only.
    Raises ValueError for pictures smaller than a window.
    """
    a, b, span = _pair(video, reference)
    if min(a.shape[-2:]) < WINDOW:
        raise ValueError(f"ssim needs pictures of at least {WINDOW} x {WINDOW} pixels, got {tuple(a.shape[-2:])}")
    a, b = (x.reshape(-1, 1, *x.shape[-2:]) for x in (a, b))
    mean_a, mean_b = _blur(a), _blur(b)
    var_a, var_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (var_a + var_b + c2)
    return (luminance * structure).mean().item()


def relative_error(value: Video, reference: Video) -> float:
    """|value - reference| / |reference|, Euclidean norms; any shape or type. 0 when equal, inf against zeros."""
    a, b = (torch.as_tensor(x).detach().double().cpu() for x in (value, reference))
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    error, norm = (a - b).norm().item(), b.norm().item()
    return error / norm if norm else (math.inf if error else 0.0)


def _pair(video: Video, reference: Video) -> tuple[Tensor, Tensor, float]:
    """Both as float64 (..., H, W) with black at 0, and the span of their levels."""
    a, b = (torch.as_tensor(x).detach().cpu() for x in (video, reference))
    if a.shape != b.shape or a.dtype.is_floating_point != b.dtype.is_floating_point or a.dim() < 2 or not a.numel():
        shapes = f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        raise ValueError(f"videos must have one shape and both be uint8 or both floats, got {shapes}")
    if a.dtype.is_floating_point:
        return a.double() + 1, b.double() + 1, 2.0
    if a.dtype != torch.uint8 or b.dtype != torch.uint8 or a.dim() < 3 or a.shape[-1] != 3:
        raise ValueError(f"integer videos must be uint8 (..., H, W, 3), got {a.dtype} {tuple(a.shape)}")
    return a.double().movedim(-1, 0), b.double().movedim(-1, 0), 255.0


def _blur(pictures: Tensor) -> Tensor:
    """(N, 1, H, W) -> (N, 1, H - 10, W - 10), weighted means under the Gaussian window."""
    place = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weight = torch.exp(-(place**2) / (2 * SIGMA**2))
    weight = weight / weight.sum()
    rows = torch.nn.functional.conv2d(pictures, weight.view(1, 1, 1, -1))
    return torch.nn.functional.conv2d(rows, weight.view(1, 1, -1, 1))
