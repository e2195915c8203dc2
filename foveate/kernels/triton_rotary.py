"""Rotary positions and tile order in one pass: what eager code does in some twenty passes over q and k.

Shapes: B batch, S tokens, H heads, D head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit(do_not_specialize=["tokens", "heads"])
def _rotate(
    X, OUT, FROM, COS, SIN, tokens, heads, xb, xs, xh, ct, st, BACK: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program some tokens of the result, all their heads: each angle is read once."""
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < tokens
    source = tl.load(FROM + row, mask=real, other=0).to(tl.int64)
    row = row.to(tl.int64)
    place = row if BACK else source  # tables are in the model's order
    pair, dim = tl.arange(0, D // 2), tl.arange(0, D)
    known = real[:, None] & (pair[None, :] < DIM // 2)
    cos = tl.load(COS + place[:, None] * ct + 2 * pair[None, :], mask=known, other=0.0)
    sin = tl.load(SIN + place[:, None] * st + 2 * pair[None, :] + 1, mask=known, other=0.0)
    if BACK:
        sin = -sin
    mask = real[:, None] & (dim[None, :] < DIM)
    for head in range(heads):
        x = tl.load(X + batch * xb + source[:, None] * xs + head * xh + dim[None, :], mask=mask, other=0.0)
        even, odd = tl.split(tl.reshape(x.to(tl.float32), [ROWS, D // 2, 2]))
        turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, D])
        at = OUT + ((batch * tokens + row[:, None]) * heads + head) * DIM + dim[None, :]
        tl.store(at, turned.to(OUT.dtype.element_ty), mask=mask)


def rotate(x: Tensor, source: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Token `source[i]` of x (B, S, H, D), its neighbouring pairs rotated, at place i; float32 inside, x's dtype out.

    source: int64 (S,). cos, sin: float32 (S, D), each angle written twice, as diffusers has them, for the tokens of x.
    back: the gradient's way. `source` is then the inverse order, and the tables are for the tokens of the result.
    """
    batch, tokens, heads, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(triton.cdiv(tokens, ROWS), batch)](
        x, out, source, cos, sin, tokens, heads, *x.stride()[:3], cos.stride(0), sin.stride(0),
        BACK=back, DIM=dim, D=triton.next_power_of_2(dim), ROWS=ROWS,
    )  # fmt: skip
    return out
