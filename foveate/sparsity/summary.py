"""What a handle prints of itself: a table of layers. Shapes: H heads, K budgets of a profile."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from foveate.sparsity.controller import Control
from foveate.sparsity.profile import HeadProfile, SparsityProfile

COLUMNS = ("layer", "attention", "kept", "least head", "most head", "pooled", "error", "recall")


def table(control: Control, profile: SparsityProfile, step: int, tokens: int | None = None) -> str:
    """A line a layer: sparse or dense, kept share, pooled heads, measured error and recall at what is kept.

    tokens: the length that it is about, where there are several.
    """
    decision, plan = control.decision, control.decision.plan
    gap = "not measured" if control.gap is None else f"{100 * control.gap:+.3f} %"
    where = "" if tokens is None else f", about {tokens} tokens"
    title = (
        f"foveate, step {step}{where}: {'sparse' if decision.active else 'dense'}, {decision.reason}; gap {gap}, "
        f"error level {control.epsilon:.3f}, next measurement at step {control.due}"
    )
    rows: list[tuple[str, ...]] = [COLUMNS]
    for index, layer in enumerate(profile.layers):
        if plan is None or layer is None:
            rows.append((str(index), "dense", *["-"] * 6))
            continue
        row, pooled = plan.budgets[index], plan.pooled[index]
        error, recall = expected(layer, profile.budgets, row, pooled)
        state = "sparse" if plan.sparse[index] and decision.active else "dense"
        shares = (f"{100 * x:.1f} %" for x in (sum(row) / len(row), min(row), max(row)))
        rows.append((str(index), state, *shares, f"{sum(pooled)} of {len(pooled)}", f"{error:.3f}", f"{recall:.3f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((title, *lines))


def expected(
    layer: HeadProfile, points: Sequence[float], budgets: Sequence[float], pooled: Sequence[bool]
) -> tuple[float, float]:
    """Mean output error and recall of a layer's heads at these budgets (H), as profiled at `points` (K)."""
    error = torch.where(torch.tensor(list(pooled))[:, None], layer.error_pool, layer.error_drop)
    return tuple(
        sum(_at([*points, 1.0], [*row, end], x) for row, x in zip(curve.tolist(), budgets, strict=True)) / len(budgets)
        for curve, end in ((error, 0.0), (layer.recall_predicted, 1.0))
    )  # type: ignore[return-value]


def _at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
        if x <= x1:
            return y0 + (y1 - y0) * max(0.0, x - x0) / (x1 - x0)
    return ys[-1]
