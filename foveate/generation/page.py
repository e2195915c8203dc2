"""The report of a folder of clips by `foveate generate`: players in step, and the settings in their headers."""

from datetime import datetime
from pathlib import Path
from typing import Any

from foveate import video
from foveate.generation.film import settings_of
from foveate.report import ClipPanel, Grid, ReportData
from foveate.video import Clip

SHOWN = 8
FRAMES = 2**28  # bytes of a clip that are shown


def generated(folder: Path) -> list[Path]:
    """The clips of a folder that `foveate generate` wrote, by name."""
    found = []
    for file in sorted(folder.glob("*.mp4")) if folder.is_dir() else ():
        try:
            settings_of(file)
        except ValueError:
            continue
        found.append(file)
    return found


def of_clips(folder: Path) -> ReportData:
    """The page of a folder of generated clips. What all of them share stands in one table, what differs in another."""
    settings = {file: _read(settings_of(file)) for file in generated(folder)}
    files = list(settings)
    shown = files[:SHOWN]
    clips = {file: video.probe(Clip(file.name, file)) for file in shown}
    rates = sorted(clip.fps for clip in clips.values())
    newest = datetime.fromtimestamp(max(file.stat().st_mtime for file in files)).astimezone()
    models = sorted({str(one.get("model")) for one in settings.values()})
    names = list(dict.fromkeys(name for one in settings.values() for name in one))
    first, count = settings[files[0]], f"{len(files)} clip{'s' if len(files) > 1 else ''}"
    shared = {name: one for name, one in first.items() if all(x.get(name) == one for x in settings.values())}
    varied = [name for name in names if name not in shared]
    rows = [[file.stem, *(str(settings[file].get(name, "-")) for name in varied)] for file in files]
    return ReportData(
        title="Generated clips",
        summary=f"{count} in {folder.resolve().name}, made with {', '.join(models)}.",
        made=f"Newest of {newest.day} {newest:%B %Y, %H:%M}",
        clips=[ClipPanel(file.stem, _frames(clips[file]), _about(settings[file])) for file in shown],
        clips_text=f"The first {SHOWN} of {len(files)}." if len(files) > SHOWN else "",
        fps=rates[len(rates) // 2],
        grids=[Grid("Clip by clip", ["", *varied], rows)] if varied else (),
        prose=["What a clip was made with is in its file's header. Shorter clips stay at their last frame."],
        tables={"All clips" if len(files) > 1 else files[0].name: shared},
    )


def _read(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as a reader wants them: without what is the same by definition, a share in per cent."""
    kept = {name: value for name, value in settings.items() if name not in ("by", "name")}
    if isinstance(kept.get("held"), float):
        kept["held"] = f"{kept['held']:.0%} of the model's calls"
    return kept


def _frames(clip: Clip):
    most = max(1, FRAMES // (clip.height * clip.width * 3))
    return video.decode(clip, 0, min(clip.frames, most))[0]


def _about(settings: dict[str, Any]) -> str:
    text = str(settings.get("prompt") or "")
    return text if len(text) <= 120 else f"{text[:117]}..."
