"""Held states on many ranks: which rank has which part, and the exchange of keys between groups.

A layer held whole needs no communication at all. One computed whole goes the way of exact context parallelism
(`parallel.policy.Parallel`: head-wise, ring). Where a layer keeps several states, keys travel by `exchange.rounds`, all
of them under way while a rank attends to its own.

Shapes: B batch, s tokens of this rank, S of its head group, H heads, G key/value heads, h, g this rank's, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from foveate.held.attention.exchange import needed, rounds
from foveate.held.attention.layout import Layout, ranks
from foveate.held.config import ReuseConfig
from foveate.held.team import Team
from foveate.parallel.comm import Pending, Shards
from foveate.parallel.headwise import Heads, exchange_qkv, return_out
from foveate.tiles import VideoGrid


class StateRanks:
    """What held states do on a team's ranks: where their parts are, and what is exchanged."""

    def __init__(self, team: Team, config: ReuseConfig):
        assert team.parallel is not None
        self.team, self.config, self.parallel, self.degrees = team, config, team.parallel, team.degrees
        self.inner, self.outer = team.ranks.of(team.degrees.head)

    def layout(self, grid: VideoGrid, apart: bool) -> Layout:
        """apart: a part a sequence rank, for states that are exchanged; else a part a rank, for layers held whole."""
        shards, config = self.parallel.cut(grid), self.config
        if apart:
            sizes = shards.merged(self.degrees.head).sizes
            return ranks(sizes, self.outer.rank, config.groups, self.degrees.node)
        node = self.degrees.node * self.degrees.head
        return ranks(shards.sizes, self.team.ranks.context.rank, config.groups, node)

    def run(self, grid: VideoGrid) -> Shards:
        """How this head group's tokens are cut over it."""
        bounds, head = self.parallel.cut(grid).bounds, self.degrees.head
        at = self.outer.rank * head
        return Shards(tuple(b - bounds[at] for b in bounds[at : at + head + 1]))

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, grid: VideoGrid, where: str) -> tuple[Tensor, Tensor, Tensor]:
        """(B, s, H, D), (B, s, G, D) twice -> (B, S, h, D), (B, S, g, D) twice."""
        heads = Heads.contiguous(k.shape[2], self.degrees.head)
        return exchange_qkv(q, k, v, heads, self.run(grid), self.inner, where)

    def to_tokens(self, out: Tensor, kv_heads: int, repeats: int, grid: VideoGrid, where: str) -> Tensor:
        """(B, S, h, D) -> (B, s, H, D)."""
        heads = Heads.contiguous(kv_heads, self.degrees.head)
        return return_out(out, heads, repeats, self.run(grid), self.inner, where)

    def fetch(self, k: Tensor, v: Tensor, layout: Layout, bundles: Any, fresh: Any, where: str) -> "Fetched":
        """Send this rank's keys to the sequence ranks that use them, and begin to receive those that it uses itself."""
        needs = needed(layout, bundles, fresh, self.config.local)
        group, sizes = self.outer, [b - a for a, b in map(layout.part, range(layout.parts))]
        packed = torch.stack([k, v]).movedim(2, 0).contiguous()  # (S, 2, B, g, D): rows are tokens
        coming: dict[int, Pending] = {}
        going: list[Pending] = []  # what is sent only must live until it has arrived too
        for away, receives in rounds(needs):
            source, target = (group.rank - away) % group.size, (group.rank + away) % group.size
            send, receive = [0] * group.size, [0] * group.size
            send[target] = sizes[group.rank] if receives[target] else 0
            receive[source] = sizes[source] if receives[group.rank] else 0
            sent = packed if send[target] else packed[:0]
            pending = group.all_to_all(sent, send, receive, f"keys of {where}")
            if receives[group.rank]:
                coming[source] = pending
            else:
                going.append(pending)
        spans = [
            span for number, bundle in enumerate(bundles) if fresh[group.rank][number]
            for span in layout.keys(group.rank, bundle, self.config.local)
        ]  # fmt: skip
        wanted = self.config.local == "fresh" or any(a <= layout.bounds[group.rank] < b for a, b in spans)
        return Fetched(coming, going, packed, layout, group.rank, wanted)

    def gather(self, sums: Tensor, apart: bool) -> Tensor:
        """Measured sums (L, 1, N, 5) of this rank -> (L, P, N, 5), the same on all ranks of the branch."""
        group = self.team.ranks.context
        rows = torch.stack(
            [x[0] for x in group.gather(sums.movedim(1, 0).contiguous(), [1] * group.size, "errors").wait()]
        )
        if apart:
            by_head = rows.unflatten(0, (self.degrees.sequence, self.degrees.head))
            rows = torch.cat([by_head[..., :-1].sum(1), by_head[..., -1:].mean(1)], -1)
        return rows.movedim(0, 1)


class Fetched:
    """Keys and values (t, 2, B, g, D) by part, waited for when first asked for. own_wanted: this rank's too."""

    def __init__(
        self,
        coming: dict[int, Pending],
        going: list[Pending],
        own: Tensor,
        layout: Layout,
        rank: int,
        own_wanted: bool,
    ):
        self.own_wanted = own_wanted
        self._coming, self._going, self._layout, self._here = coming, going, layout, {rank: own}

    def keys(self, span: tuple[int, int], without: int | None = None) -> tuple[Tensor, Tensor] | None:
        """k, v (B, t, g, D) of the parts inside a span of tokens, but one; None where that leaves none."""
        a, b = span
        parts = [p for p in range(self._layout.parts) if a <= self._layout.bounds[p] < b and p != without]
        for part in parts:
            if part not in self._here:
                self._here[part] = self._coming[part].wait()
        if not parts:
            return None
        held = [self._here[part] for part in parts]
        k, v = (held[0] if len(held) == 1 else torch.cat(held)).movedim(0, 2).unbind(0)
        return k, v

    def finish(self) -> None:
        """Wait for what is sent, and for what nobody asked for (there is none, unless a layer failed)."""
        for pending in self._going:
            pending.wait()
        for part, pending in self._coming.items():
            if part not in self._here:
                pending.wait()
