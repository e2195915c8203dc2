"""The kernels that bench_attention.py times, ours and peers', each built from a case: the same tensors, the same tiles.

Peers are imported where they are built, so that what is not installed can be named and left out.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.kernels import bits, fa4, triton_sparse

Job = Callable[[], Any]


def first(x: Any) -> Tensor:
    return x[0] if isinstance(x, tuple) else x


@dataclass(frozen=True)
class Case:
    """One problem: `mask(query_tile, kv_tile)` gives the kept tiles, bool (1, H, R, N), None where all are kept."""

    length: int
    heads: int
    dim: int
    budget: float = 1.0
    lists: str = "random"
    inputs: tuple[Tensor, ...] = field(default=(), repr=False)
    mass: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def mask(self, query_tile: int, kv_tile: int) -> Tensor:
        rows, columns = -(-self.length // query_tile), -(-self.length // kv_tile)
        if self.lists == "random":
            torch.manual_seed(query_tile + kv_tile)
            return best(torch.rand(1, self.heads, rows, columns, device="cuda"), self.budget)
        kept = best(self.mass[query_tile, kv_tile], self.budget)
        h, i, j = (
            torch.arange(n, device="cuda") % m for n, m in zip((self.heads, rows, columns), kept.shape, strict=True)
        )
        return kept[h[:, None, None], i[:, None], j][None]


def best(mass: Tensor, budget: float) -> Tensor:
    """bool: the tiles of largest mass, the same number in every row."""
    count = max(1, round(budget * mass.shape[-1]))
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, mass.topk(count, -1).indices, True)


# Kernels: each takes a case and returns its forward and its backward.


def ours(query_tile: int = 64, pool: bool = False) -> Callable[[Case], tuple[Job, Job]]:
    def build(case: Case) -> tuple[Job, Job]:
        q, k, v, dout = case.inputs
        words = bits.pack(case.mask(query_tile, 64))
        pooled = torch.zeros(case.heads, device="cuda") if pool else None
        options = {"query_tile": query_tile, "kv_tile": 64, "scale": case.dim**-0.5, "pooled": pooled}
        out, lse = triton_sparse.forward(q, k, v, words, **options)
        return (
            lambda: triton_sparse.forward(q, k, v, words, **options),
            lambda: triton_sparse.backward(dout, None, q, k, v, out, lse, words, **options),
        )

    return build


def by_autograd(attention: Callable, case: Case, by_head: bool) -> tuple[Job, Job]:
    """Forward and backward of a differentiable function of q, k, v, (B, S, H, D) or, by head, (B, H, S, D)."""
    *qkv, dout = (x.transpose(1, 2).contiguous() if by_head else x for x in case.inputs)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*leaves)

    return forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def sdpa(backend: SDPBackend) -> Callable[[Case], tuple[Job, Job]]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return lambda case: by_autograd(attention, case, by_head=True)


def fa4_backend(case: Case) -> tuple[Job, Job]:
    """foveate's own use of flash-attn-4's kernels; for the gate, which runs it on a short last tile too."""
    q, k, v, dout = case.inputs
    words, options = bits.pack(case.mask(128, 128)), {"query_tile": 128, "kv_tile": 128, "scale": case.dim**-0.5}
    fa4.check(q, k, v, **options)
    out, lse = fa4.forward(q, k, v, words, pooled=None, **options)
    return (
        lambda: fa4.forward(q, k, v, words, pooled=None, **options),
        lambda: fa4.backward(dout, None, q, k, v, out, lse, words, pooled=None, **options),
    )


def fa4_dense(case: Case) -> tuple[Job, Job]:
    from flash_attn.cute.interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return first(flash_attn_func(q, k, v))

    return by_autograd(attention, case, by_head=False)


def fa4_sparse(case: Case) -> tuple[Job, Job]:
    from flash_attn.cute.interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    mask = case.mask(128, 128)
    rows, columns = fa4.block_lists(mask), fa4.block_lists(mask.transpose(-1, -2))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return first(flash_attn_func(q, k, v, block_sparse_tensors=rows, block_sparse_tensors_bwd=columns))

    return by_autograd(attention, case, by_head=False)


def flex(case: Case) -> tuple[Job, Job]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    index, counts = bits.lists(case.mask(128, 128))
    none = torch.zeros_like(counts)
    lengths = (case.length, case.length)
    mask = BlockMask.from_kv_blocks(none, torch.zeros_like(index), counts, index, BLOCK_SIZE=128, seq_lengths=lengths)
    compiled = torch.compile(flex_attention, dynamic=False)
    return by_autograd(lambda q, k, v: compiled(q, k, v, block_mask=mask), case, by_head=True)


def vsa(case: Case) -> tuple[Job, Job]:
    os.environ.setdefault("FASTVIDEO_VSA_TRITON", "1")  # its compiled kernels do not load beside torch 2.11
    from fastvideo_kernel.block_sparse_attn import block_sparse_attn  # pyright: ignore[reportMissingImports]

    mask, sizes = case.mask(64, 64), torch.full((-(-case.length // 64),), 64, device="cuda", dtype=torch.int32)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return first(block_sparse_attn(q, k, v, mask, sizes))

    return by_autograd(attention, case, by_head=True)


# name -> (builder, query tile, key tile); tiles None for dense kernels
KERNELS: dict[str, tuple[Callable[[Case], tuple[Job, Job]], int | None, int | None]] = {
    "foveate": (ours(), 64, 64),
    "foveate, query tile 128": (ours(128), 128, 64),
    "foveate, pooled": (ours(pool=True), 64, 64),
    "cudnn dense": (sdpa(SDPBackend.CUDNN_ATTENTION), None, None),
    "flash dense": (sdpa(SDPBackend.FLASH_ATTENTION), None, None),
    "fa4 dense": (fa4_dense, None, None),
    "fa4 sparse": (fa4_sparse, 128, 128),
    "fa4 backend": (fa4_backend, 128, 128),
    "vsa": (vsa, 64, 64),
    "flex": (flex, 128, 128),
}
