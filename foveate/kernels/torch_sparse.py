"""Sparse attention in plain torch, for any device: forward and backward, time and memory fall with the budget.

Each head's rows (a row is one query tile) are sorted by how much they keep and worked through in groups whose scores
fit a core's cache; the kept key tiles of a group are gathered, so every matrix product is dense and contiguous. Tile
means of a pooled periphery are the same for all rows of a head and are never gathered.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, R query tiles, N key tiles, K kept tiles,
g rows of a group, m queries of a row, c = K * tile keys of a row.
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
    out, lse = torch.zeros_like(job.q), job.q.new_full(job.q.shape[:3], -torch.inf)
    for group in job.groups():
        near, far = group.near_logits(), group.far_logits()
        top = (
            near.amax(-1, keepdim=True)
            if far is None
            else torch.maximum(*(x.amax(-1, keepdim=True) for x in (near, far)))
        )
        top.masked_fill_(top == -torch.inf, 0.0)
        total = near.sub_(top).exp_().sum(-1, keepdim=True)
        sums = torch.bmm(near, group.values)
        if far is not None:
            total += far.sub_(top).exp_().sum(-1, keepdim=True)
            sums += far @ group.mean_v
        lse[group.head, group.rows] = (total.log() + top).squeeze(-1)
        out[group.head, group.rows] = sums.div_(total.masked_fill_(total == 0, 1.0))
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
    dmean_k, dmean_v = torch.zeros_like(job.mean_k), torch.zeros_like(job.mean_v)
    for group in job.groups():
        head, kv, rows = group.head, group.kv_head, group.rows
        dout_row, delta_row = douts[head, rows], deltas[head, rows].unsqueeze(-1)
        lse_row = lses[head, rows].unsqueeze(-1)
        weights = group.near_logits().sub_(lse_row).exp_()
        dvalues = torch.bmm(weights.mT, dout_row)
        dlogits = torch.bmm(dout_row, group.values.mT).sub_(delta_row).mul_(weights)
        dqueries = torch.bmm(dlogits, group.keys)
        for total, part in ((dk, torch.bmm(dlogits.mT, group.queries)), (dv, dvalues)):
            total[kv].index_add_(0, group.tiles, part.view(len(group.tiles), -1))
        if (far := group.far_logits()) is not None:
            weights = far.sub_(lse_row).exp_()
            dmean_v[kv] += weights.flatten(0, 1).T @ dout_row.flatten(0, 1)
            dlogits = (dout_row @ group.mean_v.T).sub_(delta_row).mul_(weights)
            dqueries += dlogits @ group.mean_k
            dmean_k[kv] += dlogits.flatten(0, 1).T @ group.queries.flatten(0, 1)
        dq[head, rows] = dqueries
    dq = job.tokens_first(dq.mul_(scale)).to(q.dtype)
    return dq, job.keys_first(dk.mul_(scale), dmean_k.mul_(scale)).to(k.dtype), job.keys_first(dv, dmean_v).to(v.dtype)


@dataclass
class _Group:
    """Rows of one head that keep about equally many tiles, and the keys they attend to, float32."""

    head: int  # of B * H
    kv_head: int  # of B * G
    rows: Tensor  # int64 (g,): query tiles of that head
    tiles: Tensor  # int64 (g * K,): the key tiles they keep, and some that `near_bias` excludes
    queries: Tensor  # (g, m, D)
    keys: Tensor  # (g, c, D)
    values: Tensor  # (g, c, D)
    near_bias: Tensor | None  # (g, 1, c): -inf where a key does not take part; None: all do
    far_bias: Tensor | None  # (g, 1, N): log(tokens) of a pooled tile, -inf for a kept one; None: no periphery
    mean_k: Tensor  # (N, D)
    mean_v: Tensor  # (N, D)
    scale: float

    def near_logits(self) -> Tensor:
        """Scaled scores (g, m, c) of the kept tiles' tokens."""
        if self.near_bias is None:
            return torch.bmm(self.queries, self.keys.mT).mul_(self.scale)
        return torch.baddbmm(self.near_bias, self.queries, self.keys.mT, alpha=self.scale)

    def far_logits(self) -> Tensor | None:
        """Scaled scores (g, m, N) of the pooled tiles, None without a periphery."""
        if self.far_bias is None:
            return None
        return (self.queries @ self.mean_k.T).mul_(self.scale).add_(self.far_bias)


