"""The policy of context parallelism: wraps the policy that says what to compute, and computes it on many ranks.

Every call of a layer has the same steps. The wrapped policy learns, and says whether the call is dense or sparse;
heads are exchanged inside the head group; dense calls go round the ring of the sequence group, sparse ones choose their
tiles and fetch them; heads are exchanged back. A degree of 1 makes a step empty, the path is the same.

Shapes: B batch, s tokens of this rank, S of its head group, H heads, G key/value heads, h, g of this rank, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foveate.attention import AttnState, Dense, Layer, Policy, attend, no_autocast, periphery_constants
from foveate.parallel.buffers import Buffers
from foveate.parallel.comm import TIMEOUT, Group, Shards, partition, release
from foveate.parallel.headwise import Heads, exchange_qkv, own_heads, return_out
from foveate.parallel.hosts import ask_hosts
from foveate.parallel.lessons import ShardedSight
from foveate.parallel.plan import LayerPlan, ParallelPlan
from foveate.parallel.ring import attend_ring
from foveate.parallel.sequence import Choice, Job, Kernel, attend_sequence, select_sequence
from foveate.sparsity.policy import Call, Sparse
from foveate.tiles import TILE, Selection, VideoGrid


@dataclass(frozen=True)
class Fixed:
    """A policy of given selections, layer -> Selection of all heads; other layers are dense. To measure with."""

    selections: Mapping[int, Selection]
    periphery: str | Sequence[str] = "drop"
    backend: str = "auto"
    query_tile: int = TILE
    kv_tile: int = TILE

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.state(layer, q, k, v).out

    def state(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        chosen = self.selections.get(layer.index)
        return attend(q, k, v, chosen, periphery=self.periphery, backend=self.backend)


class Ranks:
    """The context-parallel ranks of this process's replica, and their groups at every head degree.

    Position = replica * P + r * U + u, and `order` gives the world rank at each position: ranks of a host lie together,
    whatever the launcher has done (hosts.py). `of(U)` makes the groups of a degree when it is first asked for, on all
    ranks of the world alike.
    """

    def __init__(self, count: int, timeout: float = TIMEOUT):
        world = dist.get_world_size()
        if world % count:
            raise ValueError(f"{count} context-parallel ranks (head * sequence) do not divide the {world} of this job")
        self.hosts = ask_hosts(timeout)
        self.count, self.timeout, self.world, self.order = count, timeout, world, self.hosts.order
        self.replica, self.replicas = self.order.index(dist.get_rank()) // count, world // count
        self.context = self._partition("context", lambda start: [range(start, start + count)])
        self._made: dict[int, tuple[Group, Group]] = {}

    def of(self, head: int) -> tuple[Group, Group]:
        """Head group and sequence group at this head degree."""
        if head not in self._made:
            runs, strides = range(self.count // head), range(head)
            inner = self._partition("head", lambda s: [range(s + r * head, s + (r + 1) * head) for r in runs])
            outer = self._partition("sequence", lambda s: [range(s + u, s + self.count, head) for u in strides])
            self._made[head] = inner, outer
        return self._made[head]

    def release(self) -> None:
        """Give the groups back. Nothing may be under way in them, nor come."""
        for group in (self.context, *(one for pair in self._made.values() for one in pair)):
            release(group)
        self._made.clear()

    def _partition(self, name: str, groups: Any) -> Group:
        starts = range(0, self.world, self.count)
        found = [[self.order[place] for place in places] for start in starts for places in groups(start)]
        return partition(found, name, self.timeout)


@dataclass
class Fetched:
    """Counted for the planner: tiles received and tiles elsewhere, by layer and sequence degree."""

    got: dict[tuple[int, int], float] = field(default_factory=dict)
    others: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, layer: int, sequence: int, got: float, others: float) -> None:
        key = layer, sequence
        self.got[key] = self.got.get(key, 0.0) + got
        self.others[key] = self.others.get(key, 0.0) + others


class Parallel:
    """Policy of one model on this rank. q, k, v are this rank's tokens, `layer.grid` the whole sequence's.

    inner: `Dense`, `Sparse` or `Fixed`. plan may be exchanged between steps. fetch_cap: see `select_sequence`; None:
    every selected tile is fetched, always.
    """

    def __init__(self, inner: Policy, ranks: Ranks, plan: ParallelPlan, fetch_cap: float | None = None):
        if not isinstance(inner, Dense | Sparse | Fixed):
            raise ValueError(
                f"a {type(inner).__name__} cannot be run with context parallelism: it says nothing of selections; "
                "supported are Dense, Sparse (sparsify) and parallel.policy.Fixed"
            )
        if getattr(inner, "backend", "auto") == "reference":
            raise ValueError("backend reference has no backward of its own; use torch, triton, fa4 or auto")
        self.inner, self.ranks, self.plan, self.fetch_cap = inner, ranks, plan, fetch_cap
        self.query_tile, self.kv_tile = getattr(inner, "query_tile", TILE), getattr(inner, "kv_tile", TILE)
        self.fetched = Fetched()
        self.shape: tuple[int, ...] = ()  # B, H, D and element size of the last call, for the planner
        self.grid: VideoGrid | None = None
        self._buffers = Buffers()
        disable: Any = torch.compiler.disable
        self._outside_graphs = disable(self._call)
        self._cuts: dict[tuple[int, int], Shards] = {}

    def cut(self, grid: VideoGrid) -> Shards:
        """How a grid's tokens lie on the context-parallel ranks, in whole query tiles."""
        key = grid.tokens, self.query_tile
        if key not in self._cuts:
            self._cuts[key] = Shards.cut(grid.tokens, self.ranks.count, max(self.query_tile, self.kv_tile))
        return self._cuts[key]

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._outside_graphs(layer, q, k, v)[0]

    def state(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        return AttnState(*self._outside_graphs(layer, q, k, v, True))

    def _call(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, with_lse: bool = False) -> tuple[Tensor, Any]:
        """out (B, s, H, D), and lse (B, H, s) where it is asked for: it travels between heads and tokens too."""
        shards, me = self.cut(layer.grid), self.ranks.context.rank
        if q.shape[1] != shards.sizes[me]:
            raise ValueError(f"{layer.name}: rank {me} has {q.shape[1]} tokens, its shard {shards.sizes[me]}")
        self.shape, self.grid = (q.shape[0], q.shape[2], q.shape[3], q.element_size()), layer.grid
        with no_autocast(q.device):
            out, lse = self._compute(layer, q, k, v, shards, with_lse)
        if isinstance(self.inner, Sparse) and self.inner.weighs:
            self.inner.influence.watch(layer.index, out, self._over_ranks)
        return out, lse

    def _over_ranks(self, numbers: Tensor) -> Tensor:
        self.ranks.context.mean_([numbers], "influence of heads")
        return numbers

    def _compute(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, shards: Shards, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        where = layer.name or f"layer {layer.index}"
        call = self._begin(layer, q, k, v, shards, where)
        plan = self._plan(layer, call)
        inner, outer = self.ranks.of(plan.head)
        repeats = q.shape[2] // k.shape[2]
        heads = Heads(plan.heads) if repeats == 1 else Heads.contiguous(k.shape[2], plan.head)
        at = outer.rank * plan.head
        run = Shards(tuple(b - shards.bounds[at] for b in shards.bounds[at : at + plan.head + 1]))
        merged = shards.merged(plan.head)
        own = exchange_qkv(q, k, v, heads, run, inner, where)
        kernel = Kernel(q.shape[-1] ** -0.5, getattr(self.inner, "backend", "auto"), self.query_tile, self.kv_tile)
        if call is None:
            state = attend_ring(*own, merged, outer, kernel, where)
        else:
            mine = own_heads(heads, repeats, inner, q.device)
            words = self._words(layer, call, own, mine, merged, outer, where)
            note = partial(self.fetched.add, layer.index, plan.sequence)
            job = Job(outer, merged, kernel, self._pooled(layer, mine), where, self._buffers, note)
            state = attend_sequence(*own, words, job)
        out = return_out(state.out, heads, repeats, run, inner, where)
        if not with_lse:
            return out, None
        lse = return_out(state.lse.transpose(1, 2).unsqueeze(-1), heads, repeats, run, inner, where)
        return out, lse.squeeze(-1).transpose(1, 2)

    def _begin(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, shards: Shards, where: str) -> Any:
        """The call of a sparse layer, None where it is dense. What is learned and measured sees the whole sequence."""
        inner = self.inner
        if isinstance(inner, Fixed):
            return inner.selections.get(layer.index)
        if not isinstance(inner, Sparse):
            return None

        sight = ShardedSight(q, k, shards, self.ranks.context, where, v)
        call = inner.begin(layer, sight, torch.is_grad_enabled())
        return None if call.mode == "dense" else call

    def _plan(self, layer: Layer, call: Any) -> LayerPlan:
        return self.plan.dense if call is None else self.plan.layers[layer.index]

    def _words(
        self, layer: Layer, call: Any, own: Any, mine: Tensor, shards: Shards, group: Group, where: str
    ) -> Tensor:
        """Bitmap (B, h, R, W) of what this rank's heads and query tiles keep."""
        q, k, _ = own
        if not isinstance(call, Call):
            return self._part(call, mine, shards, group)
        inner = self.inner
        assert isinstance(inner, Sparse)

        def choose() -> Tensor:
            predictor = inner.predictor(layer.index)
            a, b = (None, None) if predictor is None else (predictor.a[mine], predictor.b[mine])
            budget = inner.budget(layer)[mine]
            choice = Choice(a, b, budget, layer.grid.video, self.query_tile, self.fetch_cap)
            return select_sequence(q, k, choice, shards, group, where, self.kv_tile)

        return inner.kept(call, (q.shape[0], q.shape[2]), choose)

    def _part(self, selection: Selection, mine: Tensor, shards: Shards, group: Group) -> Tensor:
        """This rank's heads and query tiles of a selection of them all."""
        first, stop = shards.bounds[group.rank : group.rank + 2]
        rows = slice(first // selection.query_tile, -(-stop // selection.query_tile))
        return selection.words[:, mine.to(selection.words.device)][:, :, rows].contiguous()

    def _pooled(self, layer: Layer, mine: Tensor) -> Tensor | None:
        """float32 (h,): constants of own heads' periphery; None where the layer drops all, on any rank."""
        if isinstance(self.inner, Sparse):
            constants = self.inner.periphery(layer)
            return None if isinstance(constants, str) else constants[mine]
        assert isinstance(self.inner, Fixed)
        constants = periphery_constants(self.inner.periphery, self.inner.selections[layer.index].heads, mine.device)
        return None if constants is None else constants[mine]
