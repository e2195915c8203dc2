"""How sure a number is: bootstrap intervals of means, exact intervals of shares."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

SHARE = 0.95  # of the probability that an interval covers
RESAMPLES = 2000
BEST = 100.0  # dB: what two equal clips count as in a mean


class Interval(NamedTuple):
    """A mean of `n` values and the ends of its interval, None where one value says nothing of how they vary."""

    mean: float
    low: float | None
    high: float | None
    n: int


def of_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean over clips, with the percentile bootstrap over them (Efron 1979); infinite ones count as `BEST`."""
    found = np.minimum(np.asarray(values, float), BEST) if np.isinf(values).any() else np.asarray(values, float)
    if len(found) < 2:
        return Interval(float(found.mean()), None, None, len(found))
    draw = np.random.default_rng(seed)
    means = found[draw.integers(0, len(found), (RESAMPLES, len(found)))].mean(1)
    return Interval(float(found.mean()), *ends(means), len(found))


def ends(values: np.ndarray) -> tuple[float, float]:
    """Between them lies `SHARE` of the values, as much left out below as above."""
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def of_share(hits: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's exact interval (1934) of a probability: at each end, a tail of (1 - SHARE) / 2."""
    tail = (1 - SHARE) / 2
    low = 0.0 if hits == 0 else _root(lambda p: at_least(hits, trials, p) - tail)
    high = 1.0 if hits == trials else _root(lambda p: tail - at_least(trials - hits, trials, 1 - p))
    return low, high


def at_least(hits: int, trials: int, chance: float = 0.5) -> float:
    """The probability of so many hits or more."""
    return math.fsum(math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits, trials + 1))


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
