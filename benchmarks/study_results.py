"""The results of study_training.py as a table and as figures; anything is computed from the lines of finished arms.

    python benchmarks/study_results.py benchmarks/results/study                                    # the table
    python benchmarks/study_results.py benchmarks/results/study --figure time --out time.png
    python benchmarks/study_results.py benchmarks/results/study --figure rest --out rest.png
    python benchmarks/study_results.py benchmarks/results/study --figure heads --out heads.png

Arms are compared with the dense arm of the same checkpoint and seed, pair by pair (clip, noise level, noise), so that
what is common to both cancels: `over dense` is the mean of the differences over dense's mean loss, `+-` its standard
error over the validation's windows. `time` is an arm's wall-clock over dense's; `to dense's loss` the share of dense's
wall-clock after which the arm's loss was at or below dense's last one, where it was. Folders of several runs merge:
every .jsonl in them is read.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = "runs.jsonl"
LEVELS = 5  # of noise that a window of the validation is judged at: neighbouring pairs
COLUMNS = ("arm", "seed", "steps", "loss", "over dense", "+-", "time", "to dense's loss", "kept", "ms a step")
Row = dict[str, Any]


def read(place: Path) -> list[Row]:
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place] * place.exists()
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line]


def dense_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The dense arm that a row is compared with."""
    name = "dense, scratch" if row["arm"].endswith("scratch") else "dense"
    same = (row["checkpoint"]["id"], name, row["seed"])
    return next((r for r in rows if (r["checkpoint"]["id"], r["arm"], r["seed"]) == same), None)


def compared(row: Row, rows: Sequence[Row]) -> Row:
    """A row of the table."""
    found: Row = {"arm": row["arm"], "seed": row["seed"], "steps": row["steps"], "loss": row["loss"]}
    found |= {"kept": statistics.mean(row["kept"]), "ms a step": row["step_ms"]}
    dense = dense_of(row, rows)
    if dense is None:
        return found
    over = [a - b for a, b in zip(row["losses"], dense["losses"], strict=True)]
    clips = [statistics.mean(over[i : i + LEVELS]) for i in range(0, len(over), LEVELS)]
    found["over dense"] = statistics.mean(over) / dense["loss"]
    found["+-"] = statistics.stdev(clips) / math.sqrt(len(clips)) / dense["loss"] if len(clips) > 1 else math.nan
    found["time"] = row["seconds"] / dense["seconds"]
    reached = [point["seconds"] for point in row["curve"] if point["loss"] <= dense["loss"]]
    if reached and row is not dense:
        found["to dense's loss"] = reached[0] / dense["seconds"]
    return found


def line(row: Row, rows: Sequence[Row]) -> str:
    return "  ".join(f"{name} {value}" for name, value in _shown(compared(row, rows)).items())


def _shown(found: Row) -> dict[str, str]:
    ways = {"loss": "{:.5f}", "over dense": "{:+.2%}", "+-": "{:.2%}", "time": "{:.2f}", "to dense's loss": "{:.2f}",
            "kept": "{:.1%}", "ms a step": "{:.1f}"}  # fmt: skip
    return {name: ways.get(name, "{}").format(found[name]) for name in COLUMNS if name in found}


def table(rows: Sequence[Row]) -> str:
    """Markdown, a table a checkpoint: one row an arm and seed, best first, then the mean over seeds where there are
    several."""
    text = []
    for checkpoint in dict.fromkeys(row["checkpoint"]["id"] for row in rows):
        same = [row for row in rows if row["checkpoint"]["id"] == checkpoint]
        about = same[0]["checkpoint"]
        lines = [compared(row, same) for row in same]
        order = sorted(lines, key=lambda found: (found.get("over dense", math.inf), found["arm"]))
        shown = [_shown(found) for found in order]
        text += [
            f"Size {same[0]['size']}, {same[0]['card']}, {same[0]['month']}; checkpoint {checkpoint} of "
            f"{about['short_steps']} + {about['long_steps']} steps, validation loss {about['validation']:.5f} "
            f"({about['pairs']} pairs, {about['scatter']:.2%} apart with other noise)",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
            *("| " + " | ".join(row.get(name, "") for name in COLUMNS) + " |" for row in shown),
            "",
            *spread(lines),
        ]
    return "\n".join(text)


def spread(lines: Sequence[Row]) -> list[str]:
    """Mean and range over the seeds of arms that have several."""
    found = []
    for arm in dict.fromkeys(row["arm"] for row in lines):
        seeds = [row for row in lines if row["arm"] == arm and "over dense" in row]
        if len(seeds) > 1 and not arm.startswith("dense"):
            over, time = ([row[name] for row in seeds] for name in ("over dense", "time"))
            found.append(
                f"{arm}, {len(seeds)} seeds: {statistics.mean(over):+.2%} over dense ({min(over):+.2%} to "
                f"{max(over):+.2%}), {statistics.mean(time):.2f} of its time ({min(time):.2f} to {max(time):.2f})"
            )
    return found


# Figures


def figure(what: str, rows: Sequence[Row], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    drawn, axes = plt.subplots(figsize=(6.4, 3.6), constrained_layout=True)
    {"time": _time, "rest": _rest, "heads": _heads}[what](axes, rows)
    drawn.savefig(out, dpi=150)


def _time(axes: Any, rows: Sequence[Row]) -> None:
    """Validation loss over training time, of arms with a curve."""
    for row in rows:
        if len(row["curve"]) < 2:
            continue
        start = row["checkpoint"]["validation"]
        points = [(0.0, start)] * (not row["arm"].endswith("scratch"))
        points += [(point["seconds"], point["loss"]) for point in row["curve"]]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=row["arm"],
                  color="black" if row["arm"].startswith("dense") else None)  # fmt: skip
    axes.set(xlabel="seconds of training, everything counted", ylabel="validation loss")
    axes.legend(frameon=False)


def _rest(axes: Any, rows: Sequence[Row]) -> None:
    """Loss over dense at equal steps by what is kept, a line for what becomes of the rest."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        share, _, rest = row["arm"].partition(" %, ")
        line = compared(row, rows)
        if rest and share.isdigit() and "over dense" in line and row["seed"] == 0 and "time" not in rest:
            found.setdefault(rest, []).append((line["kept"], line["over dense"], line["+-"]))
    for rest, points in found.items():
        kept, over, error = zip(*sorted(points), strict=True)
        axes.errorbar([100 * x for x in kept], [100 * x for x in over], [100 * x for x in error],
                      marker="o", markersize=4, capsize=2, label=rest)  # fmt: skip
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="tiles kept, %", ylabel="validation loss over dense, %")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.legend(frameon=False, ncols=2)


def _heads(axes: Any, rows: Sequence[Row]) -> None:
    """Share of the tiles that holds 90 % of the attention mass, every head of the checkpoint by layer."""
    layers = rows[-1]["checkpoint"]["tiles_of_90_percent"]
    axes.boxplot([[100 * x for x in heads] for heads in layers], positions=range(len(layers)), whis=(0, 100))
    axes.set(xlabel="layer", ylabel="tiles that hold 90 % of the mass, %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, help="a folder of .jsonl files, or one")
    parser.add_argument("--figure", choices=("time", "rest", "heads"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = read(asked.place)
    if not rows:
        parser.error(f"{asked.place} holds no finished arm")
    if asked.figure is None:
        print(table(rows))
    else:
        figure(asked.figure, rows, asked.out or Path(f"{asked.figure}.png"))


if __name__ == "__main__":
    main()
