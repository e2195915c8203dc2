"""The report of a comparison: players side by side, and every number with its interval."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from foveate.compare import folders, metrics, runs
from foveate.compare.pairs import Pair
from foveate.report import Chart, ClipPanel, Grid, ReportData, charts
from foveate.report.charts import Line
from foveate.video import Clip, UnusableError, probe

log = logging.getLogger("foveate")

COLORS = ("dense", "sparse", "random", "other")
HEADLINE = ("psnr", "ssim", "ms_ssim", "vmaf", "lpips")


def of(result: Mapping[str, Any]) -> ReportData:
    """The page of what `folders.compare` or `runs.compare` found."""
    return _of_runs(result) if result["kind"] == "runs" else _of_videos(result)


def _of_videos(result: Mapping[str, Any]) -> ReportData:
    names = [one["label"] for one in result["folders"]]
    count, share = len(result["pairs"]), f"{100 * result['interval']:.0f} %"
    checks = [
        (
            f"{folders.SHORT[kind]}: {name} is told from the control",
            one["control_outside"],
            f"{folders.span(one)}; the reference blurred by one pixel: {found['control']['value']:.4g}",
        )
        for kind, found in result["distances"].items()
        for name, one in found["to"].items()
    ]
    note = f"In brackets: {share} intervals by bootstrap over pairs."
    said = [line for kind in result["distances"] for line in folders.about_distance(kind, result)]
    return ReportData(
        title=f"{', '.join(names[1:])} against {names[0]}",
        summary=headline(result),
        made=f"By {result['version']}",
        figures=_figures(result, names[1]) if len(names) == 2 else (),
        clips=panels(result),
        clips_title="Side by side",
        clips_text=f"{result['clips']} of {count} pairs, spread over their names." if count > result["clips"] else "",
        fps=result["pairs"][0]["fps"],
        grids=[Grid("What is measured", *_rows(folders.cells(result)), note=note), _each_pair(result, names)],
        checks=checks,
        prose=[
            f"{names[0]} is the reference. PSNR, SSIM and MS-SSIM are computed frame by frame and compare a clip with "
            "the reference's; flicker is the mean change of a pixel from one frame to the next, and its change is "
            "against the reference's. An interval says how far the mean would move with other clips of this kind.",
            *said,
        ],
        tables={
            "Compared": {one["label"]: one["path"] for one in result["folders"]},
            **({"Not measured": result["not_measured"]} if result["not_measured"] else {}),
            **({"Left out": dict(map(tuple, result["left_out"]))} if result["left_out"] else {}),
        },
    )  # fmt: skip


def headline(result: Mapping[str, Any]) -> str:
    """The comparison in one line."""
    count, first = len(result["pairs"]), result["folders"][0]["label"]
    found = result["metrics"]["psnr"]
    best = sorted(found, key=lambda name: -found[name]["mean"])
    each = ", ".join(f"{name} {folders.cell(found[name])} dB" for name in best)
    return f"Over {count} pair{'s' if count > 1 else ''}, PSNR to {first}: {each}."


def _figures(result: Mapping[str, Any], name: str) -> list[tuple[str, str, str]]:
    found = [
        (metrics.PAIRED[metric], f"{one[name]['mean']:.4g}", _between(one[name]))
        for metric, one in result["metrics"].items()
        if metric in HEADLINE
    ]
    for kind, one in result["distances"].items():
        found.append((folders.SHORT[kind], f"{one['to'][name]['value']:.3g}", _between(one["to"][name])))
    return found


def _between(one: Mapping[str, Any]) -> str:
    return "one pair: no interval" if one["low"] is None else f"{one['low']:.4g} to {one['high']:.4g}"


def _rows(cells: Sequence[Sequence[str]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return cells[0], cells[1:]


def _each_pair(result: Mapping[str, Any], names: Sequence[str]) -> Grid:
    known = [metric for metric in metrics.PAIRED if metric in result["metrics"] and metric != "flicker"]
    columns = [(name, metric) for name in names[1:] for metric in known]
    head = ["", *(f"{metrics.PAIRED[metric]}{f', {name}' if len(names) > 2 else ''}" for name, metric in columns)]
    rows = [
        [pair["name"], *(_short(pair["scores"][name].get(metric)) for name, metric in columns)]
        for pair in result["pairs"]
    ]
    return Grid("Pair by pair", head, rows, folded=True)


def _short(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def panels(result: Mapping[str, Any]) -> list[ClipPanel]:
    """Players of some pairs, evenly spaced over their names. Files that have gone are left out, with a warning."""
    pairs, names = result["pairs"], [one["label"] for one in result["folders"]]
    found: list[ClipPanel] = []
    for place in sorted(set(np.linspace(0, len(pairs) - 1, result["clips"]).round().astype(int).tolist())):
        about = pairs[place]
        try:
            videos = read(Pair(about["name"], tuple(map(_clip(about), about["files"])), about["frames"]))
        except (OSError, UnusableError) as error:
            log.warning("the report is without %s: %s", about["name"], error)
            continue
        for number, (name, video) in enumerate(zip(names, videos, strict=True)):
            psnr = about["scores"][name].get("psnr")
            note = "reference" if number == 0 else f"{_short(psnr)} dB to {names[0]}"
            found.append(ClipPanel(name, video, note, reference=number == 0, group=about["name"]))
    return found


def _clip(about: Mapping[str, Any]):
    def made(path: str) -> Clip:
        clip = probe(Clip(Path(path).name, path))
        return clip._replace(height=about["height"], width=about["width"])

    return made


def read(pair: Pair) -> list[np.ndarray]:
    """A pair's videos, uint8 (T, H, W, 3) each, from their beginning on, as long as a page has room for."""
    first = pair.clips[0]
    most = max(2, 2**28 // (first.height * first.width * 3))
    return pair.frames_of(0, min(pair.frames, most))


def _of_runs(result: Mapping[str, Any]) -> ReportData:
    names = [one["label"] for one in result["folders"]]
    gaps = result["gaps"]
    shown = [_losses(result, 0, "step"), _losses(result, 1, "seconds of training")]
    shown += [_gap(gaps[axis], title, axis) for axis, title in runs.TITLES.items()]
    head = ["", *runs.TITLES.values()]
    rows = [[name, *(runs.per_cent(gaps[axis][name]) for axis in runs.TITLES)] for name in names[1:]]
    lead = "; ".join(f"{name} {runs.per_cent(found)}" for name, found in gaps["steps"].items())
    return ReportData(
        title=f"{', '.join(names[1:])} against {names[0]}",
        summary=f"Validation loss against {names[0]} at equal steps: {lead}.",
        made=f"By {result['version']}",
        charts=shown,
        grids=[Grid("Loss gaps", head, rows, note="Means over the second half of what the runs share.")],
        prose=[
            "Both gaps are of the loss on held-out clips, against the first run's. At equal steps, both have seen as "
            "many clips; at equal training time, the faster one has seen more. Time is the sum of the steps' own "
            "seconds. Intervals are over validations of one run, which follow each other: they say nothing of how "
            "another seed would have trained.",
        ],
        tables={"Compared": {one["label"]: one["path"] for one in result["folders"]}},
        legend=dict(zip(names, COLORS * len(names), strict=False)),
    )  # fmt: skip


def _losses(result: Mapping[str, Any], column: int, label: str) -> Chart:
    lines = []
    for (_, curve), color in zip(result["curves"].items(), COLORS * len(result["curves"]), strict=False):
        x, y = [row[column] for row in curve], [row[2] for row in curve]
        lines += [Line(x, y, color), Line(x, y, color, 4, dots=True)]
    title = f"Validation loss by {label.partition(' ')[0]}"
    last = max(max(line.steps) for line in lines)
    return Chart(title, "Held-out clips.", Markup(charts.line_chart(lines, label=title, last=last, x_label=label)))


def _gap(found: Mapping[str, Any], title: str, axis: str) -> Chart:
    lines = []
    for one, color in zip(found.values(), COLORS[1:] * len(found), strict=False):
        x, y = zip(*one["curve"], strict=True)
        lines += [Line(x, y, color), Line(x, y, color, 4, dots=True)]
    last = max(max(line.steps) for line in lines)
    label = {"steps": "step", "seconds": "seconds of training"}[axis]
    svg = charts.line_chart(lines, label=title, last=last, x_label=label, percent=True)
    return Chart(title, "Above 0 the loss is higher than the first run's.", Markup(svg))
