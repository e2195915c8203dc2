"""What every head keeps, by a profile: at one level of error, at a given budget, or by DSV's rule; and what that pays.

Shapes: L layers, H heads, K budgets and P constants of a profile.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foveate.attention import PERIPHERIES
from foveate.sparsity.plan import MOST, Plan
from foveate.sparsity.profile import DROP, SparsityProfile

Price = Callable[[Sequence[float], Sequence[bool]], tuple[float, float]]
"""(budgets of a layer's heads, which are pooled) -> milliseconds of the layer (sparse, dense)."""

POOL_WORK = 1 / 64  # of dense attention: one pooled key a tile
KEEP = 0.05  # a head's constant is left as it is while its budget, or error, is no larger than this above the best
LEAVE, ENTER = 1.0, 0.95  # a sparse layer must cost less than this share of dense to stay, and to become sparse


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
    plan = Plan.of(budgets, torch.full_like(budgets, DROP))
    low = (budgets.mean(-1) <= threshold).tolist()
    return replace(plan, sparse=tuple(on and index not in dense for index, on in enumerate(low)))


def place(
    budgets: Tensor, constants: Tensor, price: Price, before: Plan | None, stay_dense: Sequence[int] = ()
) -> Plan:
    """The plan of budgets and constants (L, H): a layer is sparse where that is cheaper, if it need not be dense."""
    plan = Plan.of(budgets, constants)
    sparse = []
    for index, (row, far) in enumerate(zip(plan.budgets, plan.pooled, strict=True)):
        ours, dense = price(row, far)
        stays = before is not None and before.sparse[index]
        sparse.append(index not in stay_dense and ours < (LEAVE if stays else ENTER) * dense)
    return replace(plan, sparse=tuple(sparse))
