"""How far a video is from another: PSNR, SSIM, MS-SSIM, relative error; and how much one changes from frame to frame.

Two layouts, told apart by type: uint8 (..., H, W, 3) as files hold it, levels 0 ... 255; or floats (..., H, W) as
`Clips` gives it, levels -1 ... 1. Arrays or tensors; both of one shape. Everything is computed in float64.
"""

import math

import numpy as np
import torch
from torch import Tensor

Video = Tensor | np.ndarray
WINDOW, SIGMA = 11, 1.5  # Wang, Bovik, Sheikh, Simoncelli 2004, "Image quality assessment", section III.B
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # Wang, Simoncelli, Bovik 2003, "Multiscale structural similarity"
MULTI_SCALE = (WINDOW - 1) * 2 ** (len(WEIGHTS) - 1) + 1  # pixels: the smallest picture with a window at every scale


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
    return similarities(video, reference, scales=1)[0]


def ms_ssim(video: Video, reference: Video) -> float:
    """Mean multi-scale structural similarity of single pictures and colours, 0 ... 1; 1 when equal.

    Five scales, each half as large by means of four pixels, with the published weights; a negative mean of a scale
    counts as 0. Raises ValueError for pictures whose shorter side is below `MULTI_SCALE` pixels.
    """
    return similarities(video, reference)[1]


def similarities(video: Video, reference: Video, *, scales: int = len(WEIGHTS)) -> tuple[float, float]:
    """`ssim` and `ms_ssim` for the price of the second alone. Over fewer scales the second number is no MS-SSIM."""
    a, b, span = _pair(video, reference)
    least = (WINDOW - 1) * 2 ** (scales - 1) + 1
    if min(a.shape[-2:]) < least:
        name = "ssim" if scales == 1 else "ms_ssim"
        raise ValueError(f"{name} needs pictures of at least {least} x {least} pixels, got {tuple(a.shape[-2:])}")
    a, b = (x.reshape(-1, 1, *x.shape[-2:]) for x in (a, b))
    first, product = 0.0, torch.ones((), dtype=torch.float64)
    for scale, weight in enumerate(WEIGHTS[:scales]):
        luminance, structure = _similarity(a, b, span)
        whole = (luminance * structure).mean((1, 2, 3))
        first = whole.mean().item() if scale == 0 else first
        of_picture = whole if scale == scales - 1 else structure.mean((1, 2, 3))
        product = product * of_picture.relu() ** weight
        if scale < scales - 1:
            a, b = (torch.nn.functional.avg_pool2d(x, 2) for x in (a, b))
    return first, product.mean().item()


def flicker(video: Video) -> float:
    """Mean change of a pixel from one frame to the next, in levels of 255: 0 for a still, large where frames jump.

    uint8 (T, H, W, 3), or floats (3, T, H, W). VBench's temporal flickering is 1 - flicker / 255. Motion counts, too:
    it says something beside another clip's of the same content only. Raises ValueError for fewer than two frames.
    """
    frames, _, span = _pair(video, video)
    if frames.dim() != 4 or frames.shape[1] < 2:
        raise ValueError(f"flicker needs a video of two frames or more, got {tuple(frames.shape)}")
    return 255 / span * frames.diff(dim=1).abs().mean().item()


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


def _similarity(a: Tensor, b: Tensor, span: float) -> tuple[Tensor, Tensor]:
    """Luminance, and contrast times structure, (N, 1, H - 10, W - 10) each, of pictures (N, 1, H, W)."""
    mean_a, mean_b = _blur(a), _blur(b)
    var_a, var_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return luminance, (2 * covariance + c2) / (var_a + var_b + c2)


def _blur(pictures: Tensor) -> Tensor:
    """(N, 1, H, W) -> (N, 1, H - 10, W - 10), weighted means under the Gaussian window."""
    place = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weight = torch.exp(-(place**2) / (2 * SIGMA**2))
    weight = (weight / weight.sum()).tolist()
    for dim in (-2, -1):  # sums of shifted pictures: ten times as fast on a CPU as a convolution of one channel
        length = pictures.shape[dim] - WINDOW + 1
        blurred = pictures.narrow(dim, 0, length) * weight[0]
        for shift in range(1, WINDOW):
            blurred.add_(pictures.narrow(dim, shift, length), alpha=weight[shift])
        pictures = blurred
    return pictures
