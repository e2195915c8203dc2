"""Which files are compared with which: videos of one name in every folder, of one size and length."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import av
import numpy as np

from foveate import video
from foveate.data.files import walk
from foveate.video import Clip, UnusableError

ROOM = 2**27  # bytes of decoded frames that are held at once, of one folder
NAMED = 5  # files that a message names


@dataclass(frozen=True)
class Pair:
    """Videos of one name, the reference folder's first. All are decoded to one size (H, W), `frames` long."""

    name: str
    clips: tuple[Clip, ...]
    frames: int

    def chunks(self) -> Iterator[list[np.ndarray]]:
        """The same frames of every folder, uint8 (T, H, W, 3) each; each chunk begins with the last one's last frame.

        Raises UnusableError where a frame of one cannot be decoded.
        """
        first = self.clips[0]
        most = max(2, ROOM // (first.height * first.width * 3))
        for start in range(0, max(1, self.frames - 1), most - 1):
            yield self.frames_of(start, min(start + most, self.frames))

    def frames_of(self, start: int, stop: int) -> list[np.ndarray]:
        """Frames start ... stop - 1 of every folder."""
        return [_decoded(clip, start, stop) for clip in self.clips]


def _decoded(clip: Clip, start: int, stop: int) -> np.ndarray:
    try:
        frames, present = video.decode(clip, start, stop)
    except (OSError, av.FFmpegError) as error:
        raise UnusableError(f"{clip.path}: {error}") from None
    if not present.all():
        raise UnusableError(f"{clip.path}: frame {start + int(np.argmin(present))} cannot be decoded")
    return frames


def labels(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [place.absolute().parts for place in places]
    for length in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    raise ValueError("the same folder is given twice; compare different ones")


def find(places: Sequence[Path], *, fit: bool = False) -> tuple[list[Pair], list[tuple[str, str]]]:
    """The pairs, and (name, reason) of what is left out. Files instead of folders are one pair, whatever their names.

    fit: videos of other size or length are decoded at the reference's size and cut to the shortest, instead of refused.
    Raises ValueError where there is nothing to compare, or where a pair does not fit.
    """
    names = labels(places)
    if len(places) < 2:
        raise ValueError("give two or more folders of videos, the reference first")
    for place in places:
        if not place.exists():
            raise ValueError(f"{place} is not there")
    if len({place.is_dir() for place in places}) > 1:
        raise ValueError("give folders only, or files only: a folder and a file cannot be paired by name")
    if places[0].is_dir():
        listed, left_out = zip(*map(_videos, places), strict=True)
    else:
        listed, left_out = [{places[0].stem: str(place)} for place in places], [[] for _ in places]
    skipped = [
        (f"{label}/{name}", reason) for label, each in zip(names, left_out, strict=True) for name, reason in each
    ]
    pairs = []
    for name in sorted(set().union(*listed)):
        absent = [label for label, each in zip(names, listed, strict=True) if name not in each]
        if absent:
            there = next(each[name] for each in listed if name in each)
            skipped.append((there, f"no video of this name in {', '.join(absent)}"))
            continue
        try:
            clips = tuple(_probed(each[name]) for each in listed)
        except UnusableError as error:
            skipped.append((name, str(error)))
            continue
        pairs.append(Pair(name, clips, clips[0].frames))
    if not pairs:
        held = "; ".join(f"{label} holds {_some(each)}" for label, each in zip(names, listed, strict=True))
        raise ValueError(
            f"no video has the same name in all folders: {held}. Pairs are found by name without the ending"
        )
    return _fitting(pairs, names, fit), skipped


def _videos(root: Path) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Path by name without its ending (with it, where two differ in nothing else), and what is no video."""
    listing = walk(root)
    short = {file.name: str(PurePath(file.name).with_suffix("")) for file in listing.files}
    count = Counter(short.values())
    return {n if count[s] > 1 else s: os.fspath(root / n) for n, s in short.items()}, listing.skipped


def _probed(path: str) -> Clip:
    try:
        return video.probe(Clip(Path(path).name, path))
    except (OSError, av.FFmpegError, UnusableError) as error:
        raise UnusableError(f"{path}: {error}") from None


def _fitting(pairs: list[Pair], names: Sequence[str], fit: bool) -> list[Pair]:
    wrong, fitted = [], []
    for pair in pairs:
        first = pair.clips[0]
        for label, clip in zip(names[1:], pair.clips[1:], strict=True):
            if (clip.height, clip.width, clip.frames) != (first.height, first.width, first.frames):
                wrong.append(f"{pair.name}: {_size(first)} in {names[0]}, {_size(clip)} in {label}")
        clips = tuple(clip._replace(height=first.height, width=first.width) for clip in pair.clips)
        fitted.append(replace(pair, clips=clips, frames=min(clip.frames for clip in clips)))
    if wrong and not fit:
        more = f" (and {len(wrong) - NAMED} more)" if len(wrong) > NAMED else ""
        raise ValueError(
            f"videos of a pair differ in size or length: {'; '.join(wrong[:NAMED])}{more}. Make them of one size and "
            "length, or give --fit to scale to the reference's size and to cut to the shorter"
        )
    return fitted


def _size(clip: Clip) -> str:
    return f"{clip.width} x {clip.height} x {clip.frames} frames"


def _some(found: dict[str, str]) -> str:
    names = sorted(found)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "") or "no file"
