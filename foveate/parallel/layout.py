"""What one layer costs at one layout: which heads each rank computes, and the time of the slowest rank.

A layout is a head degree times a sequence degree. A rank's time is its attention and what communication that attention
cannot hide, as the calls of `policy.py` follow each other: exchanges of heads hide behind nothing; octant keys and the
list of wanted tiles neither; selected tiles travel while own ones are attended, their gradients while those of own ones
are made; on a ring a step's keys travel while the step before is computed.

After DSV (arXiv 2502.07590, section 6, sparsity-aware context parallelism). No clock, no randomness, no collectives:
the same functions plan a run and predict one for a cluster that is not there.

Shapes: P ranks, U head degree, R sequence degree, P = U * R; H heads; S tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from foveate.costs import PASSES, Costs
from foveate.parallel.balance import Heads, contiguous, spread
from foveate.parallel.topology import Topology

ROWS_EXPONENT = 0.45  # of the rows of a shard, for the union of what they keep: fitted to real_qkv (docs/parallel.md)
RANK = 16  # of the predictor: octant keys that travel first
TILE, OCTANT = 64, 8
GRADIENT = 4  # bytes: gradients of keys and values travel in float32
Travel = Literal["tiles", "ring"]


@dataclass(frozen=True)
class LayerLoad:
    """What a layer computes: kept fraction of each head (1: dense), which are pooled, and how much of the other ranks'
    tiles a rank fetches at each sequence degree, mean over heads or of each, where that was measured."""

    density: tuple[float, ...]
    pooled: tuple[bool, ...] = ()
    union: Mapping[int, float | Sequence[float]] = field(default_factory=dict)

    @property
    def dense(self) -> bool:
        return min(self.density) >= 1.0

    def fetched(self, sequence: int, tiles: int) -> np.ndarray:
        """Fraction of the other ranks' tiles that a rank's queries keep together, (H,)."""
        if self.dense:
            return np.ones(len(self.density))
        rows = max(1.0, tiles / sequence) ** ROWS_EXPONENT
        guess = 1 - (1 - np.minimum(self.density, 1.0)) ** rows
        if sequence not in self.union:
            return guess
        known = np.asarray(self.union[sequence], float)
        return known if known.ndim else np.minimum(1.0, guess * known / max(float(guess.mean()), 1e-9))


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

    exposed_ms: of each, communication that computation does not hide; sent: bytes a rank sends, kept: bytes it keeps
    for the backward besides q, k and v of its own tokens; of the rank with most.
    """

    head: int
    sequence: int
    heads: Heads
    compute_ms: tuple[float, ...] = ()
    exposed_ms: tuple[float, ...] = ()
    sent: float = 0.0
    kept: float = 0.0

    @property
    def ms(self) -> float:
        """Of the slowest rank."""
        return max(a + b for a, b in zip(self.compute_ms, self.exposed_ms, strict=True))

    @property
    def imbalance(self) -> float:
        """The slowest rank's computation over the mean."""
        return max(self.compute_ms) * len(self.compute_ms) / sum(self.compute_ms)


def lay_out(
    layer: LayerLoad,
    profile: Load,
    topology: Topology,
    costs: Costs,
    head: int,
    balance: bool = True,
    travel: Travel = "tiles",
) -> LayerPlan:
    """A layer at head degree `head`. balance: heads are spread by cost where that is faster, else they are in order.

    travel: whether a sparse layer's keys travel as selected tiles or, as in plain rings, all of them.
    """
    return min(options(layer, profile, topology, costs, [head], balance, travel)[0], key=lambda plan: plan.ms)


def options(
    layer: LayerLoad,
    profile: Load,
    topology: Topology,
    costs: Costs,
    degrees: Sequence[int],
    balance: bool = True,
    travel: Travel = "tiles",
) -> list[tuple[LayerPlan, LayerPlan]]:
    """For each head degree the plan with heads in order, and with heads spread by cost (without `balance` the same)."""
    whole = WholeLayer(layer, profile, costs)
    found = []
    for head in degrees:
        layout = Layout(whole, topology, head, travel)
        in_order = layout.plan(contiguous(whole.heads, head))
        spreads = balance and head > 1 and not layer.dense
        found.append((in_order, layout.plan(spread(layout.additive, head, layout.time)) if spreads else in_order))
    return found


