"""What lessons and profiles need of sequences that are spread over ranks: octant means, and exact attention of a few
query tiles. Every rank gets the same numbers, so all learn the same predictor, for a quarter of the bytes that whole
bfloat16 queries and keys would take. For a profile only sampled queries, and what key tiles weigh to them, travel.

Shapes: B batch, s tokens of this rank (of S), H heads, G key/value heads, D head dim, O octants, N key tiles of 64,
n (R, alike for all heads) sampled query tiles, m = 64 n their queries.
"""

import torch
from torch import Tensor

from foveate.kernels.select import octant_means, project
from foveate.parallel.comm import Group, Shards
from foveate.sparsity.sight import Sight, mean_valid, take_runs, tile_lse
from foveate.tiles import OCTANT, TILE


class ShardedSight(Sight):
    """q (B, s, H, D), k and v (B, s, G, D) of this rank; `shards` says how S lies on the ranks of `group`."""

    def __init__(self, q: Tensor, k: Tensor, shards: Shards, group: Group, where: str, v: Tensor | None = None) -> None:
        super().__init__(q, k, v)
        self.shards, self.group, self.where = shards, group, where

    def queries(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """From the ranks that have them: others add zeros."""
        first, size = self.shards.bounds[self.group.rank], self.q.shape[1]
        places = (rows[:, None] * TILE + torch.arange(TILE, device=rows.device)).to(self.q.device)
        here = (places >= first) & (places < first + size)
        own = self.q[:, (places - first).clamp(0, size - 1)].float().movedim(3, 1) * here.unsqueeze(-1)
        return self._total(own, f"queries of a profile of {self.where}"), places < self.shards.bounds[-1]

    def tiles(self, count: int) -> slice:
        first, stop = self.shards.bounds[self.group.rank : self.group.rank + 2]
        return slice(first // TILE, -(-stop // TILE))

    def join(self, x: Tensor) -> Tensor:
        tiles = [-(-size // TILE) for size in self.shards.sizes]
        parts = self.group.gather(x.movedim(-1, 0).contiguous(), tiles, f"mass of a profile of {self.where}").wait()
        return torch.cat(parts).movedim(0, -1).contiguous()

    def total(self, x: Tensor) -> Tensor:
        return self._total(x, f"outputs of a profile of {self.where}")

    def _total(self, x: Tensor, what: str) -> Tensor:
        total = x.clone()
        self.group.mean_([total], what)
        return total * self.group.size

    def part(self, clip: int, groups: slice) -> Sight:
        whole = []
        for x in self._part(clip, groups):
            rows = self.group.gather(x[0].contiguous(), self.shards.sizes, f"heads of a search of {self.where}").wait()
            whole.append(torch.cat(rows).unsqueeze(0))
        return Sight(*whole)

    def octants(self, clips: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows = [-(-size // OCTANT) for size in self.shards.sizes]
        found = []
        for x in (self.q, self.k):
            own = octant_means(x if clips is None else x.index_select(0, clips)).movedim(2, 0)
            parts = self.group.gather(own.contiguous(), rows, f"octants of a lesson of {self.where}").wait()
            found.append(torch.cat(parts).movedim(0, 2))
        return found[0], project(found[1], None, self.heads)

    def mass(self, clip: Tensor, rows: Tensor, scale: float) -> Tensor:
        """By the log-sum-exp of every tile, whose softmax over all ranks' tiles is the tiles' mass."""
        queries, valid = self._of_heads(clip, rows)
        own = tile_lse(scale * queries.flatten(1, 2), self.k.index_select(0, clip)[0]).movedim(2, 0)
        tiles = [-(-size // TILE) for size in self.shards.sizes]
        parts = self.group.gather(own.contiguous(), tiles, f"mass of a lesson of {self.where}").wait()
        mass = torch.cat(parts).movedim(0, 2).softmax(-1)
        return mean_valid(mass.unflatten(1, valid.shape[1:]), valid)

    def _of_heads(self, clip: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """float32 (H, n, 64, D), the queries of sampled tiles `rows` (H, n), and which exist, from the ranks that
        have them: others add zeros."""
        first, count = self.shards.bounds[self.group.rank] // TILE, -(-self.q.shape[1] // TILE)
        here = (rows >= first) & (rows < first + count)
        own = self.q.index_select(0, clip)[0].transpose(0, 1).float()
        queries, valid = take_runs(own, (rows - first).clamp(0, count - 1), TILE)
        valid = (valid & here.unsqueeze(-1)).unsqueeze(-1).float()
        both = torch.cat([queries * valid, valid], -1).unsqueeze(0)
        parts = self.group.gather(both, [1] * self.group.size, f"queries of a lesson of {self.where}").wait()
        total = torch.cat(parts).sum(0)
        return total[..., :-1], total[..., -1] > 0
