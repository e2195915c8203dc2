"""Selection for NVIDIA GPUs, fused: `predict_words` and `select_octants` of `select.py`, same signatures and results.

Two launches. `_octants` averages octants and projects them (reads q and k once). `_select` works through blocks of
query octants: scores against all key octants, exponentials, sums per key tile; then, in the same program, normalises
them, averages over the query tile and keeps the best, and writes the bitmap. One exponential for each pair of octants,
no S x S tensor, no size that depends on data, no wait for the host.

Sums per octant and tile go to a strip of bf16 for every resident program, reused, mostly in L2: they are normalised and
averaged when they are read back. bf16 spans 2^+-126, so exponents may count from any logit near the row's largest.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, r rank, O octants, R query tiles, N key tiles,
M octants of a program's queries, C octants of a block of keys, T tiles of a block, J blocks (up to a power of two),
Z query tiles selected together.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# (pyright takes launches of Triton kernels for calls of the functions they are written as)

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.select import OCTANT, REACHED, exactly_one

QUERIES = 64  # M
KEYS = 128  # C
MEANS = 32  # octants averaged by a program
MEANS_WARPS = 4
REACH = tl.constexpr(REACHED)
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
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _zero(x, INTERPRET: tl.constexpr):
    """0, but the compiler does not know: what adds it is computed where used, not kept in registers over loops."""
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
    where = out + row[:, None] * RANK2 + ranks[None, :]
    tl.store(where, values.to(out.dtype.element_ty), mask=(octants < octants_out)[:, None])


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
def _scores(q, keys, block, C: tl.constexpr, R2: tl.constexpr, INTERPRET: tl.constexpr):
    """Logits (M, C) of a program's query octants against a block of keys, in powers of 2."""
    ranks, columns = tl.arange(0, R2), tl.arange(0, C)
    k = tl.load(keys + (block * C + columns).to(tl.int64)[None, :] * R2 + ranks[:, None])
    return tl.dot(q.to(tl.float32), k.to(tl.float32)) if INTERPRET else tl.dot(q, k)


