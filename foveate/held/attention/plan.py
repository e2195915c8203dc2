"""What is computed fresh and what is held, for a whole step, and which states memory has room for. Pure functions.

They are given numbers that all ranks share (reduced first), so every rank plans the same.

Shapes: L layers, P parts of the sequence, N states a layer and part (`layout.Layout.bundles`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ANCHOR_DRIFT = 4.0  # a step whose probes are so many times off what was predicted becomes an anchor
LEVEL_BETWEEN = 0.04  # error level of quality 0, between two anchors


def level_between(quality: float) -> float:
    """The error that held states may bring into the clip between two anchors: 0 at quality 1.

    In units of a layer's relative error times `step_weight`, added up.
    """
    return LEVEL_BETWEEN * (1 - quality)


def step_weight(before: float, sigma: float) -> float:
    """What a relative error of the velocity at this step does to the finished clip, up to a factor; in 0 ... 1.

    Samplers integrate: the error enters x times the step's length, which is taken from the step before (`before` to
    `sigma`), as the next level is not known, and cannot reach below 0. In x the clip is scaled by 1 - sigma, so what
    enters is read as a change of the clip 1 / (1 - sigma) times as large, of which later steps mend a part: the root
    was best on two models (docs/reuse.md).
    """
    length = min(abs(before - sigma), abs(sigma))
    return length / max(1 - sigma + length, length) ** 0.5 if length > 0 else 0.0


@dataclass(frozen=True)
class History:
    """What is known of the held states. All float64 on the CPU.

    last, before: noise levels (L, P, N) of the newest fresh value and the one before, NaN where there is none.
    rate: measured error over `growth` (L, P, N), infinite before it was measured. drift: how many times larger than
    predicted the probes' errors were at the last step (L,). age: steps since the newest fresh value (L, P, N). spent:
    predicted errors times `step_weight`, added up since then (L, P, N). slopes: layers (L,) whose states have a slope.
    held: layers (L,) that have states at all.
    """

    last: Tensor
    before: Tensor
    rate: Tensor
    drift: Tensor
    age: Tensor
    spent: Tensor
    slopes: Tensor
    held: Tensor

    @classmethod
    def empty(cls, layers: int, parts: int, states: int) -> "History":
        shape = layers, parts, states
        nan = torch.full(shape, torch.nan, dtype=torch.float64)
        infinite = torch.full(shape, torch.inf, dtype=torch.float64)
        everywhere = torch.ones(layers, dtype=torch.bool)
        return cls(
            last=nan, before=nan.clone(), rate=infinite, drift=torch.ones(layers, dtype=torch.float64),
            age=torch.zeros(shape, dtype=torch.float64), spent=torch.zeros(shape, dtype=torch.float64),
            slopes=everywhere, held=everywhere.clone(),
        )  # fmt: skip

    def renewed(self, fresh: Tensor, sigma: float, errors: Tensor | float = 0.0) -> "History":
        """After a step at this noise level that computed the states `fresh`; errors: spent by the others (L, P, N)."""
        moved = fresh & (self.last != sigma)  # a second value at one level says nothing of the slope
        return replace(
            self,
            before=torch.where(moved, self.last, self.before),
            last=torch.where(fresh, sigma, self.last),
            age=torch.where(fresh, 0.0, self.age + 1),
            spent=torch.where(fresh, 0.0, self.spent + errors),
        )

    def kinked(self) -> "History":
        """The trajectory bends here (another guidance): slopes from before, and what they missed by, mean nothing."""
        nan, infinite = torch.full_like(self.before, torch.nan), torch.full_like(self.rate, torch.inf)
        return replace(self, before=nan, rate=infinite, drift=torch.ones_like(self.drift))


def steps_ahead(history: History, sigma: float) -> Tensor:
    """How far to go along each state's last change, (L, P, N): 1 is as far again; 0 where there is no slope."""
    ahead = (sigma - history.last) / (history.last - history.before)
    usable = history.slopes[:, None, None] & ahead.isfinite()
    return torch.where(usable, ahead, 0.0)


def growth(history: History, sigma: float) -> Tensor:
    """How the error of holding grows with the noise level, (L, P, N), up to a factor.

    Newton's remainder: with the distance for a plain hold, with the product of the distances to both known levels for
    first order.
    """
    distance = (sigma - history.last).abs()
    second = (sigma - history.before).abs()
    first_order = history.slopes[:, None, None] & second.isfinite()
    return torch.where(first_order, distance * second, distance)


