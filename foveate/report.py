"""One HTML file that shows a run: nothing is fetched, everything is inside, light and dark.

The caller fills in `ReportData` with plain numbers; sections without data are left out. Everything that came from
outside is escaped, and the page forbids itself any request by its content security policy.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from matplotlib.image import imsave

from foveate import charts
from foveate.charts import Line
from foveate.video import write_mp4

Row = Mapping[str, Any]  # a step, and numbers or None
STRIP = 6  # frames of a clip that are also shown still
MAPS = 6  # steps whose heat maps are shown
LEAST = 256  # pixels of a clip's short side in the page: halved colour resolution would eat single pixels


@dataclass(frozen=True)
class ClipPanel:
    """A clip to show: a title, uint8 (T, H, W, 3), frames a second, and a line about it such as its PSNR."""

    title: str
    video: np.ndarray
    fps: float = 12.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the report is made of. Everything but the title may be left out."""

    title: str
    summary: str = ""
    """A sentence or two under the title."""
    figures: Sequence[tuple[str, str, str]] = ()
    """Headline row: (label, value, note)."""
    checks: Sequence[tuple[str, bool, str]] = ()
    """Verdicts: (name, passed, the numbers)."""
    runs: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """By name, rows of step, kept (share of the tiles, 1 is dense), loss, seconds, and where measured gap. "dense" is
    the twin that the others are compared with; "sparse" and "random" have colours of their own; the first run marks
    where training becomes sparse."""
    gap_limit: float | None = None
    """The relative loss gap that is allowed, as a fraction."""
    profiles: Sequence[Mapping[str, Any]] = ()
    """Each a step, and arrays (layers, heads) under any of recall, error, density."""
    density_means: str = "Share of key tiles needed"
    """What `density` is, as a heading."""
    clips: Sequence[ClipPanel] = ()
    """Shown side by side, in step."""
    tables: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By heading, name -> value: machine, versions, command, where the checkpoint comes from."""
    notes: Sequence[str] = ()
    """Paragraphs for the reader, after the report's own explanation."""


def write_report(path: str | Path, run: ReportData) -> Path:
    """Write the page, making its folder. Returns the path. Raises ValueError for clips of another shape or type."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(run), encoding="utf-8")
    return path


def render(run: ReportData) -> str:
    """The page as text."""
    template = Template(resources.files("foveate").joinpath("assets/report.html").read_text(encoding="utf-8"))
    body = [_figures(run), _checks(run), _reading(run), _clips(run), _training(run), _attention(run), _tables(run)]
    return template.substitute(
        title=escape(run.title),
        verdict=_verdict(run),
        summary=escape(run.summary),
        body="\n".join(filter(None, body)),
        shades=_shades(),
        mark=_mark(),
    )


def _shades() -> str:
    """The heat maps' colours as style sheet: .h0 ... for cells, .b0 ... for the scale."""
    mixes = []
    for shade in range(charts.HEAT):
        place = 200 * shade / (charts.HEAT - 1)
        ends = ("low", "mid") if place <= 100 else ("mid", "high")
        mixes.append(f"color-mix(in oklab, var(--{ends[1]}) {place - 100 * (place > 100):.0f}%, var(--{ends[0]}))")
    return "".join(f".h{k}{{fill:{mix}}}.b{k}{{background:{mix}}}\n" for k, mix in enumerate(mixes))


def _mark() -> str:
    """The project's sign: tiles, sharp in the middle."""
    fade = (1.0, 0.5, 0.18)
    return "".join(
        f'<rect x="{5 * x}" y="{5 * y}" width="4" height="4" rx="1" opacity="{fade[max(abs(x - 2), abs(y - 2))]}"/>'
        for x in range(5)
        for y in range(5)
    )


def _verdict(run: ReportData) -> str:
    if not run.checks:
        return ""
    good, count = sum(passed for _, passed, _ in run.checks), len(run.checks)
    kind, text = (
        ("good", f"All {count} checks passed") if good == count else ("bad", f"{good} of {count} checks passed")
    )
    return f'<p class="verdict {kind}">{text}</p>'


def _figures(run: ReportData) -> str:
    cells = [
        f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd><dd>{escape(note)}</dd></div>'
        for label, value, note in run.figures
    ]
    return f'<dl class="figures">{"".join(cells)}</dl>' if cells else ""


def _checks(run: ReportData) -> str:
    items = [
        f'<li class="{"good" if passed else "bad"}"><b>{escape(name)}</b>'
        f'<span class="sr">{"passed" if passed else "failed"}: </span><span>{escape(detail)}</span></li>'
        for name, passed, detail in run.checks
    ]
    return _section("Checks", f'<ul class="checks">{"".join(items)}</ul>') if items else ""


