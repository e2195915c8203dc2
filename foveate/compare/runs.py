"""`foveate compare` of runs by `foveate train`: validation losses at equal steps and at equal training time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foveate.compare.intervals import SHARE, Interval, of_mean
from foveate.compare.pairs import labels
from foveate.training import folder
from foveate.version import described

POINTS = 20  # moments at which losses are compared at equal time
TITLES = {"steps": "Loss gap at equal steps", "seconds": "Loss gap at equal training time"}


def is_run(place: Path) -> bool:
    """Whether `foveate train` wrote this folder."""
    return (place / folder.HISTORY).is_file() and (place / folder.CONFIG).is_file()


def compare(places: Sequence[Path], seed: int = 0) -> dict[str, Any]:
    """Each run's validation loss over the first one's, minus 1, as a mean over the second half of what they share.

    Raises ValueError for runs without a validation loss, or that share no step or no time.
    """
    names = labels(places)
    if len(places) < 2:
        raise ValueError("give two or more runs, the reference first")
    curves = dict(zip(names, map(_curve, places), strict=True))
    base = curves[names[0]]
    gaps: dict[str, dict[str, Any]] = {"steps": {}, "seconds": {}}
    for name in names[1:]:
        for axis, at in (("steps", _at_steps), ("seconds", _at_seconds)):
            places_, gap = at(base, curves[name])
            if not len(gap):
                raise ValueError(
                    f"{names[0]} and {name} have no validation at a common {axis[:-1]}: use one --validate-every"
                )
            late = gap[len(gap) // 2 :]
            found = of_mean(late.tolist(), seed)
            gaps[axis][name] = {
                **found._asdict(), "last": float(gap[-1]), "from": float(places_[len(gap) // 2]),
                "to": float(places_[-1]), "curve": [[float(x), float(y)] for x, y in zip(places_, gap, strict=True)],
            }  # fmt: skip
    runs = {
        name: {"steps": int(c[-1, 0]), "seconds": float(c[-1, 1]), "loss": float(c[-1, 2])}
        for name, c in curves.items()
    }
    return {
        "by": "foveate compare", "kind": "runs", "version": described(), "interval": SHARE, "seed": seed,
        "folders": [{"label": name, "path": str(place.absolute())} for name, place in zip(names, places, strict=True)],
        "runs": runs, "gaps": gaps, "curves": {name: curve.tolist() for name, curve in curves.items()},
    }  # fmt: skip


def _curve(place: Path) -> np.ndarray:
    """(N, 3): step, seconds of training until then, validation loss."""
    rows = folder.rows(place / folder.HISTORY)
    spent = np.cumsum([row["seconds"] for row in rows])
    found = [
        (row["step"], time, row["validation"]) for row, time in zip(rows, spent, strict=True) if "validation" in row
    ]
    if not found:
        raise ValueError(f"{place} holds no validation loss yet; train on, or with a smaller --validate-every")
    return np.array(found)


def _at_steps(base: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    steps, a, b = np.intersect1d(base[:, 0], other[:, 0], return_indices=True)
    return steps, other[b, 2] / base[a, 2] - 1


def _at_seconds(base: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Between validations losses are interpolated; nothing is extrapolated."""
    low, high = max(base[0, 1], other[0, 1]), min(base[-1, 1], other[-1, 1])
    if low > high:
        return np.empty(0), np.empty(0)
    times = np.linspace(low, high, POINTS if low < high else 1)
    a, b = (np.interp(times, curve[:, 1], curve[:, 2]) for curve in (base, other))
    return times, b / a - 1


def table(result: Mapping[str, Any]) -> str:
    """What is printed."""
    names = [one["label"] for one in result["folders"]]
    lines = [
        f"{name}: validation loss {run['loss']:.5g} at step {run['steps']:,}, after {run['seconds']:,.0f} s of training"
        for name, run in result["runs"].items()
    ]
    for axis, title in TITLES.items():
        lines += ["", f"{title}, against {names[0]}:"]
        for name, found in result["gaps"][axis].items():
            span = f"{axis} {found['from']:,.0f} to {found['to']:,.0f}, {found['n']} validations"
            lines.append(f"  {name}: {per_cent(found)} ({span}); last {100 * found['last']:+.2f} %")
    share = f"{100 * result['interval']:.0f} %"
    lines += ["", f"Means over the second half; in brackets {share} intervals by bootstrap over its validations, which"]
    lines.append("follow each other: the intervals say nothing of how another seed would have trained.")
    return "\n".join(lines)


def per_cent(found: Mapping[str, Any]) -> str:
    """A gap with its interval, in per cent."""
    one = Interval(*(found[name] for name in Interval._fields))
    ends = "" if one.low is None or one.high is None else f" [{100 * one.low:+.2f}, {100 * one.high:+.2f}]"
    return f"{100 * one.mean:+.2f} %{ends}"
