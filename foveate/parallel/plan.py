"""Where every layer runs: pure functions from measured sparsity, prices and links to a `ParallelPlan`.

A layer's layout is a head degree times a sequence degree, equal to the number of context-parallel ranks, and which
heads each rank computes. Its time is that of its slowest rank: attention, and what communication computation cannot
hide. Ranks are numbered so that the head degree is the inner one, inside a node where it fits.

After DSV (arXiv 2502.07590, section 6, sparsity-aware context parallelism). No clock, no randomness, no collectives:
the same functions plan a run and predict one for a cluster that is not there.

Shapes: P ranks, U head degree, R sequence degree, P = U * R; H heads; S tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any

from foveate.costs import PASSES, Costs

log = logging.getLogger("foveate")

GOOD_ENOUGH = 1.005  # of the lower bound: no search for a better assignment below
NODES = 300  # of the search's tree: a bound that is the same on every machine, as a time limit is not
ROWS_EXPONENT = 0.45  # of the rows of a shard, for the union of what they keep: fitted to real_qkv (docs/parallel.md)
RANK = 16  # of the predictor: octant keys that travel first


@dataclass(frozen=True)
class Link:
    """Of one rank: latency of a collective in microseconds, and bandwidth in GB/s."""

    latency_us: float
    gb_per_s: float

    def ms(self, sent: float) -> float:
        """Milliseconds to send so many bytes."""
        return self.latency_us / 1e3 + sent / self.gb_per_s / 1e6 if sent else 0.0


@dataclass(frozen=True, kw_only=True)
class Topology:
    """ranks: context-parallel ones; per_node of them share a node and its `intra` links, the others `inter`.

    memory_gib: what all layers together may keep for the backward on a rank; None: any.
    """

    ranks: int
    per_node: int = 8
    intra: Link = Link(15.0, 300.0)  # NVLink of an H100/H200 node, nominal
    inter: Link = Link(30.0, 40.0)  # 400 Gbit/s a GPU, at 80 %
    memory_gib: float | None = None

    def link(self, span: int) -> Link:
        """Between ranks whose numbers differ by less than `span`."""
        return self.intra if span <= self.per_node else self.inter


@dataclass(frozen=True)
class LayerLoad:
    """What a layer computes: kept fraction of each head (1: dense), which are pooled, and how much of the other ranks'
    tiles a rank fetches at each sequence degree, where that was measured."""

    density: tuple[float, ...]
    pooled: tuple[bool, ...] = ()
    union: Mapping[int, float] = field(default_factory=dict)

    @property
    def dense(self) -> bool:
        return min(self.density) >= 1.0

    def fetched(self, sequence: int, tiles: int) -> float:
        """Fraction of the other ranks' tiles that a rank's queries keep together, mean over heads."""
        if sequence in self.union:
            return self.union[sequence]
        rows = max(1.0, tiles / sequence) ** ROWS_EXPONENT
        return sum(1 - (1 - min(d, 1.0)) ** rows for d in self.density) / len(self.density)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model's attention: every layer's load, and the shape of its sequences. width: bytes of an element."""

    layers: tuple[LayerLoad, ...]
    tokens: int
    dim: int
    batch: int = 1
    width: int = 2
    passes: Sequence[str] = PASSES


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """head * sequence = P; heads[u]: the heads of head rank u. compute_ms: of each head rank, forward and backward.

    exposed_ms: communication that computation does not hide, sent: bytes a rank sends, kept: bytes it keeps for the
    backward besides q, k and v of its own tokens.
    """

    head: int
    sequence: int
    heads: tuple[tuple[int, ...], ...]
    compute_ms: tuple[float, ...] = ()
    exposed_ms: float = 0.0
    sent: float = 0.0
    kept: float = 0.0

    @property
    def ms(self) -> float:
        """Of the slowest rank."""
        return max(self.compute_ms) + self.exposed_ms

    @property
    def imbalance(self) -> float:
        """The slowest rank's computation over the mean."""
        return max(self.compute_ms) * len(self.compute_ms) / sum(self.compute_ms)


@dataclass(frozen=True)
class ParallelPlan:
    """The layout of every layer while it is sparse, and the one of dense calls."""

    layers: tuple[LayerPlan, ...]
    dense: LayerPlan

    @property
    def ms(self) -> float:
        return sum(layer.ms for layer in self.layers)


