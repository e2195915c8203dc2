"""Block-sparse attention in Triton: forward, dQ and dK/dV, each tile pair computed where it is kept and nowhere else.

The bitmap is expanded to lists on the device: query-major for the forward and dQ, key-major for dK and dV, so that
every output element is summed by one program in a fixed order: no atomics, bit-equal repeats. A pooled periphery runs
in the same programs as further keys, the tile means, of which the kept ones are masked; its dK and dV come from
`_grad_means`.
On sm_90 and sm_100 tiles are read and written by the copy engine (tensor descriptors), elsewhere by pointers.

Shapes: B batch, S tokens (M queries, S keys), H heads, G key/value heads, D head dim, R query tiles, N key tiles of
64 or 128 tokens, W = ceil(N / 32) bitmap words. On chip: BM query rows, BN key rows. Logits are in base 2 on chip:
their scale is multiplied into float32 scores, never into 16-bit queries or keys.
"""

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foveate.kernels.triton_lists import hot_first, key_lists, query_lists, row_stats, tile_means
from foveate.kernels.triton_tiles import (
    dot,
    far_bias,
    far_forward,
    far_queries,
    far_share,
    kept_words,
    load_rows,
    periphery,
    softmax_step,
    store_rows,
)

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _count(listed, COUNTS, row, N, EVEN: tl.constexpr):
    """Kept full tiles of a row, and 1 if it also keeps the short last tile, which then ends its list."""
    count = tl.load(COUNTS + row)
    short = 0
    if not EVEN:
        short = ((count > 0) & (tl.load(listed + tl.maximum(count - 1, 0)) == N - 1)).to(tl.int32)
    return count - short, short


