"""What the Triton attention kernels need beside q, k, v: lists of kept tiles, row statistics, tile means.

Everything stays on the device and no size depends on the data: lists have room for every tile.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, R query tiles, N key tiles,
W = ceil(N / 32) bitmap words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["N", "W"])
def _query_lists(WORDS, LISTS, COUNTS, N, W, CHUNK: tl.constexpr):
    """One program a row of the bitmap: the columns of its set bits, ascending."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK * 32)
    count = 0
    for first in range(0, W, CHUNK):
        column = first * 32 + place
        word = tl.load(WORDS + row * W + column // 32, mask=column < N, other=0)
        kept = (word >> (place % 32)) & 1
        tl.store(LISTS + row * N + count + tl.cumsum(kept, 0) - 1, column.to(LISTS.dtype.element_ty), mask=kept != 0)
        count += tl.sum(kept, 0)
    tl.store(COUNTS + row, count)


def query_lists(words: Tensor, columns: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """words (B, H, R, W) -> the N `columns` kept by each row, flat (B * H * R * N + 8), and counts (B, H, R).

    Entries past a row's count are garbage. The spare ones let readers look one ahead. dtype: of entries, by default the
    smallest of int16 and int32 that holds them.
    """
    batch, heads, rows, width = words.shape
    lists = _room(batch * heads * rows * columns, columns, words.device, dtype)
    counts = torch.empty(batch, heads, rows, dtype=torch.int32, device=words.device)
    chunk = min(64, triton.next_power_of_2(width))
    _query_lists[(batch * heads * rows,)](words, lists, counts, columns, width, CHUNK=chunk)
    return lists, counts


@triton.jit(do_not_specialize=["R", "N", "W"])
def _key_lists(WORDS, LISTS, COUNTS, R, N, W, ROWS: tl.constexpr):
    """One program a word, that is 32 columns of the bitmap: the rows in which each column's bit is set, ascending."""
    head = tl.program_id(1).to(tl.int64)
    bit = tl.arange(0, 32)
    column = tl.program_id(0) * 32 + bit
    lists = LISTS + (head * N + column) * R
    count = tl.zeros([32], tl.int32)
    for first in range(0, R, ROWS):
        row = first + tl.arange(0, ROWS)
        word = tl.load(WORDS + (head * R + row) * W + tl.program_id(0), mask=row < R, other=0)
        kept = (word[:, None] >> bit[None, :]) & 1
        target = lists[None, :] + count[None, :] + tl.cumsum(kept, 0) - 1
        rows = tl.broadcast_to(row[:, None], [ROWS, 32]).to(LISTS.dtype.element_ty)
        tl.store(target, rows, mask=(kept != 0) & (column[None, :] < N))
        count += tl.sum(kept, 0)
    tl.store(COUNTS + head * N + column, count, mask=column < N)


def key_lists(words: Tensor, columns: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """words (B, H, R, W) -> the rows that keep each column, flat (B * H * N * R + 8), and counts (B, H, N)."""
    batch, heads, rows, width = words.shape
    lists = _room(batch * heads * columns * rows, rows, words.device, dtype)
    counts = torch.empty(batch, heads, columns, dtype=torch.int32, device=words.device)
    block = min(128, triton.next_power_of_2(rows))
    _key_lists[(width, batch * heads)](words, lists, counts, rows, columns, width, ROWS=block)
    return lists, counts


def _room(entries: int, numbers: int, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    smallest = torch.int16 if numbers < 2**15 else torch.int32
    return torch.empty(entries + 8, dtype=dtype or smallest, device=device)


@triton.jit(do_not_specialize=["n"])
def _hot_first(COUNTS, ORDER, n, BLOCK: tl.constexpr):
    """One program a row of counts: a stable counting sort into classes between powers of two, largest first."""
    row = tl.program_id(0).to(tl.int64) * n
    placed = 0
    for step in range(17):
        low = tl.where(step < 16, 1 << (16 - step), 0)
        high = tl.where(step > 0, 2 << (16 - step), 1 << 30)
        for first in range(0, n, BLOCK):
            at = first + tl.arange(0, BLOCK)
            count = tl.load(COUNTS + row + at, mask=at < n, other=-1)
            hit = (count >= low) & (count < high)
            place = placed + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(ORDER + row + place, at, mask=hit)
            placed += tl.sum(hit.to(tl.int32), 0)


def hot_first(counts: Tensor) -> Tensor:
    """The order in which to start work of size `counts` int32 (B, H, n): a permutation of the last axis, int32.

    A list eight times the mean that starts last would run alone. Order changes between powers of two only, so that
    neighbours, which want much the same tiles, still run together and share the cache.
    """
    order = torch.empty_like(counts)
    size = counts.shape[-1]
    block = min(2048, triton.next_power_of_2(size))
    _hot_first[(counts.numel() // size,)](counts, order, size, BLOCK=block, num_warps=8)
    return order


@triton.jit(do_not_specialize=["tokens", "room", "H"])
def _row_stats(
    DOUT, OUT, LSE, DLSE, LSE2, DELTA, tokens, room, H,
    db, ds, dh, ob, os, oh, lb, lh, ls, gb, gh, gs, HAS_DLSE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    real = row < tokens
    at = row.to(tl.int64)
    mask = real[:, None] & (dim[None, :] < DIM)
    dout = tl.load(DOUT + b * db + h * dh + at[:, None] * ds + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    out = tl.load(OUT + b * ob + h * oh + at[:, None] * os + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(dout * out, 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + b * gb + h * gh + at * gs, mask=real, other=0.0)
    lse = tl.load(LSE + b * lb + h * lh + at * ls, mask=real, other=-float("inf"))
    # exp2(s - inf) = 0: rows without keys and rows past the end weigh nothing, without a mask in the inner loops.
    lse2 = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
    place = head.to(tl.int64) * room + row
    tl.store(LSE2 + place, lse2, mask=row < room)
    tl.store(DELTA + place, delta, mask=row < room)


def row_stats(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """lse in base 2 and delta = sum(dout * out) - dlse, float32 (B * H, room), room >= S rows; inf and 0 past S."""
    batch, tokens, heads, dim = out.shape
    dout, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, out))
    lse2, delta = (torch.empty(batch * heads, room, dtype=torch.float32, device=out.device) for _ in range(2))
    slopes = lse if dlse is None else dlse
    _row_stats[(triton.cdiv(room, 32), batch * heads)](
        dout, out, lse, slopes, lse2, delta, tokens, room, heads,
        *dout.stride()[:3], *out.stride()[:3], lse.stride(0), lse.stride(1), lse.stride(2), *slopes.stride(),
        HAS_DLSE=dlse is not None, DIM=dim, D=triton.next_power_of_2(dim), ROWS=32,
    )  # fmt: skip
    return lse2, delta


@triton.jit(do_not_specialize=["tokens", "N", "G"])
def _tile_means(X, MEAN, tokens, N, G, xb, xs, xg, DIM: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tile * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, D)
    mask = (row[:, None] < tokens) & (dim[None, :] < DIM)
    at = X + (head // G) * xb + (head % G) * xg + row.to(tl.int64)[:, None] * xs + dim[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / tl.minimum(TILE, tokens - tile * TILE).to(tl.float32)
    tl.store(MEAN + (head * N + tile) * DIM + dim, mean.to(MEAN.dtype.element_ty), mask=dim < DIM)


def tile_means(x: Tensor, tile: int) -> Tensor:
    """Mean of each tile of x (B, S, G, D), in x's dtype, laid out (B, G, N, D) and returned as (B, N, G, D)."""
    batch, tokens, groups, dim = x.shape
    tiles = triton.cdiv(tokens, tile)
    x = x if x.stride(-1) == 1 else x.contiguous()
    means = torch.empty(batch, groups, tiles, dim, dtype=x.dtype, device=x.device)
    _tile_means[(tiles, batch * groups)](
        x, means, tokens, tiles, groups, *x.stride()[:3], DIM=dim, D=triton.next_power_of_2(dim), TILE=tile
    )
    return means.transpose(1, 2)
