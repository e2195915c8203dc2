"""captions.jsonl: lines of {"file": ..., "caption": ...}. Every line names a clip, or is listed with its number.

A line ends at a line feed and nowhere else: captions may hold any other character, raw control characters too. UTF-8,
or UTF-16 and UTF-32 as `json` detects them; with or without byte order marks, also inside (joined files).
"""

import csv
import io
import json
import mimetypes
import os
import stat
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from foveate.data.files import File, Listing, Skip, file_of, unreadable

CAPTIONS = "captions.jsonl"
COLUMNS = (("file", "path", "video", "file_name", "filename"), ("caption", "text", "prompt"))
MISSING = "has a caption but no video file"


def read(root: Path, listing: Listing, table: Path | None = None) -> tuple[list[File], list[Skip]]:
    """The files that a table, `root`/captions.jsonl by default, names, sorted by name, and what is wrong with the rest.

    table: .jsonl, or .csv and .tsv with a column for the file and one for the caption (`COLUMNS`).
    Raises ValueError where it cannot be read.
    """
    table = table or root / CAPTIONS
    files: dict[str, File] = {}
    skipped: list[Skip] = []
    find = _finder(root)
    try:
        data = table.read_bytes()
    except OSError as error:
        raise ValueError(f"{table} cannot be read: {error.strerror}; mend or remove it") from error
    rows = _cells(table, data) if table.suffix.lower() in (".csv", ".tsv") else _rows(data)
    for number, name, caption, reason in rows:
        found = None
        if not reason:
            found, reason = find(name, caption)
        if found is not None and found.real in files:
            reason = "has a second caption; the first is used"
        if reason:
            here = f"{table.name} line {number}"
            skipped.append((found.name if found else name, f"{reason} ({here})") if name else (here, reason))
        elif found is not None:
            files[found.real] = found
    for file in listing.files:
        if file.real not in files:
            kind = "image" if (mimetypes.guess_type(file.name)[0] or "").startswith("image/") else "video"
            skipped.append((file.name, f"{kind} without a caption in {table.name}"))
    return sorted(files.values(), key=lambda file: file.name), skipped


def _rows(data: bytes) -> Iterator[tuple[int, str, str, str]]:
    """(number, file, caption, what is wrong) of the lines of a .jsonl."""
    for number, line in _lines(data):
        yield number, *_row(line)


def _cells(table: Path, data: bytes) -> Iterator[tuple[int, str, str, str]]:
    """The same of a .csv or .tsv with a header. ValueError where no column of it names files or captions."""
    text = data.decode(json.detect_encoding(data[:4]), errors="backslashreplace").lstrip("\ufeff")
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if table.suffix.lower() == ".tsv" else ",")
    columns = {name.strip().lower(): name for name in reader.fieldnames or () if name}
    chosen = [next((columns[name] for name in names if name in columns), None) for names in COLUMNS]
    if None in chosen:
        wanted = " and ".join(f"one of {', '.join(names)}" for names in COLUMNS)
        raise ValueError(f"the header of {table} needs {wanted}; it has {', '.join(columns) or 'nothing'}")
    try:
        for row in reader:
            name, caption = ((row[column or ""] or "").strip() for column in chosen)
            yield (
                reader.line_num,
                name,
                caption,
                "" if name and caption else "empty caption" if name else "no file name",
            )
    except csv.Error as error:
        yield reader.line_num, "", "", f"not {table.suffix[1:].upper()}: {error}"


def _lines(data: bytes) -> Iterator[tuple[int, str | bytes]]:
    """(number, line) of all lines that are not blank; bytes where they are not the text they claim to be."""
    encoding = json.detect_encoding(data[:4])
    if not encoding.startswith("utf-8"):
        data = data.decode(encoding, errors="replace").encode("utf-8", errors="replace")
    ends = b"\n" if b"\n" in data else b"\r"
    for number, line in enumerate(data.split(ends), 1):
        try:
            text = line.decode("utf-8").strip("\ufeff \t\r\n")
        except UnicodeDecodeError:
            yield number, line
        else:
            if text:
                yield number, text


def _row(line: str | bytes) -> tuple[str, str, str]:
    """One line: (file, caption, what is wrong with it)."""
    try:
        text = line if isinstance(line, str) else line.decode("utf-8")
        row = json.loads(text, strict=False)  # raw control characters inside a caption are kept
    except UnicodeDecodeError as error:
        return "", "", f"not UTF-8: {error}"
    except (ValueError, RecursionError) as error:
        return "", "", f"not JSON: {error}"
    values = [row.get(key) if isinstance(row, dict) else None for key in ("file", "caption")]
    name, caption = (value if isinstance(value, str) else "" for value in values)
    if not all(isinstance(value, str) for value in values) or not name:
        return name, "", 'needs {"file": "...", "caption": "..."}, both text'
    if not caption.strip():
        return name, "", "empty caption"
    try:
        caption.encode()
    except UnicodeEncodeError:
        return name, "", "the caption holds half a surrogate pair"
    return name, caption, ""


def _finder(root: Path):
    """A function from (name, caption) to (file or None, why not), with folders looked up once."""

    @cache
    def real(folder: str) -> str:
        return os.path.realpath(folder)

    home = real(str(root))

    @cache
    def spelled(folder: str) -> dict[str, str]:
        try:
            return {unicodedata.normalize("NFC", name): name for name in sorted(os.listdir(folder))}
        except OSError:
            return {}

    def respelled(name: str) -> str:
        """The name as the file system spells it: other Unicode forms of it, and backslashes, are tried."""
        place = str(root)
        for part in Path(name.replace("\\", "/")).parts:
            exact = os.path.join(place, part)
            known = os.path.lexists(exact)
            place = (
                exact if known else os.path.join(place, spelled(place).get(unicodedata.normalize("NFC", part), part))
            )
        return place

    def find(name: str, caption: str) -> tuple[File | None, str]:
        path = os.path.join(root, name)
        try:
            if not os.path.lexists(path):
                path = respelled(name)
            about = os.stat(path)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError) and not os.path.islink(path)
            return None, MISSING if missing else unreadable(error, os.path.islink(path))
        except ValueError:
            return None, f"{MISSING}: no file can have this name"
        if not stat.S_ISREG(about.st_mode):
            return None, "is a folder, not a video file" if stat.S_ISDIR(about.st_mode) else "not a regular file"
        place = os.path.join(real(os.path.dirname(path)), os.path.basename(path))
        shown = os.path.relpath(path, root)
        if os.path.isabs(name) or ".." in Path(name).parts:
            shown = os.path.relpath(place, home) if place.startswith(os.path.join(home, "")) else place
        return file_of(shown.replace(os.sep, "/"), path, place, about, caption), ""

    return find
