"""`foveate compare` of folders of videos: every metric with its interval, as one dictionary and as a table."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from foveate.compare import frechet, metrics
from foveate.compare.config import CompareConfig
from foveate.compare.frechet import Net, View
from foveate.compare.intervals import SHARE, of_mean
from foveate.compare.pairs import Pair, find, labels
from foveate.version import described
from foveate.video import UnusableError

log = logging.getLogger("foveate")

I3D = View(16, 224, whole=True)
Progress = Callable[[str, int, int], None]


def compare(places: Sequence[Path], config: CompareConfig, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """What `--json` writes: scores of every pair, means with intervals, distances, and what was left out and why."""
    networks = {
        name: metrics.script(file, name, config.device)
        for name, file in (("lpips", config.lpips), ("fvd", config.fvd))
        if file is not None
    }
    pairs, skipped = find(places, fit=config.fit)
    names = labels(places)
    missing = {name: metrics.HOW[name] for name in ("lpips", "fvd") if name not in networks}
    if not config.vmaf or metrics.ffmpeg()[0] is None:
        missing["vmaf"] = metrics.ffmpeg()[1] if config.vmaf else "left out by --no-vmaf"
    scored: list[tuple[Pair, metrics.Scores]] = []
    for number, pair in enumerate(pairs):
        try:
            vmaf = "vmaf" not in missing
            scored.append((pair, metrics.score(pair, vmaf=vmaf, lpips=networks.get("lpips"), device=config.device)))
        except UnusableError as error:
            skipped.append((pair.name, str(error)))
        progress("pairs", number + 1, len(pairs))
    if not scored:
        raise ValueError(f"no pair could be compared: {'; '.join(f'{name}: {why}' for name, why in skipped[:5])}")
    for pair, found in scored:
        missing |= {name: f"{reason} ({pair.name})" for name, reason in found.reasons.items()}
    result: dict[str, Any] = {
        "by": "foveate compare", "kind": "videos", "version": described(),
        "folders": [{"label": name, "path": str(place.absolute())} for name, place in zip(names, places, strict=True)],
        "pairs": [_row(pair, found, names) for pair, found in scored],
        "metrics": _means([found for _, found in scored], names, config.seed),
        "interval": SHARE, "seed": config.seed,
        "left_out": [list(one) for one in skipped],
    }  # fmt: skip
    kept = [pair for pair, _ in scored]
    distances = {}
    if config.windows:
        from foveate.compare.features import FRAMES, SIZE, trained

        distances["frechet"] = _distance(kept, trained().features, View(FRAMES, SIZE), config, names, missing, progress)
    else:
        missing["frechet"] = "left out by --windows 0"
    if "fvd" in networks:
        given = networks["fvd"]

        def i3d(x):
            return given(x.to(config.device), rescale=False, resize=False, return_features=True)

        distances["fvd"] = _distance(kept, i3d, I3D, config, names, missing, progress)
    missing["vbench"] = metrics.HOW["vbench"]
    return result | {"distances": {k: v for k, v in distances.items() if v}, "not_measured": missing}


def _row(pair: Pair, found: metrics.Scores, names: Sequence[str]) -> dict[str, Any]:
    first = pair.clips[0]
    scores = {
        name: {metric: "inf" if value == float("inf") else value for metric, value in one.items() if value is not None}
        for name, one in zip(names, found.of, strict=True)
    }
    files = [str(Path(clip.path).absolute()) for clip in pair.clips]
    size = {"frames": pair.frames, "height": first.height, "width": first.width, "fps": round(first.fps, 3)}
    return {"name": pair.name, **size, "files": files, "scores": scores}


def _means(found: Sequence[metrics.Scores], names: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:
    means: dict[str, dict[str, Any]] = {}
    for metric in metrics.PAIRED:
        for place, name in enumerate(names):
            values = [one.of[place].get(metric) for one in found]
            values = [value for value in values if value is not None]
            if values:
                means.setdefault(metric, {})[name] = of_mean(values, seed)._asdict()
                means[metric][name]["equal"] = int(np.isinf(values).sum())
    return means


def _distance(
    pairs: Sequence[Pair], net: Net, view: View, config: CompareConfig, names: Sequence[str], missing: dict[str, str],
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    name = "fvd" if view is I3D else "frechet"
    fitting = [
        pair
        for pair in pairs
        if pair.frames >= view.frames and (view.whole or min(pair.clips[0].height, pair.clips[0].width) >= view.size)
    ]
    what = f"videos of {view.frames} frames and {view.size} pixels a side, or more"
    if len(fitting) < len(pairs):
        log.warning("%s: %d of %d pairs are left out: it needs %s", name, len(pairs) - len(fitting), len(pairs), what)
    if not fitting:
        missing[name] = f"needs {what}"
        return {}
    done = 0

    def step(more: int) -> None:
        nonlocal done
        done += more
        progress("windows", done, -(-config.windows // len(fitting)) * len(fitting))

    found, damaged, video = frechet.features(fitting, net, view, config.windows, config.seed, step)
    to = {
        label: frechet.distance(found[0], x, video, config.seed) for label, x in zip(names[1:], found[1:], strict=True)
    }
    control = frechet.distance(found[0], damaged, video, config.seed)
    return {
        "windows": control.windows, "videos": control.videos,
        "to": {label: asdict(one) | {"control_outside": apart(one, control)} for label, one in to.items()},
        "control": asdict(control), "halves": frechet.halves(found[0], video),
        "drawn_anew": "videos" if control.videos >= frechet.GROUPS else "windows",
    }  # fmt: skip


def apart(one: frechet.Distance, control: frechet.Distance) -> bool:
    """Whether the damaged control lies outside the interval: whether the distance can tell the two."""
    return not one.low <= control.value <= one.high


SHORT = {"frechet": "Fréchet, own features", "fvd": "FVD (your weights)"}
TITLES = {
    "frechet": "Fréchet distance on foveate's own clip features (not FVD)",
    "fvd": "FVD (your I3D network)",
}


def cells(result: Mapping[str, Any]) -> list[list[str]]:
    """A row a metric, a column a folder, under a row of the folders' names."""
    names = [folder["label"] for folder in result["folders"]]
    rows = [["", *names]]
    for metric, found in result["metrics"].items():
        row = [cell(found[name]) if name in found else ("reference" if name == names[0] else "-") for name in names]
        rows.append([f"{metrics.PAIRED[metric]} {metrics.BETTER.get(metric, '')}".rstrip(), *row])
    for kind, found in result["distances"].items():
        rows.append([f"{SHORT[kind]} ↓", "reference", *(span(found["to"][name]) for name in names[1:])])
    return rows


