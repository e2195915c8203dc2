"""What `foveate encode` makes of clips: the dials, which stretch of which clip becomes a sample, and its pixels.

Shapes: T frames, H height, W width in pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from foveate.data.files import Skip, printable
from foveate.data.folder import read
from foveate.data.remote import copy, is_url, url_of
from foveate.video import Clip, UnusableError, decode

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """Every dial of an encoding."""

    model: Path
    """Folder of a diffusers pipeline: its VAE and text encoder are used."""
    data: Path
    """Folder of clips (with captions.jsonl, or without captions), or a .jsonl, .csv or .tsv of names and captions; or
    an fsspec URL of one, such as s3://bucket/clips, which is copied to OUT.clips beside OUT."""
    out: Path
    """Folder to write to."""
    sizes: tuple[str, ...] = ("81x480x832", "81x832x480")
    """Buckets, frames x height x width in pixels. A clip goes to the one that cuts least off, then the largest."""
    stride: int = 1
    """Take every n-th frame."""
    windows: int = 1
    """At most so many stretches of a clip, one behind the other, spread over its time."""
    shard: int = 32
    """Samples of a shard: what a kill may cost each process."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the latents and texts on disk, and of the text encoder."""
    tiling: bool = False
    """Let the VAE work tile by tile, for large pictures on small cards."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda or cuda:N; under torchrun or with workers auto is one for each process."""
    workers: int = 1
    """Processes on this machine; under torchrun its own processes are taken instead."""

    def __post_init__(self) -> None:
        for name in ("stride", "windows", "shard", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        self.buckets()

    def buckets(self) -> list[tuple[int, int, int]]:
        """The sizes as numbers."""
        found = []
        for size in self.sizes:
            parts = size.lower().split("x")
            if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
                raise ValueError(f"--sizes are frames x height x width, such as 81x480x832; got {size!r}")
            found.append((int(parts[0]), int(parts[1]), int(parts[2])))
        if not found:
            raise ValueError("--sizes needs at least one size, such as 81x480x832")
        return found


@dataclass(frozen=True)
class Unit:
    """One sample to be: a stretch of a clip from frame `start`, at size (T, H, W)."""

    clip: Clip
    start: int
    size: tuple[int, int, int]


@dataclass
class Work:
    """All units in the order of their shards, and the clips that give none."""

    units: list[Unit] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)

    def shards(self, size: int) -> list[list[Unit]]:
        return [self.units[at : at + size] for at in range(0, len(self.units), size)]


def gather(config: EncodeConfig, number: int = 0, count: int = 1) -> Work:
    """What there is to encode, for process `number` of `count`. ValueError where that is nothing."""
    data, table, absent = config.data, None, []
    if is_url(data) and not data.exists():
        beside = config.out.with_name(f"{config.out.name}.clips")
        data, absent = copy(url_of(data), beside, number=number, count=count)
    if data.is_file():
        data, table = data.parent, data
    if not data.is_dir():
        raise ValueError(f"--data {config.data}: there is no such folder or file")
    inside = config.out.resolve().is_relative_to(data.resolve()) and config.out.is_dir()
    found = read(data, table=table, leave_out=[config.out] if inside else [])
    work = Work(skipped=[*absent, *((printable(name), printable(why)) for name, why in found.skipped)])
    by_size: dict[tuple[int, int, int], list[Unit]] = {size: [] for size in config.buckets()}
    for clip in found.clips:
        size = choose(clip, config.buckets(), config.stride)
        if size is None:
            least = min(config.buckets())
            work.skipped.append((
                printable(clip.name),
                f"smaller than every size: {clip.frames}x{clip.height}x{clip.width}; needs at least "
                f"{span(least[0], config.stride)} frames of such as {least[1]}x{least[2]}",
            ))  # fmt: skip
            continue
        need = span(size[0], config.stride)
        count = min(config.windows, clip.frames // need)
        by_size[size] += [Unit(clip, start, size) for start in spread(clip.frames - need, count, need)]
    work.units = [unit for units in by_size.values() for unit in units]
    if not work.units:
        few = "; ".join(f"{name}: {why}" for name, why in work.skipped[:3]) or "it holds no video files"
        raise ValueError(f"nothing in {config.data} can be encoded ({few}); give smaller --sizes, or other clips")
    return work


def span(frames: int, stride: int) -> int:
    return (frames - 1) * stride + 1


def spread(room: int, count: int, need: int) -> list[int]:
    """Starts of `count` stretches that do not overlap, spread evenly over the room there is."""
    if count == 1:
        return [room // 2]
    return [max(i * need, i * room // (count - 1)) for i in range(count)]


def choose(clip: Clip, sizes: Sequence[tuple[int, int, int]], stride: int) -> tuple[int, int, int] | None:
    """The size that keeps most of the picture, the largest of those; None where the clip is smaller than all."""
    fits = [(t, h, w) for t, h, w in sizes if clip.frames >= span(t, stride) and clip.height >= h and clip.width >= w]

    def kept(size: tuple[int, int, int]) -> float:
        ratio = size[2] * clip.height / (size[1] * clip.width)
        return round(min(ratio, 1 / ratio), 2)

    return max(fits, key=lambda size: (kept(size), size[0] * size[1] * size[2]), default=None)


def pixels(unit: Unit, stride: int) -> Tensor:
    """The unit as (3, T, H, W) float32 in -1 ... 1: shrunk until it just covers the size, and cut in the middle.

    Raises UnusableError where a frame of it cannot be decoded.
    """
    frames, height, width = unit.size
    shrink = max(height / unit.clip.height, width / unit.clip.width)
    high, wide = (max(n, round(m * shrink)) for n, m in ((height, unit.clip.height), (width, unit.clip.width)))
    clip = unit.clip._replace(height=high, width=wide)
    found, present = decode(clip, unit.start, unit.start + span(frames, stride))
    found, present = found[::stride], present[::stride]
    if not present.all():
        raise UnusableError(f"frame {unit.start + stride * int(np.flatnonzero(~present)[0])} cannot be decoded")
    top, left = (high - height) // 2, (wide - width) // 2
    video = torch.from_numpy(np.ascontiguousarray(found[:, top : top + height, left : left + width]))
    return video.permute(3, 0, 1, 2).float().div_(127.5).sub_(1).contiguous()
