"""One video file: what it holds, the frames in any stretch of it, and MP4s that browsers play.

Shapes: T frames, H height, W width, C = 3 colours. Files hold uint8 (T, H, W, 3), tensors float (C, T, H, W).
Frames are given as a player shows them: turned and mirrored by the file's display matrix, with square pixels. Frames
are numbered in the order of their times; a variable frame rate stays as it is. Not covered: audio, interlacing.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.sidedata.sidedata import Type as SideData
from av.stream import Disposition
from av.video.stream import VideoStream
from torch import Tensor

ENCODERS = ("libx264", "libopenh264", "libvpx-vp9", "mpeg4")  # the first three play in browsers
NO_FILMS = {"concat", "dash", "hls", "image2", "imf", "rawvideo", "sdp", "tty"}  # lists of other files, text, stills
TRANSPOSED, MIRRORED, INVERTED = 1, 2, 4  # bits of `Clip.turn`, done in this order
# PyAV 19 reads titles that are no UTF-8 by itself and lacks the argument; before, they were an error without it.
UNREADABLE_NAMES: dict[str, Any] = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "replace"}
RETRIES = 16
BACK = 256  # frames: where a container's seek lands too late, decoding starts so much earlier


class UnusableError(Exception):
    """This file, or this stretch of it, cannot be used; the message says why."""


class Clip(NamedTuple):
    """One usable file: its frames' times, and the size (H, W) that it is decoded to, as it is shown."""

    name: str
    path: str | Path
    label: int = 0
    caption: str | None = None
    times: str | None = None  # see `pack`; None: the container has no usable time stamps, decode from the start
    frames: int = 0
    fps: float = 0.0
    height: int = 0
    width: int = 0
    turn: int = 0


def pack(times: Sequence[int]) -> str:
    """Rising time stamps as text: the first one, then differences, each with how often it repeats: '0 512x29'."""
    steps = ((step, len(list(run))) for step, run in groupby(np.diff(times).tolist()))
    return " ".join([str(times[0]), *(f"{step}x{run}" if run > 1 else str(step) for step, run in steps)])


def unpack(text: str) -> np.ndarray:
    """What `pack` packed, int64 (T,)."""
    first, *runs = text.split(" ")
    pairs = [(int(step), int(run or 1)) for step, _, run in (item.partition("x") for item in runs)]
    steps, counts = np.array(pairs, np.int64).reshape(-1, 2).T
    return int(first) + np.concatenate([[0], np.repeat(steps, counts).cumsum()]).astype(np.int64)


def probe(source: Clip, size: int | None = None) -> Clip:
    """Read all packets' times and decode the first sound frame; settle the size that frames are decoded to.

    size: their short side, never enlarged; None keeps the file's. Raises UnusableError, OSError or FFmpegError.
    """
    if os.stat(source.path).st_size == 0:
        raise UnusableError("the file is empty")
    with _open(source.path) as (container, stream):
        decoder = _Decoder(container, stream)
        first = next((frame for number, early, frame in decoder.frames() if decoder.sound(number, early)), None)
        if first is None:
            raise UnusableError("no frame of it can be decoded")
        for _ in decoder.packets():  # the rest is counted, not decoded
            pass
        aspect = stream.sample_aspect_ratio or 1
        rate, base = float(stream.average_rate or stream.guessed_rate or 0), float(stream.time_base or 0)
    turn = _turn(first)
    width, height = max(1, round(first.width * aspect)), first.height
    if turn & TRANSPOSED:
        width, height = height, width
    times = sorted({time for time in decoder.times if time is not None})
    timed = len(times) == len(decoder.times)
    seconds = (times[-1] - times[0]) * base if timed else 0
    measured = (len(times) - 1) / seconds if seconds else 0.0
    if measured and abs(rate / measured - 1) > 0.05:
        rate = measured  # a variable frame rate, or a tag that is wrong
    clip = source._replace(
        times=pack(times) if timed else None,
        frames=len(decoder.times),
        fps=rate or 24.0,
        height=height,
        width=width,
        turn=turn,
    )
    return fit(clip, size) if size else clip


def fit(clip: Clip, size: int) -> Clip:
    """The clip, decoded to a short side of `size`, if it is larger."""
    shrink = min(1.0, size / min(clip.height, clip.width))
    return clip._replace(height=round(clip.height * shrink), width=round(clip.width * shrink))