def _reading(run: ReportData) -> str:
    texts = [
        "A video model spends most of its time comparing every patch of the clip with every other: attention. Most of "
        "those comparisons matter little. foveate learns which blocks of patches (tiles) each part of the clip needs, "
        "computes those exactly, and stands in one average for each of the rest."
    ]
    if len(run.runs) > 1:
        texts.append(
            "Training begins dense: everything is computed while small predictors watch. When leaving tiles out hardly "
            "changes the loss, it switches to sparse. The twins start from the same weights and see the same clips and "
            "noise; only the tiles that are computed differ. If tiles chosen at random did as well, choosing would be "
            "worth nothing: that is what the random run is for."
        )
    return _section(
        "What you are looking at", "".join(f"<p>{escape(text)}</p>" for text in (*texts, *run.notes)), "prose"
    )


def _clips(run: ReportData) -> str:
    panels = []
    for clip in run.clips:
        video = _enlarged(clip.video)
        movie, strip = io.BytesIO(), io.BytesIO()
        write_mp4(movie, video, clip.fps)
        still = clip.video[np.linspace(0, len(clip.video) - 1, min(STRIP, len(clip.video))).round().astype(int)]
        imsave(strip, np.concatenate(list(still), axis=1), format="png")
        note = f"<span>{escape(clip.note)}</span>" if clip.note else ""
        panels.append(
            f"<figure><video autoplay loop muted playsinline width={video.shape[2]} height={video.shape[1]} "
            f'aria-label="{escape(clip.title)}" src="data:video/mp4;base64,{_base64(movie)}"></video>'
            f'<img alt="{escape(clip.title)}: {len(still)} frames" src="data:image/png;base64,{_base64(strip)}">'
            f"<figcaption><b>{escape(clip.title)}</b>{note}</figcaption></figure>"
        )
    return _section("Clips", f'<div class="clips">{"".join(panels)}</div>') if panels else ""


