"""The figures and the table of docs/reuse.md, from the committed results of bench_generate.py. No card, no model.

    python benchmarks/generation_figures.py frontier | schedules | parts | table

Writes docs/images/reuse_<name>.png; `table` prints. --file: other results than the committed ones.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generation_methods import PARTS
from generation_summary import FIDELITY, OURS, Outcome, frontier

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILE, SCHEDULES = RESULTS / "generate_h200_202612.json", RESULTS / "generate_h200_202612_schedules.json"
NAMED = {
    "foveate": "foveate: outputs",
    "foveate schedule": "foveate: scheduled",
    "foveate states": "foveate: attention",
}


def outcomes(record: dict[str, Any]) -> list[Outcome]:
    names = Outcome.__dataclass_fields__
    found = [Outcome(**{key: value for key, value in row.items() if key in names}) for row in record["results"]]
    for one in found:
        one.psnr = [float(x) for x in one.psnr]
    return found


def draw_frontier(record: dict[str, Any], plt: Any) -> None:
    axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)[1]
    results = [x for x in outcomes(record) if x.attention < 0.99 and x.db >= FIDELITY]
    costs: tuple[Callable[[Outcome], float], ...] = (lambda x: x.attention, lambda x: x.seconds)
    for axis, label, cost in zip(axes, ("self-attention executed", "time"), costs, strict=True):
        for family in dict.fromkeys(x.family for x in results):
            if family in OURS and family not in NAMED:
                continue
            points = frontier([x for x in results if x.family == family], cost)
            wide = 2.2 if family in NAMED else 1.0
            axis.plot(
                [cost(x) for x in points], [x.db for x in points], "o-", ms=3, lw=wide, label=NAMED.get(family, family)
            )
        axis.set(xlabel=f"{label}, share of the exact run")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="PSNR to the exact video, dB")
    axes[0].legend(fontsize=7)


def draw_schedules(record: dict[str, Any], plt: Any) -> None:
    sigmas, anchors = record["schedules"]["sigmas"], record["schedules"]["anchors"]
    axis = plt.subplots(figsize=(8, 3.2))[1]
    for row, share in enumerate(anchors):
        axis.plot(anchors[share], [row] * len(anchors[share]), "|", ms=11, mew=2, color="C0")
    axis.set(yticks=range(len(anchors)), yticklabels=[f"{float(x):.0%}" for x in anchors])
    axis.set(xlabel=f"denoising step (noise level {sigmas[0]:.2f} ... {sigmas[-1]:.2f})", ylabel="share of the calls")


def draw_parts(record: dict[str, Any], plt: Any) -> None:
    named = {(x.family, x.setting): x for x in outcomes(record)}
    rows = [
        ("held as they are", (PARTS, "every 3, held as they are")), ("extrapolated", ("foveate", "every 3")),
        ("and mended", (PARTS, "every 3, mended")), ("scheduled", (PARTS, "scheduled")),
        ("scheduled and mended", ("foveate schedule", "40% of the calls")),
    ]  # fmt: skip
    axis = plt.subplots(figsize=(7, 2.8))[1]
    values = [named[key].db for _, key in rows]
    axis.barh([name for name, _ in rows], values, color=["C7", "C0", "C7", "C7", "C0"])
    for place, value in enumerate(values):
        axis.text(value, place, f" {value:.1f}", va="center")
    axis.invert_yaxis()
    axis.set(xlabel="PSNR to the exact video at 40 % of the calls, dB", xlim=(min(values) - 5, max(values) + 4))


def print_rows(record: dict[str, Any]) -> None:
    """Markdown, a family a line, and how many settings of peers lie below ours."""
    results = [x for x in outcomes(record) if x.attention < 0.99 and x.db >= FIDELITY]
    print("| | attention | PSNR | time |\n|---|---|---|---|")
    for family in dict.fromkeys(x.family for x in results):
        points = frontier([x for x in results if x.family == family], lambda x: x.attention)[::-1]
        cells = (
            " / ".join(f"{100 * x.attention:.0f}" for x in points), " / ".join(f"{x.db:.1f}" for x in points),
            " / ".join(f"{100 * x.seconds:.0f}" for x in points),
        )  # fmt: skip
        print(f"| {NAMED.get(family, family)} | {cells[0]} % | {cells[1]} dB | {cells[2]} % |")
    for cost in ("attention", "time"):
        rows = record.get("targets", {}).get(f"frontier over {cost}", [])
        below = [f"{x['family']} {x['setting']}: {x['dB']:.1f} dB, ours {x['ours']}" for x in rows if not x["above"]]
        print(f"\nover {cost}: above {len(rows) - len(below)} of {len(rows)} settings of peers; not above: {below}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["frontier", "schedules", "parts", "table"])
    parser.add_argument("--file", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    usual = SCHEDULES if options.what in ("schedules", "parts") else FILE
    record = json.loads((options.file or usual).read_text())
    if options.what == "table":
        print_rows(record)
        return 0
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    {"frontier": draw_frontier, "schedules": draw_schedules, "parts": draw_parts}[options.what](record, plt)
    options.out.mkdir(parents=True, exist_ok=True)
    plt.gcf().tight_layout()
    plt.savefig(options.out / f"reuse_{options.what}.png", dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
