"""Sparse attention in plain torch, for any device: forward and backward, time and memory fall with the budget.

Rows (one batch, head and query tile each) are sorted by how much they keep and worked through in small groups. The
kept key tiles of a group are gathered, and each row is then dense attention of 64 or 128 queries over its own keys:
torch's fused kernel on the CPU, plain matrix products elsewhere. Tile means of a pooled periphery lie in the same table
as further tiles, so they are only more keys, with a bias.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, R query tiles, N key tiles of T tokens,
E = ceil(N / T) tiles of means, K kept tiles, g rows of a group, m queries of a row, c keys of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.kernels import dense
from foveate.kernels.bits import lists, unpack
from foveate.kernels.reference import tile_means, tile_sizes

GROUP_FLOATS = 1 << 20  # keys of one group: 4 MB, so that a group stays near the cores from gather to scatter


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor,
    *,
    query_tile: int,
    kv_tile: int,
    scale: float,
    pooled: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `reference.forward`: out (B, S, H, D), lse float32 (B, H, S)."""
    job = _Job(q, k, v, words, query_tile, kv_tile, pooled)
    out, lse = torch.zeros_like(job.q), job.q.new_full(job.q.shape[:2], -torch.inf)
    attend, _ = dense.row_kernels(q.device)
    for group in job.groups():
        part, sums = attend(job.q[group.rows].unsqueeze(1), *job.gathered(group), scale, group.bias)
        out[group.rows], lse[group.rows] = part.squeeze(1), sums.squeeze(1)
    return job.tokens_first(out).to(q.dtype), job.flat_rows(lse)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    *,
    query_tile: int,
    kv_tile: int,
    scale: float,
    pooled: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for outer gradients of (out, lse), which may be those of a larger attention: p = exp(s - lse)."""
    dim, dtypes = q.shape[-1], (q.dtype, k.dtype, v.dtype)
    if dlse is not None:
        dout, q, k, v, out = dense.with_lse_gradient(dout.float(), dlse, q.float(), k.float(), v.float(), out.float())
    job = _Job(q, k, v, words, query_tile, kv_tile, pooled)
    dout, out = (job.rows_of(x.float().transpose(1, 2)) for x in (dout, out))
    lse = job.rows_of(lse)
    dq, dk, dv = torch.zeros_like(job.q), torch.zeros_like(job.k), torch.zeros_like(job.v)
    _, differentiate = dense.row_kernels(q.device)
    for group in job.groups():
        queries, dout_row, out_row, lse_row = (x[group.rows].unsqueeze(1) for x in (job.q, dout, out, lse))
        keys, values = job.gathered(group)
        dqueries, dkeys, dvalues = differentiate(dout_row, queries, keys, values, out_row, lse_row, scale, group.bias)
        dq[group.rows] = dqueries.squeeze(1)
        for total, part in ((dk, dkeys), (dv, dvalues)):
            total.index_add_(0, group.tiles, part.reshape(len(group.tiles), -1))
    grads = job.tokens_first(dq), job.keys_first(dk), job.keys_first(dv)
    dq, dk, dv = (grad[..., :dim].to(dtype) for grad, dtype in zip(grads, dtypes, strict=True))
    return dq, dk, dv


@dataclass
class _Group:
    """Rows that keep about equally many tiles."""

    rows: Tensor  # int64 (g,)
    tiles: Tensor  # int64 (g * (K + E),): tiles of the table they attend to, and some that `bias` excludes
    bias: (
        Tensor | None
    )  # float32 (g, 1, m, c): -inf where a key does not take part, log(tokens) and a constant for a mean; None: all 0


class _Job:
    """Inputs cut into rows and tiles, in float32: q (B * H * R, m, D), k and v (B * G * (N + E) + 1, T * D).

    The last tile of k and v is zeros. Rows that keep fewer tiles than their group are filled up with it: a tile that
    they do not keep, though weighed 0, would spread a NaN.
    """

    def __init__(self, q, k, v, words, query_tile: int, kv_tile: int, pooled: Tensor | None):
        self.batch, self.tokens, self.heads, self.dim = q.shape
        self.query_tile, self.kv_tile = query_tile, kv_tile
        self.keys, self.kv_heads = k.shape[1], k.shape[2]
        self.sizes = tile_sizes(self.keys, kv_tile, q.device)
        self.count = len(self.sizes)
        self.extra = 0 if pooled is None else -(-self.count // kv_tile)
        none = torch.full((self.heads,), -torch.inf, device=q.device)
        self.pooled = none if pooled is None else pooled.float()
        # Logits are raised by this for a mean, by head: (H, E * T), -inf for what fills up the tiles of means.
        far = self.sizes.float().log() + self.pooled[:, None]
        self.far = pad(far, (0, self.extra * kv_tile - self.count), value=-torch.inf) if self.extra else far
        self.q = self.rows_of(q.float().transpose(1, 2))
        self.k, self.v = (self._table(x.float().transpose(1, 2)) for x in (k, v))
        mask = unpack(words, self.count)
        self.mask = mask.flatten(0, 2)
        index, counts = lists(mask)
        self.index, self.counts = index.flatten(0, 2).long(), counts.flatten()

    def rows_of(self, x: Tensor) -> Tensor:
        """(B, H, S, ...) -> contiguous (B * H * R, m, ...), the last row of each head filled up with zeros."""
        spare = -x.shape[2] % self.query_tile
        if spare:
            x = pad(x, (0, 0) * (x.dim() - 3) + (0, spare))
        return x.unflatten(2, (-1, self.query_tile)).flatten(0, 2).contiguous()

    def _table(self, x: Tensor) -> Tensor:
        """(B, G, S, D) -> (B * G * (N + E) + 1, T * D): each head's tiles, then its tile means, filled up with zeros,
        and at the end one tile of zeros."""
        parts = [x] if not self.extra else [x, tile_means(x, self.kv_tile)]
        tiles = [pad(part, (0, 0, 0, -part.shape[2] % self.kv_tile)) for part in parts]
        table = torch.cat(tiles, 2).unflatten(2, (-1, self.kv_tile)).flatten(0, 2).flatten(1)
        return pad(table, (0, 0, 0, 1))

    def gathered(self, group: _Group) -> tuple[Tensor, Tensor]:
        """Keys and values (g, 1, c, D) of a group's rows."""
        keys, values = (x.index_select(0, group.tiles).view(len(group.rows), 1, -1, self.dim) for x in (self.k, self.v))
        return keys, values

    def flat_rows(self, x: Tensor) -> Tensor:
        """(B * H * R, m, ...) -> (B, H, S, ...)."""
        return x.unflatten(0, (self.batch, self.heads, -1)).flatten(2, 3)[:, :, : self.tokens]

    def tokens_first(self, x: Tensor) -> Tensor:
        return self.flat_rows(x).transpose(1, 2)

    def keys_first(self, table: Tensor) -> Tensor:
        """Gradients of the table -> (B, S, G, D): a tile's own, and its mean's shared by its tokens."""
        table = table[:-1].view(self.batch, self.kv_heads, self.count + self.extra, self.kv_tile, self.dim)
        tiles = table[:, :, : self.count]
        if self.extra:
            means = table[:, :, self.count :].flatten(2, 3)[:, :, : self.count]
            tiles = tiles + (means / self.sizes[:, None]).unsqueeze(3)
        return tiles.flatten(2, 3)[:, :, : self.keys].transpose(1, 2)

    def _flat_head(self, rows: Tensor) -> Tensor:
        """Of each row its place among all batches' heads."""
        return rows // (len(self.counts) // (self.batch * self.heads))

    def head_of(self, rows: Tensor) -> Tensor:
        return self._flat_head(rows) % self.heads

    def groups(self) -> Iterator[_Group]:
        """All rows that have any key, those with a periphery apart, the ones that keep most first."""
        every = torch.arange(len(self.counts), device=self.counts.device)
        pools = (self.pooled > -torch.inf)[self.head_of(every)]
        # A row's tiles begin at its batch and key/value head: heads of a batch are whole groups, so this counts both.
        first = self._flat_head(every) // (self.heads // self.kv_heads) * (self.count + self.extra)
        for pool in (False, True):
            chosen = torch.nonzero((pools == pool) & ((self.counts > 0) | pools)).squeeze(-1)
            chosen = chosen[torch.argsort(self.counts[chosen], descending=True, stable=True)]
            counts = self.counts[chosen].tolist()
            start = 0
            while start < len(counts):
                width = (counts[start] + pool * self.extra) * self.kv_tile * self.dim
                stop = min(len(counts), start + max(1, GROUP_FLOATS // width))
                while counts[stop - 1] * 4 < counts[start] * 3 - 4:  # do not pad a row by more than a third
                    stop -= 1
                yield self._group(chosen[start:stop], first, counts[start], counts[stop - 1], pool)
                start = stop

    def _group(self, rows: Tensor, first: Tensor, most: int, least: int, pool: bool) -> _Group:
        local = self.index[rows, :most]
        bias = self._bias(rows, local, most == least, pool)
        gone = torch.arange(most, device=rows.device) >= self.counts[rows, None]
        tiles = (local + first[rows, None]).masked_fill(gone, len(self.k) - 1)
        if pool:
            means = torch.arange(self.count, self.count + self.extra, device=rows.device)
            tiles = torch.cat([tiles, means + first[rows, None]], 1)
        if bias is not None:
            bias = bias[:, None, None].expand(-1, -1, self.query_tile, -1)
        return _Group(rows, tiles.flatten(), bias)

    def _bias(self, rows: Tensor, local: Tensor, even: bool, pool: bool) -> Tensor | None:
        """(g, c): -inf for tiles past a row's count, for tokens that the short last tile lacks, and for means of kept
        tiles; log(tokens) and the head's constant for the other means. None where every key takes part as it is."""
        short = int(self.sizes[-1])
        whole = even and short == self.kv_tile
        if whole and not pool:
            return None
        near = torch.zeros(*local.shape, self.kv_tile, device=rows.device)
        if not whole:
            gone = (torch.arange(local.shape[1], device=rows.device) >= self.counts[rows, None]).unsqueeze(-1)
            last = (local == self.count - 1).unsqueeze(-1)
            near.masked_fill_(gone | (last & (torch.arange(self.kv_tile, device=rows.device) >= short)), -torch.inf)
        if not pool:
            return near.flatten(1)
        far = self.far[self.head_of(rows)]
        far[:, : self.count].masked_fill_(self.mask[rows], -torch.inf)
        return torch.cat([near.flatten(1), far], 1)
