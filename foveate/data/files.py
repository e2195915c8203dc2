"""Which files a folder holds, as the file system sees them: links followed, nothing lost without a word."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Skip = tuple[str, str]  # (file name, reason)
SIDECARS = {
    ".ass", ".cfg", ".csv", ".html", ".ini", ".json", ".jsonl", ".log", ".md", ".md5", ".nfo", ".sha256", ".srt",
    ".toml", ".tsv", ".txt", ".vtt", ".xml", ".yaml", ".yml",
}  # fmt: skip


class File(NamedTuple):
    """A regular file. `real` is its place with links in its folders resolved: two names of one place share it."""

    name: str
    path: str
    real: str
    size: int
    mtime: int  # nanoseconds
    identity: tuple[int, int]  # device and inode: two links to one file share it
    caption: str | None = None


@dataclass
class Listing:
    """All files under a folder that may be videos, its folders, and what was passed over; `quiet` is no surprise."""

    files: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    quiet: list[Skip] = field(default_factory=list)


def walk(root: Path) -> Listing:
    """Every file below `root`, sorted, except hidden ones and sidecars (text, tables), which are counted.

    Linked folders are entered; one that leads back to a folder it lies in is not.
    """
    found, sidecars, hidden = Listing(), Counter[str](), 0
    todo: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(str(root), "", (identity(os.stat(root)),))]
    while todo:
        folder, prefix, above = todo.pop()
        real = os.path.realpath(folder)
        try:
            with os.scandir(folder) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            found.skipped.append((prefix or str(root), f"the folder cannot be listed: {error.strerror}"))
            continue
        for entry in inside:
            name = prefix + entry.name
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.name.startswith("."):
                hidden += not entry.name.startswith(".foveate-index")
                continue
            try:
                about = entry.stat()
            except OSError as error:
                found.skipped.append((name, unreadable(error, entry.is_symlink())))
                continue
            if stat.S_ISDIR(about.st_mode):
                if identity(about) in above:
                    found.skipped.append((name, "a link back to a folder that it lies in"))
                    continue
                found.folders += [] if prefix else [name]
                todo.append((entry.path, name + "/", (*above, identity(about))))
            elif not stat.S_ISREG(about.st_mode):
                found.skipped.append((name, "not a regular file"))
            elif suffix in SIDECARS:
                sidecars[suffix] += name != "captions.jsonl"  # which is read
            else:
                found.files.append(file_of(name, entry.path, os.path.join(real, entry.name), about))
    found.files.sort(key=lambda file: file.name.split("/"))
    found.quiet = [
        (f"*{suffix}", f"{count} sidecar files, no video") for suffix, count in sorted(sidecars.items()) if count
    ]
    found.quiet += [(".*", f"{hidden} hidden files and folders")] if hidden else []
    return found


def file_of(name: str, path: str, real: str, about: os.stat_result, caption: str | None = None) -> File:
    """A file from what `os.stat` says of it."""
    return File(name, path, real, about.st_size, about.st_mtime_ns, identity(about), caption)


def identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def unreadable(error: OSError, link: bool) -> str:
    """Why `os.stat` failed, in words."""
    if error.errno == errno.ELOOP:
        return "a symbolic link that leads back to itself"
    if link and isinstance(error, FileNotFoundError):
        return "a broken symbolic link"
    return f"cannot be read: {error.strerror}"


def printable(text: str) -> str:
    """Text that any log or file can take: bytes and halves of characters that are no text become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def without(files: Iterable[File], others: set[tuple[int, int]]) -> list[File]:
    """The files that are none of `others`, by identity."""
    return [file for file in files if file.identity not in others]
