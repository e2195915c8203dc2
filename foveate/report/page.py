"""One HTML file that shows a run: nothing is fetched, everything is inside, light and dark.

The caller fills in `ReportData` with plain numbers; sections without data are left out. Everything that came from
outside is escaped, and the page forbids itself any request by its content security policy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from foveate.report import charts
from foveate.report.charts import Line
from foveate.report.film import Film, films

Row = Mapping[str, Any]  # a step, and numbers or None
MAPS = 6  # steps whose heat maps are shown
ROOM = 14e6  # bytes that all clips of a page may take
KNOWN = ("sparse", "dense", "random")  # runs with a colour of their own


@dataclass(frozen=True)
class ClipPanel:
    """A clip to show: a title, uint8 (T, H, W, 3), and a line about it such as its PSNR.

    reference: a reader may ask for the other clips' differences from it. derived: it is a difference itself.
    group: clips of one group stand in a row of their own under this heading, and are compared with each other.
    """

    title: str
    video: np.ndarray
    note: str = ""
    reference: bool = False
    derived: bool = False
    group: str = ""


@dataclass(frozen=True)
class Speed:
    """Seconds of a training step on so many tokens, with sparse and with dense attention."""

    tokens: int
    sparse: float
    dense: float


@dataclass(frozen=True)
class Chart:
    """A titled picture and the sentence under it."""

    title: str
    text: str
    svg: Markup


@dataclass(frozen=True)
class Grid:
    """A table of text: the first column and the first row name things. folded: shown when it is asked for."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the report is made of. Everything but the title may be left out."""

    title: str
    summary: str = ""
    """A sentence or two under the title."""
    made: str = ""
    """When, and by which revision."""
    figures: Sequence[tuple[str, str, str]] = ()
    """Headline row: (label, value, note)."""
    clips: Sequence[ClipPanel] = ()
    """Shown side by side, in step."""
    clips_title: str = "Clips"
    clips_text: str = ""
    """What there is to see."""
    fps: float = 12.0
    """Frames a second that the clips are played at."""
    speeds: Sequence[Speed] = ()
    """In order of tokens."""
    speed_limit: float | None = None
    """Promised speed-up at the longest."""
    runs: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """By name, rows of step, kept (share of the tiles, 1 is dense), loss, seconds, and where measured gap. "dense" is
    the twin that the others are compared with; "sparse" and "random" have colours of their own; the first run marks
    where training becomes sparse."""
    allowed: float | None = None
    """The loss that a run may lose against its dense twin, as a fraction."""
    tolerance: float | None = None
    """The gap at which training turns sparse, as a fraction."""
    held_out: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By run, for each held-out clip and noise level: (level, loss over the dense twin's - 1)."""
    kept: Sequence[tuple[int, np.ndarray]] = ()
    """By step, in their order, the share of the tiles that every head computes, (layers, heads)."""
    checks: Sequence[tuple[str, bool, str]] = ()
    """Verdicts: (name, passed, the numbers)."""
    tables: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By heading, name -> value: machine, versions, command, where the checkpoint comes from."""
    notes: Sequence[str] = ()
    """Paragraphs for the reader, after the report's own explanation."""
    charts: Sequence[Chart] = ()
    """Other pictures."""
    legend: Mapping[str, str] = field(default_factory=dict)
    """Of those: name -> colour."""
    grids: Sequence[Grid] = ()
    prose: Sequence[str] | None = None
    """Paragraphs in place of the report's explanation of sparse attention."""


def write_report(path: str | Path, run: ReportData) -> Path:
    """Write the page, making its folder. Returns the path. Raises ValueError for clips of another shape or type."""
    path = Path(path)
    text = render(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def render(run: ReportData) -> str:
    """The page as text."""
    good = sum(passed for _, passed, _ in run.checks)
    return (
        environment()
        .get_template("report.html")
        .render(
            run=run,
            good=good,
            groups=groups(run.clips),
            speeds=_speeds(run),
            losses=_charts(run, _against_twin, _held_out),
            training=_charts(run, _loss, _seconds, _gaps),
            maps=_maps(run),
            heat=charts.HEAT,
            color=_color,
        )
    )


def environment() -> jinja2.Environment:
    """Templates of the package's assets; what they are given is escaped."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("foveate", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def groups(clips: Sequence[ClipPanel]) -> list[tuple[str, str, list[tuple[ClipPanel, Film]]]]:
    """By heading: how its clips are packed, where something is lost by it, and the clips."""
    found = []
    for name in dict.fromkeys(clip.group for clip in clips):
        panels = [clip for clip in clips if clip.group == name]
        packed = films([clip.video for clip in panels], int(ROOM / len(clips)))
        found.append((name, packing(panels[0].video, packed[0]), list(zip(panels, packed, strict=True))))
    return found


def packing(video: np.ndarray, packed: Film) -> str:
    """What a page does not show of a clip; nothing where it shows every pixel as it is."""
    small = f"{packed.width} × {packed.height} of {video.shape[2]} × {video.shape[1]} pixels"
    said = [] if packed.height == video.shape[1] else [small]
    said += [] if packed.quality is None else [f"as JPEG of quality {packed.quality}"]
    return f"Shown {' and '.join(said)}." if said else ""


def _charts(run: ReportData, *makers: Callable[[ReportData], Chart | None]) -> list[Chart]:
    return [found for make in makers if (found := make(run)) is not None]


def _speeds(run: ReportData) -> Chart | None:
    if not run.speeds:
        return None
    x = [speed.tokens for speed in run.speeds]
    y = [speed.dense / speed.sparse for speed in run.speeds]
    lines = [Line(x, y, "sparse", 2.2), Line(x, y, "sparse", 6, dots=True)]
    svg = charts.line_chart(
        lines, label="Speed-up by length of the clip", first=0, last=max(x), x_label="tokens", limit=run.speed_limit,
        span=(0, 1.25 * max(y)), marks=[(a, b, f"{b:.2f}×") for a, b in zip(x, y, strict=True)],
    )  # fmt: skip
    text = "How many times faster a sparse training step is than a dense one. Attention grows with the square of the "
    text += "length, so what sparsity saves grows with it."
    if run.speed_limit is not None:
        text += f" Dashed: {run.speed_limit:g}×, what the longest has to reach."
    return Chart("Speed-up by length of the clip", text, Markup(svg))


def _loss(run: ReportData) -> Chart | None:
    lines = [line for name, rows in _drawn(run) for line in _raw_and_smooth(*_column(rows, "loss"), name, _switch(run))]
    return _chart(run, lines, "Training loss", "Each dot is one step; the line is their running mean.")


def _seconds(run: ReportData) -> Chart | None:
    lines = []
    for name, rows in _drawn(run):
        lines += _raw_and_smooth(*_column(rows, "seconds"), name, _switch(run), median=True)
    top = max((max(line.values) for line in lines if not line.dots), default=1)
    text = "The line is the running median. Whatever else the machine did is in these times."
    return _chart(run, lines, "Seconds a step", text, span=(0, 1.25 * top or 1))


def _against_twin(run: ReportData) -> Chart | None:
    """On a scale where the allowed loss can be seen: what lies beyond, as random tiles do, is an arrow at the edge."""
    twin = dict(zip(*_column(run.runs.get("dense", ()), "loss"), strict=True))
    lines, away = [], []
    allowed = run.allowed or 0.01
    for name, rows in _drawn(run):
        both = zip(*_column(rows, "loss"), strict=True)
        pairs = [(step, loss / twin[step] - 1) for step, loss in both if twin.get(step)]
        if name != "dense" and pairs:
            steps, ratios = zip(*pairs, strict=True)
            lines += _raw_and_smooth(steps, ratios, name, _switch(run))
            if max(ratios) > 5 * allowed:
                away.append(f"{name} reaches {100 * max(ratios):+,.0f}\u00a0%")
    text = "Each dot is one step, on the same clip with the same noise as its dense twin's, so the luck of the draw "
    text += f"cancels. Shaded: ±{100 * allowed:g}\u00a0%."
    if away:
        text += f" Arrows at the edge lie beyond the picture: {', '.join(away)}."
    return _chart(run, lines, "Loss against dense training", text, percent=True, band=allowed, span=_around(allowed))


def _held_out(run: ReportData) -> Chart | None:
    lines, allowed, means = [], run.allowed or 0.01, []
    names = list(run.held_out)
    for place, name in enumerate(names):
        levels = np.asarray([100 * level for level, _ in run.held_out[name]])
        gaps = np.asarray([gap for _, gap in run.held_out[name]])
        shift = 4 * (place - (len(names) - 1) / 2)
        lines.append(Line((levels + shift).tolist(), gaps, _color(name), 5, 0.45, dots=True))
        each = sorted(set(levels.tolist()))
        means.append(Line(each, [gaps[levels == level].mean() for level in each], _color(name), 2))
    if not lines:
        return None
    text = "Each dot is one held-out clip at one level of noise, after training; the line is the mean of the clips. "
    text += f"Shaded: ±{100 * allowed:g}\u00a0%. Arrows at the edge lie beyond the picture."
    svg = charts.line_chart(
        [*lines, *means], label="Loss on held-out clips", last=100, x_label="noise in %", percent=True, band=allowed,
        span=_around(allowed),
    )  # fmt: skip
    return Chart("Loss on held-out clips against dense training", text, Markup(svg))


def _around(allowed: float) -> tuple[float, float]:
    return -5 * allowed, 5 * allowed


def _gaps(run: ReportData) -> Chart | None:
    lines = []
    for name, rows in _drawn(run):
        steps, gaps = _column(rows, "gap")
        lines += [Line(steps, gaps, _color(name)), Line(steps, gaps, _color(name), 4, dots=True)]
    text = "One model, one training clip, attention computed both ways: how much the loss changes by leaving out."
    if run.tolerance is not None:
        text += f" Training turns sparse below the dashed {100 * run.tolerance:g}\u00a0%."
    return _chart(run, lines, "Gap between sparse and dense attention", text, percent=True, limit=run.tolerance)


def _maps(run: ReportData) -> list[tuple[int, Markup]]:
    """Heat maps of up to MAPS of the steps, evenly spaced, the first and the last among them."""
    found = [(step, values) for step, values in run.kept if np.isfinite(values).any()]
    shown = [found[k] for k in sorted(set(np.linspace(0, len(found) - 1, MAPS).round().astype(int)))] if found else []
    return [
        (step, Markup(charts.heat_map(values, low=0, high=1, label=f"Computed share, step {step}")))
        for step, values in shown
    ]


def _drawn(run: ReportData) -> list[tuple[str, list[Row]]]:
    """Runs with rows; the first is drawn last, on top."""
    return [(name, list(rows)) for name, rows in reversed(list(run.runs.items())) if rows]


def _chart(run: ReportData, lines: Sequence[Line], title: str, text: str, **options: Any) -> Chart | None:
    """A line chart over the steps, or nothing when there is nothing to draw."""
    if not any(np.isfinite(line.values).any() for line in lines):
        return None
    steps = [row["step"] for rows in run.runs.values() for row in rows]
    svg = charts.line_chart(lines, label=title, last=max(steps), switch=_switch(run), **options)
    return Chart(title, text, Markup(svg))


def _column(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    kept = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in kept], [row[key] for row in kept]


def _raw_and_smooth(
    steps: Sequence[float], values: Sequence[float], name: str, switch: float | None, *, median: bool = False
) -> list[Line]:
    """The values as faint dots under their running mean, which does not reach across the switch."""
    if not len(steps):
        return []
    cut = sum(step < switch for step in steps) if switch is not None else len(steps)
    width = max(3, len(values) // 10)
    calm = [charts.smooth(part, width, median=median) for part in (values[:cut], values[cut:]) if len(part)]
    dots = Line(steps, values, _color(name), width=2.6, opacity=0.4, dots=True)
    return [dots, Line(steps, np.concatenate(calm), _color(name))]


def _switch(run: ReportData) -> float | None:
    """The first run's first sparse step."""
    first = next(iter(run.runs.values()), ())
    return next((row["step"] for row in first if row.get("kept", 1) < 1), None)


def _color(name: str) -> str:
    return name if name in KNOWN else "other"