def _enlarged(video: np.ndarray) -> np.ndarray:
    """Whole-number enlargement to a short side of about LEAST pixels."""
    times = max(1, -(-LEAST // min(video.shape[1:3]))) if video.ndim == 4 and video.size else 1
    return video.repeat(times, axis=1).repeat(times, axis=2) if times > 1 else video


def _base64(file: io.BytesIO) -> str:
    return base64.b64encode(file.getvalue()).decode()


def _training(run: ReportData) -> str:
    runs = {
        name: list(rows) for name, rows in reversed(list(run.runs.items())) if rows
    }  # the first is drawn last, on top
    if not runs:
        return ""
    drawn = [_loss(run, runs), _seconds(run, runs), _against_twin(run, runs), _gaps(run, runs)]
    names = "".join(f'<li><i style="background:var(--{_color(n)})"></i>{escape(n)}</li>' for n in run.runs)
    return _section(
        "Training", f'<ul class="legend">{names}</ul><div class="charts">{"".join(filter(None, drawn))}</div>'
    )


def _loss(run: ReportData, runs: Mapping[str, list[Row]]) -> str:
    lines = []
    for name, rows in runs.items():
        lines += _raw_and_smooth(*_column(rows, "loss"), name, _switch(run))
    return _chart(run, lines, "Training loss", "Each dot is one step; the line is their running mean.")


def _seconds(run: ReportData, runs: Mapping[str, list[Row]]) -> str:
    lines = []
    for name, rows in runs.items():
        lines += _raw_and_smooth(*_column(rows, "seconds"), name, _switch(run), median=True)
    top = max((max(line.values) for line in lines if not line.dots), default=1)
    text = "The line is the running median; single slow steps may lie above the picture."
    return _chart(run, lines, "Seconds a step", text, span=(0, 1.25 * top or 1))


def _against_twin(run: ReportData, runs: Mapping[str, list[Row]]) -> str:
    twin = dict(zip(*_column(runs.get("dense", ()), "loss"), strict=True))
    lines = []
    for name, rows in runs.items():
        both = zip(*_column(rows, "loss"), strict=True)
        pairs = [(step, loss / twin[step] - 1) for step, loss in both if twin.get(step)]
        if name != "dense" and pairs:
            steps, ratios = zip(*pairs, strict=True)
            lines += _raw_and_smooth(steps, ratios, name, _switch(run))
    text = "The same batch and the same noise at every step, so the luck of the draw cancels."
    return _chart(run, lines, "Loss against the dense twin", text, percent=True, limit=run.gap_limit)


def _gaps(run: ReportData, runs: Mapping[str, list[Row]]) -> str:
    lines = []
    for name, rows in runs.items():
        steps, gaps = _column(rows, "gap")
        lines += [Line(steps, gaps, _color(name)), Line(steps, gaps, _color(name), dots=True)]
    text = "One model, held-out clips, attention computed both ways. Training turns sparse when this is small enough."
    return _chart(run, lines, "Gap between sparse and dense attention", text, percent=True, limit=run.gap_limit)


def _attention(run: ReportData) -> str:
    drawn = [
        _by_layer(run, "recall", "Recall", "Attention mass that the kept tiles hold; 100\u00a0% is all of it."),
        _by_layer(run, "error", "Output error", "Relative error of a layer's attention output."),
    ]
    layers = max((len(values) for key in ("recall", "error") for _, values in _profile(run, key)), default=0)
    legend = (
        f'<ul class="legend"><li><i class="ramp" style="background:linear-gradient(90deg,{",".join(charts.ramp(3))})">'
        f'</i>layer 0 to {layers - 1}</li><li><i style="background:var(--ink)"></i>mean</li></ul>'
    )
    lines = f'{legend}<div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""
    maps = _maps(run, "density", run.density_means, "Low: a head that needs to see little.")
    maps += _maps(run, "recall", "Recall at the budget", "High: a head that loses little of its attention.")
    return _section("Where attention goes", lines + maps) if lines or maps else ""


def _profile(run: ReportData, key: str) -> list[tuple[float, np.ndarray]]:
    """(step, (layers, heads)) of every profile that has the key and a number in it, in order of steps."""
    found = [(profile["step"], np.asarray(profile[key], float)) for profile in run.profiles if key in profile]
    return sorted(((step, v) for step, v in found if np.isfinite(v).any()), key=lambda pair: pair[0])


def _by_layer(run: ReportData, key: str, title: str, text: str) -> str:
    found = _profile(run, key)
    if not found:
        return ""
    steps = [step for step, _ in found]
    means = np.stack([_means(values) for _, values in found])
    lines = [Line(steps, means[:, n], color, 1.3, 0.85) for n, color in enumerate(charts.ramp(means.shape[1]))]
    lines.append(Line(steps, _means(means), "ink", 2.4))
    return _chart(run, lines, title, text, percent=True, from_zero=True)


def _maps(run: ReportData, key: str, title: str, text: str) -> str:
    found = _profile(run, key)
    if not found:
        return ""
    low, high = min(np.nanmin(v) for _, v in found), max(np.nanmax(v) for _, v in found)
    shown = [found[k] for k in sorted(set(np.linspace(0, len(found) - 1, MAPS).round().astype(int)))]
    maps = "".join(
        f"<figure>{charts.heat_map(v, low=low, high=high, label=f'{title}, step {step}')}"
        f"<figcaption>step {step}</figcaption></figure>"
        for step, v in shown
    )
    scale = "".join(f'<i class="b{shade}"></i>' for shade in range(charts.HEAT))
    return (
        f'<div class="maps"><h3>{escape(title)}</h3><p class="axes">Layers down, heads across. {escape(text)}</p>'
        f'<p class="scale">{100 * low:.0f} % <span>{scale}</span> {100 * high:.0f} %</p>'
        f'<div class="row">{maps}</div></div>'
    )


def _tables(run: ReportData) -> str:
    tables = []
    for heading, rows in run.tables.items():
        cells = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
        tables.append(f"<div><h3>{escape(heading)}</h3><table>{cells}</table></div>")
    return _section("How it was made", f'<div class="tables">{"".join(tables)}</div>') if tables else ""


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{title}</h2>{body}</section>'


def _chart(
    run: ReportData, lines: Sequence[Line], title: str, text: str, *, limit: float | None = None, **options
) -> str:
    """A titled line chart, or nothing when there is nothing to draw."""
    if not any(np.isfinite(line.values).any() for line in lines):
        return ""
    last = max(
        [row["step"] for rows in run.runs.values() for row in rows] + [max(n.steps) for n in lines if len(n.steps)]
    )
    picture = charts.line_chart(lines, label=title, last=last, switch=_switch(run), limit=limit, **options)
    text += f" Dashed: {100 * limit:g}\u00a0%, what is allowed." if limit is not None else ""
    return f"<figure><h3>{title}</h3>{picture}<figcaption>{text}</figcaption></figure>"


def _column(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    kept = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in kept], [row[key] for row in kept]


def _raw_and_smooth(steps, values, name: str, switch: float | None, *, median: bool = False) -> list[Line]:
    """The values as faint dots under their running mean, which does not reach across the switch."""
    if not len(steps):
        return []
    cut = sum(step < switch for step in steps) if switch is not None else len(steps)
    width = max(3, len(values) // 10)
    calm = [charts.smooth(part, width, median=median) for part in (values[:cut], values[cut:]) if len(part)]
    return [Line(steps, values, _color(name), opacity=0.3, dots=True), Line(steps, np.concatenate(calm), _color(name))]


def _switch(run: ReportData) -> float | None:
    """The first run's first sparse step."""
    first = next(iter(run.runs.values()), ())
    return next((row["step"] for row in first if row.get("kept", 1) < 1), None)


def _means(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis, passing over NaN; NaN where there is nothing else."""
    there = np.isfinite(values)
    return np.where(there.any(-1), np.where(there, values, 0).sum(-1) / there.sum(-1).clip(1), np.nan)


def _color(name: str) -> str:
    return name if name in ("sparse", "dense", "random") else "other"
