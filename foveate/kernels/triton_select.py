"""Selection for NVIDIA GPUs, fused: `predict_words` and `select_octants` of `select.py`, same signatures and results.

Two launches. `_octants` averages octants and projects them (reads q and k once). `_select` works through blocks of
query octants: scores against all key octants, exponentials, sums per key tile; then, in the same program, normalises
them, averages over the query tile and keeps the best, and writes the bitmap. One exponential for each pair of octants,
no S x S tensor, no size that depends on data, no wait for the host.

The largest logit of a row is not known before its end, so sums are kept beside the maximum of their block of keys and
are put on one footing when they are read back: a strip of bf16 sums for every resident program, reused, in L2.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, r rank, O octants, R query tiles, N key tiles,
M octants of a program's queries, C octants of a block of keys, T = C / octants a tile tiles of a block, J blocks,
Z query tiles selected together.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.select import OCTANT, _exactly_one

QUERIES = 64  # M
KEYS = 128  # C
WARPS = 4
STAGES = 3
HELD = 2048  # masses of query tiles selected together: 16 registers a thread
OPERAND = torch.float16  # of projected octants: 11 bits of mantissa
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
LOG2E = 1.4426950408889634


@triton.jit
def _exp2(x, INTERPRET: tl.constexpr):
    # tl.exp2 rescales denormal results, three instructions more; here they may become zero.
    if INTERPRET:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _zero(x, INTERPRET: tl.constexpr):
    """0, but the compiler does not know: what adds it is computed where it is used, not kept in registers over loops."""
    if INTERPRET:
        return x * 0
    else:
        zero = tl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
        return tl.multiple_of(zero, 1024)


@triton.jit
def _place(octant, C: tl.constexpr, OT: tl.constexpr):
    """Where octant 0 ... C-1 of a block of keys is put among its columns.

    On the tensor cores' output, a thread holds columns 8j + 2c and 8j + 2c + 1 for one c in 0 ... 3 and all j. All
    octants of a tile go to one thread, and its tiles side by side: then tiles are summed without leaving the thread.
    """
    tile, inner = octant // OT, octant % OT
    tiles: tl.constexpr = C // OT // 4
    return ((tile % tiles) * (OT // 2) + inner // 2) * 8 + (tile // tiles) * 2 + inner % 2


@triton.jit
def _one_side(
    x, matrix, out, block, head, repeats, gain, tokens, octants_out, stride_b, stride_s, stride_h, stride_d,
    batch, heads, D: tl.constexpr, D2: tl.constexpr, RANK: tl.constexpr, RANK2: tl.constexpr, PROJECT: tl.constexpr,
    BO: tl.constexpr, C: tl.constexpr, OT: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    octants = block * BO + tl.arange(0, BO)
    dims = tl.arange(0, D2)
    base = x + batch.to(tl.int64) * stride_b + (head // repeats).to(tl.int64) * stride_h
    sums = tl.zeros([BO, D2], tl.float32)
    for i in tl.static_range(8):
        token = octants * 8 + i
        where = base + token.to(tl.int64)[:, None] * stride_s + dims[None, :] * stride_d
        sums += tl.load(where, mask=(token < tokens)[:, None] & (dims < D)[None, :], other=0.0).to(tl.float32)
    sizes = tl.minimum(tl.maximum(tokens - octants * 8, 1), 8).to(tl.float32)
    values = sums * (gain / sizes)[:, None]
    ranks = tl.arange(0, RANK2)
    if PROJECT:
        where = matrix + head * D * RANK + dims[:, None] * RANK + ranks[None, :]
        weights = tl.load(where, mask=(dims < D)[:, None] & (ranks < RANK)[None, :], other=0.0).to(tl.float32)
        values = tl.dot(values, weights, input_precision="tf32x3")
    values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    if PLACE:
        octants = octants // C * C + _place(octants % C, C, OT)
    row = (batch * heads + head).to(tl.int64) * octants_out + octants
    tl.store(out + row[:, None] * RANK2 + ranks[None, :], values.to(out.dtype.element_ty), mask=(octants < octants_out)[:, None])


@triton.jit
def _octants(
    q, k, a, b, q_out, k_out, gain, heads, repeats, tokens, q_octants, k_octants,
    q_sb, q_ss, q_sh, q_sd, k_sb, k_ss, k_sh, k_sd,
    D: tl.constexpr, D2: tl.constexpr, RANK: tl.constexpr, RANK2: tl.constexpr, PROJECT: tl.constexpr,
    BO: tl.constexpr, C: tl.constexpr, OT: tl.constexpr,
):  # fmt: skip
    """Projected octant means of queries (times gain) and keys (in the order of `_place`). Padding octants become 0."""
    head, batch, block = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.program_id(1)
    if tl.program_id(2) == 0:
        _one_side(q, a, q_out, block, head, 1, gain, tokens, q_octants, q_sb, q_ss, q_sh, q_sd, batch, heads,
                  D, D2, RANK, RANK2, PROJECT, BO, C, OT, False)  # fmt: skip
    else:
        _one_side(k, b, k_out, block, head, repeats, 1.0, tokens, k_octants, k_sb, k_ss, k_sh, k_sd, batch, heads,
                  D, D2, RANK, RANK2, PROJECT, BO, C, OT, True)  # fmt: skip


@triton.jit
def _sizes(block, tokens, C: tl.constexpr, OT: tl.constexpr):
    """float32 (C,): tokens in the octant at each column of a block of keys; the inverse of `_place`."""
    column = tl.arange(0, C)
    tiles: tl.constexpr = C // OT // 4
    j = column // 8
    octant = ((column % 8 // 2) * tiles + j // (OT // 2)) * OT + j % (OT // 2) * 2 + column % 2
    return tl.minimum(tl.maximum(tokens - (block * C + octant) * 8, 0), 8).to(tl.float32)


@triton.jit
def _score_block(
    q, keys, block, tokens, sums_out, sums_stride, maxima_out, maxima_stride, top, total,
    MASK: tl.constexpr, M: tl.constexpr, C: tl.constexpr, OT: tl.constexpr, R2: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block of keys: writes its sums per tile and their maxima; returns the rows' running maximum and total."""
    T: tl.constexpr = C // OT
    rows, ranks, columns = tl.arange(0, M), tl.arange(0, R2), tl.arange(0, C)
    k = tl.load(keys + (block * C + columns).to(tl.int64)[None, :] * R2 + ranks[:, None])
    scores = tl.dot(q.to(tl.float32), k.to(tl.float32)) if INTERPRET else tl.dot(q, k)
    if MASK:
        scores += tl.log2(_sizes(block + _zero(block, INTERPRET), tokens, C, OT))[None, :] - 3.0
    peak = tl.max(scores, 1)
    shares = _exp2(scores - peak[:, None], INTERPRET)
    by_tile = tl.sum(tl.sum(tl.reshape(shares, [M, T // 4, OT // 2, 4, 2]), 4), 2)
    sums = tl.reshape(tl.permute(by_tile, 0, 2, 1), [M, T])
    tl.store(sums_out + rows[:, None] * sums_stride + (block * T + tl.arange(0, T))[None, :], sums.to(tl.bfloat16))
    tl.store(maxima_out + rows * maxima_stride + block, peak)
    higher = tl.maximum(top, peak)
    total = total * _exp2(top - higher, INTERPRET) + tl.sum(sums, 1) * _exp2(peak - higher, INTERPRET)
    return higher, total


@triton.jit
def _weight(chosen, weights):
    """Summed weight of the chosen tiles of each row: chosen, weights (Z, J, T) -> (Z,)."""
    return tl.sum(tl.sum(tl.where(chosen, weights, 0.0), 2), 1)


@triton.jit
def _best(mass, forced, exists, places, want, BY_MASS: tl.constexpr, PLACES: tl.constexpr):
    """The tiles to keep, bool (Z, J, T): forced ones, then the largest masses until their weight reaches `want`.

    Weights are masses, or 1. Bisection on the bits of the smallest mass kept (they order as floats do, all being
    positive), then on the place up to which masses equal to it are kept.
    """
    weights = mass if BY_MASS else tl.full(mass.shape, 1.0, tl.float32)
    need = want - _weight(forced & exists, weights)
    bits = tl.where(exists & ~forced, mass.to(tl.int32, bitcast=True), -1)
    low = tl.zeros_like(need).to(tl.int32)
    high = low + (1 << 30)
    for _ in range(30):
        middle = (low + high) // 2
        enough = _weight(bits >= middle[:, None, None], weights) >= need
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    above = bits > low[:, None, None]
    equal = bits == low[:, None, None]
    rest = need - _weight(above, weights)
    less, stop = tl.zeros_like(low), tl.zeros_like(low) + (1 << PLACES)
    for _ in range(PLACES):
        middle = (less + stop) // 2
        enough = _weight(equal & (places < middle[:, None, None]), weights) >= rest
        less, stop = tl.where(enough, less, middle), tl.where(enough, middle, stop)
    return exists & (forced | above | (equal & (places < stop[:, None, None])))


@triton.jit
def _finish(
    sums, maxima, norms, words, goal, rows, begin, blocks, tokens, video, stop, width,
    BY_MASS: tl.constexpr, T: tl.constexpr, OT: tl.constexpr, QO: tl.constexpr, Z: tl.constexpr, J: tl.constexpr,
    PLACES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Bitmaps of Z query tiles, the first of them from token `begin`, from their octants' strips."""
    zero = _zero(blocks, INTERPRET)
    z, j = (zero + tl.arange(0, Z))[:, None, None], (zero + tl.arange(0, J))[None, :, None]
    t = (zero + tl.arange(0, T))[None, None, :]
    places = j * T + t
    begin = begin + z * (QO * 8)
    mass = tl.zeros([Z, J, T], tl.float32)
    for i in range(QO):
        octant = z * QO + i
        present = (j < blocks) & (begin + i * 8 < stop)
        peak = tl.load(maxima + octant * blocks + j, mask=present, other=-float("inf"))
        part = tl.load(sums + octant * (blocks * T) + places, mask=present & (t >= 0), other=0.0)
        mass += part.to(tl.float32) * _exp2(peak - tl.load(norms + octant), INTERPRET)
    octants = tl.minimum(tl.maximum((stop - begin + 7) // 8, 1), QO)
    mass /= octants.to(tl.float32)
    column = places * (OT * 8)
    own = (column < begin + QO * 8) & (column + OT * 8 > begin)
    text = (video < tokens) & ((column + OT * 8 > video) | (tl.minimum(begin + QO * 8, stop) > video))
    kept = _best(mass, own | text, (column < tokens) & (z >= 0), places, goal, BY_MASS, PLACES)
    packed = tl.sum(kept.to(tl.int32) << t, 2)
    row, place = zero + tl.arange(0, Z)[:, None], zero + tl.arange(0, J)[None, :]
    tl.store(words + row * width + place, packed.to(words.dtype.element_ty), mask=(row < rows) & (place < width))


@triton.jit
def _select(
    q, k, want, words, sums, maxima, norms, items, row_blocks, heads, q_octants, k_octants, rows, blocks,
    tokens, video, first, queries, width,
    BY_MASS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, OT: tl.constexpr, QO: tl.constexpr, R2: tl.constexpr,
    Z: tl.constexpr, J: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Each program works through row blocks: M query octants against all keys, then M / QO query tiles' bitmaps.

    words: its bits seen as integers of T bits, `width` a row. sums, maxima, norms: this program's own strips.
    """
    T: tl.constexpr = C // OT
    program = tl.program_id(0)
    sums_stride = blocks * T
    sums += program.to(tl.int64) * M * sums_stride
    maxima += program.to(tl.int64) * M * blocks
    norms += program * M
    octants, ranks = tl.arange(0, M), tl.arange(0, R2)
    whole = tokens // (8 * C)
    for item in range(program, items, tl.num_programs(0)):
        plane, start = (item // row_blocks).to(tl.int64), item % row_blocks * M
        queries_at = q + (plane * q_octants + start + octants[:, None]) * R2 + ranks[None, :]
        tile = tl.load(queries_at)
        keys = k + plane * k_octants * R2
        top, total = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
        for block in tl.range(0, whole, num_stages=STAGES):
            top, total = _score_block(tile, keys, block, tokens, sums, sums_stride, maxima, blocks, top, total,
                                      False, M, C, OT, R2, INTERPRET)  # fmt: skip
        if whole < blocks:
            top, total = _score_block(tile, keys, whole, tokens, sums, sums_stride, maxima, blocks, top, total,
                                      True, M, C, OT, R2, INTERPRET)  # fmt: skip
        tl.store(norms + octants, top + tl.log2(total))
        tl.debug_barrier()
        goal = tl.load(want + plane % heads)
        if not BY_MASS:
            goal = tl.maximum(tl.floor(goal * ((tokens + OT * 8 - 1) // (OT * 8)).to(tl.float32) + 0.5), 1.0)
        for group in range(0, M // QO, Z):
            row = start // QO + group
            _finish(sums + group * QO * sums_stride, maxima + group * QO * blocks, norms + group * QO,
                    words + (plane * rows + row) * width, goal, rows - row, first + row * (QO * 8), blocks,
                    tokens, video, first + queries, width, BY_MASS, T, OT, QO, Z, J, PLACES, INTERPRET)  # fmt: skip
        tl.debug_barrier()


def predict_words(
    q: Tensor,
    k: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    video: int | None = None,
    scale: float,
    query_tile: int = 64,
    kv_tile: int = 64,
    budget: Tensor | None = None,
    mass_target: Tensor | None = None,
) -> Tensor:
    """As `select.predict_words`, in two launches."""
    _exactly_one(budget, mass_target)
    batch, tokens, heads, dim = q.shape
    rank = dim if a is None else a.shape[-1]
    padded = max(16, triton.next_power_of_2(rank))
    octants = -(-tokens // OCTANT)
    q_hat = q.new_empty(batch, heads, _up(octants, QUERIES), padded, dtype=OPERAND)
    k_hat = q.new_empty(batch, heads, _up(octants, KEYS), padded, dtype=OPERAND)
    size = 32
    grid = (heads * batch, k_hat.shape[2] // size, 2)
    a, b = (q, k) if a is None else (a.contiguous(), b.contiguous())
    _octants[grid](
        q, k, a, b, q_hat, k_hat, scale * LOG2E, heads, heads // k.shape[2], tokens, q_hat.shape[2], k_hat.shape[2],
        *q.stride(), *k.stride(), dim, triton.next_power_of_2(dim), rank, padded, rank != dim or a is not q,
        size, KEYS, kv_tile // OCTANT, num_warps=4,
    )  # fmt: skip
    return _words(q_hat, k_hat, tokens, video, 0, tokens, query_tile, kv_tile, budget, mass_target)


def select_octants(
    q_oct: Tensor,
    k_oct: Tensor,
    *,
    tokens: int,
    video: int | None = None,
    first: int = 0,
    queries: int | None = None,
    scale: float,
    query_tile: int = 64,
    kv_tile: int = 64,
    budget: Tensor | None = None,
    mass_target: Tensor | None = None,
) -> Tensor:
    """As `select.select_octants`, in one launch and a few small ones that pack the octants."""
    _exactly_one(budget, mass_target)
    q_hat = _packed(q_oct * (scale * LOG2E), QUERIES)
    k_hat = _packed(k_oct, KEYS)
    k_hat = k_hat.unflatten(2, (-1, KEYS))[:, :, :, _columns(kv_tile // OCTANT, k_oct.device)].flatten(2, 3).contiguous()
    queries = tokens if queries is None else queries
    return _words(q_hat, k_hat, tokens, video, first, queries, query_tile, kv_tile, budget, mass_target)


def _words(
    q_hat: Tensor, k_hat: Tensor, tokens: int, video: int | None, first: int, queries: int,
    query_tile: int, kv_tile: int, budget: Tensor | None, mass_target: Tensor | None,
) -> Tensor:  # fmt: skip
    batch, heads, q_octants, rank = q_hat.shape
    rows, columns = -(-queries // query_tile), -(-tokens // kv_tile)
    tiles, blocks = KEYS * OCTANT // kv_tile, k_hat.shape[2] // KEYS
    words = torch.empty(batch, heads, rows, -(-columns // 32), dtype=torch.int32, device=q_hat.device)
    per_row = words.shape[-1] * 32 // tiles
    padded = triton.next_power_of_2(per_row)
    row_blocks = q_octants // QUERIES
    items = batch * heads * row_blocks
    # Four programs to a multiprocessor hide each other's latencies, if 128 registers a thread hold a row's masses.
    resident = 4 if max(padded * tiles, rank * 64) <= HELD else 3 if rank <= 64 else 2
    programs = min(items, resident * _multiprocessors(q_hat.device))
    strips = torch.empty(programs, QUERIES, blocks * tiles, dtype=torch.bfloat16, device=q_hat.device)
    maxima = torch.empty(programs, QUERIES, blocks, device=q_hat.device)
    norms = torch.empty(programs, QUERIES, device=q_hat.device)
    together = max(1, min(QUERIES * OCTANT // query_tile, HELD // (padded * tiles)))
    want = budget if mass_target is None else mass_target
    _select[(programs,)](
        q_hat, k_hat, want.float().contiguous(), words.view(torch.int16 if tiles == 16 else torch.int8),
        strips, maxima, norms, items, row_blocks, heads, q_octants, k_hat.shape[2], rows, blocks,
        tokens, tokens if video is None else video, first, queries, per_row,
        mass_target is not None, QUERIES, KEYS, kv_tile // OCTANT, query_tile // OCTANT, rank,
        together, padded, (padded * tiles).bit_length() - 1, STAGES, INTERPRET,
        num_warps=WARPS, maxnreg=512 // resident,
    )  # fmt: skip
    return words


def _packed(octants: Tensor, block: int) -> Tensor:
    """Octants (B, H, O, r) as the kernel wants them: whole blocks, whole powers of two of ranks, its dtype."""
    rank = max(16, triton.next_power_of_2(octants.shape[-1]))
    spare = (0, rank - octants.shape[-1], 0, -octants.shape[2] % block)
    return torch.nn.functional.pad(octants.clamp(-65504, 65504).to(OPERAND), spare)


@cache
def _columns(tile: int, device: torch.device) -> Tensor:
    """The octant at each column of a block of keys: the inverse of `_place`."""
    column = torch.arange(KEYS, device=device)
    tiles, j = KEYS // tile // 4, column // 8
    return ((column % 8 // 2) * tiles + j // (tile // 2)) * tile + j % (tile // 2) * 2 + column % 2


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _up(count: int, block: int) -> int:
    return -(-count // block) * block
