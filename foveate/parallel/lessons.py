"""What a predictor's lesson needs of sequences that are spread over ranks: octant means, and the exact attention mass
of a few query tiles. Every rank gets the same numbers, so all learn the same predictor, for a quarter of the bytes that
whole bfloat16 queries and keys would take.

Shapes: B batch, s tokens of this rank (of S), H heads, G key/value heads, D head dim, O octants, N key tiles of 64,
n sampled query tiles, m = 64 n their queries.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.kernels.select import octant_means, project
from foveate.parallel.comm import Group, Shards
from foveate.sparsity.predictor import Sight, mean_valid, take_runs
from foveate.tiles import OCTANT, TILE


class ShardedSight(Sight):
    """q (B, s, H, D) and k (B, s, G, D) of this rank; `shards` says how S lies on the ranks of `group`."""

    def __init__(self, q: Tensor, k: Tensor, shards: Shards, group: Group, where: str) -> None:
        super().__init__(q, k)
        self.shards, self.group, self.where = shards, group, where

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
        queries, valid = self._queries(clip, rows)
        keys = self.k.index_select(0, clip)[0].float().permute(1, 2, 0)
        keys = keys.repeat_interleave(self.heads // keys.shape[0], dim=0)
        logits = (scale * queries.flatten(1, 2)) @ keys
        logits = pad(logits, (0, -logits.shape[-1] % TILE), value=-torch.inf)
        own = logits.unflatten(-1, (-1, TILE)).logsumexp(-1).movedim(2, 0)  # (own tiles, H, m)
        tiles = [-(-size // TILE) for size in self.shards.sizes]
        parts = self.group.gather(own.contiguous(), tiles, f"mass of a lesson of {self.where}").wait()
        mass = torch.cat(parts).movedim(0, 2).softmax(-1)
        return mean_valid(mass.unflatten(1, valid.shape[1:]), valid)

    def _queries(self, clip: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
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
