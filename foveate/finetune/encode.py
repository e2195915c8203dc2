"""`foveate encode`: clips and captions through a pipeline's VAE and text encoder, once, into shards for training.

    OUT/encode.json                what was encoded, and how
    OUT/shard-00017.safetensors    latents.<n>, text.<k>, mask.<k>, ...; the rows of the index in its header
    OUT/empty.safetensors          the text sequence of no caption
    OUT/index.jsonl, skipped.jsonl a line a sample, and a clip that could not be used; made when all shards are there

Which sample lies in which shard follows from names and flags alone, so any number of processes share the work without a
word between them, and a killed run goes on at the first shard that is missing: a shard has its name once it is whole.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foveate.data.files import Skip, printable
from foveate.finetune import families
from foveate.finetune.units import DTYPES, EncodeConfig, gather, pixels
from foveate.training.machine import pick_device
from foveate.video import UnusableError

log = logging.getLogger("foveate")

ABOUT, INDEX, SKIPPED, EMPTY = "encode.json", "index.jsonl", "skipped.jsonl", "empty.safetensors"
Say = Callable[[int, int], None]  # samples done, of how many


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
