"""How flash-attn-4 is used, with its part emulated: lists, merging with the pooled periphery, and all gradients.

The emulation takes the arguments that flash-attn-4 4.0 takes, checks them as it does, reads its lists as it does, and
computes in plain torch. The periphery's Triton kernels run in the interpreter, in a process of their own
(test_interpreter.py). On a card the real ones run in tests/gpu/test_gpu_fa4.py.
"""

import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from test_triton_sparse import draw, oracle, relative
from torch import Tensor

pytest.importorskip("triton")

from foveate.kernels import bits, fa4

interpreted = pytest.mark.interpreted
TOLERANCE = {torch.float32: (2e-6, 2e-6, 5e-6), torch.float16: (2e-3, 1e-4, 3e-3)}


class Blocks(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def kept(blocks: Blocks, shape: tuple[int, int, int, int]) -> Tensor:
    """bool `shape` (B, H, R, N) from lists: their first entries, as many as are counted; nothing else is read."""
    count, index = blocks.full_block_cnt, blocks.full_block_idx
    assert blocks.block_size == (128, 128)
    assert count.dtype == index.dtype == torch.int32
    assert count.is_contiguous()
    assert index.is_contiguous()
    assert count.shape == shape[:3]
    assert index.shape == shape
    assert blocks.mask_block_cnt.shape == shape[:3]
    assert not blocks.mask_block_cnt.any()
    assert blocks.mask_block_idx.shape[:3] == shape[:3]
    mask = torch.zeros(shape, dtype=torch.bool)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in shape[:3])).tolist():
        mask[*at, index[*at, : int(count[*at])].long()] = True
    return mask


def part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, H, M, S), -inf where a block is left out, and k, v (B, H, S, D), float32."""
    repeats = q.shape[2] // k.shape[2]
    kh, vh = (x.float().transpose(1, 2).repeat_interleave(repeats, 1) for x in (k, v))
    logits = scale * q.float().transpose(1, 2) @ kh.mT
    if mask is not None:
        tokens = mask.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, : q.shape[1], : k.shape[1]]
        logits = logits.masked_fill(~tokens, -torch.inf)
    return logits, kh, vh


def tiles(tokens: int) -> int:
    return -(-tokens // 128)


def emulated_forward(q, k, v, *, softmax_scale, block_sparse_tensors, return_lse):
    assert return_lse
    shape = q.shape[0], q.shape[2], tiles(q.shape[1]), tiles(k.shape[1])
    mask = None if block_sparse_tensors is None else kept(block_sparse_tensors, shape)
    logits, _, vh = part(q, k, v, mask, softmax_scale)
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return (p @ vh).transpose(1, 2).to(q.dtype).contiguous(), lse, None, None, None


def emulated_backward(q, k, v, out, dout, lse, softmax_scale, *, dlse, block_sparse_tensors):
    assert q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    shape = q.shape[0], q.shape[2], tiles(k.shape[1]), tiles(q.shape[1])
    mask = None if block_sparse_tensors is None else kept(block_sparse_tensors, shape).mT
    logits, kh, vh = part(q, k, v, mask, softmax_scale)
    qh, do, o = (x.float().transpose(1, 2) for x in (q, dout, out))
    delta = (do * o).sum(-1, keepdim=True) - (0 if dlse is None else dlse.unsqueeze(-1))
    p = (logits - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).exp()
    ds = p * (do @ vh.mT - delta) * softmax_scale
    by_group = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (ds.mT @ qh, p.mT @ do))
    return tuple(x.transpose(1, 2).to(q.dtype).contiguous() for x in (ds @ kh, *by_group))


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface", "flash_attn.cute.block_sparsity"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["flash_attn.cute.block_sparsity"], "BlockSparseTensorsTorch", Blocks, raising=False)
    interface = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(interface, "_flash_attn_fwd", emulated_forward, raising=False)
    monkeypatch.setattr(interface, "_flash_attn_bwd", emulated_backward, raising=False)
    monkeypatch.setattr(fa4, "_interface", lambda: interface)


def drawn(batch, tokens, heads, groups, dim, kept=0.5, **options):
    """As `draw`, with a mask of 128-token tiles."""
    q, k, v, _ = draw(batch, tokens, heads, groups, dim, **options)
    count = tiles(tokens)
    mask = torch.rand(batch, heads, count, count, generator=torch.Generator().manual_seed(5)) < kept
    return q, k, v, mask


def compare(q, k, v, mask, pooled, dtype=None):
    options = {"query_tile": 128, "kv_tile": 128, "scale": 0.2, "pooled": pooled}
    words = bits.pack(mask)
    out, lse = fa4.forward(q, k, v, words, **options, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    dout, dlse = torch.randn(out.shape, generator=generator).to(q.dtype), torch.randn(lse.shape, generator=generator)
    grads = fa4.backward(dout, dlse, q, k, v, out, lse, words, **options, dtype=dtype)
    true_out, true_lse, true_grads = oracle(q, k, v, dout, dlse, words, **options)
    finite = true_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert not out[~finite.transpose(1, 2)].any()
    for_out, for_lse, for_grads = TOLERANCE[q.dtype]
    assert relative(out, true_out) <= for_out
    assert relative(lse[finite], true_lse[finite]) <= for_lse
    for grad, true, x in zip(grads, true_grads, (q, k, v), strict=True):
        assert grad.dtype == (dtype or x.dtype)
        assert relative(grad, true) <= for_grads


@interpreted
class TestEmulated:
    @pytest.mark.parametrize("tokens", [1, 128, 300])
    def test_pooled_and_dropped_heads_at_lengths(self, tokens):
        compare(*drawn(1, tokens, 2, 2, 32), torch.tensor([-0.7, -torch.inf]))

    def test_grouped_heads_in_batches_with_empty_rows_and_columns(self):
        q, k, v, mask = drawn(2, 260, 4, 2, 32)
        mask[0, 1] = False  # nothing at all near, in a head that pools
        mask[1, 0, 1] = False  # a row without keys where the periphery is dropped
        mask[:, :, :, 1] = False  # a tile that nobody wants
        mask[:, 3] = True  # nothing far
        compare(q, k, v, mask, torch.tensor([-torch.inf, -0.7, 0.0, 0.4]))

    def test_all_dropped_and_float32_results_of_16_bit_inputs(self):
        q, k, v, mask = drawn(1, 200, 2, 1, 32, dtype=torch.float16)
        compare(q, k, v, mask, None)
        compare(q, k, v, mask, torch.tensor([0.0, -0.7]), dtype=torch.float32)

    def test_a_part_of_a_larger_attention(self):
        """Gradients of two disjoint parts, made with the merged (out, lse), add up to those of the whole."""
        q, k, v, mask = drawn(1, 300, 1, 1, 32)
        options = {"query_tile": 128, "kv_tile": 128, "scale": 0.2}
        everything = bits.pack(torch.ones_like(mask))
        out, lse = fa4.forward(q, k, v, everything, **options)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        parts = [
            fa4.backward(dout, dlse, q, k, v, out, lse, bits.pack(m), **options, pooled=None) for m in (mask, ~mask)
        ]
        _, _, whole = oracle(q, k, v, dout, dlse, everything, **options, pooled=None)
        for first, second, true in zip(*parts, whole, strict=True):
            assert relative(first + second, true) <= 2e-6
