"""The kernels that bench_attention.py times, ours and peers', each built from a case: the same tensors, the same tiles.

`foveate` runs on its own Triton kernels, `foveate on fa4` on flash-attn-4's. Names say query tile x key tile.

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
Builder = Callable[["Case"], tuple[Job, Job]]


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
    unwanted: tuple[int, int] = (0, 0)  # tokens from ... to that no query keeps

    def mask(self, query_tile: int, kv_tile: int) -> Tensor:
        kept = self._chosen(query_tile, kv_tile)
        kept[..., self.unwanted[0] // kv_tile : self.unwanted[1] // kv_tile] = False
        return kept

    def _chosen(self, query_tile: int, kv_tile: int) -> Tensor:
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


def tensors(length: int, heads: int, dim: int) -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient, normal, bfloat16 (1, S, H, D)."""
    torch.manual_seed(length)
    return tuple(torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))


# Kernels: each takes a case and returns its forward and its backward.


def ours(query_tile: int, kv_tile: int, pool: bool = False, engine: Any = triton_sparse) -> Builder:
    def build(case: Case) -> tuple[Job, Job]:
        q, k, v, dout = case.inputs
        words = bits.pack(case.mask(query_tile, kv_tile))
        pooled = torch.zeros(case.heads, device="cuda") if pool else None
        options = {"query_tile": query_tile, "kv_tile": kv_tile, "scale": case.dim**-0.5, "pooled": pooled}
        engine.check(q, k, v, **options, deterministic=False)
        out, lse = engine.forward(q, k, v, words, **options)
        return (
            lambda: engine.forward(q, k, v, words, **options),
            lambda: engine.backward(dout, None, q, k, v, out, lse, words, **options),
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


def fa4_dense(case: Case) -> tuple[Job, Job]:
    from flash_attn.cute.interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return first(flash_attn_func(q, k, v))

    return by_autograd(attention, case, by_head=False)


def fa4_sparse(case: Case) -> tuple[Job, Job]:
    from flash_attn.cute.interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    words, columns = bits.pack(case.mask(128, 128)), -(-case.length // 128)
    by_query, by_key = fa4.row_lists(words, columns), fa4.column_lists(words, columns)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return first(flash_attn_func(q, k, v, block_sparse_tensors=by_query, block_sparse_tensors_bwd=by_key))

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
KERNELS: dict[str, tuple[Builder, int | None, int | None]] = {
    "foveate": (ours(64, 64), 64, 64),
    "foveate, query tile 128": (ours(128, 64), 128, 64),
    "foveate, pooled": (ours(64, 64, pool=True), 64, 64),
    "foveate 128x128": (ours(128, 128), 128, 128),
    "foveate 128x128, pooled": (ours(128, 128, pool=True), 128, 128),
    "foveate on fa4": (ours(128, 128, engine=fa4), 128, 128),
    "foveate on fa4, pooled": (ours(128, 128, pool=True, engine=fa4), 128, 128),
    "cudnn dense": (sdpa(SDPBackend.CUDNN_ATTENTION), None, None),
    "flash dense": (sdpa(SDPBackend.FLASH_ATTENTION), None, None),
    "fa4 dense": (fa4_dense, None, None),
    "fa4 sparse": (fa4_sparse, 128, 128),
    "vsa": (vsa, 64, 64),
    "flex": (flex, 128, 128),
}


def is_ours(name: str) -> bool:
    return name.startswith("foveate")
