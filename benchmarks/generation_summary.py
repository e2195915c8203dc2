"""What bench_generate.py's outcomes say: frontiers, targets, table, plot. Pure functions of outcomes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import generation_methods as methods
from generation_methods import Method

FIDELITY, WORK, BYTES, GAIN = 30.0, 0.35, 0.30, 3.0  # the targets: dB, shares of exact, dB over plain hold
MARGIN = 4.0  # dB under the target at which the choosing seeds' settings are still worth reporting
BEST_OF_OURS = ("foveate", "foveate schedule", "foveate states")
OURS = ("exact", "plain hold", "states, undamped", "variant", methods.PARTS, methods.NODES, *BEST_OF_OURS)
BEST = 100.0  # dB; what equal videos count as in a mean


@dataclass
class Outcome:
    """One setting on one batch. attention, seconds: totals; bytes: between groups, as a share of exact, ours only."""

    family: str
    setting: str
    psnr: list[float]
    ssim: list[float]
    attention: float
    seconds: float
    bytes: float | None = None

    @property
    def db(self) -> float:
        return sum(min(x, BEST) for x in self.psnr) / len(self.psnr)


def frontier(outcomes: list[Outcome], cost: Callable[[Outcome], float]) -> list[Outcome]:
    """Those that no other beats in both, cheapest first."""
    kept: list[Outcome] = []
    for one in sorted(outcomes, key=lambda x: (cost(x), -x.db)):
        if not kept or one.db > kept[-1].db:
            kept.append(one)
    return kept


def chosen(outcomes: list[Outcome], tried: list[Method]) -> list[Method]:
    """Settings on their family's frontier over attention or time, unless far under the target; all fixed intervals."""
    names = {(one.family, one.setting) for one in methods.fixed(methods.INTERVALS)}
    for family in {one.family for one in outcomes} - {"variant"}:
        mine = [one for one in outcomes if one.family == family]
        for cost in (lambda x: x.attention, lambda x: x.seconds):
            names |= {(one.family, one.setting) for one in frontier(mine, cost) if one.db >= FIDELITY - MARGIN}
    done = {(one.family, one.setting) for one in outcomes}
    return [method for method in tried if (method.family, method.setting) in names & done]


def together(batches: list[Outcome]) -> Outcome:
    """Several batches of one setting: videos side by side, costs added."""
    first = batches[0]
    moved = None if first.bytes is None else sum(one.bytes or 0.0 for one in batches) / len(batches)
    return Outcome(
        first.family, first.setting, [x for one in batches for x in one.psnr], [x for one in batches for x in one.ssim],
        sum(one.attention for one in batches), sum(one.seconds for one in batches), moved,
    )  # fmt: skip


def at(points: list[Outcome], cost: Callable[[Outcome], float], where: float) -> float | None:
    """dB of a frontier at a cost, straight between its points; None under its cheapest point."""
    if where < cost(points[0]):
        return None
    for low, high in pairwise(points):
        if where <= cost(high):
            share = (where - cost(low)) / (cost(high) - cost(low))
            return low.db + share * (high.db - low.db)
    return points[-1].db


def compare(results: list[Outcome], cost: Callable[[Outcome], float]) -> list[dict[str, Any]]:
    """Every peer's setting that skips something at 30 dB or more, against our frontier at its cost.

    `ours` is None where no setting of ours is so cheap.
    """
    skipping = [x for x in results if x.attention < 0.99]
    peers = [x for x in skipping if x.family not in OURS and x.db >= FIDELITY]
    ours = frontier([x for x in skipping if x.family in BEST_OF_OURS], cost)
    found = []
    for peer in sorted(peers, key=lambda x: (x.family, cost(x))):
        mine = at(ours, cost, cost(peer)) if ours else None
        found.append(
            {"family": peer.family, "setting": peer.setting, "cost": cost(peer), "dB": peer.db, "ours": mine,
             "above": mine is not None and mine > peer.db}
        )  # fmt: skip
    return found


def targets(results: list[Outcome]) -> dict[str, Any]:
    """Costs are shares of exact by now."""
    named = {(x.family, x.setting): x for x in results}
    gains = {}
    for n in (2, 3, 4):
        plain, ours = (named.get((family, f"every {n}")) for family in ("plain hold", "foveate"))
        if plain and ours:
            gains[n] = {"gain, dB": ours.db - plain.db, "dB": ours.db, "attention": [ours.attention, plain.attention]}
    good = [x for x in results if x.family in BEST_OF_OURS and x.db >= FIDELITY]
    least = min(good, key=lambda x: x.attention, default=None)
    return {
        "over plain hold": gains, "gain met": bool(gains) and all(x["gain, dB"] >= GAIN for x in gains.values()),
        f"cheapest at {FIDELITY:g} dB": None if least is None else vars(least) | {"dB": least.db},
        "work met": least is not None and least.attention <= WORK and (least.bytes or 0.0) <= BYTES,
        "frontier over attention": compare(results, lambda x: x.attention),
        "frontier over time": compare(results, lambda x: x.seconds),
    }  # fmt: skip


def plot(results: list[Outcome], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    labels = ("self-attention executed, share of exact", "time, share of exact")
    for axis, label, cost in zip(axes, labels, (lambda x: x.attention, lambda x: x.seconds), strict=True):
        for family in dict.fromkeys(x.family for x in results if x.family != "exact"):
            mine = [x for x in results if x.family == family]
            line = axis.plot(*zip(*[(cost(x), x.db) for x in frontier(mine, cost)], strict=True), "-", label=family)[0]
            axis.plot([cost(x) for x in mine], [x.db for x in mine], "o", color=line.get_color(), ms=4)
        axis.axhline(FIDELITY, color="gray", lw=0.8, ls=":")
        axis.set(xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="PSNR against the exact run, dB")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def print_table(results: list[Outcome]) -> None:
    print(f"\n{'reported':44} {'dB':>6} {'worst':>6} {'ssim':>6} {'attn':>6} {'time':>6} {'bytes':>6}")
    for one in results:
        moved = "" if one.bytes is None else f"{one.bytes:6.3f}"
        name, similar = f"{one.family} {one.setting}", sum(one.ssim) / len(one.ssim)
        row = f"{name:44} {one.db:6.2f} {min(one.psnr):6.2f} {similar:6.3f} {one.attention:6.3f}"
        print(f"{row} {one.seconds:6.3f} {moved}")


def plain(value: Any) -> Any:
    """For JSON, which has no infinity."""
    if isinstance(value, dict):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
