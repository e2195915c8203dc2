"""A run's budgets over time, as a picture: what every head keeps from one decision to the next, and the measured gap.

python benchmarks/plot_budgets.py RUN --out docs/images/budgets.png

RUN: the folder of a `foveate train` with a tolerance, with its plans.jsonl and config.json.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = json.loads((options.run / "config.json").read_text())
    rows = [json.loads(line) for line in (options.run / "plans.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "kept" in row]
    edges = [*(row["step"] for row in rows), config["steps"]]
    kept = np.array([np.ravel(row["kept"]) for row in rows]).T  # (layers x heads, decisions)
    layers, heads = np.shape(rows[0]["kept"])
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1), layout="constrained")
    image = above.pcolormesh(edges, np.arange(layers * heads + 1), 100 * kept, cmap="viridis", vmin=0, vmax=100)
    figure.colorbar(image, ax=above, label="tiles kept, %")
    above.set_yticks(heads * (np.arange(layers) + 0.5), [f"layer {index}" for index in range(layers)])
    above.hlines(heads * np.arange(1, layers), edges[0], edges[-1], color="white", linewidth=1)
    above.invert_yaxis()
    above.set_title("what each head keeps (one row a head)", fontsize=10)
    gaps = [(row["step"], 100 * row["gap"]) for row in rows if row["gap"] is not None]
    below.plot(*zip(*gaps, strict=True), "o-", label="measured gap")
    below.axhline(100 * config["sparsity"]["tolerance"], color="gray", linestyle="--", label="tolerance")
    for start, stop, row in zip(edges, edges[1:], rows, strict=False):
        if row["active"]:
            below.axvspan(start, stop, color="tab:green", alpha=0.15, linewidth=0)
    below.set_ylabel("gap, %")
    below.set_xlabel("training step (shaded: attention is sparse)")
    below.set_xlim(0, edges[-1])
    below.set_ylim(0)
    below.legend(fontsize=8)
    figure.savefig(options.out, dpi=90)


if __name__ == "__main__":
    main()
