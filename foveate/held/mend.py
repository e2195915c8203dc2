"""What held steps missed, taken back at the next computed one, where the sampler is Euler's. Pure functions of floats.

Euler adds the output times the step's length to the clip. So once the model has been computed again, the outputs held
since are known better than they were predicted: by interpolation, between the new value and the last two. The sum of
the differences, each times its step's length, over the length of the step that begins, is added to what the model
gave, and the sampler puts the clip where interpolated outputs would have put it. This is the corrector of a
predictor-corrector method for ordinary differential equations, evaluated once (PEC), and it calls no model.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

Step = tuple[float, float | None]  # noise levels here and at the next step, None where the sampler is not Euler's


def lagrange(nodes: Sequence[float], at: float) -> list[float]:
    """Weights of values at `nodes` in the polynomial through them, at another place."""
    weights = []
    for one in nodes:
        weight = 1.0
        for other in nodes:
            weight *= (at - other) / (one - other) if other != one else 1.0
        weights.append(weight)
    return weights


def mending(
    skipped: Sequence[Step], sigma: float, then: float | None, known: Sequence[float], ahead: Callable[[float], float]
) -> list[float]:
    """Weights of (the new value, the last, the one before that), to be added to the new one; [] where nothing is.

    skipped: the steps held since the last value. sigma, then: of the computed step. known: noise levels of the last
    values, the newest first, at most two. ahead(sigma): by how much of their difference the last was moved there.
    """
    nodes = [sigma, *known]
    steps = [(level, next_level) for level, next_level in skipped if next_level is not None]
    if then is None or then == sigma or len(steps) < len(skipped) or not steps:
        return []
    if len(nodes) < 2 or any(a == b for a, b in pairwise(nodes)):
        return []
    weights = [0.0] * len(nodes)
    for level, next_level in steps:
        length = (next_level - level) / (then - sigma)
        given = [0.0, 1.0 + ahead(level), -ahead(level)]
        for index, better in enumerate(lagrange(nodes, level)):
            weights[index] += length * (better - given[index])
    return weights
