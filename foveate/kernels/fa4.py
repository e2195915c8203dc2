"""flash-attn-4's kernels, dense and block-sparse at 128-token tiles, behind the contract of this folder.

Kept tiles are flash-attn-4's, by lists made from the bitmap on the device; a pooled periphery is merged into its result
by one kernel of ours, and its gradients are added to flash-attn-4's, which are made with the merged (out, lse)
(`triton_periphery`). flash-attn-4 rounds its part to 16 bits before that.

Optional: `pip install foveate[fa4]`. Its backward cannot take 64-token tiles, and its gradients of queries are summed
with atomics unless asked otherwise, so two runs may differ in the last bits.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, R query tiles, N key tiles.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

TILE = 128
HEAD_DIMS = (64, 128)
SPARSE_CARDS = 9  # compute capability: on later ones its sparse kernels want other tiles, or have no backward

RETURNS_FLOAT32 = True  # `dtype` of forward and backward: see kernels/__init__.py


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
    if pooled is not None and scale < 0:
        raise ValueError(f"backend fa4 pools the periphery for scale >= 0, got {scale}; negate q instead")
    if deterministic:
        raise ValueError("backend fa4 sums query gradients with atomics; use backend='triton' to repeat bit by bit")
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] not in HEAD_DIMS:
        raise ValueError(
            f"backend fa4 takes float16 or bfloat16 of head dim {HEAD_DIMS} on cuda, "
            f"got {q.dtype}, head dim {q.shape[-1]}, on {q.device}"
        )
    _interface()


def lists_refused(device: torch.device) -> str | None:
    """Why a card cannot compute lists of 128-token tiles, None if it can."""
    major = torch.cuda.get_device_capability(device)[0]
    if major == SPARSE_CARDS:
        return None
    return f"computes lists of 128-token tiles on compute capability {SPARSE_CARDS} only, this card has {major}"


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
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.forward`: out (B, M, H, D) in `dtype`, q's by default, lse float32 (B, H, M). Dense without words.

    Without a pooled periphery nothing is gained by another dtype: flash-attn-4 has rounded to q's.
    """
    if words is not None and q.is_cuda and (reason := lists_refused(q.device)) is not None:
        raise ValueError(f"backend fa4 {reason}; use backend 'triton'")
    # A row without keys is left out by the kernel's lists, and out = 0, lse = -inf is what it returns for one.
    kept = None if words is None else row_lists(words, -(-k.shape[1] // TILE))
    out, lse, *_ = _interface()._flash_attn_fwd(
        q, k, v, softmax_scale=scale, block_sparse_tensors=kept, return_lse=True
    )
    out = out.to(dtype or q.dtype)
    if words is not None and pooled is not None:
        from foveate.kernels import triton_periphery as periphery

        periphery.merge(periphery.Job(q, k, words, TILE, TILE, scale, pooled, dtype), q, k, v, words, (out, lse))
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
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for outer gradients of (out, lse), which may be those of a larger attention: p = exp(s - lse).

    dtype: as in `forward`.
    """
    kept = None if words is None else column_lists(words, -(-k.shape[1] // TILE))
    dout, out, lse = dout.to(q.dtype).contiguous(), out.to(q.dtype), lse.contiguous()
    dq, dk, dv, *_ = _interface()._flash_attn_bwd(q, k, v, out, dout, lse, scale, dlse=dlse, block_sparse_tensors=kept)
    dq, dk, dv = (grad.to(dtype or q.dtype).contiguous() for grad in (dq, dk, dv))
    if words is not None and pooled is not None:
        from foveate.kernels import triton_periphery as periphery

        job = periphery.Job(q, k, words, TILE, TILE, scale, pooled, dtype)
        periphery.add_gradients(job, dout, dlse, q, k, v, out, lse, words, (dq, dk, dv))
    return dq, dk, dv


def row_lists(words: Tensor, columns: int):
    """flash-attn-4's lists of the key tiles that each query tile keeps, of words (B, H, R, W): for its forward."""
    from foveate.kernels.triton_lists import query_lists

    lists, counts = query_lists(words, columns, torch.int32)
    return _blocks(lists[: counts.numel() * columns].view(*counts.shape, columns), counts)


def column_lists(words: Tensor, columns: int):
    """The same of the query tiles that keep each key tile: for its backward."""
    from foveate.kernels.triton_lists import key_lists

    lists, counts = key_lists(words, columns, torch.int32)
    rows = words.shape[2]
    return _blocks(lists[: counts.numel() * rows].view(*counts.shape, rows), counts)


def _blocks(index: Tensor, counts: Tensor):
    """Every kept block is full: none needs a mask. Entries of `index` past the counts are garbage that nobody reads."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # pyright: ignore[reportMissingImports]

    none = torch.zeros_like(counts)
    return BlockSparseTensorsTorch(none, none.unsqueeze(-1), counts, index, block_size=(TILE, TILE))


@cache
def _interface() -> ModuleType:
    try:
        from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("backend fa4 needs flash-attn-4: pip install 'foveate[fa4]'") from error
    return interface
