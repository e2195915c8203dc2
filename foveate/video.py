"""Video files: which ones a folder holds, the frames in any stretch of one, and MP4s that browsers play.

Shapes: T frames, H height, W width, C = 3 colours. Files hold uint8 (T, H, W, 3), tensors float (C, T, H, W).
Not covered: audio, rotation tags, non-square pixels.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, cast

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from torch import Tensor

ENCODERS = ("libx264", "libopenh264", "libvpx-vp9", "mpeg4")  # the first three play in browsers
CAPTIONS = "captions.jsonl"
SUFFIXES = {".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm"}
Skip = tuple[str, str]  # (file name, reason)


class UnusableError(Exception):
    """This file, or this stretch of it, cannot be used; the message says why."""


@dataclass(frozen=True)
class Clip:
    """One usable file: its frames' times, and the size (H, W) that it is decoded to."""

    name: str
    path: Path
    label: int = 0
    caption: str | None = None
    times: tuple[int, ...] | None = None  # None: the container has no usable time stamps, decode from the start
    frames: int = 0
    fps: float = 0.0
    height: int = 0
    width: int = 0


def find(root: Path) -> tuple[list[Clip], tuple[str, ...], list[Skip]]:
    """The clips a folder names (not opened yet), its class names, and what its layout already rules out.

    Raises ValueError when `root` is not a folder.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give a folder of video files")
    if (root / CAPTIONS).is_file():
        return _captioned(root)
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not any(_videos(folder) for folder in folders):
        return [Clip(path.name, path) for path in _videos(root)], (), []
    skipped = [(folder.name, "class folder without video files") for folder in folders if not _videos(folder)]
    skipped += [(path.name, "lies beside class folders, so it has no class") for path in _videos(root)]
    clips = [Clip(f"{f.name}/{path.name}", path, label) for label, f in enumerate(folders) for path in _videos(f)]
    return clips, tuple(folder.name for folder in folders), skipped


def _videos(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file() and p.name[0] != ".")


def _captioned(root: Path) -> tuple[list[Clip], tuple[str, ...], list[Skip]]:
    files = {p.relative_to(root).as_posix(): p for folder in (root, *root.glob("**/")) for p in _videos(folder)}
    captions: dict[str, str] = {}
    skipped: list[Skip] = []
    for number, line in enumerate((root / CAPTIONS).read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        if line.strip():
            name, caption, reason = _caption(line)
            reason = reason or ("" if name in files else "has a caption but no video file")
            reason = reason or ("has a second caption; the first is used" if name in captions else "")
            if reason:
                skipped.append((name or f"{CAPTIONS} line {number}", reason))
            else:
                captions[name] = caption
    skipped += [(name, f"video without a caption in {CAPTIONS}") for name in sorted(files) if name not in captions]
    return [Clip(name, files[name], caption=captions[name]) for name in sorted(captions)], (), skipped


def _caption(line: str) -> tuple[str, str, str]:
    """One line of the captions file: (file, caption, what is wrong with it)."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return "", "", f"not JSON: {error}"
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("file", "caption")):
        return "", "", 'needs {"file": "...", "caption": "..."}'
    return row["file"], row["caption"], "" if row["caption"].strip() else "empty caption"


def to_uint8(video: Tensor) -> np.ndarray:
    """float (..., C, T, H, W) in [-1, 1] -> uint8 (..., T, H, W, C). Values outside are clipped, NaN becomes grey."""
    pixels = (video.detach().float().cpu().nan_to_num(0.0) + 1) * 127.5
    return pixels.round().clamp(0, 255).byte().movedim(-4, -1).contiguous().numpy()


