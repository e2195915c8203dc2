"""What lessons and profiles see of a layer's queries, keys and values, and the true mass of tiles for a few of them.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads (G divides H), D head dim, O octants (8 consecutive
tokens), R query tiles, N key tiles (64 tokens), n sampled query tiles.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.kernels.select import octant_means, project
from foveate.tiles import TILE, VideoGrid

CHUNK = {"cpu": 1 << 20, "other": 1 << 25}  # exact weights held at once: in cache on a CPU, 128 MB elsewhere


class Sight:
    """What lessons and profiles look at: q (B, S, H, D), k and v (B, S, G, D) of whole sequences, any float dtype.

    A subclass may hold a part of the sequences only, and find out the rest (parallel/lessons.py).
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
        self.q, self.k, self.heads = q.detach(), k.detach(), q.shape[2]
        self.v = None if v is None else v.detach()

    def queries(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """float32 (B, H, R, 64, D): the queries of tiles `rows` (R,), zero where there are none, and bool (R, 64)."""
        places = (rows[:, None] * TILE + torch.arange(TILE, device=rows.device)).to(self.q.device)
        valid = places < self.q.shape[1]
        found = self.q[:, places.clamp(max=self.q.shape[1] - 1)]  # index_select would copy q where it is strided
        return found.float().movedim(3, 1) * valid.unsqueeze(-1), valid

    def tiles(self, count: int) -> slice:
        """Which of the `count` key tiles are here."""
        return slice(0, count)

    def join(self, x: Tensor) -> Tensor:
        """x (..., own tiles) of every rank -> (..., N)."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks that share the sequence."""
        return x

    def part(self, clip: int, groups: slice) -> "Sight":
        """Whole sequences of one clip and a run of key/value heads with the query heads that share them."""
        q, k, v = self._part(clip, groups)
        return Sight(q, k, v)

    def _part(self, clip: int, groups: slice) -> list[Tensor]:
        assert self.v is not None
        repeats = self.heads // self.k.shape[2]
        heads = slice(groups.start * repeats, groups.stop * repeats)
        pairs = ((self.q, heads), (self.k, groups), (self.v, groups))
        return [x[clip : clip + 1, :, some] for x, some in pairs]

    def octants(self, clips: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Octant means (B, H, O, D) of queries and of keys; of these clips (int64) only, where given."""
        q, k = ((x if clips is None else x.index_select(0, clips)) for x in (self.q, self.k))
        return octant_means(q), project(octant_means(k), None, self.heads)

    def mass(self, clip: Tensor, rows: Tensor, scale: float) -> Tensor:
        """`true_mass` of one clip, int64 (1,)."""
        return true_mass(self.q.index_select(0, clip), self.k.index_select(0, clip), rows, scale)


def sample_rows(grid: VideoGrid, heads: int, count: int, generator: torch.Generator) -> Tensor:
    """int64 (H, n): `count` different query tiles for each head, fewer where the grid has fewer.

    Tiles with text keep every key and teach nothing, so they are drawn only where there are no others.
    """
    tiles = grid.video // TILE if grid.text else grid.tiles()
    tiles = tiles or grid.tiles()
    lots = torch.rand(heads, tiles, generator=generator, device=generator.device)
    return lots.topk(min(count, tiles)).indices


def take_runs(x: Tensor, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Runs of `length` rows of x (H, L, C) that begin at length * `rows` (H, n): (H, n, length, C) and which exist.

    The latter is bool (H, n, length), False past the end of x, where the last row is repeated.
    """
    index = rows.unsqueeze(-1) * length + torch.arange(length, device=x.device)
    places = index.clamp(max=x.shape[1] - 1)
    heads = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return x[heads, places], index < x.shape[1]


@torch.no_grad()
def true_mass(q: Tensor, k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """float32 (H, n, N): exact attention mass of every key tile for query tiles `rows` (H, n), each summing to 1.

    Of one sequence, q (1, S, H, D) and k (1, S, G, D), averaged over the query tile's tokens.
    """
    queries, valid = take_runs(q[0].transpose(0, 1), rows, TILE)
    mass = tile_lse(queries.flatten(1, 2).float() * scale, k[0]).softmax(-1)
    return mean_valid(mass.unflatten(1, valid.shape[1:]), valid)


def tile_lse(queries: Tensor, k: Tensor) -> Tensor:
    """float32 (H, m, N): log-sum-exp over every tile of keys k (s, G, D) for scaled queries (H, m, D), by chunks."""
    heads = queries.shape[0]
    tiles = max(1, CHUNK.get(k.device.type, CHUNK["other"]) // (queries[..., 0].numel() * TILE))
    parts = []
    for part in k.split(tiles * TILE):
        keys = part.float().permute(1, 2, 0).repeat_interleave(heads // k.shape[1], dim=0)
        logits = pad(queries @ keys, (0, -keys.shape[-1] % TILE), value=-torch.inf)
        parts.append(logits.unflatten(-1, (-1, TILE)).logsumexp(-1))
    return torch.cat(parts, -1)


def mean_valid(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x (H, n, L, N) over those of its L that are valid (H, n, L)."""
    weight = valid.to(x.dtype)
    weight = weight / weight.sum(-1, keepdim=True)
    return (weight.unsqueeze(-2) @ x).squeeze(-2)
