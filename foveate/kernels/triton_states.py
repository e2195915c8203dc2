"""Held states moved along their last change, and merged, in one pass each; torch makes four to ten of them.

Shapes: B batch, S tokens, H heads, D head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32


@triton.jit(do_not_specialize=["tokens", "heads", "clamp"])
def _extrapolate(
    OUT, OLD, LSE, OLD_LSE, AHEAD, TO, TO_LSE, tokens, heads, clamp, nb, ns, nh, ob, os, oh, lb, lh, pb, ph,
    WEIGHED: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program some tokens of a head. WEIGHED: there are log-sum-exps, and rows without a finite one stay."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < tokens
    ahead = tl.load(AHEAD + row, mask=real, other=0.0)
    if WEIGHED:
        lse = tl.load(LSE + batch * lb + head * lh + row, mask=real, other=0.0)
        change = lse - tl.load(OLD_LSE + batch * pb + head * ph + row, mask=real, other=0.0)
        known = tl.abs(change) < float("inf")  # false for NaN too, and for -inf on either side
        ahead = tl.where(known, ahead, 0.0)
        move = tl.where(known, tl.minimum(tl.maximum(ahead * change, -clamp), clamp), 0.0)
        tl.store(TO_LSE + (batch * heads + head) * tokens + row, lse + move, mask=real)
    row = row.to(tl.int64)[:, None]
    dim = tl.arange(0, D)[None, :]
    mask = real[:, None] & (dim < DIM)
    new = tl.load(OUT + batch * nb + row * ns + head * nh + dim, mask=mask, other=0.0).to(tl.float32)
    old = tl.load(OLD + batch * ob + row * os + head * oh + dim, mask=mask, other=0.0).to(tl.float32)
    moved = new + ahead[:, None] * (new - old)
    tl.store(TO + ((batch * tokens + row) * heads + head) * DIM + dim, moved.to(TO.dtype.element_ty), mask=mask)


def extrapolate(
    out: Tensor, old: Tensor, ahead: Tensor, lse: Tensor, old_lse: Tensor, clamp: float, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out + ahead * (out - old), for out, old (B, S, H, D) and float32 ahead (S,); float32 inside, `dtype` out.

    lse, old_lse: float32 (B, H, S). The lse moves likewise, by at most `clamp`; where either is not finite, both stay.
    """
    lse, old_lse = (x if x.stride(-1) == 1 else x.contiguous() for x in (lse, old_lse))
    moved_lse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    return _launch(out, old, ahead, (lse, old_lse, moved_lse), clamp, dtype), moved_lse


def extrapolate_out(out: Tensor, old: Tensor, ahead: Tensor, *, dtype: torch.dtype) -> Tensor:
    """As `extrapolate`, of outputs alone."""
    return _launch(out, old, ahead, None, 0.0, dtype)


def _launch(
    out: Tensor, old: Tensor, ahead: Tensor, lses: tuple[Tensor, Tensor, Tensor] | None, clamp: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    batch, tokens, heads, dim = out.shape
    out, old = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, old))
    moved = torch.empty(out.shape, dtype=dtype, device=out.device)
    lse, old_lse, moved_lse = lses or (None, None, None)
    steps = (0, 0, 0, 0) if lses is None else (*lses[0].stride()[:2], *lses[1].stride()[:2])
    _extrapolate[(triton.cdiv(tokens, ROWS), heads, batch)](
        out, old, lse, old_lse, ahead, moved, moved_lse, tokens, heads, clamp, *out.stride()[:3], *old.stride()[:3],
        *steps, WEIGHED=lses is not None, DIM=dim, D=triton.next_power_of_2(dim), ROWS=ROWS,
    )  # fmt: skip
    return moved


@triton.jit(do_not_specialize=["tokens", "heads"])
def _merge(
    OUTS, LSES, TO, tokens, heads, N: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """One program some tokens of a head. OUTS, LSES: N pointers each, contiguous (B, S, H, D) and (B, H, S)."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < tokens
    at = (batch * heads + head) * tokens + row
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for n in tl.static_range(N):
        top = tl.maximum(top, tl.load(LSES[n] + at, mask=real, other=0.0))
    infinite = tl.abs(top) == float("inf")
    dim = tl.arange(0, D)[None, :]
    place = ((batch * tokens + row[:, None]) * heads + head) * DIM + dim
    mask = real[:, None] & (dim < DIM)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, D], tl.float32)
    for n in tl.static_range(N):
        lse = tl.load(LSES[n] + at, mask=real, other=0.0)
        # Where the largest lse is infinite only states that reach +inf weigh; inf - inf would be NaN.
        equal = tl.where((lse == top) & (top > 0), 1.0, 0.0)
        weight = tl.where(infinite, equal, tl.exp(lse - tl.where(infinite, 0.0, top)))
        total += weight
        out += weight[:, None] * tl.load(OUTS[n] + place, mask=mask, other=0.0).to(tl.float32)
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(TO + place, out.to(TO.dtype.element_ty), mask=mask)


def merge_out(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """The output of `attention.merge` of states out (B, S, H, D), lse float32 (B, H, S); float32 inside, first's dtype.

    Reads every state once; not differentiable.
    """
    batch, tokens, heads, dim = outs[0].shape
    merged = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    _merge[(triton.cdiv(tokens, ROWS), heads, batch)](
        tuple(x.contiguous() for x in outs), tuple(x.contiguous() for x in lses), merged, tokens, heads,
        N=len(outs), DIM=dim, D=triton.next_power_of_2(dim), ROWS=ROWS,
    )  # fmt: skip
    return merged
