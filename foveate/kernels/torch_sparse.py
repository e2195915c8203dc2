"""Sparse attention in plain torch, for any device: forward and backward, time and memory fall with the budget.

Rows (one batch, head and query tile each) are sorted by how much they keep and worked through in groups whose scores
fit a core's cache; the kept key tiles of a group are gathered, so every matrix product is dense and contiguous.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, R query tiles, N key tiles, T tokens a tile,
K kept tiles, g rows of a group, m queries of a row, c keys of a group (kept tokens, then pooled tiles).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.kernels.bits import lists, unpack
from foveate.kernels.reference import tile_means, tile_sizes

CACHE_FLOATS = 1 << 18  # scores of one group: 1 MB in float32, half of a server core's second-level cache


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
    job = _Job(q, k, v, words, query_tile, kv_tile, scale, pooled)
    out, lse = torch.zeros_like(job.q), job.q.new_full(job.q.shape[:2], -torch.inf)
    for group in job.groups():
        logits = job.logits(group)
        top = logits.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[group.rows] = (total.log() + top).squeeze(-1)
        out[group.rows] = torch.bmm(weights, group.values).div_(total.masked_fill_(total == 0, 1.0))
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
    job = _Job(q, k, v, words, query_tile, kv_tile, scale, pooled)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    # A row without keys has lse = -inf; it has no weights either, and exp(-inf - 0) says so without a NaN.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    douts, deltas, lses = job.rows_of(dout.float().transpose(1, 2)), job.rows_of(delta), job.rows_of(lse)
    dq, dk, dv = torch.zeros_like(job.q), torch.zeros_like(job.k), torch.zeros_like(job.v)
    far_k, far_v = torch.zeros_like(job.mean_k), torch.zeros_like(job.mean_v)
    for group in job.groups():
        dout_row = douts[group.rows]
        weights = job.logits(group).sub_(lses[group.rows].unsqueeze(-1)).exp_()
        dvalues = torch.bmm(weights.transpose(1, 2), dout_row)
        dlogits = torch.bmm(dout_row, group.values.transpose(1, 2)).sub_(deltas[group.rows].unsqueeze(-1)).mul_(weights)
        dq[group.rows] = torch.bmm(dlogits, group.keys).mul_(scale)
        dkeys = torch.bmm(dlogits.transpose(1, 2), job.q[group.rows]).mul_(scale)
        for total, far, part in ((dk, far_k, dkeys), (dv, far_v, dvalues)):
            near = part[:, : group.near]
            total.index_add_(0, group.tiles.flatten(), near.unflatten(1, (-1, kv_tile)).flatten(0, 1))
            if group.pool is not None:
                far.index_add_(0, group.pool.flatten(), part[:, group.near :].flatten(0, 1))
    return (
        job.tokens_first(dq).to(q.dtype),
        job.keys_first(dk, far_k).to(k.dtype),
        job.keys_first(dv, far_v).to(v.dtype),
    )


@dataclass
class _Group:
    rows: Tensor  # int64 (g,): rows of the group
    tiles: Tensor  # int64 (g, K): the key tiles they keep, by number over all batches and heads
    bias: Tensor | None  # float32 (g, 1, c): 0 where a key takes part, -inf where it does not; log(tokens) for pooled
    keys: Tensor  # float32 (g, c, D)
    values: Tensor  # float32 (g, c, D)
    near: int  # keys of kept tiles; the rest of c are pooled tiles
    pool: Tensor | None  # int64 (g, N): pooled tiles by number, None in a group without periphery


class _Job:
    """Inputs cut into rows and tiles, all heads side by side, in float32."""

    def __init__(self, q, k, v, words, query_tile: int, kv_tile: int, scale: float, pooled: Tensor | None):
        self.batch, self.tokens, self.heads, self.dim = q.shape
        self.query_tile, self.kv_tile, self.scale = query_tile, kv_tile, scale
        self.groups_of_heads = k.shape[2]
        self.sizes = tile_sizes(k.shape[1], kv_tile, q.device)
        self.count = len(self.sizes)
        kh, vh = k.float().transpose(1, 2), v.float().transpose(1, 2)
        self.q = self.rows_of(q.float().transpose(1, 2))
        self.k, self.v = self._tiles_of(kh), self._tiles_of(vh)
        self.pooled = torch.zeros(self.heads, dtype=torch.bool) if pooled is None else pooled.cpu()
        if pooled is None:
            self.mean_k = self.mean_v = q.new_zeros(0, self.dim, dtype=torch.float32)
        else:
            self.mean_k, self.mean_v = tile_means(kh, kv_tile).flatten(0, 2), tile_means(vh, kv_tile).flatten(0, 2)
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

    def _tiles_of(self, x: Tensor) -> Tensor:
        spare = -x.shape[2] % self.kv_tile
        return pad(x, (0, 0, 0, spare)).unflatten(2, (-1, self.kv_tile)).flatten(0, 2).contiguous()

    def flat_rows(self, x: Tensor) -> Tensor:
        """(B * H * R, m, ...) -> (B, H, S, ...)."""
        return x.unflatten(0, (self.batch, self.heads, -1)).flatten(2, 3)[:, :, : self.tokens]

    def tokens_first(self, x: Tensor) -> Tensor:
        return self.flat_rows(x).transpose(1, 2)

    def keys_first(self, near: Tensor, far: Tensor) -> Tensor:
        """Gradients of key tiles and of tile means -> (B, S, G, D)."""
        if len(far):
            sizes = self.sizes.repeat(self.batch * self.groups_of_heads)
            near = near + (far / sizes[:, None]).unsqueeze(1)
        return (
            near.unflatten(0, (self.batch, self.groups_of_heads, -1)).flatten(2, 3)[:, :, : self._keys].transpose(1, 2)
        )

    @property
    def _keys(self) -> int:
        return int(self.sizes.sum())

    def groups(self) -> Iterator[_Group]:
        """All rows that have any key, in groups of about equal kept counts whose scores fit the cache."""
        head = torch.arange(len(self.counts), device=self.counts.device) // (
            len(self.counts) // (self.batch * self.heads)
        )
        pools = self.pooled.to(head.device)[head % self.heads]
        # Key/value tiles of a row start at its batch and key/value head.
        first = head // (self.heads // self.groups_of_heads) * self.count
        for pool in (False, True):
            chosen = torch.nonzero((pools == pool) & ((self.counts > 0) | pools)).squeeze(-1)
            chosen = chosen[torch.argsort(self.counts[chosen], descending=True, stable=True)]
            counts = self.counts[chosen].tolist()
            start = 0
            while start < len(counts):
                width = counts[start] * self.kv_tile + (self.count if pool else 0)
                stop = min(len(counts), start + max(1, CACHE_FLOATS // (width * self.query_tile)))
                while counts[stop - 1] * 4 < counts[start] * 3 - 4:  # do not pad a row by more than a third
                    stop -= 1
                yield self._group(chosen[start:stop], first, counts[start], counts[stop - 1], pool)
                start = stop

    def _group(self, rows: Tensor, first: Tensor, most: int, least: int, pool: bool) -> _Group:
        local = self.index[rows, :most]
        tiles = local + first[rows, None]
        near = most * self.kv_tile
        keys, values = self.k[tiles].flatten(1, 2), self.v[tiles].flatten(1, 2)
        bias = self._near_bias(rows, local, most, least, keys)
        if not pool:
            return _Group(rows, tiles, bias, keys, values, near, None)
        far = torch.arange(self.count, device=rows.device) + first[rows, None]
        far_bias = self.sizes.float().log().masked_fill(self.mask[rows], -torch.inf)
        bias = keys.new_zeros(len(rows), near) if bias is None else bias
        bias = torch.cat([bias, far_bias], 1)
        keys, values = torch.cat([keys, self.mean_k[far]], 1), torch.cat([values, self.mean_v[far]], 1)
        return _Group(rows, tiles, bias, keys, values, near, far)

    def _near_bias(self, rows: Tensor, local: Tensor, most: int, least: int, like: Tensor) -> Tensor | None:
        """-inf for tiles past a row's count and for tokens that the short last tile lacks; None if there are none."""
        short = int(self.sizes[-1])
        if most == least and short == self.kv_tile:
            return None
        gone = (torch.arange(most, device=rows.device) >= self.counts[rows, None]).unsqueeze(-1)
        last = (local == self.count - 1).unsqueeze(-1)
        gone = gone | (last & (torch.arange(self.kv_tile, device=rows.device) >= short))
        return (
            torch.zeros_like(gone, dtype=like.dtype)
            .masked_fill_(gone, -torch.inf)
            .expand(-1, -1, self.kv_tile)
            .flatten(1)
        )

    def logits(self, group: _Group) -> Tensor:
        """Scaled scores (g, m, c) of a group, biases added."""
        rows = self.q[group.rows]
        if group.bias is None:
            return torch.bmm(rows, group.keys.transpose(1, 2)).mul_(self.scale)
        return torch.baddbmm(group.bias.unsqueeze(1), rows, group.keys.transpose(1, 2), alpha=self.scale)