def plan_parallel(
    profile: Load, topology: Topology, costs: Costs, *, head: int | None = None, balance: bool = True
) -> ParallelPlan:
    """The fastest layout of every layer, under the memory limit. head: fixes the head degree of all layers.

    balance: heads are assigned by cost; False: contiguous. Raises ValueError where no layout is possible.
    """
    count = len(profile.layers[0].density)
    degrees = [u for u in range(1, topology.ranks + 1) if topology.ranks % u == 0 and u <= count]
    if head is not None:
        if head not in degrees:
            raise ValueError(f"a head degree of {head} does not fit {topology.ranks} ranks and {count} heads")
        degrees = [head]
    by_layer = [
        sorted((lay_out(layer, profile, topology, costs, u, balance) for u in degrees), key=lambda x: (x.ms, x.kept))
        for layer in profile.layers
    ]
    dense = min(
        (lay_out(LayerLoad((1.0,) * count), profile, topology, costs, u, False) for u in degrees), key=lambda x: x.ms
    )
    return ParallelPlan(tuple(_within(by_layer, topology.memory_gib)), dense)


def lay_out(
    layer: LayerLoad, profile: Load, topology: Topology, costs: Costs, head: int, balance: bool = True
) -> LayerPlan:
    """What a layer costs at head degree `head`: the assignment of its heads and the predicted times."""
    sequence = topology.ranks // head
    prices = [_price(layer, h, profile, costs) / sequence for h in range(len(layer.density))]
    heads = assign_heads(prices, head) if balance else contiguous(len(prices), head)
    compute = tuple(profile.batch * sum(prices[h] for h in own) for own in heads)
    most, widest = max(compute), max(map(len, heads))
    forward, backward = ("forward_ms" in profile.passes), ("backward_ms" in profile.passes)
    element = profile.batch * profile.dim * profile.width
    tokens = profile.tokens / topology.ranks
    # q, k, v there and out back; the gradients of these four the other way.
    all_to_all = (forward + backward) * 4 * tokens * len(prices) * element * (head - 1) / head
    exposed = (forward + backward) * topology.link(head).ms(all_to_all / (forward + backward))
    union = 1.0 if layer.dense else layer.fetched(sequence, -(-profile.tokens // 64))
    others = profile.tokens * (sequence - 1) / sequence * widest * element * 2
    fetch = union * others * forward
    back = union * others * backward * 4 / profile.width  # gradients of tiles travel in float32
    octants = 0.0 if layer.dense else profile.tokens * (sequence - 1) / sequence / 8 * widest * RANK * 4 * profile.batch
    # While tiles travel a rank attends to its own: at least its share of the keys, more where near tiles are kept.
    hidden = most / sequence if not layer.dense else most * (sequence - 1) / sequence
    link = topology.link(topology.ranks if sequence > 1 else 1)
    exposed += link.ms(octants) + max(0.0, link.ms(fetch) + link.ms(back) - hidden)
    kept = 0.0 if layer.dense else union * others
    return LayerPlan(
        head=head, sequence=sequence, heads=heads, compute_ms=compute, exposed_ms=exposed,
        sent=all_to_all + fetch + back + octants, kept=kept,
    )  # fmt: skip


def assign_heads(prices: Sequence[float], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Heads spread over ranks so that the dearest rank is as cheap as can be found; every rank gets one at least.

    Longest processing time first; where that is not near the bound, mixed-integer search (scipy), if it does better.
    Heads of a rank are ascending. Raises ValueError where there are fewer heads than ranks.
    """
    if len(prices) < ranks:
        raise ValueError(f"{len(prices)} heads cannot be spread over {ranks} ranks; use a smaller head degree")
    prices = [max(price, 1e-12) for price in prices]
    loads, found = [0.0] * ranks, [[] for _ in range(ranks)]
    for head in sorted(range(len(prices)), key=lambda h: (-prices[h], h)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        found[rank].append(head)
        loads[rank] += prices[head]
    bound = max(sum(prices) / ranks, max(prices))
    if max(loads) > GOOD_ENOUGH * bound:
        found = _search(prices, ranks, max(loads)) or found
    return tuple(tuple(sorted(own)) for own in found)


def contiguous(heads: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Runs of heads, as even in number as can be."""
    even, more = divmod(heads, ranks)
    ends = [rank * even + min(rank, more) for rank in range(ranks + 1)]
    return tuple(tuple(range(ends[rank], ends[rank + 1])) for rank in range(ranks))


def imbalance(prices: Sequence[float], heads: Sequence[Sequence[int]]) -> float:
    """The dearest rank over the mean."""
    loads = [sum(prices[h] for h in own) for own in heads]
    return max(loads) * len(loads) / sum(loads)


def _search(prices: Sequence[float], ranks: int, known: float) -> list[list[int]] | None:
    """An assignment whose dearest rank is below `known`, by mixed-integer programming; None where none was found."""
    try:
        import numpy as np
        from scipy import optimize
    except ImportError:
        _say_once(
            "scipy is not installed: heads are assigned longest first, not refined (pip install 'foveate[parallel]')"
        )
        return None
    order = sorted(range(len(prices)), key=lambda h: (round(prices[h] / max(prices), 6), h))
    kinds = [list(same) for _, same in groupby(order, key=lambda h: round(prices[h] / max(prices), 6))]
    # How many heads of each kind each rank gets (kind-major), and the dearest rank's load, to be made small.
    price, counts = [prices[kind[0]] for kind in kinds], [len(kind) for kind in kinds]
    size = len(kinds) * ranks
    rows: list[Any] = []
    lower: list[float] = []
    upper: list[float] = []
    for k, count in enumerate(counts):
        row = np.zeros(size + 1)
        row[k * ranks : (k + 1) * ranks] = 1
        rows, lower, upper = [*rows, row], [*lower, count], [*upper, count]
    for rank in range(ranks):
        load, some = np.zeros(size + 1), np.zeros(size + 1)
        load[rank:size:ranks], load[-1], some[rank:size:ranks] = price, -1, 1
        rows, lower, upper = [*rows, load, some], [*lower, -np.inf, 1], [*upper, 0, np.inf]
    scipy: Any = optimize  # its stubs know no arrays of bounds
    solved = scipy.milp(
        np.append(np.zeros(size), 1.0),
        constraints=scipy.LinearConstraint(np.stack(rows), lower, upper),
        integrality=np.append(np.ones(size), 0),
        bounds=scipy.Bounds(np.zeros(size + 1), np.append(np.repeat(counts, ranks), known)),
        options={"node_limit": NODES, "mip_rel_gap": GOOD_ENOUGH - 1},
    )
    if solved.x is None or solved.x[-1] > known * (1 - 1e-9):
        return None
    taken = np.rint(solved.x[:-1]).astype(int).reshape(len(kinds), ranks)
    left = [list(kind) for kind in kinds]
    return [[left[k].pop(0) for k in range(len(kinds)) for _ in range(taken[k, rank])] for rank in range(ranks)]


def _price(layer: LayerLoad, head: int, profile: Load, costs: Costs) -> float:
    """One head's share of a call with all heads, so that what a call costs by itself is not counted for each."""
    density, heads = layer.density[head], len(layer.density)
    if density >= 1.0:
        return costs.dense(profile.tokens, heads, profile.dim, passes=profile.passes) / heads
    pooled = float(layer.pooled[head]) if layer.pooled else 0.0
    return costs.sparse(profile.tokens, heads, profile.dim, density, pooled=pooled, passes=profile.passes) / heads


def _within(by_layer: list[list[LayerPlan]], memory_gib: float | None) -> list[LayerPlan]:
    """The fastest plan of each layer, and where they keep too much the exchanges that cost least for what they save."""
    chosen = [options[0] for options in by_layer]
    while memory_gib is not None and sum(plan.kept for plan in chosen) > memory_gib * 2**30:
        swaps = [
            ((other.ms - plan.ms) / (plan.kept - other.kept), index, other)
            for index, (plan, options) in enumerate(zip(chosen, by_layer, strict=True))
            for other in options
            if other.kept < plan.kept
        ]
        if not swaps:
            log.warning("no layout keeps less than %.1f GiB for the backward", sum(p.kept for p in chosen) / 2**30)
            break
        _, index, other = min(swaps, key=lambda swap: swap[:2])
        chosen[index] = replace(other)
    return chosen


@cache
def _say_once(message: str) -> None:
    log.info(message)