def decode(clip: Clip, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames start ... stop - 1 as uint8 (T, H, W, 3), and bool (T,): which of them could be decoded.

    Raises OSError or FFmpegError when the file cannot be opened.
    """
    frames: dict[int, np.ndarray] = {}
    places = (start, max(0, start - BACK), 0) if clip.times else (0,)
    for place in dict.fromkeys(places):  # damage, or a container that seeks past what is needed: begin earlier
        if len(frames) < stop - start:
            frames |= _read(clip, start, stop, place)
    blank = np.zeros((clip.height, clip.width, 3), np.uint8)
    present = np.array([k in frames for k in range(start, stop)])
    return np.stack([frames.get(k, blank) for k in range(start, stop)]), present


def _read(clip: Clip, start: int, stop: int, place: int) -> dict[int, np.ndarray]:
    """The sound frames among start ... stop - 1 that are found when decoding begins at frame `place`."""
    times = unpack(clip.times) if clip.times else None
    width, height = (clip.height, clip.width) if clip.turn & TRANSPOSED else (clip.width, clip.height)
    found: dict[int, tuple[int, bool, np.ndarray]] = {}
    last = -1
    with _open(clip.path) as (container, stream):
        if place and times is not None:
            with suppress(av.FFmpegError):  # cannot seek: it is read from the first frame
                container.seek(int(times[place]), stream=stream)
        decoder = _Decoder(container, stream)
        for number, early, frame in decoder.frames():
            index = decoder.shown - 1 if times is None else _place(times, frame.pts)
            if start <= index < stop:
                picture = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="AREA")
                found[index] = number, early, _upright(picture, clip.turn)
                last = max(last, number)
            # A frame that is shown later may be what these were decoded from: its damage must be known, too.
            if index >= stop - 1 and (decoder.shown > last or (index >= stop and number > last)):
                break
    return {index: picture for index, (number, early, picture) in found.items() if decoder.sound(number, early)}


def _place(times: np.ndarray, time: int | None) -> int:
    index = -1 if time is None else int(np.searchsorted(times, time))
    return index if 0 <= index < len(times) and times[index] == time else -1


class _Decoder:
    """Decodes a stream from where it stands, and knows which frames are sound.

    Damage (a packet that the demuxer flags, one that cannot be decoded, a frame that the decoder flags) counts from
    there to the next key packet, in the order of decoding; for frames shown before their key frame, which lean on the
    group before it, one group longer. Packets are numbered as they come.
    """

    def __init__(self, container: InputContainer, stream: VideoStream) -> None:
        stream.codec_context.copy_opaque = True
        self.times: list[int | None] = []  # of every packet that is to be shown
        self.shown = 0  # frames given so far, those lost to an error included
        self._container, self._stream = container, stream
        self._number = -1  # of the packet read last
        self._keys: list[int] = []
        self._hurt: list[int] = []
        self._key_shown = -1

    def packets(self) -> Iterator[Packet]:
        """The packets that are left. Reading goes on behind what cannot be read, up to `RETRIES` times in turn."""
        source, failed = self._container.demux(self._stream), 0
        while failed <= RETRIES:
            self._number += 1
            try:
                packet = next(source)
            except StopIteration:
                return
            except (av.FFmpegError, LookupError):  # LookupError: PyAV, where damage makes up a new stream
                self._hurt.append(self._number)
                source, failed = self._container.demux(self._stream), failed + 1
                continue
            failed = 0
            if packet.size:
                packet.opaque = (self._number,)  # PyAV knows it by its address, which a bare small number shares
                if not packet.is_discard:
                    self.times.append(packet.pts)
                if packet.is_keyframe:
                    self._keys.append(self._number)
                if packet.is_corrupt:  # a parser may flag the packet that it finished when the damage came
                    self._hurt += [self._number, self._number + 1]
            yield packet

    def frames(self) -> Iterator[tuple[int, bool, av.VideoFrame]]:
        """Each frame with its packet's number, and whether it is shown before the key frame of its group."""
        for packet in self.packets():
            try:
                frames = packet.decode()
            except av.FFmpegError:
                self._hurt.append(self._number)
                self.shown += bool(packet.size)
                continue
            for frame in cast(list[av.VideoFrame], frames):
                number = cast(tuple[int], frame.opaque)[0] if frame.opaque else self.shown
                self.shown += 1
                if frame.is_corrupt:
                    self._hurt.append(number)
                if frame.key_frame and not self._keys:  # a container that flags none
                    self._keys.append(number)
                key = self._keys[self._group(number)] if self._group(number) >= 0 else -1
                self._key_shown = key if number == key else self._key_shown
                yield number, self._key_shown < key, frame

    def sound(self, number: int, early: bool) -> bool:
        """Whether nothing that this frame is decoded from is known to be damaged so far."""
        group = self._group(number) - early
        return group >= 0 and not any(self._keys[group] <= hurt <= number for hurt in self._hurt)

    def _group(self, number: int) -> int:
        return bisect_right(self._keys, number) - 1


@contextmanager
def _open(path: str | Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The file and its film: the first video stream that is not a cover picture. Opens no other file, no address."""
    only_this = {"protocol_whitelist": "file"}
    with av.open(str(Path(path).absolute()), options=only_this, **UNREADABLE_NAMES) as container:
        kind = container.format.name
        if kind == "webp_pipe":
            raise UnusableError("a still WebP image, or an animated one, which FFmpeg cannot decode; convert it to MP4")
        if kind.endswith("_pipe") or kind in NO_FILMS:
            raise UnusableError(f"no film: {container.format.long_name or kind}")
        films = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not films:
            covers = ", only a cover picture" if container.streams.video else ""
            raise UnusableError(f"no video stream{covers}")
        if films[0].codec_context is None:
            raise UnusableError("no decoder for this codec")
        yield container, films[0]


def _turn(frame: av.VideoFrame) -> int:
    """How a frame is turned to be shown, from its display matrix: x' = a x + c y, y' = b x + d y."""
    found = cast(Mapping, frame.side_data).get(SideData.DISPLAYMATRIX)
    if found is None:
        return 0
    a, b, _, c, d = np.frombuffer(cast(bytes, found), np.int32)[:5].tolist()
    if max(abs(b), abs(c)) * 100 < min(abs(a), abs(d)):
        return MIRRORED * (a < 0) + INVERTED * (d < 0)
    if max(abs(a), abs(d)) * 100 < min(abs(b), abs(c)):
        return TRANSPOSED + MIRRORED * (c < 0) + INVERTED * (b < 0)
    raise UnusableError(f"turned by about {frame.rotation} degrees, not by a right angle")


def _upright(picture: np.ndarray, turn: int) -> np.ndarray:
    picture = picture.swapaxes(0, 1) if turn & TRANSPOSED else picture
    picture = picture[:, ::-1] if turn & MIRRORED else picture
    return picture[::-1] if turn & INVERTED else picture


def to_uint8(video: Tensor) -> np.ndarray:
    """float (..., C, T, H, W) in [-1, 1] -> uint8 (..., T, H, W, C). Values outside are clipped, NaN becomes grey."""
    pixels = (video.detach().float().cpu().nan_to_num(0.0) + 1) * 127.5
    return pixels.round().clamp(0, 255).byte().movedim(-4, -1).contiguous().numpy()


def write_mp4(
    target: str | Path | BinaryIO, video: np.ndarray, fps: float, about: Mapping[str, str] | None = None
) -> None:
    """Write uint8 (T, H, W, 3) as an MP4 that browsers play: H.264 where PyAV has it, yuv420p, even sizes.

    An odd edge is repeated once. about: tags of the file's header, such as `comment`. Raises ValueError for another
    shape or type.
    """
    if video.ndim != 4 or video.shape[-1] != 3 or video.dtype != np.uint8 or 0 in video.shape:
        raise ValueError(f"video must be uint8 (T, H, W, 3), got {video.dtype} {video.shape}; see to_uint8")
    video = np.pad(video, ((0, 0), (0, video.shape[1] % 2), (0, video.shape[2] % 2), (0, 0)), mode="edge")
    codec = next(name for name in ENCODERS if name in av.codecs_available)
    named = isinstance(target, str | Path)
    place, layout = (str(target), {"movflags": "faststart"}) if named else (target, {})
    with av.open(place, "w", format="mp4", options=layout) as container:
        container.metadata.update(about or {})
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