def predict(history: History, sigma: float) -> Tensor:
    """Predicted error of holding each state at this noise level, relative to its layer's output, (L, P, N)."""
    error = history.rate * growth(history, sigma) * history.drift[:, None, None]
    return torch.where(error.isnan(), torch.inf, error)


@dataclass(frozen=True)
class StepPlan:
    """fresh: states (L, P, N) to be computed at this step. reason: in words."""

    fresh: Tensor
    reason: str

    @property
    def anchor(self) -> bool:
        return bool(self.fresh.all())


def anchor(history: History, reason: str) -> StepPlan:
    return StepPlan(torch.ones_like(history.rate, dtype=torch.bool), reason)


def hold_all(history: History) -> StepPlan:
    """Everything held that has a state."""
    nothing = history.last.isnan() | ~history.held[:, None, None]
    return StepPlan(nothing.any(dim=-1, keepdim=True).any(dim=1, keepdim=True) | torch.zeros_like(nothing), "interval")


def plan_step(history: History, sigma: float, weight: float, level: float, max_hold: int) -> StepPlan:
    """Hold everywhere as many states as keep the sum of a layer's predicted errors within `level`, least error first.

    The sums' root mean square over layers and parts is what counts, and all of them hold equally many: ranks finish
    together, and slopes are taken between steps at which the whole model was fresh (layers that are fresh at steps of
    their own see inputs that held layers have bent: docs/log.md). A larger level never makes a state fresh that a
    smaller one holds.
    """
    if float(history.drift.median()) > ANCHOR_DRIFT:
        return anchor(history, "drift")
    errors = history.spent + predict(history, sigma) * weight
    errors = torch.where((history.age >= max_hold) & history.held[:, None, None], torch.inf, errors)
    ordered, order = errors.sort(dim=-1)
    together = ordered.cumsum(-1)[history.held].square().mean((0, 1)).sqrt()
    fits = (together <= level).expand_as(ordered)
    fresh = torch.ones_like(fits).scatter(-1, order, ~fits) | ~history.held[:, None, None]
    return StepPlan(fresh, "predicted error")


@dataclass(frozen=True)
class MemoryPlan:
    """states: kept per layer. slopes, held: by layer, whether states have slopes, and whether there are any."""

    states: int
    slopes: tuple[bool, ...]
    held: tuple[bool, ...]
    bytes: int

    def __str__(self) -> str:
        layers = len(self.held)
        return (
            f"{sum(self.held)} of {layers} layers held in {self.states} state{'s' if self.states > 1 else ''} each, "
            f"{sum(self.slopes)} with slopes, {self.bytes / 2**30:.2f} GiB"
        )


def fit_states(layers: int, states: int, order: int, state_bytes: int, cap: float) -> int:
    """How many states a layer may keep: neighbours are merged, which costs freedom but no error, before slopes go."""
    while states > 1 and layers * states * (1 + order) * state_bytes > cap:
        states = -(-states // 2)
    return states


def plan_memory(plain: Tensor, first: Tensor, states: int, order: int, state_bytes: int, cap: float) -> MemoryPlan:
    """Which layers keep states and slopes within `cap` bytes.

    plain, first: measured error (L,) of a plain hold and with the slope. A layer's states and its slopes cost the same
    bytes. Slopes go first, those that save the least error; then layers with the largest errors are left always fresh.
    """
    layers, unit = len(plain), states * state_bytes
    room = layers * (1 + order) if unit == 0 else int(min(cap // unit, layers * (1 + order)))
    if room >= layers:
        gain = (plain - first).nan_to_num(0.0, 0.0, 0.0)
        slopes = set(gain.argsort(descending=True, stable=True)[: room - layers].tolist())
        held = set(range(layers))
    else:
        slopes, held = set(), set(plain.nan_to_num(torch.inf).argsort(stable=True)[:room].tolist())
    return MemoryPlan(
        states, tuple(layer in slopes for layer in range(layers)), tuple(layer in held for layer in range(layers)),
        (len(slopes) + len(held)) * unit,
    )  # fmt: skip
