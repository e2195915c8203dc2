"""What is decided, as values: a `Plan` of every layer, the `Decision` that it is part of, and all that is remembered.

Shapes: L layers, H heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foveate.sparsity.profile import DROP, plain, unplain

MOST = 4.0  # times more, or less, that a head's error may count than its size
START, LOWEST, HIGHEST = 0.05, 1e-3, MOST  # of epsilon


@dataclass(frozen=True)
class Plan:
    """What every layer does when attention is sparse: (L, H) budgets and constants of the periphery (-inf where it is
    dropped, 0 where it is pooled, see `attend`), (L,) which are sparse at all."""

    budgets: tuple[tuple[float, ...], ...]
    constants: tuple[tuple[float, ...], ...]
    sparse: tuple[bool, ...]

    @property
    def pooled(self) -> tuple[tuple[bool, ...], ...]:
        """(L, H): whether a head's periphery takes part at all."""
        return tuple(tuple(x > DROP for x in row) for row in self.constants)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        return {**vars(self), "constants": [plain(row) for row in self.constants]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Plan":
        """Undoes `to_dict`."""
        budgets = tuple(tuple(row) for row in saved["budgets"])
        return cls(budgets, tuple(unplain(row) for row in saved["constants"]), tuple(saved["sparse"]))

    @classmethod
    def of(cls, budgets: Tensor, constants: Tensor) -> "Plan":
        """Of budgets and constants (L, H), all layers sparse."""
        rows, others = (tuple(tuple(row) for row in x.tolist()) for x in (budgets, constants))
        return cls(rows, others, (True,) * len(rows))

    @property
    def kept(self) -> float:
        """Mean kept fraction over all heads of all layers; a dense layer keeps everything."""
        rows = [row if on else [1.0] * len(row) for row, on in zip(self.budgets, self.sparse, strict=True)]
        return sum(map(sum, rows)) / sum(map(len, rows))


@dataclass(frozen=True)
class Decision:
    """The outcome at `step`: whether training forwards are sparse now, the plan they follow, and why."""

    step: int = 0
    active: bool = False
    plan: Plan | None = None
    reason: str = "predictors learn"


@dataclass(frozen=True)
class Control:
    """All that the controller remembers between measurements. Plain numbers, for JSON."""

    decision: Decision = Decision()
    epsilon: float = START
    good: float = 0.0
    bad: float = HIGHEST
    streak: int = 0  # measurements in a row within (> 0) or above (< 0) the tolerance
    gap: float | None = None
    interval: int = 0
    due: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plan = self.decision.plan
        decision = {**vars(self.decision), "plan": None if plan is None else plan.to_dict()}
        return {**vars(self), "decision": decision}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Control":
        decision = dict(saved["decision"])
        if decision["plan"] is not None:
            decision["plan"] = Plan.from_dict(decision["plan"])
        return cls(**{**saved, "decision": Decision(**decision)})
