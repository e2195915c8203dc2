"""The pooled periphery by itself, on top of attention over the kept tiles that other kernels have computed.

Forward: the online softmax goes on from the near part's (out, lse) over the means of the tiles that are not kept, so
that computing the far part and merging it are one kernel. Backward: the near part's gradients, made with the merged
(out, lse), get what the means add. Heads whose periphery is dropped are left alone.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, R query tiles, N key tiles, W = ceil(N / 32).
"""

import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.triton_lists import row_stats
from foveate.kernels.triton_sparse import Job, grad_means_of
from foveate.kernels.triton_tiles import far_forward, far_queries, far_share, load_rows, store_rows

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["tokens", "keys", "R", "N", "W", "H", "REP"])
def _merge(
    Q, MEAN_K, MEAN_V, OUT, LSE, WORDS, POOLED, scale2, tokens, keys, R, N, W, H, REP,
    DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """OUT, LSE: the near part's, overwritten with the merged ones."""
    head = tl.program_id(1)
    b, h = head // H, head % H
    if tl.load(POOLED + h) > -float("inf"):
        start = tl.program_id(0) * BM
        at = start + tl.arange(0, BM)
        stat = LSE + head.to(tl.int64) * tokens + at
        lse = tl.load(stat, mask=at < tokens, other=-float("inf"))
        none = lse == -float("inf")
        q = load_rows(Q, b, h, start, BM, DIM, D, TMA)
        near = load_rows(OUT, b, h, start, BM, DIM, D, TMA).to(tl.float32)
        acc = tl.where(none[:, None], 0.0, near)
        words = WORDS + (head.to(tl.int64) * R + start // QUERY_TILE) * W
        acc, top, total = far_forward(
            q, acc, lse * LOG2E, tl.where(none, 0.0, 1.0), MEAN_K, MEAN_V, words, POOLED, b, h, h // REP, scale2, keys,
            N, W, DIM, D, BN, TILE, EVEN, TMA, UPCAST,
        )  # fmt: skip
        none = total == 0.0
        total = tl.where(none, 1.0, total)
        store_rows(OUT, acc / total[:, None], b, h, start, BM, DIM, D, TMA)
        lse = tl.where(none, -float("inf"), (top + tl.log2(total)) / LOG2E)
        tl.store(stat, lse, mask=at < tokens)


@triton.jit(do_not_specialize=["blocks", "keys", "R", "N", "W", "H", "REP"])
def _add_grad_queries(
    Q, MEAN_K, MEAN_V, DOUT, DQ, LSE2, DELTA, WORDS, POOLED, scale, scale2, blocks, keys, R, N, W, H, REP,
    DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    b, h = head // H, head % H
    if tl.load(POOLED + h) > -float("inf"):
        start = tl.program_id(0) * BM
        q = load_rows(Q, b, h, start, BM, DIM, D, TMA)
        dout = load_rows(DOUT, b, h, start, BM, DIM, D, TMA)
        stat = (head.to(tl.int64) * blocks + tl.program_id(0)) * BM + tl.arange(0, BM)
        words = WORDS + (head.to(tl.int64) * R + start // QUERY_TILE) * W
        dq = far_queries(
            q, dout, tl.load(LSE2 + stat), tl.load(DELTA + stat), tl.zeros([BM, D], tl.float32), MEAN_K, MEAN_V, words,
            POOLED, b, h, h // REP, scale2, keys, N, W, DIM, D, BN, TILE, EVEN, TMA, UPCAST,
        )  # fmt: skip
        near = load_rows(DQ, b, h, start, BM, DIM, D, TMA).to(tl.float32)
        store_rows(DQ, near + dq * scale, b, h, start, BM, DIM, D, TMA)


@triton.jit(do_not_specialize=["keys", "N", "G", "SPLITS"])
def _add_grad_means(
    DK, DV, FAR_K, FAR_V, scale, keys, N, G, SPLITS, DIM: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    TILE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Each token of a tile carries an equal part of its mean's gradient."""
    group = tl.program_id(1)
    b, g = group // G, group % G
    tile = tl.program_id(0)
    size = tl.minimum(TILE, keys - tile * TILE).to(tl.float32)
    far_k = far_share(FAR_K, group, SPLITS, N, tile, size, DIM, D) * scale
    far_v = far_share(FAR_V, group, SPLITS, N, tile, size, DIM, D)
    for part in tl.static_range(TILE // BN):
        start = tile * TILE + part * BN
        dk = load_rows(DK, b, g, start, BN, DIM, D, TMA).to(tl.float32)
        store_rows(DK, dk + far_k[None, :], b, g, start, BN, DIM, D, TMA)
        dv = load_rows(DV, b, g, start, BN, DIM, D, TMA).to(tl.float32)
        store_rows(DV, dv + far_v[None, :], b, g, start, BN, DIM, D, TMA)


def merge(job: Job, q: Tensor, k: Tensor, v: Tensor, words: Tensor, near: tuple[Tensor, Tensor]) -> None:
    """Merge the periphery into `near`, in place: contiguous out (B, M, H, D) and float32 lse (B, H, M)."""
    config = job.config("forward", 64)  # 128 query rows spill: they hold the near part beside the far one's scores
    mean_k, mean_v = job.means(k, v)
    _merge[job.query_grid(config)](
        *job.views((q, config.m), (mean_k, config.n), (mean_v, config.n), (near[0], config.m)), near[1],
        words, job.pooled, job.scale2, job.tokens, job.keys, job.rows, job.columns, job.width, job.heads, job.repeats,
        EVEN=job.even, **job.constants(config),
    )  # fmt: skip


def add_gradients(
    job: Job,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add what the periphery gives to the near part's dq, dk, dv, in place; contiguous. out, lse: the merged ones."""
    stats = row_stats(dout, dlse, out, lse, job.rows * job.query_tile)
    mean_k, mean_v = job.means(k, v)
    dq, dk, dv = grads
    config = job.config("queries")
    _add_grad_queries[job.query_grid(config)](
        *job.views((q, config.m), (mean_k, config.n), (mean_v, config.n), (dout, config.m), (dq, config.m)), *stats,
        words, job.pooled, job.scale, job.scale2, job.blocks(config), job.keys, job.rows, job.columns, job.width,
        job.heads, job.repeats, EVEN=job.even, **job.constants(config),
    )  # fmt: skip
    far_k, far_v, splits = grad_means_of(job, q, mean_k, mean_v, dout, stats, words)
    config = job.config("keys")
    constants = {name: job.constants(config)[name] for name in ("DIM", "D", "BN", "TILE", "TMA")}
    _add_grad_means[(job.columns, job.batch * job.groups)](
        *job.views((dk, config.n), (dv, config.n)), far_k, far_v, job.scale, job.keys, job.columns, job.groups, splits,
        **constants,
    )  # fmt: skip
