"""Which layers are sparse, and what each head keeps: pure functions from reduced measurements to a `Decision`.

One error level epsilon for all heads is the only unknown. Every head gets the smallest budget, and the constant of its
periphery that allows it, whose measured output error, weighed by what the model makes of that head (influence.py),
stays within epsilon; a layer is sparse where the prices say that pays; epsilon moves until the measured paired gap,
loss with sparse over loss with dense attention - 1, nears the tolerance from below. A search with brackets: `good` is
the largest level that held, `bad` the smallest that did not, and both are forgotten slowly, because a model in training
moves. Two clean measurements make training sparse; one far above the tolerance, or two above it, make it dense again,
and so does error that rises until sparse attention no longer pays.

No clock, no randomness, no collectives: the same numbers give the same decision on every rank and in every repeat.
After DSV (arXiv 2502.07590, section 4, two-stage training), whose rule of 90 % mass is `budgets.by_mass`.

Shapes: L layers, H heads.
"""

from dataclasses import replace

from torch import Tensor

from foveate.sparsity.budgets import Price, at_budget, by_error, by_mass, most_useful, place
from foveate.sparsity.cadence import OFTEN, RARE
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.plan import HIGHEST, LOWEST, Control, Decision, Plan
from foveate.sparsity.profile import SparsityProfile

AIM, CALM = 0.7, 0.5  # shares of the tolerance: where epsilon is led, and below which it may grow
ALARM = 1.5  # times the tolerance: back to dense at once
GROW, SHRINK = 1.4, 0.3  # most that one measurement may move epsilon
STRIDE = 1.2  # by which epsilon rises in search of a first plan that pays
FORGET = 1.15  # a bracket drifts outwards by this at each measurement
SAME = 0.1  # budgets that moved by less, relatively, are left as they are


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