class WholeLayer:
    """A layer's prices in milliseconds on one process, by head (H,): they do not depend on the layout."""

    def __init__(self, layer: LayerLoad, profile: Load, costs: Costs):
        self.layer, self.profile, self.heads = layer, profile, len(layer.density)
        tokens, dim = profile.tokens, profile.dim
        self.select = np.zeros(self.heads)
        if not layer.dense and "forward_ms" in profile.passes:
            sparse = np.array(layer.density) < 1
            self.select = sparse * costs.select(tokens, self.heads, dim) / self.heads * profile.batch
        self.forward, self.backward = (self._pass(name, costs) for name in PASSES)

    def _pass(self, name: str, costs: Costs) -> np.ndarray:
        """A head's share of a call with all heads, so that what a call costs by itself is not counted for each."""
        profile, layer = self.profile, self.layer
        if name not in profile.passes:
            return np.zeros(self.heads)
        shape = profile.tokens, self.heads, profile.dim
        dense = costs.dense(*shape, passes=(name,)) if max(layer.density) >= 1 else 0.0
        pooled = layer.pooled or (False,) * self.heads
        times = [
            dense if density >= 1 else costs.attend(*shape, density, pooled=float(pool), passes=(name,))
            for density, pool in zip(layer.density, pooled, strict=True)
        ]
        return np.array(times) / self.heads * profile.batch


