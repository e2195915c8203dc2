"""`foveate encode`: clips and captions through a pipeline's VAE and text encoder, once, into shards for training.

    OUT/encode.json                what was encoded, and how
    OUT/shard-00017.safetensors    latents.<n>, text.<k>, mask.<k>, ...; the rows of the index in its header
    OUT/empty.safetensors          the text sequence of no caption
    OUT/index.jsonl, skipped.jsonl a line a sample, and a clip that could not be used; made when all shards are there

Which sample lies in which shard follows from names and flags alone, so any number of processes share the work without a
word between them, and a killed run goes on at the first shard that is missing: a shard has its name once it is whole.

Shapes: T frames, H height, W width in pixels.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foveate.data.files import Skip, printable
from foveate.data.folder import read
from foveate.data.remote import copy, is_url, url_of
from foveate.finetune import families
from foveate.training.machine import pick_device
from foveate.video import Clip, UnusableError, decode

log = logging.getLogger("foveate")

ABOUT, INDEX, SKIPPED, EMPTY = "encode.json", "index.jsonl", "skipped.jsonl", "empty.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Say = Callable[[int, int], None]  # samples done, of how many


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


class Encoder:
    """One process's part of an encoding: every `count`-th shard that is missing, from the `number`-th on.

    Raises ValueError where the folder holds an encoding of something else, or the sizes do not suit the model.
    """

    def __init__(self, config: EncodeConfig, number: int = 0, count: int = 1):
        self.config, self.number, self.count = config, number, count
        self.about = families.examine(config.model)
        families.check_encoders(self.about)
        self.work = gather(config, number, count)
        self.shards = self.work.shards(config.shard)
        self._claim()
        device = pick_device(config.device)
        if device == "cuda":
            device = f"cuda:{number % torch.cuda.device_count()}"
        self.pipe = families.load_encoders(self.about, device, DTYPES[config.dtype])
        if config.tiling:
            self.pipe.vae.enable_tiling()
        self._check_sizes()

    def _claim(self) -> None:
        """Say in encode.json what is encoded here; ValueError where it says something else."""
        config, out = self.config, self.config.out
        units = [(u.clip.name, u.clip.caption, u.start, u.size) for u in self.work.units]
        digest = hashlib.sha256(json.dumps(units).encode("utf-8", "surrogatepass")).hexdigest()
        plain = {"sizes": list(config.sizes), "stride": config.stride, "shard": config.shard, "dtype": config.dtype}
        mine = {"format": 1, "pipeline": self.about.pipeline, "model": str(config.model.resolve()), **plain}
        mine["vae"] = families.vae_of(config.model)
        mine |= {"samples": len(units), "shards": len(self.shards), "clips": digest}
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file; give another --out")
        out.mkdir(parents=True, exist_ok=True)
        file = out / ABOUT
        if file.is_file():
            try:
                held = json.loads(file.read_text())
            except ValueError as error:
                raise ValueError(f"{file} is not whole ({error}); give another --out") from None
            odd = [name for name in mine if held.get(name, mine[name]) != mine[name]]
            if odd:
                raise ValueError(
                    f"{out} holds an encoding of something else ({', '.join(odd)} differ). Give another --out, or the "
                    "same clips and flags to go on with it"
                )
        elif any(out.iterdir()):
            raise ValueError(f"{out} holds other files; give another --out")
        else:
            _whole(file, lambda path: path.write_text(json.dumps(mine, indent=1)))

    def _check_sizes(self) -> None:
        pipe, names = self.pipe, ("vae_scale_factor_{}", "vae_{}_compression_ratio")
        space, time_ = (
            next(getattr(pipe, name.format(kind)) for name in names if hasattr(pipe, name.format(kind)))
            for kind in ("spatial", "temporal")
        )
        _, high, wide = self.about.patch
        for frames, height, width in self.config.buckets():
            if height % (space * high) or width % (space * wide) or (frames - 1) % time_:
                raise ValueError(
                    f"--sizes {frames}x{height}x{width} does not suit this model: frames must be 1 + a multiple "
                    f"of {time_}, height a multiple of {space * high}, width of {space * wide}"
                )

    def run(self, say: Say = lambda done, total: None) -> None:
        """Encode what is missing of this process's shards; the last process to end writes the index."""
        total = len(self.work.units)
        if not (self.config.out / EMPTY).is_file():
            [empty] = families.encode_captions(self.about, self.pipe, [""])
            self._save(EMPTY, self._typed(empty), {})
        for number in range(self.number, len(self.shards), self.count):
            if not shard_file(self.config.out, number).is_file():
                done = self._done()
                self._encode(number, lambda n, done=done: say(done + n, total))
        done = self._done()
        say(done, total)
        if done == total:
            finish(self.config.out, len(self.shards), self.work.skipped)

    def _done(self) -> int:
        """Samples in the shards that are there, other processes' too."""
        there = set(os.listdir(self.config.out))
        return sum(len(units) for i, units in enumerate(self.shards) if shard_file(self.config.out, i).name in there)

    def _encode(self, number: int, say: Callable[[int], None]) -> None:
        """One shard. What cannot be decoded is listed in its header."""
        tensors: dict[str, Tensor] = {}
        texts: dict[str, tuple[int, int]] = {}
        rows, skipped = [], []
        for place, unit in enumerate(self.shards[number]):
            name = printable(unit.clip.name)
            try:
                video = pixels(unit, self.config.stride)
            except (UnusableError, OSError, av.FFmpegError) as error:
                skipped.append([name, f"{error} (from frame {unit.start})"])
                continue
            caption = unit.clip.caption or ""
            if caption not in texts:
                [text] = families.encode_captions(self.about, self.pipe, [caption])
                texts[caption] = len(texts), int(text["mask"].sum())
                tensors |= {f"{key}.{texts[caption][0]}": x for key, x in self._typed(text).items()}
            found = self._typed(families.encode_clip(self.about, self.pipe, video))
            tensors |= {f"{key}.{place}": x for key, x in found.items()}
            shape = list(found["latents"].shape)
            rows.append({
                "shard": number, "place": place, "clip": name, "start": unit.start, "caption": unit.clip.caption,
                "fps": unit.clip.fps / self.config.stride, "shape": shape, "tokens": self.about.tokens(tuple(shape)),
                "text": texts[caption][0], "text_tokens": texts[caption][1],
                "more": sorted(set(found) - {"latents"}),
            })  # fmt: skip
            say(place + 1)
        about = {"rows": json.dumps(rows), "skipped": json.dumps(skipped)}
        self._save(shard_file(self.config.out, number).name, tensors, about)

    def _typed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        dtype = DTYPES[self.config.dtype]
        return {k: (x.to(dtype) if x.is_floating_point() else x).contiguous() for k, x in tensors.items()}

    def _save(self, name: str, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
        given = tensors or {"nothing": torch.zeros(1)}
        _whole(self.config.out / name, lambda path: save_file(given, path, metadata=about))


def shard_file(out: Path, number: int) -> Path:
    return out / f"shard-{number:05d}.safetensors"


def _whole(target: Path, write: Callable[[Path], Any]) -> None:
    """Written beside its name, by this process only, and renamed: a file with the name is complete."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        write(fresh)
        with fresh.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def finish(out: Path, shards: int, skipped: Sequence[Skip]) -> None:
    """Write the index from the shards' headers, and what was left out. Several processes may: they write the same."""
    rows, left = [], [list(pair) for pair in skipped]
    for number in range(shards):
        with safe_open(shard_file(out, number), "pt") as file:
            about = file.metadata()
        rows += json.loads(about["rows"])
        left += json.loads(about["skipped"])
    if not rows:
        raise ValueError(f"no clip could be decoded; {out / SKIPPED} would list {left[:3]}")
    lines = [json.dumps({"clip": name, "reason": why}) for name, why in left]
    _whole(out / SKIPPED, lambda path: path.write_text("".join(f"{line}\n" for line in lines)))
    _whole(out / INDEX, lambda path: path.write_text("".join(f"{json.dumps(row)}\n" for row in rows)))
    for stale in out.glob(".*.partial"):  # of processes that were killed
        stale.unlink(missing_ok=True)


def place() -> tuple[int, int] | None:
    """This process's number and how many there are, as torchrun says; None where it is alone."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return (int(rank), int(size)) if rank and size else None


def encode(config: EncodeConfig, say: Say = lambda done, total: None) -> tuple[int, list[Skip]]:
    """All of this machine's or torchrun's processes' part. Returns the samples there are now and what was left out."""
    number, count = place() or (0, config.workers)
    encoder = Encoder(config, number, count)  # whatever is wrong is said before others start
    others: list[Any] = []
    if place() is None and count > 1:
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        others = [context.Process(target=_other, args=(config, i, count)) for i in range(1, count)]
    try:
        for process in others:
            process.start()
        encoder.run(say)
        for process in others:
            process.join()
    finally:
        for process in others:
            process.kill()
    if any(process.exitcode for process in others):
        raise OSError("a process of the encoding failed, see above; run the same command again to go on")
    if others and not (config.out / INDEX).is_file():
        finish(config.out, len(encoder.shards), encoder.work.skipped)
    done = (config.out / INDEX).is_file()
    rows = len((config.out / INDEX).read_text().splitlines()) if done else 0
    left = list(_skips(config.out / SKIPPED)) if done else encoder.work.skipped
    return rows, left


def _other(config: EncodeConfig, number: int, count: int) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    Encoder(config, number, count).run()


def _skips(file: Path) -> Iterator[Skip]:
    for line in file.read_text().splitlines():
        row = json.loads(line)
        yield row["clip"], row["reason"]