class _Job:
    """Inputs cut into rows and tiles, in float32: q (B * H, R, m, D), k and v (B * G, N, tile * D)."""

    def __init__(self, q, k, v, words, query_tile: int, kv_tile: int, scale: float, pooled: Tensor | None):
        self.batch, self.tokens, self.heads, self.dim = q.shape
        self.query_tile, self.kv_tile, self.scale = query_tile, kv_tile, scale
        self.keys, self.kv_heads = k.shape[1], k.shape[2]
        self.sizes = tile_sizes(self.keys, kv_tile, q.device)
        kh, vh = k.float().transpose(1, 2), v.float().transpose(1, 2)
        self.q = self.rows_of(q.float().transpose(1, 2))
        self.k, self.v = self._tiles_of(kh), self._tiles_of(vh)
        self.pooled = [False] * self.heads if pooled is None else pooled.tolist()
        means = (tile_means(x, kv_tile).flatten(0, 1) for x in (kh, vh))
        empty = q.new_zeros(self.batch * self.kv_heads, 0, self.dim, dtype=torch.float32)
        self.mean_k, self.mean_v = means if any(self.pooled) else (empty, empty.clone())
        mask = unpack(words, len(self.sizes)).flatten(0, 1)
        self.mask = mask
        self.index, self.counts = lists(mask)

    def rows_of(self, x: Tensor) -> Tensor:
        """(B, H, S, ...) -> contiguous (B * H, R, m, ...), the last row of each head filled up with zeros."""
        spare = -x.shape[2] % self.query_tile
        if spare:
            x = pad(x, (0, 0) * (x.dim() - 3) + (0, spare))
        return x.unflatten(2, (-1, self.query_tile)).flatten(0, 1).contiguous()

    def _tiles_of(self, x: Tensor) -> Tensor:
        padded = pad(x, (0, 0, 0, -x.shape[2] % self.kv_tile))
        return padded.unflatten(2, (-1, self.kv_tile)).flatten(0, 1).flatten(2).contiguous()

    def flat_rows(self, x: Tensor) -> Tensor:
        """(B * H, R, m, ...) -> (B, H, S, ...)."""
        return x.unflatten(0, (self.batch, self.heads)).flatten(2, 3)[:, :, : self.tokens]

    def tokens_first(self, x: Tensor) -> Tensor:
        return self.flat_rows(x).transpose(1, 2)

    def keys_first(self, tiles: Tensor, means: Tensor) -> Tensor:
        """Gradients of key tiles (B * G, N, tile * D) and of their means (B * G, N, D) -> (B, S, G, D)."""
        tokens = tiles.unflatten(2, (self.kv_tile, self.dim))
        if means.shape[1]:
            tokens = tokens + (means / self.sizes[:, None]).unsqueeze(2)
        return tokens.unflatten(0, (self.batch, self.kv_heads)).flatten(2, 3)[:, :, : self.keys].transpose(1, 2)

    def groups(self) -> Iterator[_Group]:
        """All rows that have any key, head by head, those that keep most first, in groups that fit the cache."""
        order = torch.argsort(self.counts, dim=1, descending=True, stable=True)
        counts = self.counts.gather(1, order).tolist()
        for head, kept in enumerate(counts):
            pool = self.pooled[head % self.heads]
            stop = len(kept) if pool else sum(count > 0 for count in kept)
            start = 0
            while start < stop:
                width = kept[start] * self.kv_tile + (len(self.sizes) if pool else 0)
                end = min(stop, start + max(1, CACHE_FLOATS // (width * self.query_tile)))
                while kept[end - 1] * 4 < kept[start] * 3 - 4:  # do not pad a row by more than a third
                    end -= 1
                # One tile at least, masked where a row keeps none and only its periphery speaks.
                yield self._group(head, order[head, start:end], max(1, kept[start]), kept[end - 1], pool)
                start = end

    def _group(self, head: int, rows: Tensor, most: int, least: int, pool: bool) -> _Group:
        kv_head = head // (self.heads // self.kv_heads)  # heads of a batch are whole groups, so this counts batches too
        local = self.index[head, rows, :most]
        tiles = local.flatten()
        keys, values = (x[kv_head].index_select(0, tiles).view(len(rows), -1, self.dim) for x in (self.k, self.v))
        far_bias = (
            self.sizes.float().log().masked_fill(self.mask[head, rows], -torch.inf).unsqueeze(1) if pool else None
        )
        return _Group(
            head, kv_head, rows, tiles, self.q[head].index_select(0, rows), keys, values,
            self._near_bias(local, self.counts[head, rows], most == least), far_bias,
            self.mean_k[kv_head], self.mean_v[kv_head], self.scale,
        )  # fmt: skip

    def _near_bias(self, local: Tensor, counts: Tensor, even: bool) -> Tensor | None:
        """-inf for tiles past a row's count and for tokens that the short last tile lacks; None if there are none."""
        short = int(self.sizes[-1])
        if even and short == self.kv_tile:
            return None
        gone = (torch.arange(local.shape[1], device=local.device) >= counts[:, None]).unsqueeze(-1)
        last = (local == len(self.sizes) - 1).unsqueeze(-1)
        gone = gone | (last & (torch.arange(self.kv_tile, device=local.device) >= short))
        bias = torch.zeros(gone.shape, device=local.device).masked_fill_(gone, -torch.inf)
        return bias.expand(-1, -1, self.kv_tile).flatten(1).unsqueeze(1)
