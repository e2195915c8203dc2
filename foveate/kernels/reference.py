"""The oracle: sparse attention written plainly, S x S scores and all, differentiable by torch's own autograd.

Shapes: B batch, S tokens (M queries, S keys), H heads, G key/value heads, D head dim, R query tiles, N key tiles.
Inputs are (B, M, H, D) and (B, S, G, D) with G dividing H. Arithmetic in float32, or float64 for float64 inputs.
"""

import torch
from torch import Tensor

from foveate.kernels.bits import unpack


def tile_sizes(tokens: int, tile: int, device: torch.device) -> Tensor:
    """int64 (N,): tokens in each tile; all `tile` but the last."""
    sizes = torch.full((-(-tokens // tile),), tile, device=device)
    sizes[-1] = tokens - tile * (len(sizes) - 1)
    return sizes


def tile_means(x: Tensor, tile: int) -> Tensor:
    """Mean over each tile of x (B, H, S, D) -> (B, H, N, D); the last tile over the tokens it has."""
    spare = -x.shape[2] % tile
    sums = torch.nn.functional.pad(x, (0, 0, 0, spare)).unflatten(2, (-1, tile)).sum(3)
    return sums / tile_sizes(x.shape[2], tile, x.device)[:, None]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor | None,
    *,
    query_tile: int,
    kv_tile: int,
    scale: float,
    pooled: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention over the kept tiles. Returns out (B, M, H, D) in q's dtype and lse (B, H, M), natural log.

    words: int32 (B, H, R, W) bitmap of kept tiles, None keeps all. pooled: float (H,), or None: each tile that a head
    does not keep takes part as one key, its mean, with logit `scale * q . mean + log(tokens) + pooled` and the mean
    value; -inf leaves them out. Differentiable in pooled too.
    A query with no key at all gets out = 0 and lse = -inf.
    """
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, tokens = q.shape[2], k.shape[1]
    qh, kh, vh = (x.to(work).transpose(1, 2) for x in (q, k, v))
    kh, vh = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (kh, vh))
    if words is None:
        out, lse = _softmax(scale * qh @ kh.mT, vh)
        return out.transpose(1, 2).to(q.dtype), lse
    sizes = tile_sizes(tokens, kv_tile, q.device)
    kept = unpack(words, len(sizes))
    taken = kept.repeat_interleave(sizes, dim=3, output_size=tokens)
    bias = torch.zeros(heads, 1, tokens, dtype=work, device=q.device)
    if pooled is not None:
        kh, vh = (torch.cat([x, tile_means(x, kv_tile)], dim=2) for x in (kh, vh))
        takes_part = pooled > -torch.inf
        taken = torch.cat([taken, ~kept & takes_part[:, None, None]], dim=3)
        weighed = pooled.to(work).masked_fill(~takes_part, 0.0)[:, None, None] + sizes.to(work).log()
        bias = torch.cat([bias, weighed], dim=2)
    parts = [
        _row(rows, kh, vh, row, scale, bias) for rows, row in zip(qh.split(query_tile, 2), taken.unbind(2), strict=True)
    ]
    out, lse = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return out.transpose(1, 2).to(q.dtype), lse


def _row(q: Tensor, k: Tensor, v: Tensor, taken: Tensor, scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """One query tile q (B, H, m, D) over the keys of `taken` (B, H, S). The others are zeros to it: weighed 0, a NaN in
    them would still spread, forward and backward."""
    k, v = (x.masked_fill(~taken.unsqueeze(-1), 0.0) for x in (k, v))
    logits = scale * q @ k.mT + bias
    return _softmax(logits.masked_fill(~taken.unsqueeze(2), -torch.inf), v)


def _softmax(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax-weighted values and log-sum-exp that stay free of NaN, gradients too, where every logit is -inf."""
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    lse = (safe.log() + top).masked_fill(empty, -torch.inf)
    return weights @ values / safe, lse.squeeze(-1)
