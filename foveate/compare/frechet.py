"""The Fréchet distance between two sets of videos, on the features of short windows cut from them.

Shapes: N windows, D features. With `features.trained` it is not "FVD", which is this distance on the features of one
I3D network: numbers of different networks cannot be compared. Windows are cut at the same places of a pair's videos.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foveate.compare.intervals import RESAMPLES, ends
from foveate.compare.pairs import ROOM, Pair
from foveate.compare.treatments import blurred

STARTS = 16  # moments of a video at most that windows are cut at
GROUPS = 8  # videos from which on they are what is drawn anew; below, windows are
Net = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class View:
    """What a network sees: windows of `frames` x `size` x `size` pixels. whole: the full picture, else crops of it."""

    frames: int
    size: int
    whole: bool = False


@dataclass(frozen=True)
class Distance:
    """The distance, the ends of its interval, and how many windows of how many videos it is of."""

    value: float
    low: float
    high: float
    windows: int
    videos: int


def windows(pair: Pair, count: int, view: View, seed: int) -> list[Tensor]:
    """The same `count` windows of every folder's video, float32 (count, 3, T, H, W) in [-1, 1].

    Starts are spread over the time; a crop is of 1 to as many pixels a pixel as the picture has room for.
    """
    draw = np.random.default_rng((seed, zlib.crc32(pair.name.encode("utf-8", "surrogateescape"))))
    height, width = pair.clips[0].height, pair.clips[0].width
    starts = (
        np.linspace(0, pair.frames - view.frames, min(count, STARTS, pair.frames - view.frames + 1)).round().astype(int)
    )
    small = pair.frames * height * width * 3 <= ROOM
    whole = pair.frames_of(0, pair.frames) if small else None
    cuts: list[list[Tensor]] = [[] for _ in pair.clips]
    for place, start in enumerate(starts.tolist()):
        stop = start + view.frames
        found = [x[start:stop] for x in whole] if whole is not None else pair.frames_of(start, stop)
        tensors = [torch.from_numpy(np.ascontiguousarray(x)).permute(3, 0, 1, 2) for x in found]
        for _ in range(place, count, len(starts)):
            most = min(height, width) / view.size
            side = min(round(view.size * most ** draw.random()), height, width)
            top, left = (int(draw.integers(room + 1)) for room in (height - side, width - side))
            area = (slice(None), slice(None), slice(top, top + side), slice(left, left + side))
            for cut, x in zip(cuts, tensors, strict=True):
                piece = x if view.whole else x[area]
                cut.append(F.adaptive_avg_pool2d(piece.float() / 127.5 - 1, view.size))
    return [torch.stack(cut) for cut in cuts]


def features(
    pairs: Sequence[Pair], net: Net, view: View, count: int, seed: int, progress: Callable[[int], None]
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Features (N, D) of every folder, those of the reference's windows blurred, and each window's video (N,)."""
    each = -(-count // len(pairs))
    rows: list[list[np.ndarray]] = [[] for _ in range(len(pairs[0].clips) + 1)]
    for pair in pairs:
        cut = windows(pair, each, view, seed)
        cut.append(torch.stack([control(x) for x in cut[0]]))
        for row, x in zip(rows, cut, strict=True):
            with torch.no_grad():
                row += [net(part).double().cpu().numpy() for part in x.split(16)]
        progress(each)
    found = [np.concatenate(row) for row in rows]
    return found[:-1], found[-1], np.repeat(np.arange(len(pairs)), each)


def control(window: Tensor) -> Tensor:
    """A window damaged mildly: blurred by a Gaussian of one pixel."""
    return blurred(window, 0.25, torch.Generator())


def distance(a: np.ndarray, b: np.ndarray, video: np.ndarray, seed: int = 0) -> Distance:
    """Between features of the same windows, (N, D) each, with a bootstrap over videos (of windows, if they are few).

    A resample draws the same videos on both sides.
    """
    videos = len(np.unique(video))
    group = video if videos >= GROUPS else np.arange(len(video))
    count = int(group.max()) + 1
    draw = np.random.default_rng(seed)
    values = []
    for _ in range(RESAMPLES // 4):
        weight = np.bincount(draw.integers(0, count, count), minlength=count)[group].astype(float)
        values.append(frechet(*_moments(a, weight), *_moments(b, weight)))
    even = np.ones(len(a))
    return Distance(frechet(*_moments(a, even), *_moments(b, even)), *ends(np.array(values)), len(a), videos)


def halves(a: np.ndarray, video: np.ndarray) -> float:
    """The distance between one half of a set's windows and the other: what half as many windows take for the same."""
    odd = (video if len(np.unique(video)) > 1 else np.arange(len(video))) % 2 == 1
    return frechet(*_moments(a, odd.astype(float)), *_moments(a, (~odd).astype(float)))


def _moments(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (D,) and covariance (D, D), unbiased for whole weights."""
    mean = weight @ x / weight.sum()
    apart = x - mean
    return mean, (apart * weight[:, None]).T @ apart / (weight.sum() - 1)


def frechet(mean_a: np.ndarray, cov_a: np.ndarray, mean_b: np.ndarray, cov_b: np.ndarray) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of two normal distributions (Dowson and Landau 1982)."""
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ cov_b @ root).clip(0)).sum()
    return float(max(0.0, np.square(mean_a - mean_b).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * cross))
