"""flash-attn-4's kernels, dense and block-sparse, behind the contract of this folder: 128-token tiles, no pooling.

Optional: `pip install foveate[fa4]`. Its backward cannot take 64-token tiles, and its gradients of queries are summed
with atomics unless asked otherwise, so two runs may differ in the last bits.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, R query tiles, N key tiles.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from foveate.kernels.bits import lists, unpack

TILE = 128
HEAD_DIMS = (64, 128)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    query_tile: int = TILE,
    kv_tile: int = TILE,
    pooled: Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """Raises ValueError for what these kernels cannot compute, ImportError where flash-attn-4 is not installed."""
    if (query_tile, kv_tile) != (TILE, TILE):
        raise ValueError(f"backend fa4 takes query and key tiles of 128 tokens, got {query_tile} and {kv_tile}")
    if pooled is not None:
        raise ValueError("backend fa4 has no pooled periphery; use periphery='drop' or backend='triton'")
    if deterministic:
        raise ValueError("backend fa4 sums query gradients with atomics; use backend='triton' to repeat bit by bit")
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] not in HEAD_DIMS:
        raise ValueError(
            f"backend fa4 takes float16 or bfloat16 of head dim {HEAD_DIMS} on cuda, "
            f"got {q.dtype}, head dim {q.shape[-1]}, on {q.device}"
        )
    _interface()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor | None = None,
    *,
    scale: float,
    query_tile: int = TILE,
    kv_tile: int = TILE,
    pooled: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.forward`: out (B, M, H, D), lse float32 (B, H, M). Dense without words."""
    # A row without keys is left out by the kernel's lists, and out = 0, lse = -inf is what it returns for one.
    kept = None if words is None else block_lists(unpack(words, -(-k.shape[1] // TILE)))
    out, lse, *_ = _interface()._flash_attn_fwd(
        q, k, v, softmax_scale=scale, block_sparse_tensors=kept, return_lse=True
    )
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    words: Tensor | None = None,
    *,
    scale: float,
    query_tile: int = TILE,
    kv_tile: int = TILE,
    pooled: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for outer gradients of (out, lse), which may be those of a larger attention: p = exp(s - lse)."""
    kept = None if words is None else block_lists(unpack(words, -(-k.shape[1] // TILE)).transpose(-1, -2))
    dq, dk, dv, *_ = _interface()._flash_attn_bwd(
        q, k, v, out, dout.contiguous(), lse.contiguous(), scale, dlse=dlse, block_sparse_tensors=kept
    )
    return dq, dk, dv


def block_lists(mask: Tensor):
    """flash-attn-4's lists for a bool mask (B, H, rows, columns): every kept block is full, none needs a mask."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # pyright: ignore[reportMissingImports]

    index, counts = (x.contiguous() for x in lists(mask))  # a transposed mask gives transposed lists
    none = torch.zeros_like(counts)
    return BlockSparseTensorsTorch(none, none.unsqueeze(-1), counts, index, block_size=(TILE, TILE))


@cache
def _interface() -> ModuleType:
    try:
        from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("backend fa4 needs flash-attn-4: pip install 'foveate[fa4]'") from error
    return interface