def write_mp4(target: str | Path | BinaryIO, video: np.ndarray, fps: float) -> None:
    """Write uint8 (T, H, W, 3) as an MP4 that browsers play: H.264 where PyAV has it, yuv420p, even sizes.

    An odd edge is repeated once. Raises ValueError for another shape or type.
    """
    if video.ndim != 4 or video.shape[-1] != 3 or video.dtype != np.uint8 or 0 in video.shape:
        raise ValueError(f"video must be uint8 (T, H, W, 3), got {video.dtype} {video.shape}; see to_uint8")
    video = np.pad(video, ((0, 0), (0, video.shape[1] % 2), (0, video.shape[2] % 2), (0, 0)), mode="edge")
    codec = next(name for name in ENCODERS if name in av.codecs_available)
    named = isinstance(target, str | Path)
    place, layout = (str(target), {"movflags": "faststart"}) if named else (target, {})
    with av.open(place, "w", format="mp4", options=layout) as container:
        # One thread: with several, x264's bytes differed from run to run on a busy machine.
        options = {"crf": "14", "threads": "1"} if codec == "libx264" else {}
        rate = Fraction(fps).limit_denominator(1001)
        stream = cast(VideoStream, container.add_stream(codec, rate=rate, options=options))
        stream.height, stream.width, stream.pix_fmt = video.shape[1], video.shape[2], "yuv420p"
        if not options:
            stream.bit_rate = 4_000_000
        for picture in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())


def probe(source: Clip, size: int) -> Clip:
    """Read the packets' times, without decoding, and settle the size that frames are decoded to."""
    if source.path.stat().st_size == 0:
        raise UnusableError("the file is empty")
    with av.open(str(source.path)) as container:
        if not container.streams.video:
            raise UnusableError("no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise UnusableError("no decoder for this codec")
        packets = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
        times = {time for time in packets if time is not None}
        height, width = stream.codec_context.height, stream.codec_context.width
        fps = float(stream.average_rate or 24)
    if min(height, width) < 1:
        raise UnusableError("no picture size")
    shrink = min(1.0, size / min(height, width))
    return replace(
        source,
        times=tuple(sorted(times)) if len(times) == len(packets) else None,
        frames=len(packets),
        fps=fps,
        height=round(height * shrink),
        width=round(width * shrink),
    )


def decode(clip: Clip, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames start ... stop - 1 as uint8 (T, H, W, 3), and bool (T,): which of them could be decoded.

    Raises OSError or FFmpegError when the file cannot be opened.
    """
    frames = _read(clip, start, stop, seek=True) if clip.times and start else {}
    if len(frames) < stop - start:  # damaged; or this container seeks past leading B-frames: read from the first frame
        frames |= _read(clip, start, stop, seek=False)
    blank = np.zeros((clip.height, clip.width, 3), np.uint8)
    present = np.array([k in frames for k in range(start, stop)])
    return np.stack([frames.get(k, blank) for k in range(start, stop)]), present


def _read(clip: Clip, start: int, stop: int, *, seek: bool) -> dict[int, np.ndarray]:
    place: dict[int | None, int] = {time: k for k, time in enumerate(clip.times or ())}
    found: dict[int, np.ndarray] = {}
    with av.open(str(clip.path)) as container:
        stream = container.streams.video[0]
        if seek and clip.times:
            container.seek(clip.times[start], stream=stream)
        for number, frame in enumerate(_frames(container, stream)):
            index = place.get(frame.pts, -1) if clip.times else number
            if start <= index < stop:
                found[index] = frame.to_ndarray(
                    format="rgb24", width=clip.width, height=clip.height, interpolation="AREA"
                )
            if index >= stop - 1:
                break
    return found


def _frames(container: InputContainer, stream: VideoStream) -> Iterator[av.VideoFrame]:
    """Sound frames only: after a decoding error nothing is trusted up to the next key frame. One thread, so that the
    place of an error does not depend on timing."""
    trusted = True
    packets = container.demux(stream)
    while True:
        try:
            frames = next(packets).decode()
        except StopIteration:
            return
        except av.FFmpegError:
            trusted = False
            continue
        for frame in frames:
            trusted = trusted or frame.key_frame
            if trusted and not frame.is_corrupt:
                yield frame
