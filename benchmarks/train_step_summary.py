"""What benchmarks/bench_train_step.py ran, in a few lines and a plot; again from a saved result, with --peers added.

python benchmarks/train_step_summary.py RESULT.json [--peers attention_h200_202611.json]
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEACH_EVERY, OFTEN, RARE, PAIRS = 4, 50, 1000, 2  # the library's defaults: see SparsityConfig


@dataclass(frozen=True)
class Setting:
    """What a run does: a kept fraction, None for dense; with `learns`, dense while predictors learn (stage 1)."""

    name: str
    budget: float | None = None
    periphery: str = "drop"
    keeps_dense: bool = False
    learns: bool = False
    dense: str = ""  # of a dense run: foveate's name of the kernel, instead of torch's fastest

    def dense_layers(self, layers: int) -> tuple[int, ...]:
        """DSV's five of 30 layers."""
        return (0, 1, 2, 3, layers - 1) if self.keeps_dense else ()


DENSE, STAGE1 = Setting("dense"), Setting("stage 1", learns=True)
DENSE_FA4 = Setting("dense, flash-attn-4", dense="fa4")
DSV = [Setting(f"DSV-like, {far}", 0.026, far, keeps_dense=True) for far in ("drop", "pool")]
UNIFORM = [Setting(f"uniform 10 %, {far}", 0.1, far) for far in ("drop", "pool")]


def peers(path: Path | None) -> dict[int, float]:
    """flash-attn-4's time over cuDNN's, dense, forward + backward, by length, of a result of bench_attention.py."""
    if path is None:
        return {}
    times: dict[tuple[str, int], float] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["kernel"] in ("fa4 dense", "cudnn dense") and row["dim"] == 128 and "backward_ms" in row:
            times[row["kernel"], row["length"]] = row["forward_ms"] + row["backward_ms"]
    lengths = {length for name, length in times if name == "fa4 dense"}
    return {n: times["fa4 dense", n] / times["cudnn dense", n] for n in lengths if ("cudnn dense", n) in times}


def summary(rows: Sequence[dict], layers: int, fa4: dict[int, float]) -> list[dict]:
    """Per length and checkpoint mode: dense seconds, and how many times faster each setting is, all costs included."""
    steps = {(r["tokens"], r["checkpoint"], r["setting"], r["layers"]): r for r in rows if "seconds" in r}
    parts = {r["tokens"]: r for r in rows if r["what"] == "lessons"}
    found = []
    for tokens, mode in sorted({key[:2] for key in steps}):
        whole = (tokens, mode, "dense", layers) in steps
        get = whole_step if whole else summed
        dense = get(steps, tokens, mode, DENSE, layers)
        if dense is None:
            continue
        line: dict[str, Any] = {"tokens": tokens, "checkpoint": mode, "dense_s": dense}
        line["dense_peak_gib"] = steps.get((tokens, mode, "dense", layers if whole else 1), {}).get("peak_gib")
        line["how"] = "whole steps" if whole else f"sum of {layers} layers timed one by one"
        if tokens in parts:
            real = [
                r["measurement_s"]
                for r in rows
                if r.get("tokens") == tokens and "measurement_s" in r and r["layers"] == layers
            ]
            line |= overheads(parts[tokens], dense, layers, real)
        computed = with_fa4(rows, tokens, mode, dense, layers, fa4[tokens]) if tokens in fa4 else None
        line |= {} if computed is None else {"dense_fa4_s_computed": computed}
        fa4_dense = get(steps, tokens, mode, DENSE_FA4, layers)
        line |= {} if fa4_dense is None else {"dense_fa4_s": fa4_dense}
        for setting in (*DSV, *UNIFORM):
            seconds = get(steps, tokens, mode, setting, layers)
            if seconds is None:
                continue
            seconds += line.get("sparse_overhead_s", 0.0)
            row = steps[tokens, mode, setting.name, layers if whole else 1]
            memory = {name: size for name, size in row.items() if name.endswith("_gib")}
            line[setting.name] = {"amortised_s": seconds, "times_faster": dense / seconds, **memory}
            if fa4_dense is not None:
                line[setting.name]["times_faster_than_fa4"] = fa4_dense / seconds
            elif computed is not None:
                line[setting.name]["times_faster_than_fa4_computed"] = computed / seconds
        found.append(line)
    return found