@triton.jit
def _peak(
    q, keys, stop, tokens,
    M: tl.constexpr, C: tl.constexpr, OT: tl.constexpr, R2: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The largest logit (M,) of the first `stop` blocks of keys."""
    peak = tl.full([M], -float("inf"), tl.float32)
    for block in range(stop):
        exists = _sizes(block + _zero(block, INTERPRET), tokens, C, OT) > 0
        scores = _scores(q, keys, block, C, R2, INTERPRET)
        peak = tl.maximum(peak, tl.max(tl.where(exists[None, :], scores, -float("inf")), 1))
    return peak


@triton.jit
def _sum_block(
    scores, peak, strip, block, stride, tokens,
    MASK: tl.constexpr, M: tl.constexpr, C: tl.constexpr, OT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sums (M, T) of 2^(logit - peak) over the tiles of a block of keys, as written to the program's strip.

    With MASK octants weigh as many eighths as they have tokens; else all are whole.
    """
    T: tl.constexpr = C // OT
    shares = _exp2(scores - peak[:, None], INTERPRET)
    if MASK:
        sizes = _sizes(block + _zero(block, INTERPRET), tokens, C, OT)[None, :]
        shares = tl.where(sizes > 0, shares * (sizes / 8), 0.0)
    by_tile = tl.sum(tl.sum(tl.reshape(shares, [M, T // 4, OT // 2, 4, 2]), 4), 2)
    sums = tl.reshape(tl.permute(by_tile, 0, 2, 1), [M, T])
    rows, tiles = tl.arange(0, M), tl.arange(0, T)
    sums = sums.to(tl.bfloat16)
    tl.store(strip + rows[:, None] * stride + (block * T + tiles)[None, :], sums)
    return sums.to(tl.float32)  # totals are of what is stored, so that masses sum to 1


@triton.jit
def _total(x):
    """Sum of each row: (Z, J, T) -> (Z,)."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _totals(a, b, c, INTERPRET: tl.constexpr):
    """Three `_total`s in one exchange between threads."""
    if INTERPRET:
        return _total(a), _total(b), _total(c)
    else:
        return tl.reduce(tl.reduce((a, b, c), 2, _add3), 1, _add3)


@triton.jit
def _first_of_equals(bits, low, places, weights, need, PLACES: tl.constexpr):
    """Bits with -1 for those tiles equal to `low` that come after enough of them: lower places first."""
    equal = bits == low[:, None, None]
    rest = need - _total(tl.where(bits > low[:, None, None], weights, 0.0))
    less, stop = tl.zeros_like(low), tl.zeros_like(low) + (1 << PLACES)
    for _ in range(PLACES):
        middle = (less + stop) // 2
        enough = _total(tl.where(equal & (places < middle[:, None, None]), weights, 0.0)) >= rest
        less, stop = tl.where(enough, less, middle), tl.where(enough, middle, stop)
    return tl.where(equal & (places >= stop[:, None, None]), -1, bits)


@triton.jit
def _weights_from(bits, least, weights):
    """The weights of tiles of at least so many bits, 0 for others."""
    return tl.where(bits >= least[:, None, None], weights, 0.0)


@triton.jit
def _best(bits, places, mass, need, BY_MASS: tl.constexpr, PLACES: tl.constexpr, INTERPRET: tl.constexpr):
    """bool (Z, J, T): the tiles of most bits, as many as it takes until their weight, mass or 1, reaches `need` (Z,).

    Bits of masses order as masses do, all being positive and below 2. The smallest kept is found two bits at a time,
    until the weight is met exactly or no bit is left; then the first of those equal to it are taken.
    """
    weights = mass if BY_MASS else tl.full(mass.shape, 1.0, tl.float32)
    low, reached, step = tl.zeros_like(need).to(tl.int32), need + 1, 1 << 28
    for _ in range(15):
        if tl.max(reached - need) > 0:
            a = _weights_from(bits, low + step, weights)
            b = _weights_from(bits, low + 2 * step, weights)
            c = _weights_from(bits, low + 3 * step, weights)
            a, b, c = _totals(a, b, c, INTERPRET)
            above = tl.where(c >= need, 3, tl.where(b >= need, 2, tl.where(a >= need, 1, 0)))
            now = tl.where(c >= need, c, tl.where(b >= need, b, tl.where(a >= need, a, reached)))
            low, reached = tl.where(reached > need, low + step * above, low), tl.where(reached > need, now, reached)
        step = step // 4
    if BY_MASS:
        low = tl.maximum(low, 1)  # a tile of no mass cannot help
        ties = tl.max(_total(tl.where(bits == low[:, None, None], 1.0, 0.0))) > 1
    else:
        ties = tl.max(reached - need) > 0
    if ties:
        bits = _first_of_equals(bits, low, places, weights, need, PLACES)
    return bits >= low[:, None, None]


@triton.jit
def _finish(
    strip, norms, words, goal, rows, begin, blocks, columns, video, tokens, stop, width,
    BY_MASS: tl.constexpr, T: tl.constexpr, OT: tl.constexpr, QO: tl.constexpr, Z: tl.constexpr, J: tl.constexpr,
    PLACES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Bitmaps of Z query tiles, the first of them from token `begin`, from their octants' strips."""
    zero = _zero(blocks, INTERPRET)
    z, j = (zero + tl.arange(0, Z))[:, None, None], (zero + tl.arange(0, J))[None, :, None]
    t = (zero + tl.arange(0, T))[None, None, :]
    places = j * T + t
    mass = tl.zeros([Z, J, T], tl.float32)
    begin = begin + z * (QO * 8)
    for i in tl.range(0, QO, loop_unroll_factor=4):
        octant = z * QO + i
        weight = tl.where(begin + i * 8 < stop, tl.load(norms + octant), 0.0)
        sums = tl.load(strip + octant * (blocks * T) + places, mask=(places < blocks * T) & (z >= 0), other=0.0)
        mass += sums.to(tl.float32) * weight
    octants = tl.minimum(tl.maximum((stop - begin + 7) // 8, 1), QO)
    mass /= octants.to(tl.float32)
    # Kept in any case, as if of mass 2: tiles from `text` on (0 for a query tile with text), own ones from `left` on.
    text = tl.where(tl.minimum(begin + QO * 8, stop) > video, 0, video // (OT * 8))
    text = tl.where(video < tokens, text, columns)
    left, right = begin // (OT * 8), (begin + QO * 8 + OT * 8 - 1) // (OT * 8)
    bits = tl.where((places < text) & ((places < left) | (places >= right)), mass.to(tl.int32, bitcast=True), 1 << 30)
    bits = tl.where(places < columns, bits, -1)
    kept = _best(bits, places, mass, tl.zeros([Z], tl.float32) + goal, BY_MASS, PLACES, INTERPRET)
    packed = tl.sum(kept.to(tl.int32) << t, 2)
    row, place = zero + tl.arange(0, Z)[:, None], zero + tl.arange(0, J)[None, :]
    tl.store(words + row * width + place, packed.to(words.dtype.element_ty), mask=(row < rows) & (place < width))


@triton.jit
def _select(
    q, k, want, words, strips, norms, items, row_blocks, heads, q_octants, k_octants, rows, blocks,
    tokens, video, first, queries, width,
    BY_MASS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, OT: tl.constexpr, QO: tl.constexpr, R2: tl.constexpr,
    Z: tl.constexpr, J: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Each program works through row blocks: M query octants against all keys, then M / QO query tiles' bitmaps.

    words: its bits seen as integers of T bits, `width` a row. strips, norms: a part of them for each program.
    """
    T: tl.constexpr = C // OT
    program = tl.program_id(0)
    stride = blocks * T
    strip = strips + program.to(tl.int64) * M * stride
    norms += program * M
    octants, ranks = tl.arange(0, M), tl.arange(0, R2)
    whole = tokens // (8 * C)
    for item in range(program, items, tl.num_programs(0)):
        plane, start = (item // row_blocks).to(tl.int64), item % row_blocks * M
        tile = tl.load(q + (plane * q_octants + start + octants[:, None]) * R2 + ranks[None, :])
        keys = k + plane * k_octants * R2
        # Exponents count from the largest logit of the first block. Where later ones lie so far above it that a sum
        # overflows (by 70 in natural units), the largest of all is found first and the work repeated.
        seen, worst = 1, float("inf")
        total = tl.zeros([M], tl.float32)
        for _ in range(2):
            if worst > 1e30:
                peak = _peak(tile, keys, seen, tokens, M, C, OT, R2, INTERPRET)
                sums = tl.zeros([M, T], tl.float32)
                for block in tl.range(0, whole, num_stages=STAGES):
                    scores = _scores(tile, keys, block, C, R2, INTERPRET)
                    sums += _sum_block(scores, peak, strip, block, stride, tokens, False, M, C, OT, INTERPRET)
                if whole < blocks:
                    scores = _scores(tile, keys, whole, C, R2, INTERPRET)
                    sums += _sum_block(scores, peak, strip, whole, stride, tokens, True, M, C, OT, INTERPRET)
                total = tl.sum(sums, 1)
                seen, worst = blocks, tl.max(total)
        tl.store(norms + octants, 1.0 / total)
        tl.debug_barrier()
        goal = tl.load(want + plane % heads)
        columns = (tokens + OT * 8 - 1) // (OT * 8)
        if BY_MASS:
            goal *= REACH
        else:
            goal = tl.maximum(tl.floor(goal * columns.to(tl.float32) + 0.5), 1.0)
        for group in range(0, M // QO, Z):
            row = start // QO + group
            _finish(strip + group * QO * stride, norms + group * QO, words + (plane * rows + row) * width, goal,
                    rows - row, first + row * (QO * 8), blocks, columns, video, tokens, first + queries, width,
                    BY_MASS, T, OT, QO, Z, J, PLACES, INTERPRET)  # fmt: skip
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
    exactly_one(budget, mass_target)
    batch, tokens, heads, dim = q.shape
    rank = dim if a is None else a.shape[-1]
    padded = max(16, triton.next_power_of_2(rank))
    octants = -(-tokens // OCTANT)
    q_hat = q.new_empty(batch, heads, _up(octants, QUERIES), padded, dtype=OPERAND)
    k_hat = q.new_empty(batch, heads, _up(octants, KEYS), padded, dtype=OPERAND)
    grid = (heads * batch, k_hat.shape[2] // MEANS, 2)
    project = a is not None and b is not None
    a, b = (a.contiguous(), b.contiguous()) if a is not None and b is not None else (q, k)
    _octants[grid](
        q, k, a, b, q_hat, k_hat, scale * LOG2E, heads, heads // k.shape[2], tokens, q_hat.shape[2], k_hat.shape[2],
        *q.stride(), *k.stride(), dim, triton.next_power_of_2(dim), rank, padded, project,
        MEANS, KEYS, kv_tile // OCTANT, num_warps=MEANS_WARPS,
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
    exactly_one(budget, mass_target)
    q_hat = _packed(q_oct * (scale * LOG2E), QUERIES)
    k_hat = _packed(k_oct, KEYS)
    places = _columns(kv_tile // OCTANT, k_oct.device)
    k_hat = k_hat.unflatten(2, (-1, KEYS))[:, :, :, places].flatten(2, 3).contiguous()
    queries = tokens if queries is None else queries
    return _words(q_hat, k_hat, tokens, video, first, queries, query_tile, kv_tile, budget, mass_target)


@dataclass(frozen=True)
class Plan:
    """How the kernel is cut for a size: known before launch, the same whatever is kept."""

    blocks: int  # J: blocks of keys, a power of two
    together: int  # Z
    places: int  # bits of a tile's number
    resident: int  # programs to a multiprocessor


def plan(columns: int, rank: int, query_tile: int, kv_tile: int, architecture: int) -> Plan:
    """The plan for rows of `columns` key tiles, operands of `rank` and a card of compute capability 9.0 = 90."""
    tiles = KEYS * OCTANT // kv_tile
    blocks = triton.next_power_of_2(-(-columns // 32) * 32 // tiles)
    together = max(1, min(QUERIES * OCTANT // query_tile, HELD // (blocks * tiles)))
    # Programs that share a multiprocessor hide each other's latencies, as far as registers hold a row's masses. Other
    # cards than Hopper keep more of the matrix operands in registers.
    held = together * blocks * tiles
    resident = 4 if held <= 2048 and rank <= 32 else 3 if held <= 4096 and rank <= 64 else 2
    if architecture != 90:
        resident = 2
    return Plan(blocks, together, (blocks * tiles).bit_length() - 1, resident)


def _words(
    q_hat: Tensor, k_hat: Tensor, tokens: int, video: int | None, first: int, queries: int,
    query_tile: int, kv_tile: int, budget: Tensor | None, mass_target: Tensor | None,
) -> Tensor:  # fmt: skip
    batch, heads, q_octants, rank = q_hat.shape
    rows, columns = -(-queries // query_tile), -(-tokens // kv_tile)
    tiles, blocks = KEYS * OCTANT // kv_tile, k_hat.shape[2] // KEYS
    per_row = -(-columns // 32) * 32 // tiles
    words = torch.empty(batch, heads, rows, -(-columns // 32), dtype=torch.int32, device=q_hat.device)
    how = plan(columns, rank, query_tile, kv_tile, _architecture(q_hat.device))
    row_blocks = q_octants // QUERIES
    items = batch * heads * row_blocks
    programs = min(items, how.resident * _multiprocessors(q_hat.device))
    strips = torch.empty(programs, QUERIES, blocks * tiles, dtype=torch.bfloat16, device=q_hat.device)
    norms = torch.empty(programs, QUERIES, device=q_hat.device)
    want = exactly_one(budget, mass_target)
    _select[(programs,)](
        q_hat, k_hat, want.float().contiguous(), words.view(torch.int16 if tiles == 16 else torch.int8),
        strips, norms, items, row_blocks, heads, q_octants, k_hat.shape[2], rows, blocks,
        tokens, tokens if video is None else video, first, queries, per_row,
        mass_target is not None, QUERIES, KEYS, kv_tile // OCTANT, query_tile // OCTANT, rank,
        how.together, how.blocks, how.places, STAGES, INTERPRET, num_warps=WARPS, maxnreg=512 // how.resident,
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
def _architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _up(count: int, block: int) -> int:
    return -(-count // block) * block
