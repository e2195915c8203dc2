"""What is known of the video files under a folder, kept beside them, so that each is read once and not at every start.

`ROOT/.foveate-index.jsonl`: a header (format, number of rows, checksum of what follows), then one JSON list a file. A
row counts only while the file's size and time of change are the row's; an index that is cut, damaged or of another
format is made anew. Written beside its name and renamed, under a lock on the folder where the file system has locks,
so that of several processes one reads the files and the others wait for it. Where the folder cannot be written the
index lies in the user's cache ($XDG_CACHE_HOME/foveate or ~/.cache/foveate), and the log says so.
"""

import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import av

from foveate.data.files import File
from foveate.video import Clip, UnusableError, probe

log = logging.getLogger(__name__)

NAME = ".foveate-index.jsonl"
FORMAT = 1
SAVE_EVERY = 60.0  # seconds: what a kill during the first reading may cost
WORKERS = min(16, os.cpu_count() or 1)
DECODER = f"av {av.__version__}"  # a file that one version cannot read is tried again by another
Row = list  # [place, size, mtime, frames, fps, height, width, turn, times] or [place, size, mtime, reason, decoder]


def measure(root: Path, files: Sequence[File]) -> list[Clip | str]:
    """Each file as a clip at its full size, or the reason why it cannot be used; from the index as far as it holds."""
    home = os.path.join(os.path.realpath(root), "")
    wanted = {file.real.removeprefix(home): file for file in files}
    rows, others = _known(root, wanted)
    if len(rows) < len(wanted):
        with _lock(root):
            rows, others = _known(root, wanted)  # another process may have been at it
            missing = {place: file for place, file in wanted.items() if place not in rows}
            if missing:
                _read(root, missing, rows, others)
    return [_clip(file, rows[file.real.removeprefix(home)]) for file in files]


def _clip(file: File, row: Row) -> Clip | str:
    if isinstance(row[3], str):
        return row[3]
    frames, fps, height, width, turn, times = row[3:]
    return Clip(file.name, file.path, 0, file.caption, times, frames, fps, height, width, turn)


def _read(root: Path, missing: dict[str, File], rows: dict[str, Row], others: list[Row]) -> None:
    """Read these files into `rows`, in threads, and write the index now and then, whatever happens."""
    began = saved = time.monotonic()
    passing: set[str] = set()  # failures to read that say nothing about the file
    pool = ThreadPoolExecutor(WORKERS)

    def save() -> None:
        there = [row for row in others if os.path.lexists(os.path.join(root, row[0]))]
        _save(root, [*(row for place, row in rows.items() if place not in passing), *there])

    try:
        for done, (place, row, lasts) in enumerate(pool.map(_probe, missing.items()), 1):
            rows[place] = row
            if not lasts:
                passing.add(place)
            if time.monotonic() - saved > SAVE_EVERY:
                save()
                saved = time.monotonic()
                log.info("read %d of %d new or changed files in %s", done, len(missing), root)
    finally:
        pool.shutdown(cancel_futures=True)
        save()
    log.info("read %d new or changed files in %s in %.1f s", len(missing), root, time.monotonic() - began)


def _probe(item: tuple[str, File]) -> tuple[str, Row, bool]:
    """(place, row, whether it says something lasting about the file)."""
    place, file = item
    key = [place, file.size, file.mtime]
    try:
        clip = probe(Clip(file.name, file.path))
    except OSError as error:
        return place, [*key, f"cannot be read: {error.strerror}", DECODER], False
    except UnusableError as error:
        return place, [*key, str(error), DECODER], True
    except av.FFmpegError as error:
        return place, [*key, error.strerror, DECODER], True
    except Exception as error:  # files come from anywhere: one that trips a library must not end the run
        return place, [*key, f"{type(error).__name__}: {error}", DECODER], True
    return place, [*key, clip.frames, clip.fps, clip.height, clip.width, clip.turn, clip.times], True


def _known(root: Path, wanted: dict[str, File]) -> tuple[dict[str, Row], list[Row]]:
    """Rows that hold for these files, by place; and rows of other files."""
    rows: dict[str, Row] = {}
    others: dict[str, Row] = {}
    for where in _places(root):
        for row in _load(where):
            file = wanted.get(row[0])
            if file is None:
                others[row[0]] = row
            elif row[1:3] == [file.size, file.mtime] and (not isinstance(row[3], str) or row[4] == DECODER):
                rows[row[0]] = row
    return rows, list(others.values())


def _load(where: Path) -> list[Row]:
    """The rows of an index; none where there is none, or where it is not to be trusted, which the log says."""
    try:
        head, _, body = where.read_bytes().partition(b"\n")
        about = json.loads(head)
        if about["format"] != FORMAT or about["checksum"] != zlib.crc32(body):
            raise ValueError("another format" if about["format"] != FORMAT else "cut or damaged")
        rows = json.loads(b"[" + body.rstrip(b"\n").replace(b"\n", b",") + b"]")
        if not all(map(_fits, rows)) or len(rows) != about["rows"]:
            raise ValueError("it holds rows of another kind")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        log.info("the index %s is made anew: %s", where, error)
        return []
    return rows


def _fits(row: Row) -> bool:
    kinds = tuple(map(type, row))
    if kinds == (str, int, int, str, str):
        return True
    if kinds[:8] != (str, int, int, int, float, int, int, int) or len(row) != 9:
        return False
    return min(row[3:7]) > 0 and (row[8] is None or isinstance(row[8], str))


def _save(root: Path, rows: list[Row]) -> None:
    """Write the index where it may lie; where that is nowhere, say so and go on."""
    body = b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
    head = json.dumps({"format": FORMAT, "rows": len(rows), "checksum": zlib.crc32(body)}).encode()
    reason = ""
    for where in _places(root):
        try:
            _write(where, head + b"\n" + body)
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        if where.parent != root:
            log.info("the index of %s is kept as %s, because the folder cannot be written: %s", root, where, reason)
        return
    log.warning("the index of %s cannot be kept (%s): its files are read again at every start", root, reason)


def _write(where: Path, data: bytes) -> None:
    if where.name != NAME:
        where.parent.mkdir(parents=True, exist_ok=True)
    beside = where.with_name(f"{where.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        beside.write_bytes(data)  # by the user's umask: others who share the data may read it
        os.replace(beside, where)
    finally:
        with suppress(OSError):
            beside.unlink()


def _places(root: Path) -> list[Path]:
    """Where an index of `root` may lie, the best place first."""
    places = [root / NAME]
    with suppress(RuntimeError):  # no home folder
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        digest = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:32]
        places.append(cache / "foveate" / f"index-{digest}.jsonl")
    return places


@contextmanager
def _lock(root: Path) -> Iterator[None]:
    """One process at a time, where the file system can: a lock on the folder itself, which leaves nothing behind."""
    handle = None
    try:
        import fcntl

        handle = os.open(root, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that reads the files of %s", root)
            fcntl.flock(handle, fcntl.LOCK_EX)
    except (ImportError, OSError):  # then each process reads for itself, and the last one's index stays
        pass
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)
