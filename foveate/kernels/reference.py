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

    words: int32 (B, H, R, W) bitmap of kept tiles, None keeps all. pooled: bool (H,), heads in which each tile that is
    not kept takes part as one key, its mean, with logit `scale * q . mean + log(tokens)` and the mean value.
    A query with no key at all gets out = 0 and lse = -inf.
    """
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, tokens = q.shape[2], k.shape[1]
    qh, kh, vh = (x.to(work).transpose(1, 2) for x in (q, k, v))
    kh, vh = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (kh, vh))
    logits = scale * qh @ kh.transpose(-1, -2)
    values = vh
    if words is not None:
        sizes = tile_sizes(tokens, kv_tile, q.device)
        kept = unpack(words, len(sizes)).repeat_interleave(query_tile, dim=2)[:, :, : q.shape[1]]
        logits = logits.masked_fill(~kept.repeat_interleave(sizes, dim=3), -torch.inf)
        if pooled is not None:
            means = tile_means(kh, kv_tile)
            far = scale * qh @ means.transpose(-1, -2) + sizes.to(work).log()
            far = far.masked_fill(kept | ~pooled[:, None, None], -torch.inf)
            logits = torch.cat([logits, far], dim=-1)
            values = torch.cat([values, tile_means(vh, kv_tile)], dim=2)
    out, lse = _softmax(logits, values)
    return out.transpose(1, 2).to(q.dtype), lse


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
