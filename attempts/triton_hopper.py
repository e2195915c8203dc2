"""The kernels of `triton_sparse` again for Hopper (sm_90), written in Gluon to place every wait by hand.

Same work, same lists, same order of sums. What changes: key tiles are fetched while the tensor cores still work on the
last ones, and the softmax of one half runs while they multiply for the other.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, R query tiles, N key tiles of 64 tokens.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

TILE = gl.constexpr(64)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))


@gluon.jit
def _ring(DESC, STAGES: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    return gl.allocate_shared_memory(DESC.dtype, [STAGES, 1, 1, ROWS, D], DESC.layout)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def _expect(DESC, bars, slot, pred):
    mbarrier.expect(bars.index(slot), DESC.block_type.nbytes, pred)


@gluon.jit
def _copy(DESC, ring, bars, slot, b, h, at, pred):
    tma.async_copy_global_to_shared(DESC, [b, h, at, 0], bars.index(slot), ring.index(slot), pred)


@gluon.jit
def _fetch(DESC, ring, bars, slot, b, h, at, pred):
    _expect(DESC, bars, slot, pred)
    _copy(DESC, ring, bars, slot, b, h, at, pred)


@gluon.jit
def _grad_keys(
    Q, K, V, DOUT, DK, DV, LSE2, DELTA, LISTS, COUNTS, ORDER, FAR_K, FAR_V, scale, scale2, blocks, keys, R, N, H, G,
    SPLITS, DIM: gl.constexpr, D: gl.constexpr, QUERY_TILE: gl.constexpr, REP: gl.constexpr, POOL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    group = gl.program_id(1)
    b = group // G
    g = group % G
    QSUB: gl.constexpr = QUERY_TILE // TILE
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    tile = gl.load(ORDER + group * N + gl.program_id(0)).to(gl.int32)
    start = tile * TILE
    ks = _ring(K, 1, TILE, D)
    vs = _ring(V, 1, TILE, D)
    qs = _ring(Q, STAGES, TILE, D)
    gs = _ring(DOUT, STAGES, TILE, D)
    qbars = _barriers(STAGES)
    gbars = _barriers(STAGES)
    kbar = _barriers(1)
    vbar = _barriers(1)
    _fetch(K, ks, kbar, 0, b, g, start, True)
    _fetch(V, vs, vbar, 0, b, g, start, True)
    k = ks.index(0).reshape([TILE, D])
    v = vs.index(0).reshape([TILE, D])
    none = gl.zeros([TILE, TILE], gl.float32, scores)
    dk = gl.zeros([TILE, D], gl.float32, sums)
    dv = gl.zeros([TILE, D], gl.float32, sums)
    place = gl.arange(0, TILE, gl.SliceLayout(0, scores))
    mbarrier.wait(kbar.index(0), 0)
    mbarrier.wait(vbar.index(0), 0)
    c = 0
    for rep in gl.static_range(REP):
        h = g * REP + rep
        head = b * H + h
        column = head.to(gl.int64) * N + tile
        listed = LISTS + column * R
        steps = gl.load(COUNTS + column) * QSUB
        for i in gl.static_range(STAGES - 1):
            first = (gl.load(listed + i // QSUB).to(gl.int32) * QSUB + i % QSUB) * TILE
            _fetch(Q, qs, qbars, (c + i) % STAGES, b, h, first, i < steps)
            _fetch(DOUT, gs, gbars, (c + i) % STAGES, b, h, first, i < steps)
        at = gl.load(listed).to(gl.int32) * QSUB
        ahead = gl.load(listed + (STAGES - 1) // QSUB).to(gl.int32)
        dk = warpgroup_mma_init(dk)
        dv = warpgroup_mma_init(dv)
        for i in range(steps):
            slot = c % STAGES
            phase = c // STAGES & 1
            stat = (head.to(gl.int64) * blocks + at) * TILE + place
            mbarrier.wait(qbars.index(slot), phase)
            mbarrier.wait(gbars.index(slot), phase)
            q = qs.index(slot).reshape([TILE, D])
            s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
            lse = gl.load(LSE2 + stat)
            dout = gs.index(slot).reshape([TILE, D])
            dp = warpgroup_mma(v, dout.permute((1, 0)), none, use_acc=False, is_async=True)
            nxt = i + STAGES - 1
            more = nxt < steps
            free = (c + STAGES - 1) % STAGES
            _expect(Q, qbars, free, more)
            _expect(DOUT, gbars, free, more)
            s, dk, dv = warpgroup_mma_wait(1, deps=[s, dk, dv])
            # Every warp is past the sums of the last step: its tiles may be overwritten.
            gl.thread_barrier()
            first = (ahead * QSUB + nxt % QSUB) * TILE
            _copy(Q, qs, qbars, free, b, h, first, more)
            _copy(DOUT, gs, gbars, free, b, h, first, more)
            delta = gl.load(DELTA + stat)
            p = gl.exp2(s * scale2 - gl.expand_dims(lse, 0))
            dv = warpgroup_mma(gl.convert_layout(p.to(Q.dtype), weights), dout, dv, is_async=True)
            at = gl.load(listed + (i + 1) // QSUB).to(gl.int32) * QSUB + (i + 1) % QSUB
            ahead = gl.load(listed + (nxt + 1) // QSUB).to(gl.int32)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = p * (dp - gl.expand_dims(delta, 0))
            dk = warpgroup_mma(gl.convert_layout(ds.to(Q.dtype), weights), q, dk, is_async=True)
            c += 1
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        gl.thread_barrier()
    if POOL:
        dim = gl.arange(0, D, gl.SliceLayout(0, sums))
        far_k = gl.zeros([D], gl.float32, gl.SliceLayout(0, sums))
        far_v = gl.zeros([D], gl.float32, gl.SliceLayout(0, sums))
        for split in range(SPLITS):
            at_far = ((group.to(gl.int64) * SPLITS + split) * N + tile) * DIM + dim
            far_k += gl.load(FAR_K + at_far, mask=dim < DIM, other=0.0)
            far_v += gl.load(FAR_V + at_far, mask=dim < DIM, other=0.0)
        size = gl.minimum(TILE, keys - start).to(gl.float32)
        dk += gl.expand_dims(far_k / size, 0)
        dv += gl.expand_dims(far_v / size, 0)
    k.store((dk * scale).to(DK.dtype))
    v.store(dv.to(DV.dtype))
    gl.thread_barrier()
    fence_async_shared()
    tma.async_copy_shared_to_global(DK, [b, g, start, 0], ks.index(0))
    tma.async_copy_shared_to_global(DV, [b, g, start, 0], vs.index(0))
    tma.store_wait(pendings=0)


@gluon.jit
def _bias(words, first, N, keys, SHORT: gl.constexpr, LAYOUT: gl.constexpr):
    """What is added to the logits of TILE columns, base 2. SHORT: 0 for the keys of the last tile that exist.
    Otherwise for tile means: log2 of the tokens behind each. -inf for columns that take no part."""
    column = first + gl.arange(0, TILE, LAYOUT)
    if SHORT:
        return gl.where(column < keys, 0.0, -INF)
    word = gl.load(words + column // 32, mask=column < N, other=-1)
    size = gl.minimum(TILE, keys - column * TILE).to(gl.float32)
    far = ((word >> (column % 32)) & 1 == 0) & (column < N)
    return gl.where(far, gl.log2(gl.maximum(size, 1.0)), -INF)


@gluon.jit
def _position(listed, i, N, KIND: gl.constexpr):
    """First row of the i-th key tile to visit: KIND 0 of the list, 1 the short last tile, 2 all tile means."""
    if KIND == 0:
        return gl.load(listed + i).to(gl.int32) * TILE
    if KIND == 1:
        return (N - 1) * TILE + i * TILE
    return i * TILE


@gluon.jit
def _walk_grad_queries(
    K, V, ks, vs, kbars, vbars, q, dout, lse, delta, dq, c, listed, steps, b, g, words, N, keys, scale2,
    KIND: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr,
):  # fmt: skip
    none = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    for i in gl.static_range(STAGES - 1):
        at = _position(listed, i, N, KIND)
        _fetch(K, ks, kbars, (c + i) % STAGES, b, g, at, i < steps)
        _fetch(V, vs, vbars, (c + i) % STAGES, b, g, at, i < steps)
    ahead = _position(listed, STAGES - 1, N, KIND)
    dq = warpgroup_mma_init(dq)
    for i in range(steps):
        slot = c % STAGES
        phase = c // STAGES & 1
        mbarrier.wait(kbars.index(slot), phase)
        mbarrier.wait(vbars.index(slot), phase)
        k = ks.index(slot).reshape([TILE, D])
        s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
        v = vs.index(slot).reshape([TILE, D])
        dp = warpgroup_mma(dout, v.permute((1, 0)), none, use_acc=False, is_async=True)
        if KIND > 0:
            shift = gl.expand_dims(_bias(words, ahead_bias(i, N, KIND), N, keys, KIND == 1, gl.SliceLayout(0, SCORES)), 0)
            shift = shift - gl.expand_dims(lse, 1)
        else:
            shift = -gl.expand_dims(lse, 1)
        more = i + STAGES - 1 < steps
        free = (c + STAGES - 1) % STAGES
        _expect(K, kbars, free, more)
        _expect(V, vbars, free, more)
        s, dq = warpgroup_mma_wait(1, deps=[s, dq])
        gl.thread_barrier()
        _copy(K, ks, kbars, free, b, g, ahead, more)
        _copy(V, vs, vbars, free, b, g, ahead, more)
        ahead = _position(listed, i + STAGES, N, KIND)
        p = gl.exp2(s * scale2 + shift)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = p * (dp - gl.expand_dims(delta, 1))
        dq = warpgroup_mma(gl.convert_layout(ds.to(K.dtype), WEIGHTS), k, dq, is_async=True)
        c += 1
    dq = warpgroup_mma_wait(0, deps=[dq])
    gl.thread_barrier()
    return dq, c


@gluon.jit
def ahead_bias(i, N, KIND: gl.constexpr):
    if KIND == 1:
        return (N - 1) * TILE
    return i * TILE


@gluon.jit
def _grad_queries(
    Q, K, V, MEAN_K, MEAN_V, DOUT, DQ, LSE2, DELTA, LISTS, COUNTS, ORDER, WORDS, POOLED, scale, scale2, room, keys,
    R, N, W, H, REP,
    D: gl.constexpr, ROWS: gl.constexpr, QUERY_TILE: gl.constexpr, EVEN: gl.constexpr, POOL: gl.constexpr,
    STAGES: gl.constexpr, RS: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(1)
    b = head // H
    h = head % H
    g = h // REP
    QSUB: gl.constexpr = QUERY_TILE // ROWS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    r = gl.load(ORDER + head * R + gl.program_id(0) // QSUB).to(gl.int32)
    start = r * QUERY_TILE + gl.program_id(0) % QSUB * ROWS
    row = head.to(gl.int64) * R + r
    listed = LISTS + row * N
    count = gl.load(COUNTS + row)
    short = 0
    if not EVEN:
        short = ((count > 0) & (gl.load(listed + gl.maximum(count - 1, 0)) == N - 1)).to(gl.int32)
    qs = _ring(Q, 1, ROWS, D)
    ds_ = _ring(DOUT, 1, ROWS, D)
    ks = _ring(K, STAGES, TILE, D)
    vs = _ring(V, STAGES, TILE, D)
    kbars = _barriers(STAGES)
    vbars = _barriers(STAGES)
    own = _barriers(2)
    _fetch(Q, qs, own, 0, b, h, start, True)
    mbarrier.expect(own.index(1), DOUT.block_type.nbytes)
    tma.async_copy_global_to_shared(DOUT, [b, h, start, 0], own.index(1), ds_.index(0))
    stat = head.to(gl.int64) * room + start + gl.arange(0, ROWS, gl.SliceLayout(1, scores))
    lse = gl.load(LSE2 + stat)
    delta = gl.load(DELTA + stat)
    held: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    dq = gl.zeros([ROWS, D], gl.float32, sums)
    mbarrier.wait(own.index(0), 0)
    mbarrier.wait(own.index(1), 0)
    q = qs.index(0).reshape([ROWS, D])
    dout = ds_.index(0).reshape([ROWS, D])
    if RS:
        q = q.load(held)
        dout = dout.load(held)
    words = WORDS + row * W
    c = 0
    dq, c = _walk_grad_queries(
        K, V, ks, vs, kbars, vbars, q, dout, lse, delta, dq, c, listed, count - short, b, g, words, N, keys, scale2,
        0, STAGES, D, ROWS, scores, weights,
    )  # fmt: skip
    if not EVEN:
        dq, c = _walk_grad_queries(
            K, V, ks, vs, kbars, vbars, q, dout, lse, delta, dq, c, listed, short, b, g, words, N, keys, scale2,
            1, STAGES, D, ROWS, scores, weights,
        )  # fmt: skip
    if POOL:
        blocks = (N + TILE - 1) // TILE * gl.load(POOLED + h).to(gl.int32)
        dq, c = _walk_grad_queries(
            MEAN_K, MEAN_V, ks, vs, kbars, vbars, q, dout, lse, delta, dq, c, listed, blocks, b, g, words, N, keys, scale2,
            2, STAGES, D, ROWS, scores, weights,
        )  # fmt: skip
    qs.index(0).reshape([ROWS, D]).store((dq * scale).to(DQ.dtype))
    gl.thread_barrier()
    fence_async_shared()
    tma.async_copy_shared_to_global(DQ, [b, h, start, 0], qs.index(0))
    tma.store_wait(pendings=0)


@gluon.jit
def _softmax(s, top, total, bias, scale2, KIND: gl.constexpr):
    """One step of the online softmax over scores s (m, n): weights, new maximum and sum, factor for the old sums."""
    if KIND == 0:
        peak = gl.maximum(top, gl.max(s, 1) * scale2)
        safe = peak
        p = gl.exp2(s * scale2 - gl.expand_dims(safe, 1))
    else:
        s = s * scale2 + gl.expand_dims(bias, 0)
        peak = gl.maximum(top, gl.max(s, 1))
        safe = gl.where(peak == -INF, 0.0, peak)
        p = gl.exp2(s - gl.expand_dims(safe, 1))
    shrink = gl.exp2(top - safe)
    return p, peak, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _scaled(acc, factor, SUMS: gl.constexpr):
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, SUMS)), 1)


@gluon.jit
def _walk_forward(
    K, V, ks, vs, kbars, vbars, q, acc, top, total, c, listed, steps, b, g, words, N, keys, scale2,
    KIND: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, SCORES: gl.constexpr,
    SUMS: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    none = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    columns: gl.constexpr = gl.SliceLayout(0, SCORES)
    if steps > 0:
        for i in gl.static_range(STAGES):
            at = _position(listed, i, N, KIND)
            _fetch(K, ks, kbars, (c + i) % STAGES, b, g, at, i < steps)
            _fetch(V, vs, vbars, (c + i) % STAGES, b, g, at, i < steps)
        bias = _columns_bias(words, 0, N, keys, KIND, columns)
        mbarrier.wait(kbars.index(c % STAGES), c // STAGES & 1)
        k = ks.index(c % STAGES).reshape([TILE, D])
        s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        gl.thread_barrier()
        at = _position(listed, STAGES, N, KIND)
        _fetch(K, ks, kbars, c % STAGES, b, g, at, STAGES < steps)
        p, top, total, shrink = _softmax(s, top, total, bias, scale2, KIND)
        acc = _scaled(acc, shrink, SUMS)
        w = gl.convert_layout(p.to(K.dtype), WEIGHTS)
        for i in range(1, steps):
            # Scores of step i and sums of step i - 1 run together; the softmax waits for the scores only.
            bias = _columns_bias(words, i, N, keys, KIND, columns)
            k_at = _position(listed, i + STAGES, N, KIND)
            v_at = _position(listed, gl.maximum(i - 2, 0) + STAGES, N, KIND)
            slot = (c + 1) % STAGES
            mbarrier.wait(kbars.index(slot), (c + 1) // STAGES & 1)
            mbarrier.wait(vbars.index(c % STAGES), c // STAGES & 1)
            k = ks.index(slot).reshape([TILE, D])
            s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
            acc = warpgroup_mma(w, vs.index(c % STAGES).reshape([TILE, D]), acc, is_async=True)
            more_k = i + STAGES < steps
            more_v = (i > 1) & (i - 2 + STAGES < steps)
            old = (c + STAGES - 1) % STAGES
            _expect(V, vbars, old, more_v)
            s = warpgroup_mma_wait(1, deps=[s])
            _expect(K, kbars, slot, more_k)
            gl.thread_barrier()
            _copy(V, vs, vbars, old, b, g, v_at, more_v)
            _copy(K, ks, kbars, slot, b, g, k_at, more_k)
            p, top, total, shrink = _softmax(s, top, total, bias, scale2, KIND)
            acc = warpgroup_mma_wait(0, deps=[acc])
            acc = _scaled(acc, shrink, SUMS)
            w = gl.convert_layout(p.to(K.dtype), WEIGHTS)
            c += 1
        mbarrier.wait(vbars.index(c % STAGES), c // STAGES & 1)
        acc = warpgroup_mma(w, vs.index(c % STAGES).reshape([TILE, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        c += 1
    return acc, top, total, c


@gluon.jit
def _columns_bias(words, i, N, keys, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    if KIND == 0:
        return gl.zeros([TILE], gl.float32, LAYOUT)
    return _bias(words, ahead_bias(i, N, KIND), N, keys, KIND == 1, LAYOUT)


@gluon.jit
def _forward(
    Q, K, V, MEAN_K, MEAN_V, OUT, LSE, LISTS, COUNTS, ORDER, WORDS, POOLED, scale2, tokens, keys, R, N, W, H, REP,
    D: gl.constexpr, ROWS: gl.constexpr, QUERY_TILE: gl.constexpr, EVEN: gl.constexpr, POOL: gl.constexpr,
    STAGES: gl.constexpr, RS: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(1)
    b = head // H
    h = head % H
    g = h // REP
    QSUB: gl.constexpr = QUERY_TILE // ROWS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    r = gl.load(ORDER + head * R + gl.program_id(0) // QSUB).to(gl.int32)
    start = r * QUERY_TILE + gl.program_id(0) % QSUB * ROWS
    row = head.to(gl.int64) * R + r
    listed = LISTS + row * N
    count = gl.load(COUNTS + row)
    short = 0
    if not EVEN:
        short = ((count > 0) & (gl.load(listed + gl.maximum(count - 1, 0)) == N - 1)).to(gl.int32)
    qs = _ring(Q, 1, ROWS, D)
    ks = _ring(K, STAGES, TILE, D)
    vs = _ring(V, STAGES, TILE, D)
    kbars = _barriers(STAGES)
    vbars = _barriers(STAGES)
    own = _barriers(1)
    _fetch(Q, qs, own, 0, b, h, start, True)
    held: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    acc = gl.zeros([ROWS, D], gl.float32, sums)
    top = gl.full([ROWS], -INF, gl.float32, rows)
    total = gl.zeros([ROWS], gl.float32, rows)
    mbarrier.wait(own.index(0), 0)
    q = qs.index(0).reshape([ROWS, D])
    if RS:
        q = q.load(held)
    words = WORDS + row * W
    c = 0
    acc, top, total, c = _walk_forward(
        K, V, ks, vs, kbars, vbars, q, acc, top, total, c, listed, count - short, b, g, words, N, keys, scale2,
        0, STAGES, D, ROWS, scores, sums, weights,
    )  # fmt: skip
    if not EVEN:
        acc, top, total, c = _walk_forward(
            K, V, ks, vs, kbars, vbars, q, acc, top, total, c, listed, short, b, g, words, N, keys, scale2,
            1, STAGES, D, ROWS, scores, sums, weights,
        )  # fmt: skip
    if POOL:
        steps = (N + TILE - 1) // TILE * gl.load(POOLED + h).to(gl.int32)
        acc, top, total, c = _walk_forward(
            MEAN_K, MEAN_V, ks, vs, kbars, vbars, q, acc, top, total, c, listed, steps, b, g, words, N, keys, scale2,
            2, STAGES, D, ROWS, scores, sums, weights,
        )  # fmt: skip
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    qs.index(0).reshape([ROWS, D]).store(_scaled(acc, 1.0 / total, sums).to(OUT.dtype))
    gl.thread_barrier()
    fence_async_shared()
    tma.async_copy_shared_to_global(OUT, [b, h, start, 0], qs.index(0))
    at = start + gl.arange(0, ROWS, rows)
    lse = gl.where(empty, -INF, (top + gl.log2(total)) * LN2)
    gl.store(LSE + head.to(gl.int64) * tokens + at, lse, mask=at < tokens)
    tma.store_wait(pendings=0)


@gluon.jit
def _keys_producer(
    Q, DOUT, LSE2, DELTA, qs, gs, lses, deltas, full, free, LISTS, COUNTS, tile, b, g, R, N, H,
    QUERY_TILE: gl.constexpr, REP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    QSUB: gl.constexpr = QUERY_TILE // TILE
    c = 0
    for rep in gl.static_range(REP):
        h = g * REP + rep
        head = b * H + h
        column = head.to(gl.int64) * N + tile
        listed = LISTS + column * R
        steps = gl.load(COUNTS + column) * QSUB
        ahead = gl.load(listed).to(gl.int32)
        for i in range(steps):
            at = (ahead * QSUB + i % QSUB) * TILE
            ahead = gl.load(listed + (i + 1) // QSUB).to(gl.int32)
            slot = c % STAGES
            mbarrier.wait(free.index(slot), (c // STAGES & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, Q.block_type.nbytes + DOUT.block_type.nbytes + LSE2.block_type.nbytes * 2)
            tma.async_copy_global_to_shared(Q, [b, h, at, 0], bar, qs.index(slot))
            tma.async_copy_global_to_shared(DOUT, [b, h, at, 0], bar, gs.index(slot))
            tma.async_copy_global_to_shared(LSE2, [head, at], bar, lses.index(slot))
            tma.async_copy_global_to_shared(DELTA, [head, at], bar, deltas.index(slot))
            c += 1


@gluon.jit
def _keys_consumer(
    k, v, qs, gs, lses, deltas, full, free, COUNTS, tile, b, g, N, H, scale2,
    D: gl.constexpr, QUERY_TILE: gl.constexpr, REP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    QSUB: gl.constexpr = QUERY_TILE // TILE
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    columns: gl.constexpr = gl.SliceLayout(0, scores)
    none = gl.zeros([TILE, TILE], gl.float32, scores)
    dk = gl.zeros([TILE, D], gl.float32, sums)
    dv = gl.zeros([TILE, D], gl.float32, sums)
    c = 0
    for rep in gl.static_range(REP):
        column = (b * H + g * REP + rep).to(gl.int64) * N + tile
        steps = gl.load(COUNTS + column) * QSUB
        dk = warpgroup_mma_init(dk)
        dv = warpgroup_mma_init(dv)
        for i in range(steps):
            slot = c % STAGES
            mbarrier.wait(full.index(slot), c // STAGES & 1)
            q = qs.index(slot).reshape([TILE, D])
            dout = gs.index(slot).reshape([TILE, D])
            s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, dout.permute((1, 0)), none, use_acc=False, is_async=True)
            s, dk, dv = warpgroup_mma_wait(1, deps=[s, dk, dv])
            mbarrier.arrive(free.index((c + STAGES - 1) % STAGES), pred=c > 0)
            lse = lses.index(slot).reshape([TILE]).load(columns)
            p = gl.exp2(s * scale2 - gl.expand_dims(lse, 0))
            w = p.to(qs.dtype)
            dv = warpgroup_mma(gl.convert_layout(w, weights), dout, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            delta = deltas.index(slot).reshape([TILE]).load(columns)
            ds = w.to(gl.float32) * (dp - gl.expand_dims(delta, 0))
            dk = warpgroup_mma(gl.convert_layout(ds.to(qs.dtype), weights), q, dk, is_async=True)
            c += 1
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    return dk, dv


@gluon.jit
def _grad_keys_ws(
    Q, K, V, DOUT, DK, DV, LSE2, DELTA, LISTS, COUNTS, ORDER, FAR_K, FAR_V, scale, scale2, keys, R, N, H, G,
    SPLITS, DIM: gl.constexpr, D: gl.constexpr, QUERY_TILE: gl.constexpr, REP: gl.constexpr, POOL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    group = gl.program_id(1)
    b = group // G
    g = group % G
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    tile = gl.load(ORDER + group * N + gl.program_id(0)).to(gl.int32)
    start = tile * TILE
    ks = _ring(K, 1, TILE, D)
    vs = _ring(V, 1, TILE, D)
    qs = _ring(Q, STAGES, TILE, D)
    gs = _ring(DOUT, STAGES, TILE, D)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], LSE2.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], DELTA.layout)
    full = _barriers(STAGES)
    free = _barriers(STAGES)
    kbar = _barriers(1)
    vbar = _barriers(1)
    _fetch(K, ks, kbar, 0, b, g, start, True)
    _fetch(V, vs, vbar, 0, b, g, start, True)
    k = ks.index(0).reshape([TILE, D])
    v = vs.index(0).reshape([TILE, D])
    mbarrier.wait(kbar.index(0), 0)
    mbarrier.wait(vbar.index(0), 0)
    dk, dv = gl.warp_specialize(
        [
            (_keys_consumer, (k, v, qs, gs, lses, deltas, full, free, COUNTS, tile, b, g, N, H, scale2, D, QUERY_TILE, REP, STAGES)),
            (_keys_producer, (Q, DOUT, LSE2, DELTA, qs, gs, lses, deltas, full, free, LISTS, COUNTS, tile, b, g, R, N, H, QUERY_TILE, REP, STAGES)),
        ],
        worker_num_warps=[1], worker_num_regs=[24],
    )
    if POOL:
        dim = gl.arange(0, D, gl.SliceLayout(0, sums))
        far_k = gl.zeros([D], gl.float32, gl.SliceLayout(0, sums))
        far_v = gl.zeros([D], gl.float32, gl.SliceLayout(0, sums))
        for split in range(SPLITS):
            at_far = ((group.to(gl.int64) * SPLITS + split) * N + tile) * DIM + dim
            far_k += gl.load(FAR_K + at_far, mask=dim < DIM, other=0.0)
            far_v += gl.load(FAR_V + at_far, mask=dim < DIM, other=0.0)
        size = gl.minimum(TILE, keys - start).to(gl.float32)
        dk += gl.expand_dims(far_k / size, 0)
        dv += gl.expand_dims(far_v / size, 0)
    k.store((dk * scale).to(DK.dtype))
    v.store(dv.to(DV.dtype))
    gl.thread_barrier()
    fence_async_shared()
    tma.async_copy_shared_to_global(DK, [b, g, start, 0], ks.index(0))
    tma.async_copy_shared_to_global(DV, [b, g, start, 0], vs.index(0))
    tma.store_wait(pendings=0)
