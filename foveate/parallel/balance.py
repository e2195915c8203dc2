"""Which rank computes which heads: spread so that the slowest rank is as fast as can be found, in milliseconds.

A head has several additive costs (computation, bytes, what hides them). A rank's time is a function of the sums over
its heads, so communication that computation hides counts for nothing. Longest first, then moves and exchanges of heads
with the slowest rank while they help. No clock, no randomness: the same numbers give the same heads everywhere.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

Heads = tuple[tuple[int, ...], ...]
Time = Callable[[np.ndarray], np.ndarray]  # sums (K, ...) of a rank -> its time (...)

GOOD_ENOUGH = 1.001  # of the mean over ranks: no search for a better one below
BETTER = 1 - 1e-9  # an exchange must gain more than rounding
PAIRED = 12  # heads of a rank up to which pairs of them are exchanged too: more have single ones enough


def assign_heads(prices: Sequence[float], ranks: int) -> Heads:
    """Heads spread over ranks so that the dearest rank is as cheap as can be found; every rank gets one at least.

    Heads of a rank are ascending. Raises ValueError where there are fewer heads than ranks.
    """
    return spread(np.asarray(prices, float)[None], ranks, lambda sums: sums[0])


def spread(costs: np.ndarray, ranks: int, time: Time) -> Heads:
    """`costs` (K, H) of heads over ranks, so that `time` of a rank's sums is small for the slowest rank."""
    if costs.shape[1] < ranks:
        raise ValueError(f"{costs.shape[1]} heads cannot be spread over {ranks} ranks; use a smaller head degree")
    owner = _longest_first(costs, ranks, time)
    for _ in range(4 * len(owner) if ranks > 1 else 0):
        if not _improve(costs, owner, ranks, time):
            break
    return tuple(tuple(np.flatnonzero(owner == rank).tolist()) for rank in range(ranks))


def contiguous(heads: int, ranks: int) -> Heads:
    """Runs of heads, as even in number as can be."""
    even, more = divmod(heads, ranks)
    ends = [rank * even + min(rank, more) for rank in range(ranks + 1)]
    return tuple(tuple(range(ends[rank], ends[rank + 1])) for rank in range(ranks))


def imbalance(prices: Sequence[float], heads: Sequence[Sequence[int]]) -> float:
    """The dearest rank over the mean."""
    loads = [sum(prices[h] for h in own) for own in heads]
    return max(loads) * len(loads) / sum(loads)


def _longest_first(costs: np.ndarray, ranks: int, time: Time) -> np.ndarray:
    """Owner of every head (H,)."""
    alone = time(costs)
    owner, sums, empty = np.empty(len(alone), int), np.zeros((len(costs), ranks)), np.ones(ranks, bool)
    for place, head in enumerate(sorted(range(len(alone)), key=lambda h: (-alone[h], h))):
        after = time(sums + costs[:, head, None])
        if empty.sum() >= len(alone) - place:  # as many heads left as ranks without one
            after = np.where(empty, after, np.inf)
        rank = int(after.argmin())
        owner[head], empty[rank] = rank, False
        sums[:, rank] += costs[:, head]
    return owner


def _improve(costs: np.ndarray, owner: np.ndarray, ranks: int, time: Time) -> bool:
    """Make the one exchange that helps the slowest rank most, in place: one or two of its heads for none, one or two of
    another's. False where none helps, or where little is left to gain."""
    sums = np.stack([np.bincount(owner, weights=row, minlength=ranks) for row in costs])
    times, count = time(sums), np.bincount(owner, minlength=ranks)
    slow, none = int(times.argmax()), len(owner)
    if times[slow] <= GOOD_ENOUGH * times.mean():
        return False
    by_rank = [_bundles(np.flatnonzero(owner == rank), none) for rank in range(ranks)]
    leave = by_rank[slow]
    nothing = np.full((1, 2), none)
    come = np.concatenate([np.concatenate([nothing, x]) for rank, x in enumerate(by_rank) if rank != slow])
    partner = np.concatenate([np.full(len(x) + 1, rank) for rank, x in enumerate(by_rank) if rank != slow])
    padded = np.concatenate([costs, np.zeros((len(costs), 1))], 1)
    change = padded[:, come].sum(-1)[:, None, :] - padded[:, leave].sum(-1)[:, :, None]
    more = (come < none).sum(1) - (leave < none).sum(1)[:, None]
    after = np.maximum(time(sums[:, slow, None, None] + change), time(sums[:, partner][:, None, :] - change))
    after[(count[slow] + more < 1) | (count[partner] - more < 1)] = np.inf
    away, back = np.unravel_index(after.argmin(), after.shape)
    if after[away, back] >= times[slow] * BETTER:
        return False
    owner[leave[away][leave[away] < none]] = partner[back]
    owner[come[back][come[back] < none]] = slow
    return True


def _bundles(own: np.ndarray, none: int) -> np.ndarray:
    """int (n, 2): single heads, filled up with `none`, and pairs of them."""
    single = np.stack([own, np.full(len(own), none)], 1)
    if len(own) > PAIRED:
        return single
    first, second = _pairs(len(own))
    return np.concatenate([single, np.stack([own[first], own[second]], 1)])


@lru_cache(maxsize=PAIRED + 1)
def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(count, 1)