def table(result: Mapping[str, Any]) -> str:
    """What is printed: the cells, then what has to be known of distances, then what is not in it and why."""
    rows = cells(result)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    count, share = len(result["pairs"]), f"{100 * result['interval']:.0f} %"
    lines += ["", f"{count} pair{'s' if count > 1 else ''}; in brackets {share} intervals by bootstrap over pairs."]
    lines += [one for kind in result["distances"] for one in about_distance(kind, result)]
    lines += [f"Not measured: {name}: {reason}" for name, reason in result["not_measured"].items()]
    lines += [f"Left out: {name}: {reason}" for name, reason in result["left_out"]]
    return "\n".join(lines)


def cell(found: Mapping[str, Any]) -> str:
    """A mean and its interval, with how many pairs are equal."""
    text = span({"value": found["mean"], **found})
    return text + (f" ({found['equal']} of {found['n']} equal)" if found.get("equal") else "")


def span(found: Mapping[str, Any]) -> str:
    """A value and the ends of its interval."""
    text = f"{found['value']:.4g}"
    return text if found["low"] is None else f"{text} [{found['low']:.4g}, {found['high']:.4g}]"


def about_distance(kind: str, result: Mapping[str, Any]) -> list[str]:
    """What has to be known to read a distance."""
    found = result["distances"][kind]
    lines = [
        f"{TITLES[kind]}: {found['windows']} windows of {found['videos']} videos, interval by drawing "
        f"{found['drawn_anew']} anew. Control, the reference blurred by one pixel: {span(found['control'])}. "
        f"Halves of the reference: {found['halves']:.4g}."
    ]
    for name, one in found["to"].items():
        if not one["control_outside"]:
            lines.append(
                f"The control lies inside the interval of {name}: it cannot be told from the blurred reference."
            )
    return lines
