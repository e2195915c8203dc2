"""A folder or table that lies elsewhere: an fsspec URL such as s3://bucket/clips/, copied once to this machine.

A file has its name once it is whole, so several processes may copy into one folder, and a killed copy goes on.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from foveate.data.files import Skip, printable

log = logging.getLogger("foveate")

TABLES = (".jsonl", ".csv", ".tsv")


def is_url(name: str | Path) -> bool:
    """Whether this names a place by protocol. `Path` makes one slash of two."""
    head, colon, rest = str(name).partition(":")
    return bool(colon) and rest.startswith("/") and len(head) > 1 and head.replace("+", "").isalnum()


def url_of(name: str | Path) -> str:
    """As it was before `Path` took a slash."""
    head, _, rest = str(name).partition(":")
    return f"{head}://{rest.removeprefix('//').removeprefix('/') if head != 'file' else '/' + rest.lstrip('/')}"


def copy(
    url: str, to: Path, *, number: int = 0, count: int = 1, say: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Path, list[Skip]]:
    """Copy what lies under `url` into `to`, and say what could not be: (the folder or table there, what was left).

    Process `number` of `count` begins at its own part. A file that is there in its size is not copied again. ValueError
    where there is nothing, ImportError that names the package where the protocol needs one.
    """
    system, root = _open(url)
    try:
        found = system.find(root, detail=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--data {url} cannot be listed: {error}") from error
    if not found:
        raise ValueError(f"--data {url}: there is no such folder or file, or it is empty")
    alone = list(found) == [system._strip_protocol(root)]
    if alone and PurePosixPath(root).suffix.lower() in TABLES:  # the clips lie beside it
        base = str(PurePosixPath(root).parent)
        found = system.find(base, detail=True)
    elif alone:
        raise ValueError(f"--data {url} is one file; give its folder, or a {', '.join(TABLES)} of names and captions")
    else:
        base = root
    items = sorted(found.items())
    begin = number * len(items) // count
    failed: dict[PurePosixPath, str] = {}
    log.info("%d files of %s are copied to %s, those that are not there", len(items), url, to)
    for done, (name, about) in enumerate([*items[begin:], *items[:begin]], 1):
        inside = PurePosixPath(name).relative_to(base.rstrip("/") or "/")
        try:
            _fetch(system, name, about.get("size"), to, inside)
        except Exception as error:  # whatever a protocol raises
            failed[inside] = f"could not be copied from {url}: {printable(str(error) or repr(error))}"
        say(done, len(items))
    left = [(printable(str(inside)), why) for inside, why in sorted(failed.items()) if not (to / inside).is_file()]
    return (to / PurePosixPath(root).name if base != root else to), left


def _open(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise ImportError(f"{url} needs fsspec: pip install fsspec") from None
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:  # names its package
        raise ImportError(f"{url}: {error} (pip install it beside foveate)") from None
    except ValueError as error:
        raise ValueError(f"--data {url}: {error}; known are file, s3, gs, hf, http and the others of fsspec") from None


def _fetch(system: Any, name: str, size: int | None, to: Path, inside: PurePosixPath) -> None:
    if ".." in inside.parts:  # an object's name may be anything
        raise ValueError("its name leads out of the folder")
    target = to / inside
    if target.is_file() and (size is None or target.stat().st_size == size):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with system.open(name, "rb") as source, fresh.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 22)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)
