"""The report of a folder of clips by `foveate generate`: players in step, and the settings in their headers."""

from datetime import datetime
from pathlib import Path
from typing import Any

from foveate import video
from foveate.generation.film import settings_of
from foveate.report import ClipPanel, ReportData
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
    """The page of a folder of generated clips."""
    files = generated(folder)
    settings = {file: settings_of(file) for file in files}
    shown = files[:SHOWN]
    clips = {file: video.probe(Clip(file.name, file)) for file in shown}
    rates = sorted(clip.fps for clip in clips.values())
    newest = datetime.fromtimestamp(max(file.stat().st_mtime for file in files)).astimezone()
    models = sorted({str(one.get("model")) for one in settings.values()})
    return ReportData(
        title=f"Clips in {folder.resolve().name}",
        summary=f"{len(files)} clip{'s' if len(files) > 1 else ''} by foveate generate, with {', '.join(models)}.",
        made=f"Newest of {newest.day} {newest:%B %Y, %H:%M}",
        clips=[ClipPanel(file.stem, _frames(clips[file]), _about(settings[file])) for file in shown],
        clips_text=f"The first {SHOWN} of {len(files)}." if len(files) > SHOWN else "",
        fps=rates[len(rates) // 2],
        prose=["What a clip was made with lies in its file's header. Shorter clips stay at their last frame."],
        tables={file.name: {k: v for k, v in settings[file].items() if k != "by"} for file in shown},
    )


def _frames(clip: Clip):
    most = max(1, FRAMES // (clip.height * clip.width * 3))
    return video.decode(clip, 0, min(clip.frames, most))[0]


def _about(settings: dict[str, Any]) -> str:
    text = str(settings.get("prompt") or "")
    return text if len(text) <= 120 else f"{text[:117]}..."
