"""Files of generated clips: where they may be written, whole or not at all, and the settings they carry."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import av


def check_target(out: Path, overwrite: bool, suffix: str = ".mp4") -> None:
    """ValueError where no such file can be written to `out`, or where one is already there."""
    if out.suffix != suffix:
        raise ValueError(f"{out} must end in {suffix}")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; give the name of a file")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} is there already; give another name, or --overwrite to replace it")
    home = next(folder for folder in out.absolute().parents if folder.exists())
    if not home.is_dir():
        raise ValueError(f"{home} is a file, so {out} cannot lie in it")
    if not os.access(home, os.W_OK | os.X_OK):
        raise ValueError(f"{home} cannot be written to (read-only, or not yours); give another place")


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A name to write to, which becomes `out` when the `with` ends well and disappears otherwise."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.stem}.partial{out.suffix}")
    try:
        yield partial
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def about(settings: dict[str, Any]) -> dict[str, str]:
    """Settings as what an MP4's header holds: players show the comment."""
    return {"comment": json.dumps({"by": "foveate generate"} | settings, ensure_ascii=False)}


def given_flags(config: Any) -> dict[str, Any]:
    """The flags of a dataclass that say something, as JSON has them."""
    plain = {field.name: field.default for field in fields(config)}
    values = {name: getattr(config, name) for name in plain}
    kept = {name: value for name, value in values.items() if value != plain[name] or name in ("model", "seed")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}


def settings_of(file: str | Path) -> dict[str, Any]:
    """What a clip by `foveate generate` was made with. ValueError for a file that does not say."""
    try:
        with av.open(str(file)) as container:
            found = json.loads(container.metadata.get("comment", ""))
    except (av.FFmpegError, ValueError, UnicodeError):
        found = None
    if not isinstance(found, dict) or found.get("by") != "foveate generate":
        raise ValueError(f"{file} is no clip by `foveate generate`, or has lost its header")
    return found
