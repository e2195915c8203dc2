"""A clip as one picture that a page can carry: its frames in rows, without loss where that fits.

A page draws single frames of it, so players are in step to the frame, can be stopped and compared pixel by pixel, and
need no video decoder. Without scripts the picture is still a contact sheet.
"""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

QUALITIES = (92, 80, 65)  # of JPEG, where a lossless picture is too large
SIDE = 16_000  # pixels that browsers draw in one picture


@dataclass(frozen=True)
class Film:
    """src: a data URI of frames of height x width in `columns`; count: how many; quality: JPEG's, None without loss."""

    src: str
    columns: int
    count: int
    height: int
    width: int
    quality: int | None = None


def film(video: np.ndarray, most: int) -> Film:
    """uint8 (T, H, W, 3) in at most about `most` bytes: as it is, else as JPEG, else smaller and smaller.

    Raises ValueError for another shape or type.
    """
    return films([video], most)[0]


def films(videos: Sequence[np.ndarray], most: int) -> list[Film]:
    """Clips that are to be compared: all packed alike, as the one that takes the most room needs it."""
    for video in videos:
        if video.ndim != 4 or video.shape[-1] != 3 or video.dtype != np.uint8 or 0 in video.shape:
            raise ValueError(f"a clip must be uint8 (T, H, W, 3), got {video.dtype} {video.shape}")
    while True:
        sheets = [contact_sheet(video) for video in videos]
        smallest = min(min(video.shape[1:3]) for video in videos) < 32
        fits = max(max(sheet.shape[:2]) for sheet, _ in sheets) <= SIDE
        found = _within([sheet for sheet, _ in sheets], most) if fits else None
        if found is None and smallest:
            found = QUALITIES[-1], [_packed(sheet, QUALITIES[-1]) for sheet, _ in sheets]
        if found is not None:
            quality, packed = found
            kind = "png" if quality is None else "jpeg"
            sources = [f"data:image/{kind};base64,{base64.b64encode(data).decode()}" for data in packed]
            return [
                Film(src, columns, len(video), video.shape[1], video.shape[2], quality)
                for src, (_, columns), video in zip(sources, sheets, videos, strict=True)
            ]
        videos = [halved(video) for video in videos]


def contact_sheet(video: np.ndarray) -> tuple[np.ndarray, int]:
    """Frames in rows, as near to a square as they go, black where the last row is short; and how many a row has."""
    count, height, width = video.shape[:3]
    columns = min(count, math.ceil(math.sqrt(count * height / width)))
    rows = -(-count // columns)
    padded = np.concatenate([video, np.zeros((rows * columns - count, height, width, 3), np.uint8)])
    grid = padded.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
    return grid.reshape(rows * height, columns * width, 3), columns


def halved(video: np.ndarray) -> np.ndarray:
    """Half as high and wide, means of four pixels; an odd last row or column is left out."""
    even = video[:, : video.shape[1] // 2 * 2, : video.shape[2] // 2 * 2].astype(np.float32)
    four = even[:, ::2, ::2] + even[:, 1::2, ::2] + even[:, ::2, 1::2] + even[:, 1::2, 1::2]
    return (four / 4).round().astype(np.uint8)


def _within(sheets: Sequence[np.ndarray], most: int) -> tuple[int | None, list[bytes]] | None:
    """The best quality, None without loss, at which no sheet takes more, and the sheets so packed."""
    for quality in (None, *QUALITIES):
        packed = []
        for sheet in sheets:
            packed.append(_packed(sheet, quality))
            if len(packed[-1]) * 4 / 3 > most:
                break
        else:
            return quality, packed
    return None


def _packed(sheet: np.ndarray, quality: int | None) -> bytes:
    target, kind = io.BytesIO(), "png" if quality is None else "jpeg"
    options = {} if quality is None else {"quality": quality, "subsampling": 0}
    Image.fromarray(sheet).save(target, kind, **options)
    return target.getvalue()
