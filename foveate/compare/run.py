"""`foveate compare` from its folders to its files: nothing is computed before every target is known to be free."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from foveate.compare import blind as blind_test
from foveate.compare import folders, page, runs
from foveate.compare.config import CompareConfig
from foveate.generation.film import check_target, whole
from foveate.report import render

FILE, REPORT = "compare.json", "report.html"
Done = tuple[str, list[Path]]  # what is printed, and the files that were written


def compare(
    places: Sequence[Path], config: CompareConfig, as_json: Path | None, out: Path | None, overwrite: bool,
    messages: Console,
) -> Done:  # fmt: skip
    """Folders of videos or of runs. ValueError, before any work, for what cannot be compared or written."""
    targets = [] if as_json is None else [as_json]
    targets += [] if out is None else [out / FILE, out / REPORT]
    _check(targets, overwrite)
    if len({runs.is_run(place) for place in places}) > 1:
        raise ValueError("some of these folders are runs of `foveate train`, others are not; compare one kind")
    of_runs = bool(places) and runs.is_run(places[0])
    found = runs.compare(places, config.seed) if of_runs else _watched(places, config, messages)
    found["clips"] = config.clips
    for target in targets:
        _write(target, render(page.of(found)) if target.suffix == ".html" else _json(found))
    return (runs.table if of_runs else folders.table)(found), targets


def report(out: Path) -> Path:
    """The report of a folder that `compare --out` wrote, made again. ValueError for another file of this name."""
    try:
        found = json.loads((out / FILE).read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("by") != "foveate compare":
        raise ValueError(f"{out / FILE} is no file by `foveate compare --out`")
    _write(out / REPORT, render(page.of(found)))
    return out / REPORT


def blind(places: Sequence[Path], config: CompareConfig, out: Path, overwrite: bool) -> Done:
    """A blind test of two folders: its page, and the key that stays with who asks."""
    targets = [out / blind_test.PAGE, out / blind_test.KEY]
    _check(targets, overwrite)
    text, key = blind_test.make(places, config.clips, config.seed, config.fit)
    _write(targets[0], text)
    _write(targets[1], _json(key))
    said = f"give {targets[0].name} to readers, keep {targets[1].name}; then: foveate compare --answers FILE ... --key "
    return f"{len(key['pairs'])} pairs; {said}{targets[1]}", targets


def count(
    places: Sequence[Path], answers: Sequence[Path], key: Path | None, as_json: Path | None, overwrite: bool
) -> Done:
    """The answers of a blind test's readers."""
    if places:
        raise ValueError(f"--answers takes no folders; the key names them. Leave out {', '.join(map(str, places))}")
    missing = [str(file) for file in answers if not file.is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not there")
    targets = [] if as_json is None else [as_json]
    _check(targets, overwrite)
    found = blind_test.count(answers, key)
    for target in targets:
        _write(target, _json(found))
    return blind_test.table(found), targets


def _watched(places: Sequence[Path], config: CompareConfig, messages: Console) -> dict[str, Any]:
    with Progress(console=messages, disable=not messages.is_terminal, transient=True) as bar:
        tasks = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        return folders.compare(places, config, show)


def _check(targets: Sequence[Path], overwrite: bool) -> None:
    for target in targets:
        check_target(target, overwrite, target.suffix if target.suffix == ".html" else ".json")


def _json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)


def _write(target: Path, text: str) -> None:
    with whole(target) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