@triton.jit(do_not_specialize=["tokens", "keys", "R", "N", "W", "H", "REP"])
def _forward(
    Q, K, V, MEAN_K, MEAN_V, OUT, LSE, LISTS, COUNTS, ORDER, WORDS, POOLED, scale2, tokens, keys, R, N, W, H, REP,
    DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, POOL: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    b, h = head // H, head % H
    g = h // REP
    QSUB: tl.constexpr = QUERY_TILE // BM
    KSUB: tl.constexpr = TILE // BN
    r = tl.load(ORDER + head * R + tl.program_id(0) // QSUB)
    start = r * QUERY_TILE + tl.program_id(0) % QSUB * BM
    row = head.to(tl.int64) * R + r
    listed = LISTS + row * N
    full, short = _count(listed, COUNTS, row, N, EVEN)
    q = load_rows(Q, b, h, start, BM, DIM, D, TMA)
    acc = tl.zeros([BM, D], tl.float32)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    ahead = tl.load(listed).to(tl.int32)
    for i in tl.range(0, full * KSUB):
        at = ahead * TILE + i % KSUB * BN
        ahead = tl.load(listed + (i + 1) // KSUB).to(tl.int32)  # a step early: the copy must not wait for it
        s = dot(q, load_rows(K, b, g, at, BN, DIM, D, TMA).T, None, UPCAST)
        peak = tl.maximum(top, tl.max(s, 1) * scale2)
        p = tl.exp2(s * scale2 - peak[:, None])
        shrink = tl.exp2(top - peak)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_rows(V, b, g, at, BN, DIM, D, TMA)
        acc = dot(p.to(v.dtype), v, acc, UPCAST)
        top = peak
    if not EVEN:
        for i in tl.range(0, short * KSUB):
            at = (N - 1) * TILE + i * BN
            s = dot(q, load_rows(K, b, g, at, BN, DIM, D, TMA).T, None, UPCAST) * scale2
            s = tl.where((at + tl.arange(0, BN) < keys)[None, :], s, -float("inf"))
            p, acc, top, total = softmax_step(s, acc, top, total)
            v = load_rows(V, b, g, at, BN, DIM, D, TMA)
            acc = dot(p.to(v.dtype), v, acc, UPCAST)
    if POOL:
        acc, top, total = far_forward(
            q, acc, top, total, MEAN_K, MEAN_V, WORDS + row * W, POOLED, b, h, g, scale2, keys, N, W,
            DIM, D, BN, TILE, EVEN, TMA, UPCAST,
        )  # fmt: skip
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    store_rows(OUT, acc / total[:, None], b, h, start, BM, DIM, D, TMA)
    lse = tl.where(empty, -float("inf"), (top + tl.log2(total)) * LN2)
    at = start + tl.arange(0, BM)
    tl.store(LSE + head.to(tl.int64) * tokens + at, lse, mask=at < tokens)


@triton.jit(do_not_specialize=["blocks", "keys", "R", "N", "W", "H", "REP"])
def _grad_queries(
    Q, K, V, MEAN_K, MEAN_V, DOUT, DQ, LSE2, DELTA, LISTS, COUNTS, ORDER, WORDS, POOLED, scale, scale2, blocks, keys,
    R, N, W, H, REP,
    DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, POOL: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    b, h = head // H, head % H
    g = h // REP
    QSUB: tl.constexpr = QUERY_TILE // BM
    KSUB: tl.constexpr = TILE // BN
    r = tl.load(ORDER + head * R + tl.program_id(0) // QSUB)
    block = r * QSUB + tl.program_id(0) % QSUB
    start = block * BM
    row = head.to(tl.int64) * R + r
    listed = LISTS + row * N
    full, short = _count(listed, COUNTS, row, N, EVEN)
    q = load_rows(Q, b, h, start, BM, DIM, D, TMA)
    dout = load_rows(DOUT, b, h, start, BM, DIM, D, TMA)
    stat = (head.to(tl.int64) * blocks + block) * BM + tl.arange(0, BM)
    lse = tl.load(LSE2 + stat)
    delta = tl.load(DELTA + stat)
    dq = tl.zeros([BM, D], tl.float32)
    ahead = tl.load(listed).to(tl.int32)
    for i in tl.range(0, full * KSUB):
        at = ahead * TILE + i % KSUB * BN
        ahead = tl.load(listed + (i + 1) // KSUB).to(tl.int32)
        k = load_rows(K, b, g, at, BN, DIM, D, TMA)
        v = load_rows(V, b, g, at, BN, DIM, D, TMA)
        p = tl.exp2(dot(q, k.T, None, UPCAST) * scale2 - lse[:, None])
        ds = p * (dot(dout, v.T, None, UPCAST) - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq, UPCAST)
    if not EVEN:
        for i in tl.range(0, short * KSUB):
            at = (N - 1) * TILE + i * BN
            k = load_rows(K, b, g, at, BN, DIM, D, TMA)
            v = load_rows(V, b, g, at, BN, DIM, D, TMA)
            s = dot(q, k.T, None, UPCAST) * scale2 - lse[:, None]
            p = tl.exp2(tl.where((at + tl.arange(0, BN) < keys)[None, :], s, -float("inf")))
            ds = p * (dot(dout, v.T, None, UPCAST) - delta[:, None])
            dq = dot(ds.to(k.dtype), k, dq, UPCAST)
    if POOL:
        dq = far_queries(
            q, dout, lse, delta, dq, MEAN_K, MEAN_V, WORDS + row * W, POOLED, b, h, g, scale2, keys, N, W,
            DIM, D, BN, TILE, EVEN, TMA, UPCAST,
        )  # fmt: skip
    store_rows(DQ, dq * scale, b, h, start, BM, DIM, D, TMA)


@triton.jit(do_not_specialize=["blocks", "keys", "R", "N", "H", "G", "SPLITS"])
def _grad_keys(
    Q, K, V, DOUT, DK, DV, LSE2, DELTA, LISTS, COUNTS, ORDER, FAR_K, FAR_V, scale, scale2, blocks, keys, R, N, H, G,
    SPLITS, DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr, REP: tl.constexpr, POOL: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores stand transposed, (n, m): each program owns n keys and walks the query tiles that keep them."""
    group = tl.program_id(1)
    b, g = group // G, group % G
    QSUB: tl.constexpr = QUERY_TILE // BM
    KSUB: tl.constexpr = TILE // BN
    tile = tl.load(ORDER + group * N + tl.program_id(0) // KSUB)
    start = tile * TILE + tl.program_id(0) % KSUB * BN
    k = load_rows(K, b, g, start, BN, DIM, D, TMA)
    v = load_rows(V, b, g, start, BN, DIM, D, TMA)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    for rep in range(REP):
        h = g * REP + rep
        head = b * H + h
        column = head.to(tl.int64) * N + tile
        listed = LISTS + column * R
        ahead = tl.load(listed).to(tl.int32)
        for i in tl.range(0, tl.load(COUNTS + column) * QSUB):
            block = ahead * QSUB + i % QSUB
            ahead = tl.load(listed + (i + 1) // QSUB).to(tl.int32)
            q = load_rows(Q, b, h, block * BM, BM, DIM, D, TMA)
            dout = load_rows(DOUT, b, h, block * BM, BM, DIM, D, TMA)
            stat = (head.to(tl.int64) * blocks + block) * BM + tl.arange(0, BM)
            s = dot(k, q.T, None, UPCAST)
            dp = dot(v, dout.T, None, UPCAST)
            p = tl.exp2(s * scale2 - tl.load(LSE2 + stat)[None, :])
            dv = dot(p.to(dout.dtype), dout, dv, UPCAST)
            ds = p * (dp - tl.load(DELTA + stat)[None, :])
            dk = dot(ds.to(q.dtype), q, dk, UPCAST)
    if POOL:  # each token of a tile carries an equal part of its mean's gradient
        size = tl.minimum(TILE, keys - tile * TILE).to(tl.float32)
        dk += far_share(FAR_K, group, SPLITS, N, tile, size, DIM, D)[None, :]
        dv += far_share(FAR_V, group, SPLITS, N, tile, size, DIM, D)[None, :]
    store_rows(DK, dk * scale, b, g, start, BN, DIM, D, TMA)
    store_rows(DV, dv, b, g, start, BN, DIM, D, TMA)


@triton.jit(do_not_specialize=["blocks", "keys", "R", "N", "W", "H", "G", "SPLITS", "STEPS"])
def _grad_means(
    Q, MEAN_K, MEAN_V, DOUT, LSE2, DELTA, FAR_K, FAR_V, WORDS, POOLED, scale2, blocks, keys, R, N, W, H, G, SPLITS,
    STEPS, DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr, REP: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of BN tile means from STEPS of the query tiles (SPLITS programs see them all), unscaled, float32."""
    group = tl.program_id(1)
    b, g = group // G, group % G
    split = tl.program_id(2)
    QSUB: tl.constexpr = QUERY_TILE // BM
    first = tl.program_id(0) * BN
    tile = first + tl.arange(0, BN)
    k = load_rows(MEAN_K, b, g, first, BN, DIM, D, TMA)
    v = load_rows(MEAN_V, b, g, first, BN, DIM, D, TMA)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    begin = split * STEPS
    for rep in range(REP):
        h = g * REP + rep
        head = b * H + h
        weight2, means = periphery(POOLED, h, N)
        end = tl.where(means > 0, tl.minimum(begin + STEPS, R), 0)
        words = WORDS + head.to(tl.int64) * R * W
        low, high = kept_words(words + tl.minimum(begin, R - 1) * W, first, N, W)
        for block in tl.range(begin * QSUB, end * QSUB):
            q = load_rows(Q, b, h, block * BM, BM, DIM, D, TMA)
            dout = load_rows(DOUT, b, h, block * BM, BM, DIM, D, TMA)
            stat = (head.to(tl.int64) * blocks + block) * BM + tl.arange(0, BM)
            bias = far_bias(low, high, first, N, keys, weight2, BN, TILE, EVEN)
            low, high = kept_words(words + tl.minimum((block + 1) // QSUB, R - 1) * W, first, N, W)
            s = dot(k, q.T, None, UPCAST)
            dp = dot(v, dout.T, None, UPCAST)
            p = tl.exp2(s * scale2 + (bias[:, None] - tl.load(LSE2 + stat)[None, :]))
            dv = dot(p.to(dout.dtype), dout, dv, UPCAST)
            ds = p * (dp - tl.load(DELTA + stat)[None, :])
            dk = dot(ds.to(q.dtype), q, dk, UPCAST)
    dim = tl.arange(0, D)
    at = ((group.to(tl.int64) * SPLITS + split) * N + tile)[:, None] * DIM + dim[None, :]
    mask = (tile < N)[:, None] & (dim < DIM)[None, :]
    tl.store(FAR_K + at, dk, mask=mask)
    tl.store(FAR_V + at, dv, mask=mask)


@dataclass(frozen=True)
class Config:
    """Rows of queries and of keys on chip, warps and pipeline stages of one kernel."""

    m: int
    n: int
    warps: int
    stages: int


# Kernel -> (head dim, query tile) -> configuration, for 16-bit inputs. Measured on one H200 (docs/log.md).
HOPPER = {
    "forward": {
        (64, 64): Config(64, 64, 4, 2),
        (64, 128): Config(64, 64, 4, 2),
        (128, 64): Config(64, 64, 4, 3),
        (128, 128): Config(128, 64, 4, 2),
        (256, 64): Config(64, 64, 8, 2),
        (256, 128): Config(64, 64, 8, 2),
    },
    "queries": {
        (64, 64): Config(64, 64, 4, 2),
        (64, 128): Config(64, 64, 4, 2),
        (128, 64): Config(64, 64, 4, 2),
        (128, 128): Config(128, 64, 8, 3),
        (256, 64): Config(64, 64, 8, 2),
        (256, 128): Config(64, 64, 8, 2),
    },
    "keys": {(64, 64): Config(64, 64, 4, 3), (128, 64): Config(64, 64, 4, 2), (256, 64): Config(64, 64, 8, 2)},
}
# Blackwell keeps scores in shared memory too, so the largest head dim has room for one stage only. Never timed.
BLACKWELL = {**HOPPER, "keys": {**HOPPER["keys"], (256, 64): Config(64, 64, 8, 1)}}
# Kernel -> head dim -> configuration: compiled and checked for size (tests/test_compile_targets.py), never timed.
LARGE = 166_912  # bytes of shared memory a block may have on an A100; consumer cards have 101,376
AMPERE = {
    "forward": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 8, 2), 256: Config(64, 32, 8, 2)},
    "queries": {64: Config(64, 64, 8, 2), 128: Config(64, 64, 8, 2), 256: Config(64, 32, 8, 2)},
    "keys": {64: Config(64, 64, 8, 2), 128: Config(64, 64, 8, 2), 256: Config(32, 64, 8, 2)},
}
CONSUMER = {
    "forward": {64: Config(64, 64, 8, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 2)},
    "queries": {64: Config(64, 64, 8, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 2)},
    "keys": {64: Config(64, 64, 8, 2), 128: Config(32, 64, 8, 2), 256: Config(32, 32, 8, 2)},
}
FLOAT32 = Config(32, 32, 4, 1)

RETURNS_FLOAT32 = True  # `dtype` of forward and backward: see kernels/__init__.py


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pooled: Tensor | None,
    deterministic: bool,
    query_tile: int,
    kv_tile: int,
    scale: float,
) -> None:
    """ValueError for what these kernels cannot serve. They always repeat bit by bit, so `deterministic` is free."""
    if kv_tile not in (64, 128):
        raise ValueError(f"the triton backend works on key tiles of 64 or 128 tokens, got {kv_tile}")
    if scale < 0:
        raise ValueError(f"the triton backend needs scale >= 0, got {scale}; negate q instead")
    if INTERPRETED:
        return
    if q.device.type != "cuda":
        raise ValueError(f"the triton backend needs CUDA tensors, got {q.device}; use backend 'torch'")
    capability, memory = _card(q.device)
    if capability < (8, 0):
        raise ValueError(f"the triton backend needs compute capability 8.0, this card has {capability}; use 'torch'")
    _config("keys", q.dtype, q.shape[-1], query_tile, capability, memory)


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
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.forward`: out (B, M, H, D) in `dtype`, q's by default, lse float32 (B, H, M)."""
    job = Job(q, k, words, query_tile, kv_tile, scale, pooled, dtype)
    config = job.config("forward")
    out = torch.empty(q.shape, dtype=job.result, device=q.device)
    lse = torch.empty(job.batch, job.heads, job.tokens, dtype=torch.float32, device=q.device)
    lists, counts = query_lists(words, job.columns)
    mean_k, mean_v = job.means(k, v)
    _forward[job.query_grid(config)](
        *job.views((q, config.m), (k, config.n), (v, config.n), (mean_k, config.n), (mean_v, config.n)),
        *job.views((out, config.m)), lse, lists, counts, hot_first(counts), words, pooled, job.scale2,
        job.tokens, job.keys, job.rows, job.columns, job.width, job.heads, job.repeats,
        EVEN=job.even, POOL=pooled is not None, **job.constants(config),
    )  # fmt: skip
    return out, lse


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
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for outer gradients of (out, lse), which may be those of a larger attention: p = exp(s - lse).

    dtype: of the gradients, q's by default.
    """
    job = Job(q, k, words, query_tile, kv_tile, scale, pooled, dtype)
    stats = row_stats(dout, dlse, out, lse, job.rows * query_tile)
    dout = dout.to(q.dtype)
    mean_k, mean_v = job.means(k, v)
    dq = _run_grad_queries(job, q, k, v, mean_k, mean_v, dout, stats, words)
    far = (None, None, 0) if pooled is None else grad_means_of(job, q, mean_k, mean_v, dout, stats, words)
    dk, dv = _run_grad_keys(job, q, k, v, dout, stats, far, words)
    return dq, dk, dv


def _run_grad_queries(job: "Job", q, k, v, mean_k, mean_v, dout, stats, words) -> Tensor:
    config = job.config("queries")
    dq = torch.empty(q.shape, dtype=job.result, device=q.device)
    lists, counts = query_lists(words, job.columns)
    _grad_queries[job.query_grid(config)](
        *job.views((q, config.m), (k, config.n), (v, config.n), (mean_k, config.n), (mean_v, config.n)),
        *job.views((dout, config.m), (dq, config.m)), *stats, lists, counts, hot_first(counts), words, job.pooled,
        job.scale, job.scale2, job.blocks(config), job.keys, job.rows, job.columns, job.width, job.heads, job.repeats,
        EVEN=job.even, POOL=job.pooled is not None, **job.constants(config),
    )  # fmt: skip
    return dq


def _run_grad_keys(job: "Job", q, k, v, dout, stats, far, words) -> tuple[Tensor, Tensor]:
    config = job.config("keys")
    dk, dv = (torch.empty(k.shape, dtype=job.result, device=k.device) for _ in range(2))
    lists, counts = key_lists(words, job.columns)
    wanted = counts if job.repeats == 1 else counts.unflatten(1, (job.groups, job.repeats)).sum(2, dtype=torch.int32)
    _grad_keys[(job.columns * (job.kv_tile // config.n), job.batch * job.groups)](
        *job.views((q, config.m), (k, config.n), (v, config.n), (dout, config.m), (dk, config.n), (dv, config.n)),
        *stats, lists, counts, hot_first(wanted), *far[:2], job.scale, job.scale2, job.blocks(config), job.keys,
        job.rows, job.columns, job.heads, job.groups, far[2],
        REP=job.repeats, POOL=job.pooled is not None, **job.constants(config),
    )  # fmt: skip
    return dk, dv


def grad_means_of(job: "Job", q, mean_k, mean_v, dout, stats, words) -> tuple[Tensor, Tensor, int]:
    """Partial sums (B * G, splits, N, D) over `splits` runs of query tiles; their number depends on shapes only."""
    config = job.config("keys")
    tiles, groups = triton.cdiv(job.columns, config.n), job.batch * job.groups
    splits = max(1, min(job.rows, triton.cdiv(1024, tiles * groups)))
    shape = (groups, splits, job.columns, job.dim)
    far_k, far_v = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    _grad_means[(tiles, groups, splits)](
        *job.views((q, config.m), (mean_k, config.n), (mean_v, config.n), (dout, config.m)), *stats,
        far_k, far_v, words, job.pooled, job.scale2, job.blocks(config), job.keys, job.rows, job.columns, job.width,
        job.heads, job.groups, splits, triton.cdiv(job.rows, splits),
        REP=job.repeats, EVEN=job.even, **job.constants(config),
    )  # fmt: skip
    return far_k, far_v, splits


class Job:
    """Sizes shared by the kernels of one call, and views of its tensors for them."""

    def __init__(self, q: Tensor, k: Tensor, words: Tensor, query_tile: int, kv_tile: int, scale: float, pooled, dtype):
        self.batch, self.tokens, self.heads, self.dim = q.shape
        self.keys, self.groups = k.shape[1], k.shape[2]
        self.repeats = self.heads // self.groups
        self.rows, self.width = words.shape[2:]
        self.columns = triton.cdiv(self.keys, kv_tile)
        self.query_tile, self.kv_tile, self.pooled = query_tile, kv_tile, pooled
        self.dtype, self.result = q.dtype, dtype or q.dtype
        self.scale, self.scale2 = scale, scale * LOG2E
        self.even = self.keys % kv_tile == 0
        self.capability, self.memory = ((9, 0), 1 << 20) if INTERPRETED else _card(q.device)
        self.tma = _has_tma(self.capability)

    def config(self, kernel: str, query_tile: int | None = None) -> Config:
        """query_tile: take the configuration for query tiles of this size instead of the job's."""
        return _config(kernel, self.dtype, self.dim, query_tile or self.query_tile, self.capability, self.memory)

    def constants(self, config: Config) -> dict:
        return {
            "DIM": self.dim, "D": triton.next_power_of_2(self.dim), "BM": config.m, "BN": config.n,
            "QUERY_TILE": self.query_tile, "TILE": self.kv_tile, "TMA": self.tma, "UPCAST": INTERPRETED,
            "num_warps": config.warps, "num_stages": config.stages,
        }  # fmt: skip

    def query_grid(self, config: Config) -> tuple[int, int]:
        return self.rows * (self.query_tile // config.m), self.batch * self.heads

    def blocks(self, config: Config) -> int:
        """Blocks of `config.m` rows that the row statistics of one head hold."""
        return self.rows * self.query_tile // config.m

    def means(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Tile means of k and v; k and v themselves where no head is pooled, since kernels then read neither."""
        return (k, v) if self.pooled is None else (tile_means(k, self.kv_tile), tile_means(v, self.kv_tile))

    def views(self, *pairs: tuple[Tensor, int]) -> list:
        """Of each (tensor (B, S, H, D), rows a block): what `load_rows` and `store_rows` take."""
        if self.tma:
            return [_descriptor(x, rows, triton.next_power_of_2(self.dim)) for x, rows in pairs]
        rows_first = [x if x.stride(3) == 1 else x.contiguous() for x, _ in pairs]
        return [(x, x.stride(0), x.stride(2), x.stride(1), x.shape[1]) for x in rows_first]


def _descriptor(x: Tensor, rows: int, dim: int) -> TensorDescriptor:
    """Descriptor over (B, H, S, D) of x (B, S, H, D), in blocks of `rows` tokens of one head.

    Copies x where the copy engine cannot read it: it wants addresses in multiples of 16 bytes.
    """
    steps = [stride * x.element_size() for stride in x.stride()[:3]]
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(step % 16 or step <= 0 for step in steps):
        x = x.contiguous()
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, dim])


def _has_tma(capability: tuple[int, int]) -> bool:
    """Whether tiles go through the copy engine. Consumer Blackwell has one too, but spills registers with it."""
    return (9, 0) <= capability < (12, 0)


@cache
def _card(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, and bytes of shared memory a block may have."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.shared_memory_per_block_optin


@cache
def _config(
    kernel: str, dtype: torch.dtype, dim: int, query_tile: int, capability: tuple[int, int], memory: int
) -> Config:
    """The configuration for a card; ValueError where none of ours fits its shared memory."""
    if dtype == torch.float32:
        return FLOAT32
    size = max(64, triton.next_power_of_2(dim))
    if _has_tma(capability):
        return (HOPPER if capability < (10, 0) else BLACKWELL)[kernel][size, query_tile if kernel != "keys" else 64]
    table = AMPERE if memory >= LARGE else CONSUMER
    if size not in table[kernel]:
        raise ValueError(
            f"head dim {dim} does not fit the {memory} bytes of shared memory of this card (compute capability "
            f"{capability}); use backend 'torch'"
        )
    return table[kernel][size]
