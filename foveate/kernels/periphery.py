"""The gradient into the constants of a pooled periphery, for every kernel: it is a sum over the tile means alone.

Its work is 1 / 64 of dense attention, in plain torch, and nothing of it runs unless the constants are learned.

Shapes: B batch, M queries, S keys, H heads, G key/value heads, D head dim, R query tiles, N key tiles.
"""

import torch
from torch import Tensor

from foveate.kernels.bits import unpack
from foveate.kernels.reference import tile_means, tile_sizes

ROOM = 1 << 26  # logits at once


def constants_gradient(
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
    pooled: Tensor,
) -> Tensor:
    """float32 (H,): outer gradients of (out, lse) carried to `pooled`, what `backward` carries to q, k and v."""
    heads, repeats = q.shape[2], q.shape[2] // k.shape[2]
    sizes = tile_sizes(k.shape[1], kv_tile, k.device)
    mean_k, mean_v = (tile_means(x.float().transpose(1, 2), kv_tile).repeat_interleave(repeats, 1) for x in (k, v))
    bias = sizes.float().log() + pooled.float()[:, None, None]
    kept = unpack(words, len(sizes))
    step = query_tile * max(1, ROOM // (q.shape[0] * heads * query_tile * len(sizes)))
    total = q.new_zeros(heads, dtype=torch.float32)
    for start in range(0, q.shape[1], step):
        rows = slice(start, start + step)
        queries, douts, outs = (x[:, rows].float().transpose(1, 2) for x in (q, dout, out))
        logits = scale * queries @ mean_k.mT + bias
        tiles = kept[:, :, start // query_tile : -(-(start + step) // query_tile)]
        logits = logits.masked_fill(tiles.repeat_interleave(query_tile, 2)[:, :, : logits.shape[2]], -torch.inf)
        top = lse[:, :, rows, None]
        weights = (logits - top.masked_fill(top == -torch.inf, torch.inf)).exp()
        delta = (douts * outs).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, :, rows]
        slopes = weights * (douts @ mean_v.mT - delta.unsqueeze(-1))
        total += slopes.masked_fill(logits == -torch.inf, 0.0).sum((0, 2, 3))  # 0 * NaN of a tile that is kept
    return total
