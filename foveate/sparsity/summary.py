"""What a handle prints of itself: a table of layers. Shapes: H heads, K budgets of a profile."""

from collections.abc import Sequence

import numpy as np
import torch

from foveate.sparsity.plan import Control
from foveate.sparsity.profile import DROP, HeadProfile, SparsityProfile

COLUMNS = ("layer", "attention", "kept", "least head", "most head", "pooled", "constants", "error", "recall")


def table(control: Control, profile: SparsityProfile, step: int, tokens: int | None = None) -> str:
    """A line a layer: sparse or dense, kept share, pooled heads and their constants, measured error and recall of that.

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
            rows.append((str(index), "dense", *["-"] * 7))
            continue
        row, constants = plan.budgets[index], plan.constants[index]
        error, recall = expected(layer, profile, row, constants)
        pooled = [x for x in constants if x > DROP]
        state = "sparse" if plan.sparse[index] and decision.active else "dense"
        spread = f"{min(pooled):g} to {max(pooled):g}" if pooled else "-"
        shares = (f"{100 * x:.1f} %" for x in (sum(row) / len(row), min(row), max(row)))
        far = f"{len(pooled)} of {len(row)}", spread
        rows.append((str(index), state, *shares, *far, f"{error:.3f}", f"{recall:.3f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((title, *lines))


def expected(
    layer: HeadProfile, profile: SparsityProfile, budgets: Sequence[float], constants: Sequence[float]
) -> tuple[float, float]:
    """Mean output error and recall of a layer's heads at these budgets and constants (H), as profiled."""
    points = [*profile.budgets, 1.0]
    places = [profile.constants.index(x) for x in constants]
    error = layer.error_predicted[torch.arange(len(places)), places]
    return tuple(
        sum(float(np.interp(x, points, [*row, end])) for row, x in zip(curve.tolist(), budgets, strict=True))
        / len(budgets)
        for curve, end in ((error, 0.0), (layer.recall_predicted, 1.0))
    )  # type: ignore[return-value]
