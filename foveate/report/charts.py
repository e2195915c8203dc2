"""Charts as inline SVG that follow the page: colours are CSS variables, text is the page's own font.

matplotlib draws with stand-in colours that are then replaced by `var(--name)`, so that one picture serves light and
dark. Heat maps are written out by hand: one <rect> a cell, with its value to read on hover.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, MaxNLocator

SIZE = (4.8, 2.7)  # inches; 72 units each, so text keeps a readable size when a phone shrinks the picture
HEAT = 16  # shades of a heat map; the page defines their colours, .h0 ... .h15, for light and for dark
STAND_IN = {
    name: f"#0f{n:02x}f{n:x}"
    for n, name in enumerate(("ink", "muted", "rule", "stage", "band", "sparse", "dense", "random", "other"))
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "foveate",
    "font.size": 10,
    "axes.edgecolor": STAND_IN["rule"],
    "axes.labelcolor": STAND_IN["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": STAND_IN["rule"],
    "grid.linewidth": 0.7,
    "text.color": STAND_IN["muted"],
    "xtick.color": STAND_IN["muted"],
    "ytick.color": STAND_IN["muted"],
    "ytick.left": False,
    "xtick.major.size": 3,
    "lines.solid_capstyle": "round",
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Line:
    """One curve: steps and values of one length, a colour (a name in STAND_IN or #rrggbb), and how it is drawn.

    width: points, of the line or of a dot.
    """

    steps: Sequence[float]
    values: Sequence[float] | np.ndarray
    color: str
    width: float = 1.8
    opacity: float = 1.0
    dots: bool = False


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    last: float,
    first: float = 0,
    x_label: str = "step",
    switch: float | None = None,
    percent: bool = False,
    limit: float | None = None,
    band: float | None = None,
    from_zero: bool = False,
    span: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, float, str]] = (),
) -> str:
    """SVG of curves over `first` ... `last`. The part after step `switch` is shaded, `limit` is a dashed level, `band`
    shades what is nearer than it to 0, `span` fixes the vertical range: dots beyond it are arrows at its edge. `marks`
    are texts at points (x, y). `label` describes the picture to those who cannot see it."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            _draw(axes, line, span)
        margin = 0.02 * ((last - first) or 1)
        axes.set_xlim(first - margin, last + margin)
        if span:
            axes.set_ylim(*span)
        if from_zero:
            axes.set_ylim(bottom=0)
        if limit is not None:
            axes.axhline(limit, color=STAND_IN["ink"], linewidth=0.9, linestyle=(0, (4, 3)))
        if band is not None:
            axes.axhspan(-band, band, color=STAND_IN["band"], linewidth=0, zorder=0.5)
        if switch is not None:
            _mark_stages(axes, switch)
        for x, y, text in marks:
            axes.annotate(text, (x, y), (0, 7), textcoords="offset points", ha="center", color=STAND_IN["ink"])
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(_Labels(".{}g", 3, percent=percent))
        axes.xaxis.set_major_formatter(_Labels(",.{}f", 0))
        axes.set_xlabel(x_label, loc="right")
        return _themed(figure, label)


def heat_map(values: np.ndarray, *, low: float, high: float, label: str) -> str:
    """SVG of one square a cell, layers down, heads across; values (L, H), NaN left blank. Hover names the value."""
    layers, heads = values.shape
    level = np.nan_to_num((values - low) / ((high - low) or 1.0)).clip(0, 1)
    cells = []
    for layer, head in np.ndindex(layers, heads):
        if np.isfinite(values[layer, head]):
            shade = min(int(level[layer, head] * HEAT), HEAT - 1)
            cells.append(
                f'<rect x="{head * 10}" y="{layer * 10}" width="9.4" height="9.4" rx="1" class="h{shade}">'
                f"<title>layer {layer}, head {head}: {_percent(float(values[layer, head]))}</title></rect>"
            )
    box = f"0 0 {heads * 10 - 0.6:g} {layers * 10 - 0.6:g}"
    return f'<svg class="heat" viewBox="{box}" role="img" aria-label="{escape(label)}">{"".join(cells)}</svg>'


def smooth(values: Sequence[float], width: int, *, median: bool = False) -> np.ndarray:
    """Centred running mean (or median) over `width` values, shorter at the ends; NaN is passed over."""
    array = np.asarray(values, float)
    half = width // 2
    padded = np.concatenate([np.full(half, np.nan), array, np.full(half, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    found = np.isfinite(windows).any(1)
    result = np.full(len(array), np.nan)
    result[found] = (np.nanmedian if median else np.nanmean)(np.where(np.isfinite(windows), windows, np.nan)[found], 1)
    return result


def _draw(axes, line: Line, span: tuple[float, float] | None) -> None:
    color = STAND_IN.get(line.color, line.color)
    if not line.dots:
        axes.plot(line.steps, line.values, color=color, alpha=line.opacity, linewidth=line.width)
        return
    x, y = np.asarray(line.steps, float), np.asarray(line.values, float)
    low, high = span or (-np.inf, np.inf)
    for marker, chosen in (("o", (y >= low) & (y <= high)), ("^", y > high), ("v", y < low)):
        if chosen.any():
            inside = y[chosen] if marker == "o" else np.full(chosen.sum(), high if marker == "^" else low)
            size = line.width if marker == "o" else line.width + 1.5
            axes.plot(
                x[chosen], inside, color=color, alpha=line.opacity, marker=marker, markersize=size, linestyle="",
                markeredgewidth=0, clip_on=marker == "o",
            )  # fmt: skip


def _mark_stages(axes, switch: float) -> None:
    left, right = axes.get_xlim()
    axes.axvspan(switch, right, color=STAND_IN["stage"], linewidth=0, zorder=0)
    axes.axvline(switch, color=STAND_IN["muted"], linewidth=0.9)
    axes.set_xlim(left, right)
    place = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "fontsize": 9, "va": "bottom"}
    axes.annotate("sparse →", (switch, 1), (4, 3), ha="left", **place)
    if switch - left > 0.2 * (right - left):
        axes.annotate("← dense", (switch, 1), (-4, 3), ha="right", **place)


class _Labels(Formatter):
    """Labels of an axis, with as many digits more than `digits` as it takes to say where the ticks are."""

    def __init__(self, form: str, digits: int, *, percent: bool = False) -> None:
        self.form, self.digits, self.percent = form, digits, percent

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        shown = [100 * value if self.percent else value for value in values]
        allowed = 0.01 * min((abs(b - a) for a, b in pairwise(shown)), default=np.inf)
        texts: list[str] = []
        for digits in range(self.digits, self.digits + 9):
            texts = [format(value, self.form.format(digits)) for value in shown]
            said = [float(text.replace(",", "")) for text in texts]
            if all(abs(a - b) <= allowed for a, b in zip(said, shown, strict=True)):
                break
        return [f"{text} %" for text in texts] if self.percent else texts


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _themed(figure: Figure, label: str) -> str:
    """The figure as an <svg> element without size, date, links or colours of its own."""
    target = io.BytesIO()
    figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = target.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg class="chart" {box.group() if box else ""} role="img" aria-label="{escape(label)}">'
    text = re.sub(r"<svg[^>]*>", head, text, count=1).replace("xlink:href", "href")
    for name, color in STAND_IN.items():
        text = text.replace(color, f"var(--{name})")
    return text