def whole_step(steps: dict, tokens: int, mode: str, setting: Setting, layers: int) -> float | None:
    row = steps.get((tokens, mode, setting.name, layers))
    return row and row["seconds"]


def summed(steps: dict, tokens: int, mode: str, setting: Setting, layers: int) -> float | None:
    """Seconds of all layers: what a model without layers takes, and for each layer what one more takes."""
    wanted = (("dense", 0), (setting.name, 1), ("dense", 1))
    rest, one, dense = (steps.get((tokens, mode, name, count)) for name, count in wanted)
    if rest is None or one is None or dense is None:
        return None
    few = len(setting.dense_layers(layers))
    more = [(few, dense["seconds"]), (layers - few, one["seconds"])]
    return rest["seconds"] + sum(count * (seconds - rest["seconds"]) for count, seconds in more)


def overheads(part: dict, dense: float, layers: int, measured: Sequence[float]) -> dict[str, float]:
    """Shares of a dense step: learning in stage 1; lessons and measurements in stage 2, early and when settled.

    measured: seconds of a pair with its profile, as a run had it. Where none was run, a profile and two forwards, which
    are taken as half of a dense step each; a forward is a third of one.
    """
    lesson, profiled = part["lesson ms"] * layers / 1e3, part["profile ms"] * layers / 1e3
    measurement = PAIRS * (measured[0] if measured else profiled + dense)
    return {
        "stage1_share": max(part["lesson ms"], part["closed form ms"]) * layers / 1e3 / dense,
        "stage2_share_early": (lesson / TEACH_EVERY + measurement / OFTEN) / dense,
        "stage2_share_settled": (lesson / TEACH_EVERY + measurement / RARE) / dense,
        "sparse_overhead_s": lesson / TEACH_EVERY + measurement / RARE,
    }


def with_fa4(rows: Sequence[dict], tokens: int, mode: str, dense: float, layers: int, ratio: float) -> float | None:
    """The dense step if attention took flash-attn-4's share of what torch's fastest took: computed, not run."""
    times = [r["ms"] for r in rows if r["what"] == "dense attention" and r["tokens"] == tokens]
    if not times:
        return None
    forward, backward = min(times, key=sum)
    once = forward + backward + (forward if mode == "block" else 0.0)
    return dense - layers * once / 1e3 * (1 - ratio)


def plot(path: Path, lines: Sequence[dict]) -> None:
    """Bars: how many times faster than dense, by length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    names = [setting.name for setting in (*DSV, *UNIFORM)]
    for place, name in enumerate(names):
        points = [(x, line[name]["times_faster"]) for x, line in enumerate(lines) if name in line]
        bars = axes.bar([x + (place - 1.5) * 0.2 for x, _ in points], [y for _, y in points], 0.18, label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    labels = [f"{line['tokens']:,} tokens\ncheckpoint {line['checkpoint']}\n{line['how']}" for line in lines]
    axes.set_xticks(range(len(lines)), labels, fontsize=7)
    axes.set_ylabel("training step, times faster than dense")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of bench_train_step.py; its summary and plot are made anew")
    parser.add_argument("--peers", type=Path, help="a result of bench_attention.py, for flash-attn-4's share")
    options = parser.parse_args()
    data = json.loads(options.result.read_text())
    data["summary"] = summary(data["rows"], data["layers"], peers(options.peers))
    options.result.write_text(json.dumps(data, indent=1) + "\n")
    plot(options.result.with_suffix(".png"), data["summary"])


if __name__ == "__main__":
    main()
