"""What reuse did, step by step: what was fresh, what moved, what was held, and how far predictions were right.

Shapes: L layers, P parts, N states a layer and part.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class StepRecord:
    """One forward of one branch.

    fresh: bool (L, P, N), states computed. computed: share of exact attention's key-query pairs, by layer (L,).
    bytes_moved, bytes_exact: what this rank sent to others, and what it sends where all is fresh. bytes_held: on this
    device, this branch. model: its name in the pipeline.
    predicted: error of holding each state (L, P, N), infinite where not known. actual: the same as sampled rows
    measured it, NaN where they did not: of states computed (what holding would have cost) or, with `audit`, of all.
    """

    request: int
    step: int
    branch: str
    sigma: float
    reason: str
    fresh: Tensor
    predicted: Tensor
    computed: Tensor
    bytes_moved: int
    bytes_exact: int
    bytes_held: int = 0
    actual: Tensor | None = None
    model: str = ""

    @property
    def hits(self) -> int:
        return int((~self.fresh).sum())

    def row(self) -> dict[str, Any]:
        """Plain numbers for JSON, a layer's states summed up."""
        fresh = self.fresh.double().mean((1, 2))
        rows = {
            "fresh": fresh,
            "computed": self.computed,
            "predicted": _rms(self.predicted),
            "actual": _rms(self.actual),
        }
        return {
            "request": self.request, "model": self.model, "step": self.step, "branch": self.branch, "sigma": self.sigma,
            "reason": self.reason, "bytes_moved": self.bytes_moved, "bytes_saved": self.bytes_exact - self.bytes_moved,
            "bytes_held": self.bytes_held,
        } | {
            name: None if x is None else [_plain(value) for value in x.tolist()] for name, x in rows.items()
        }  # fmt: skip


@dataclass
class ReuseReport:
    """Of the newest request. `steps` in the order they ran; sums and shares over all of them."""

    steps: list[StepRecord] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the states that were held."""
        total = sum(record.fresh.numel() for record in self.steps)
        return sum(record.hits for record in self.steps) / total if total else 0.0

    @property
    def computed(self) -> float:
        """Attention computed, as a share of exact attention."""
        shares = [float(record.computed.mean()) for record in self.steps]
        return sum(shares) / len(shares) if shares else 1.0

    @property
    def bytes_moved(self) -> int:
        return sum(record.bytes_moved for record in self.steps)

    @property
    def bytes_saved(self) -> int:
        return sum(record.bytes_exact - record.bytes_moved for record in self.steps)

    @property
    def bytes_held(self) -> int:
        """The most that was held at once on this device, all branches."""
        newest: dict[str, int] = {}
        most = 0
        for record in self.steps:
            newest[record.branch] = record.bytes_held
            most = max(most, sum(newest.values()))
        return most

    def within(self, factor: float = 2.0, least: float = 1e-3) -> tuple[float, int]:
        """Share of held states with an actual error above `least` predicted within a factor, and how many."""
        good = count = 0
        for record in self.steps:
            if record.actual is None:
                continue
            chosen = ~record.fresh & (record.actual > least) & record.predicted.isfinite()
            ratio = (record.predicted / record.actual)[chosen]
            good += int(((ratio >= 1 / factor) & (ratio <= factor)).sum())
            count += int(chosen.sum())
        return (good / count if count else 1.0), count

    def to_dict(self) -> dict[str, Any]:
        return {
            "hit_rate": self.hit_rate, "computed": self.computed, "bytes_moved": self.bytes_moved,
            "bytes_saved": self.bytes_saved, "bytes_held": self.bytes_held,
            "steps": [record.row() for record in self.steps],
        }  # fmt: skip

    def __str__(self) -> str:
        moved = self.bytes_moved / max(1, self.bytes_moved + self.bytes_saved)
        lines = [
            f"{len(self.steps)} forwards: {self.hit_rate:.0%} of the states held, {self.computed:.0%} of exact "
            f"attention computed, {moved:.0%} of the bytes between groups, at most {self.bytes_held / 2**20:.1f} MiB "
            "held"
        ]
        for record in self.steps:
            share = record.fresh.double().mean((1, 2))
            layers = "".join("#" if x == 1 else "." if x == 0 else "+" for x in share.tolist())
            error = "" if record.actual is None else f"  measured {_worst(record.actual):.4f}"
            guess = f"  predicted {_worst(record.predicted):.4f}"
            lines.append(f"{record.step:4d} {record.branch:12} {layers} {record.reason}{guess}{error}")
        return "\n".join(lines)


def _rms(x: Tensor | None) -> Tensor | None:
    """By layer."""
    return None if x is None else torch.where(x.isfinite(), x, torch.nan).square().nanmean((1, 2)).sqrt()


def _worst(x: Tensor) -> float:
    known = x[x.isfinite()]
    return float(known.max()) if len(known) else float("nan")


def _plain(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
