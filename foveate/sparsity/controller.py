"""Which layers are sparse, and what each head keeps: pure functions from reduced measurements to a `Decision`.

One error level epsilon for all heads is the only unknown. Every head gets the smallest budget, and the constant of its
periphery that allows it, whose measured output error, weighed by what the model makes of that head (influence.py),
stays within epsilon; a layer is sparse where the prices say that pays; epsilon moves until the measured paired gap,
loss with sparse over loss with dense attention - 1, nears the tolerance from below. A search with brackets: `good` is
the largest level that held, `bad` the smallest that did not, and both are forgotten slowly, because a model in training
moves. Two clean measurements make training sparse; one far above the tolerance, or two above it, make it dense again,
and so does error that rises until sparse attention no longer pays.

No clock, no randomness, no collectives: the same numbers give the same decision on every rank and in every repeat.
After DSV (arXiv 2502.07590, section 4, two-stage training), whose rule of 90 % mass is `by_mass`.

Shapes: L layers, H heads, K budgets and P constants of a profile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foveate.attention import PERIPHERIES
from foveate.sparsity.cadence import OFTEN, RARE
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.profile import DROP, HeadProfile, SparsityProfile, plain, unplain

Price = Callable[[Sequence[float], Sequence[bool]], tuple[float, float]]
"""(budgets of a layer's heads, which are pooled) -> milliseconds of the layer (sparse, dense)."""

MOST = 4.0  # times more, or less, that a head's error may count than its size
START, LOWEST, HIGHEST = 0.05, 1e-3, MOST  # of epsilon
AIM, CALM = 0.7, 0.5  # shares of the tolerance: where epsilon is led, and below which it may grow
ALARM = 1.5  # times the tolerance: back to dense at once
GROW, SHRINK = 1.4, 0.3  # most that one measurement may move epsilon
STRIDE = 1.2  # by which epsilon rises in search of a first plan that pays
FORGET = 1.15  # a bracket drifts outwards by this at each measurement
POOL_WORK = 1 / 64  # of dense attention: one pooled key a tile
SAME = 0.1  # budgets that moved by less, relatively, are left as they are
KEEP = 0.05  # a head's constant is left as it is while its budget, or error, is no larger than this above the best
LEAVE, ENTER = 1.0, 0.95  # a sparse layer must cost less than this share of dense to stay, and to become sparse


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


def begin(config: SparsityConfig, step: int = 0) -> Control:
    return Control(interval=config.often or OFTEN, due=max(config.warmup, step))


def advance(
    control: Control,
    config: SparsityConfig,
    profile: SparsityProfile,
    gap: float | None,
    step: int,
    price: Price,
    influence: Tensor | None = None,
    least: float = 0.0,
) -> Control:
    """The controller after a measurement at `step`.

    gap: of the plan in `control.decision`, as losses say, None where that plan has no sparse layer. profile: every
    layer must have been measured. influence: (L, H), what each head's error counts (influence.py); None: all alike.
    least: one tile of the sequence, as a fraction; no budget is smaller.
    """
    if config.rule == "dsv" or config.budget is not None:
        return _fixed(control, config, profile, gap, step, price, least)
    assert config.goal is not None
    often, rare = _cadence(config)
    before = control.decision

    def plan_at(level: float) -> Plan:
        budgets, constants = by_error(profile, level, config.periphery, influence, before.plan)
        return place(budgets.clamp(min=least), constants, price, before.plan, config.dense_layers)

    # Nothing sparse costs nothing. The level may then rise until something pays, which is measured before it is used.
    moved = _move(control, 0.0 if gap is None else gap, config.goal)
    most = max(LOWEST, most_useful(profile, config.periphery, influence))
    moved = replace(moved, epsilon=min(moved.epsilon, most), streak=0 if gap is None else moved.streak)
    plan = plan_at(moved.epsilon)
    while gap is None and not any(plan.sparse) and moved.epsilon * STRIDE < min(most, moved.bad):
        moved = replace(moved, epsilon=moved.epsilon * STRIDE)
        plan = plan_at(moved.epsilon)
    if before.plan is not None and moved.streak > 0 and _same(plan, before.plan):
        plan = before.plan
    active = any(plan.sparse) and (before.active if gap is None else _active(before.active, moved.streak, gap, config))
    idle = before.plan is not None and not any(plan.sparse) and not any(before.plan.sparse)
    settled = idle or (plan == before.plan and active == before.active and moved.streak > 0)
    near = before.active or active or moved.streak > 0  # otherwise dense training may go on for long
    interval = often if near and not settled else max(often, min(rare, control.interval * 3 // 2))
    reason = _reason(before, active, plan, gap, config.goal)
    decision = before if settled else Decision(step, active, plan, reason)
    return replace(moved, decision=decision, gap=gap, interval=interval, due=step + interval)


def _move(control: Control, gap: float, tolerance: float) -> Control:
    """The next error level. Gaps grow about with the square of the error once a loss is near its minimum."""
    epsilon = control.epsilon
    good, bad = control.good / FORGET, min(HIGHEST, control.bad * FORGET)
    if gap > tolerance and good > 0.9 * epsilon:
        good = 0.0  # it held once, and no longer does
    towards = (AIM * tolerance / max(gap, 1e-12)) ** 0.5
    if gap > tolerance:
        bad, streak = epsilon, min(control.streak, 0) - 1
        target = max(min(towards, 0.9), SHRINK) * epsilon
        epsilon = max(target, good) if streak == -1 else target
    else:
        good, streak = max(good, epsilon), max(control.streak, 0) + 1
        if gap < CALM * tolerance:
            epsilon = min(min(towards, GROW) * epsilon, max((epsilon * bad) ** 0.5, epsilon))
    return replace(control, epsilon=min(max(epsilon, LOWEST), HIGHEST), good=good, bad=bad, streak=streak)


def _active(before: bool, streak: int, gap: float, config: SparsityConfig) -> bool:
    assert config.goal is not None
    if before:
        return gap <= ALARM * config.goal and streak > -2
    return streak >= 2


def _cadence(config: SparsityConfig) -> tuple[int, int]:
    often = config.often or OFTEN
    return often, max(often, config.rare or RARE)


def _fixed(
    control: Control,
    config: SparsityConfig,
    profile: SparsityProfile,
    gap: float | None,
    step: int,
    price: Price,
    least: float,
) -> Control:
    """Budgets that the loss does not move: given ones, or DSV's rule."""
    before, (often, rare) = control.decision, _cadence(config)
    if config.budget is not None:
        budgets, constants = at_budget(profile, config.budget, config.periphery, before.plan)
        plan = place(budgets, constants, price, before.plan, config.dense_layers)
    else:
        plan = by_mass(profile, config.dsv_mass, config.dsv_threshold, config.dense_layers, least)
    if before.plan is not None and _same(plan, before.plan):
        plan = before.plan
    settled = before.active and plan == before.plan
    interval = max(often, min(rare, control.interval * 3 // 2)) if settled else often
    active = any(plan.sparse)
    reason = "as configured" if active else "sparse attention does not pay in any layer"
    decision = before if settled else Decision(step, active, plan, reason)
    return replace(control, decision=decision, gap=gap, interval=interval, due=step + interval)


def smallest_budget(error: Tensor, budgets: Sequence[float], epsilon: float) -> Tensor:
    """(..., ) float64: the smallest budget, interpolated, where error (..., K) is within epsilon; 1 has no error.

    Never below the smallest profiled budget. An error that is not lower at a larger budget is noise, and taken down.
    """
    curve = torch.cat([error.double(), torch.zeros_like(error[..., :1], dtype=torch.float64)], -1).cummin(-1).values
    ends = torch.tensor([*budgets, 1.0], dtype=torch.float64)
    right = (curve > epsilon).sum(-1)  # the last one is 0, so this is at most K
    left = (right - 1).clamp(min=0)
    high, low = (curve.gather(-1, i.unsqueeze(-1)).squeeze(-1) for i in (left, right))
    share = torch.where(right > 0, (high - epsilon) / (high - low).clamp(min=1e-12), 1.0)
    return ends[left] + share * (ends[right] - ends[left])


def by_error(
    profile: SparsityProfile,
    epsilon: float,
    periphery: str | float,
    influence: Tensor | None = None,
    before: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Budgets (L, H) at one level of weighed error, by the predictor's own choice of tiles, and the constants (L, H)
    of the periphery that allow them. before: whose constants stay where they are as good."""
    error, constants = weighed(profile, influence), allowed(profile.constants, periphery)
    error = error[..., [profile.constants.index(x) for x in constants], :]
    budgets = smallest_budget(error, profile.budgets, epsilon)
    pools = torch.tensor(constants) > DROP
    # Among those that come down to the smallest budget, the one of least error.
    work = budgets + POOL_WORK * pools + 1e-4 * error[..., 0]
    chosen = _chosen(work, constants, before)
    return budgets.gather(-1, chosen).squeeze(-1), torch.tensor(constants, dtype=torch.float64)[chosen.squeeze(-1)]


def weighed(profile: SparsityProfile, influence: Tensor | None) -> Tensor:
    """Output errors (L, H, P, K), each head's by the square root of its influence (L, H)."""
    error = profile.stacked().error_predicted
    return error if influence is None else error * weights(influence)[..., None, None]


def weights(influence: Tensor) -> Tensor:
    """What heads' errors count (L, H), of their influence."""
    return (influence / influence.mean()).sqrt().clamp(1 / MOST, MOST)


def most_useful(profile: SparsityProfile, periphery: str | float, influence: Tensor | None = None) -> float:
    """The error level at which every head has the smallest budget. A higher one would only be slow to come back."""
    places = [profile.constants.index(x) for x in allowed(profile.constants, periphery)]
    return float(weighed(profile, influence)[:, :, places, 0].amin(-1).max())


def at_budget(
    profile: SparsityProfile, budget: float | Sequence[float], periphery: str | float, before: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Budgets (L, H) as given, one or one per head, and the constants of smallest error there (L, H)."""
    error, constants = profile.stacked().error_predicted, allowed(profile.constants, periphery)
    layers, heads = error.shape[:2]
    budgets = torch.as_tensor(budget, dtype=torch.float64).expand(layers, heads)
    nearest = (torch.tensor(profile.budgets) - budgets.unsqueeze(-1)).abs().argmin(-1)[..., None, None]
    error = error[..., [profile.constants.index(x) for x in constants], :]
    there = error.gather(-1, nearest.expand(*error.shape[:-1], 1)).squeeze(-1)
    there = there * torch.tensor([0.97 if x == DROP else 1.0 for x in constants])  # pooling costs a little
    return budgets, torch.tensor(constants, dtype=torch.float64)[_chosen(there, constants, before).squeeze(-1)]


def allowed(constants: Sequence[float], periphery: str | float) -> tuple[float, ...]:
    """Which of the constants that are measured a periphery may have."""
    if periphery == "auto":
        return tuple(constants)
    return (PERIPHERIES[periphery] if isinstance(periphery, str) else periphery,)


def _chosen(cost: Tensor, constants: Sequence[float], before: Plan | None) -> Tensor:
    """int64 (L, H, 1): which constant has the least cost (L, H, P). Noise shall not exchange equals."""
    best = cost.argmin(-1, keepdim=True)
    if before is None or not all(x in constants for row in before.constants for x in row):
        return best
    old = torch.tensor([[constants.index(x) for x in row] for row in before.constants]).unsqueeze(-1)
    stays = cost.gather(-1, old) <= (1 + KEEP) * cost.gather(-1, best)
    return torch.where(stays, old, best)


def by_mass(
    profile: SparsityProfile, mass: float, threshold: float, dense: Sequence[int] = (), least: float = 0.0
) -> Plan:
    """DSV's rule: per head the smallest budget whose tiles hold `mass`; layers above `threshold` stay dense.

    So do those of `dense`. The paper's threshold is on a block's sparsity; its value is not published, so it is a
    setting here.
    """
    budgets = smallest_budget(1 - profile.stacked().recall_predicted, profile.budgets, 1 - mass).clamp(min=least)
    plan = _plan(budgets, torch.full_like(budgets, DROP))
    low = (budgets.mean(-1) <= threshold).tolist()
    return replace(plan, sparse=tuple(on and index not in dense for index, on in enumerate(low)))


def place(
    budgets: Tensor, constants: Tensor, price: Price, before: Plan | None, stay_dense: Sequence[int] = ()
) -> Plan:
    """The plan of budgets and constants (L, H): a layer is sparse where that is cheaper, if it need not be dense."""
    plan = _plan(budgets, constants)
    sparse = []
    for index, (row, far) in enumerate(zip(plan.budgets, plan.pooled, strict=True)):
        ours, dense = price(row, far)
        stays = before is not None and before.sparse[index]
        sparse.append(index not in stay_dense and ours < (LEAVE if stays else ENTER) * dense)
    return replace(plan, sparse=tuple(sparse))


def heads(profiles: Sequence[HeadProfile]) -> Tensor:
    """All numbers of a model's profiles in one float32 tensor (L, H, 2 + 2 P, K), to reduce over ranks in one go."""
    return torch.stack([layer.flat() for layer in profiles])


def unstack(numbers: Tensor) -> list[HeadProfile]:
    """Undoes `heads`."""
    return [HeadProfile.from_flat(layer) for layer in numbers]


def _plan(budgets: Tensor, constants: Tensor) -> Plan:
    return Plan(
        tuple(tuple(row) for row in budgets.tolist()),
        tuple(tuple(row) for row in constants.tolist()),
        (True,) * len(budgets),
    )


def _same(plan: Plan, other: Plan) -> bool:
    """Near enough to leave things as they are. Larger budgets where error rose are always taken."""
    if plan.sparse != other.sparse or plan.constants != other.constants:
        return False
    return all(
        old * (1 - SAME) <= new <= old * (1 + SAME / 2)
        for row, old_row in zip(plan.budgets, other.budgets, strict=True)
        for new, old in zip(row, old_row, strict=True)
    )


def _reason(before: Decision, active: bool, plan: Plan, gap: float | None, tolerance: float) -> str:
    if not any(plan.sparse):
        return "sparse attention does not pay in any layer at this error level"
    if gap is None:
        return "a first plan to measure"
    if active != before.active:
        return "the gap held twice" if active else "the gap is too large"
    return "the gap is above the tolerance" if gap > tolerance else "errors or the gap moved"
