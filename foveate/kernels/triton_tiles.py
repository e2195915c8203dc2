"""What a Triton program does with one block of an attention: load and store rows, multiply, one step of the softmax;
and the pooled periphery of a block of queries, whose keys and values are the means of the tiles that it does not keep.

Inlined into the kernels of `triton_sparse` and `triton_periphery`.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, N key tiles, W = ceil(N / 32) bitmap words. On
chip: BM query rows, BN key rows or tile means. Logits are in base 2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(X, b, h, start, ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """(ROWS, D) of one head, zeros past the ends. X: descriptor over (B, H, S, D), or (pointer, strides b h s, S)."""
    if TMA:
        x = X.load([b, h, start, 0]).reshape(ROWS, D)
    else:
        row = start + tl.arange(0, ROWS)
        dim = tl.arange(0, D)
        head = X[0] + b.to(tl.int64) * X[1] + h.to(tl.int64) * X[2]
        at = head + row.to(tl.int64)[:, None] * X[3] + dim[None, :]
        if DIM == D:
            x = tl.load(at, mask=(row < X[4])[:, None], other=0.0)
        else:
            x = tl.load(at, mask=(row < X[4])[:, None] & (dim < DIM)[None, :], other=0.0)
    return x


@triton.jit
def store_rows(X, value, b, h, start, ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """Store (ROWS, D) where `load_rows` would read it, nothing past the ends."""
    if TMA:
        X.store([b, h, start, 0], value.to(X.dtype).reshape(1, 1, ROWS, D))
    else:
        row = start + tl.arange(0, ROWS)
        dim = tl.arange(0, D)
        head = X[0] + b.to(tl.int64) * X[1] + h.to(tl.int64) * X[2]
        at = head + row.to(tl.int64)[:, None] * X[3] + dim[None, :]
        tl.store(at, value.to(X[0].dtype.element_ty), mask=(row < X[4])[:, None] & (dim < DIM)[None, :])


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:  # Triton's interpreter multiplies bfloat16 wrongly
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def kept_words(words, first, N, W):
    """The two bitmap words from tile `first` on, as scalars; bits past the last tile are set, as if it were kept."""
    at = first // 32
    low = tl.load(words + at, mask=at < W, other=-1)
    high = tl.load(words + at + 1, mask=at + 1 < W, other=-1)
    room = N - at * 32
    low = tl.where(room < 32, low | (-1 << tl.minimum(tl.maximum(room, 0), 31)), low)
    high = tl.where(room < 64, high | (-1 << tl.minimum(tl.maximum(room - 32, 0), 31)), high)
    return low, high


@triton.jit
def far_bias(low, high, first, N, keys, weight2, BN: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr):
    """Of each of BN tile means from `first` on: log2 of its tokens plus the head's constant, -inf where it is kept."""
    place = first % 32 + tl.arange(0, BN)
    far = (tl.where(place < 32, low, high) >> (place % 32)) & 1 == 0
    size = tl.full([BN], TILE, tl.float32)
    if not EVEN:
        size = tl.where(first + tl.arange(0, BN) == N - 1, (keys - (N - 1) * TILE).to(tl.float32), size)
    return tl.where(far, tl.log2(size) + weight2, -float("inf"))


@triton.jit
def periphery(POOLED, h, N):
    """A head's constant in base 2, and its number of tile means: none where the constant is -inf."""
    weight = tl.load(POOLED + h)
    return weight * LOG2E, tl.where(weight == -float("inf"), 0, N)


@triton.jit
def softmax_step(s, acc, top, total):
    """One step of the online softmax over logits s (m, n), some of them -inf: weights, and the rescaled sums so far."""
    peak = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(peak == -float("inf"), 0.0, peak)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    return p, acc * shrink[:, None], peak, total * shrink + tl.sum(p, 1)


@triton.jit
def far_forward(
    q, acc, top, total, MEAN_K, MEAN_V, words, POOLED, b, h, g, scale2, keys, N, W, DIM: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The online softmax of queries q, so far (acc, top, total), goes on over the means of the tiles not in `words`."""
    weight2, means = periphery(POOLED, h, N)
    low, high = kept_words(words, 0, N, W)
    for first in tl.range(0, means, BN):
        s = dot(q, load_rows(MEAN_K, b, g, first, BN, DIM, D, TMA).T, None, UPCAST)
        s = s * scale2 + far_bias(low, high, first, N, keys, weight2, BN, TILE, EVEN)[None, :]
        low, high = kept_words(words, first + BN, N, W)
        p, acc, top, total = softmax_step(s, acc, top, total)
        v = load_rows(MEAN_V, b, g, first, BN, DIM, D, TMA)
        acc = dot(p.to(v.dtype), v, acc, UPCAST)
    return acc, top, total


@triton.jit
def far_queries(
    q, dout, lse, delta, dq, MEAN_K, MEAN_V, words, POOLED, b, h, g, scale2, keys, N, W, DIM: tl.constexpr,
    D: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dq, unscaled, with what the means of the tiles not in `words` add to it."""
    weight2, means = periphery(POOLED, h, N)
    low, high = kept_words(words, 0, N, W)
    for first in tl.range(0, means, BN):
        bias = far_bias(low, high, first, N, keys, weight2, BN, TILE, EVEN)
        low, high = kept_words(words, first + BN, N, W)
        k = load_rows(MEAN_K, b, g, first, BN, DIM, D, TMA)
        v = load_rows(MEAN_V, b, g, first, BN, DIM, D, TMA)
        p = tl.exp2(dot(q, k.T, None, UPCAST) * scale2 + (bias[None, :] - lse[:, None]))
        ds = p * (dot(dout, v.T, None, UPCAST) - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq, UPCAST)
    return dq


@triton.jit
def far_share(FAR, group, SPLITS, N, tile, size, DIM: tl.constexpr, D: tl.constexpr):
    """float32 (D,): what each of the `size` tokens of a tile gets of its mean's gradient, summed over the SPLITS."""
    dim = tl.arange(0, D)
    total = tl.zeros([D], tl.float32)
    for split in range(SPLITS):
        at = ((group.to(tl.int64) * SPLITS + split) * N + tile) * DIM + dim
        total += tl.load(FAR + at, mask=dim < DIM, other=0.0)
    return total / size