class Layout:
    """A layer at one head degree. Heads are assigned by `spread(additive, U, time)`; `plan` prices an assignment."""

    def __init__(self, whole: WholeLayer, topology: Topology, head: int, travel: Travel):
        self.whole, self.topology, self.head, self.sequence = whole, topology, head, topology.ranks // head
        self.profile = profile = whole.profile
        self.ring = whole.layer.dense or travel == "ring"
        self.tokens = profile.tokens / topology.ranks
        self.element = profile.batch * profile.dim * profile.width
        self.passes = [name in profile.passes for name in PASSES]
        others = profile.tokens * (self.sequence - 1) / self.sequence
        share = whole.layer.fetched(self.sequence, -(-profile.tokens // TILE)) if self.sequence > 1 else 0.0
        self.union = np.ones(whole.heads) * (1.0 if self.ring else share)
        self.fetch = self.union * others * self.element * 2
        near = np.full(whole.heads, 1 / self.sequence)
        if not self.ring:  # what is not kept of others is kept of own tiles
            elsewhere = self.union * (1 - 1 / self.sequence) / np.maximum(whole.layer.density, 1e-9)
            near = np.maximum(near, 1 - elsewhere)
        count = np.ones(whole.heads)
        compute = (whole.forward + whole.backward + whole.select) / self.sequence
        hides = [near * whole.forward / self.sequence, near * whole.backward / self.sequence]
        back = self.fetch * GRADIENT / profile.width
        self.additive = np.stack([compute, *hides, self.fetch, back, count])

    @cached_property
    def _per_unit(self) -> tuple[float, float, float]:
        """Milliseconds of an exchange of heads for each head of a rank; of fetching: latency, and for each byte."""
        exchange = sum(self.passes) * sum(self._to_heads(np.ones(self.head)))
        once, twice = (float(self.topology.fetch_ms(self.head, [1e9 * n] * self.head).max()) for n in (1, 2))
        return exchange, 2 * once - twice if self.sequence > 1 else 0.0, (twice - once) / 1e9

    def time(self, sums: np.ndarray) -> np.ndarray:
        """About the milliseconds of a rank with these sums of `additive`, without what does not depend on its heads."""
        exchange, latency, byte = self._per_unit
        compute, near_forward, near_backward, fetch, back, count = sums
        exposed = exchange * count
        for wanted, moved, hides in zip(self.passes, (fetch, back), (near_forward, near_backward), strict=True):
            if wanted and self.sequence > 1:
                exposed = exposed + np.maximum(0.0, latency + byte * moved - hides)
        return compute + exposed

    def plan(self, heads: Heads) -> LayerPlan:
        """The prices of an assignment of heads."""
        sums = np.stack([self.additive[:, list(own)].sum(1) for own in heads], 1)
        compute, count = sums[0], sums[-1]
        exchanged = sum(self.passes) * sum(self._to_heads(count))
        exposed, sent = (self._ring if self.ring else self._tiles)(sums)
        move = sum(self.passes) * 4 * self.tokens * self.element * max(
            count.max() * (self.head - 1), (len(self.whole.select) - count).max()
        )  # fmt: skip
        return LayerPlan(
            head=self.head, sequence=self.sequence, heads=heads, compute_ms=tuple(compute.tolist()),
            exposed_ms=tuple((exposed + exchanged).tolist()), sent=float(move * (self.head > 1) + sent),
            kept=float(self._kept(sums)),
        )  # fmt: skip

    def _to_heads(self, count: np.ndarray) -> tuple[float, float]:
        """q, k, v there, and out back; in the backward their gradients the other way."""
        once = self.tokens * self.element * count
        return self.topology.all_to_all_ms(self.head, 3 * once), self.topology.all_to_all_ms(self.head, once)

    def _tiles(self, sums: np.ndarray) -> tuple[np.ndarray, float]:
        """Exposed milliseconds (U,) and bytes sent, of selected tiles."""
        if self.sequence == 1:
            return np.zeros(self.head), 0.0
        _, near_forward, near_backward, fetch, back, count = sums
        topology, profile = self.topology, self.profile
        rows = profile.tokens / self.sequence * profile.batch * count
        octants, exposed = rows / OCTANT * RANK * 4, np.zeros(self.head)
        sent = 0.0
        if self.passes[0]:
            wanted = profile.batch * count * profile.tokens / TILE / 8  # one bit a tile
            exposed += topology.gather_ms(self.head, octants) + topology.gather_ms(self.head, wanted)
            exposed += np.maximum(0.0, topology.fetch_ms(self.head, fetch) - near_forward)
            sent += float((fetch + (octants + wanted) * (self.sequence - 1)).max())
        if any(self.whole.layer.pooled):
            means = rows / TILE * profile.dim * profile.width * 2
            exposed += self.passes[0] * topology.gather_ms(self.head, means)
            sent += self.passes[0] * float(means.max()) * (self.sequence - 1)
        if self.passes[1]:
            exposed += np.maximum(0.0, topology.fetch_ms(self.head, back) - near_backward)
            sent += float(back.max())
        return exposed, sent

    def _ring(self, sums: np.ndarray) -> tuple[np.ndarray, float]:
        """The same of all keys and values, round a ring; gradients follow them, and go one step further, home."""
        if self.sequence == 1:
            return np.zeros(self.head), 0.0
        steps = self.sequence - 1
        keys = self.profile.tokens / self.sequence * self.element * 2 * sums[-1]
        gradients = keys * GRADIENT / self.profile.width
        exposed, sent = np.zeros(self.head), 0.0
        if self.passes[0]:
            exposed += steps * np.maximum(0.0, self.topology.shift_ms(self.head, keys) - sums[1])
            sent += steps * float(keys.max())
        if self.passes[1]:
            both = self.topology.shift_ms(self.head, keys + gradients)
            exposed += steps * np.maximum(0.0, both - sums[2]) + self.topology.shift_ms(self.head, gradients)
            sent += steps * float(keys.max()) + (steps + 1) * float(gradients.max())
        return exposed, sent

    def _kept(self, sums: np.ndarray) -> float:
        """Fetched tiles, and q, k, v and out of more heads than a rank's share."""
        if not self.passes[1]:
            return 0.0
        surplus = max(0.0, float(sums[-1].max()) * self.head - self.whole.heads)
        own = 4 * self.tokens * self.element * surplus
        return own if self.ring else own + float(sums[3].max())
