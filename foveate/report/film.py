"""A clip as one picture that a page can carry: its frames in rows, without loss where that fits.

A page draws single frames of it, so players are in step to the frame, can be stopped and compared pixel by pixel, and
need no video decoder. Without scripts the picture is still a contact sheet.
"""

import base64
import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

QUALITIES = (92, 80, 65)  # of JPEG, where a lossless picture is too large
SIDE = 16_000  # pixels that browsers draw in one picture


@dataclass(frozen=True)
class Film:
    """src: a data URI of frames of height x width in `columns`; count: how many."""

    src: str
    columns: int
    count: int
    height: int
    width: int


def film(video: np.ndarray, most: int) -> Film:
    """uint8 (T, H, W, 3) in at most about `most` bytes: as it is, else as JPEG, else smaller and smaller.

    Raises ValueError for another shape or type.
    """
    if video.ndim != 4 or video.shape[-1] != 3 or video.dtype != np.uint8 or 0 in video.shape:
        raise ValueError(f"a clip must be uint8 (T, H, W, 3), got {video.dtype} {video.shape}")
    while True:
        sheet, columns = contact_sheet(video)
        found = _within(sheet, most) if max(sheet.shape[:2]) <= SIDE else None
        if found is not None or min(video.shape[1:3]) < 32:
            kind, data = found or _packed(sheet, QUALITIES[-1])
            src = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
            return Film(src, columns, *video.shape[:3])
        video = halved(video)


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


def _within(sheet: np.ndarray, most: int) -> tuple[str, bytes] | None:
    for quality in (None, *QUALITIES):
        kind, data = _packed(sheet, quality)
        if len(data) * 4 / 3 <= most:
            return kind, data
    return None


def _packed(sheet: np.ndarray, quality: int | None) -> tuple[str, bytes]:
    target, kind = io.BytesIO(), "png" if quality is None else "jpeg"
    options = {} if quality is None else {"quality": quality, "subsampling": 0}
    Image.fromarray(sheet).save(target, kind, **options)
    return kind, target.getvalue()
