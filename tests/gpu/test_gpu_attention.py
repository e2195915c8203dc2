"""The Triton attention kernels on a card: `make gpu-test`. Skipped, with the reason printed, where there is none."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foveate.kernels import bits, reference
from foveate.kernels import triton_lists as lists
from foveate.kernels import triton_sparse as sparse

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.skipif(sparse.INTERPRETED, reason="TRITON_INTERPRET=1 replaces the card"),
]

# Relative L2 error against float64: out, dq, dk, dv.
TOLERANCE = {torch.float32: (2e-6, 5e-6), torch.float16: (1e-3, 2e-3), torch.bfloat16: (4e-3, 8e-3)}


def draw(tokens, heads, groups, dim, *, batch=1, query_tile=64, kv_tile=64, dtype=torch.bfloat16, kept=0.3):
    torch.manual_seed(0)
    q, dout = (torch.randn(batch, tokens, heads, dim, device="cuda").to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, tokens, groups, dim, device="cuda").to(dtype) for _ in range(2))
    mask = torch.rand(batch, heads, -(-tokens // query_tile), -(-tokens // kv_tile), device="cuda") < kept
    mask[..., 0] |= ~mask.any(-1)
    return q, k, v, dout, bits.pack(mask)


def choices(q: Tensor, query_tile: int = 64, pooled: Tensor | None = None, kv_tile: int = 64) -> dict:
    return {"query_tile": query_tile, "kv_tile": kv_tile, "scale": q.shape[-1] ** -0.5, "pooled": pooled}


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def compare(q, k, v, dout, words, **options):
    sparse.check(q, k, v, deterministic=True, **options)
    out, lse = sparse.forward(q, k, v, words, **options)
    dlse = torch.randn_like(lse)
    grads = sparse.backward(dout, dlse, q, k, v, out, lse, words, **options)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    true_out, true_lse = reference.forward(*leaves, words, **options)
    finite = true_lse.isfinite()
    loss = (true_out * dout).sum() + torch.where(finite, true_lse, 0.0).mul(dlse).sum()
    true_grads = torch.autograd.grad(loss, leaves)
    assert torch.equal(lse.isfinite(), finite)
    for_out, for_grads = TOLERANCE[q.dtype]
    assert relative(out, true_out) <= for_out
    assert relative(lse[finite], true_lse[finite]) <= 1e-5
    for grad, true in zip(grads, true_grads, strict=True):
        assert relative(grad, true) <= for_grads


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("query_tile", "kv_tile"), [(64, 64), (128, 64), (128, 128)])
def test_head_dims(dim, query_tile, kv_tile):
    pooled = torch.tensor([-0.7, -torch.inf, 0.0, -torch.inf], device="cuda")
    drawn = draw(1000, 4, 2, dim, query_tile=query_tile, kv_tile=kv_tile)
    compare(*drawn, **choices(drawn[0], query_tile, pooled, kv_tile))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [63, 200, 1024])
def test_dtypes_and_lengths(dtype, tokens):
    compare(*(x := draw(tokens, 2, 2, 64, batch=2, dtype=dtype)), **choices(x[0]))


@pytest.mark.parametrize("factor", [1, 4, 16])
@pytest.mark.parametrize("pool", [False, True])
def test_large_logits(factor, pool):
    q, k, v, dout, words = draw(2048, 2, 2, 128, query_tile=128)
    pooled = torch.tensor([-0.7, 0.0], device="cuda") if pool else None
    compare(q * factor, k * factor, v, dout, words, **choices(q, 128, pooled))


def test_empty_rows_and_strided_views():
    dout, words = draw(500, 2, 2, 64)[3:]
    words[:, :, 2] = 0
    fused = torch.randn(1, 500, 3 * 2 * 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.unflatten(-1, (2, 64)) for x in fused.chunk(3, -1))
    compare(q, k, v, dout, words, **choices(q))
    odd = [torch.randn(1, 500, 2, 65, device="cuda", dtype=torch.bfloat16)[..., 1:] for _ in range(3)]
    compare(*odd, dout, words, **choices(q))


def test_other_shapes_leave_nothing_behind():
    for tokens in (1000, 333, 1000):
        compare(*(x := draw(tokens, 2, 1, 64)), **choices(x[0]))


def test_everything_kept_equals_dense():
    q, k, v, _, words = draw(1024, 2, 2, 128, query_tile=128, kept=2.0)
    out, _ = sparse.forward(q, k, v, words, **choices(q, 128))
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2).double() for x in (q, k, v)))
    assert relative(out, dense.transpose(1, 2)) <= 4e-3


def test_a_thousand_backwards_are_bit_equal():
    q, k, v, dout, words = draw(4096, 4, 2, 64, kept=0.1)
    options = choices(q, pooled=torch.tensor([-0.7, -torch.inf, 0.0, -torch.inf], device="cuda"))
    out, lse = sparse.forward(q, k, v, words, **options)
    first = sparse.backward(dout, None, q, k, v, out, lse, words, **options)
    differ = torch.zeros((), device="cuda")
    for _ in range(1000):
        again = sparse.backward(dout, None, q, k, v, out, lse, words, **options)
        differ += sum((a != b).any() for a, b in zip(first, again, strict=True))
    assert differ.item() == 0


def test_nothing_waits_for_the_host_and_a_graph_replays():
    q, k, v, dout, words = draw(2048, 2, 2, 64)
    options = choices(q, pooled=torch.tensor([-0.7, -torch.inf], device="cuda"))

    def both():
        out, lse = sparse.forward(q, k, v, words, **options)
        return out, *sparse.backward(dout, None, q, k, v, out, lse, words, **options)

    expected = both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_lists_match_the_bitmap():
    mask = torch.rand(2, 3, 700, 1500, device="cuda") < 0.1
    for build, dense in ((lists.query_lists, mask), (lists.key_lists, mask.transpose(-1, -2))):
        flat, counts = build(bits.pack(mask), 1500)
        index, expected = bits.lists(dense)
        assert torch.equal(counts, expected)
        used = torch.arange(dense.shape[-1], device="cuda") < counts.unsqueeze(-1)
        assert torch.equal(flat[: dense.numel()].view(dense.shape)[used].int(), index[used])
        order = lists.hot_first(counts).long()
        assert torch.equal(order.sort(-1).values, torch.arange(dense.shape[-2], device="cuda").expand_as(order))


def test_offsets_beyond_two_to_the_31():
    tokens, heads, dim = 70_000, 240, 128
    q = torch.empty(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16).normal_()
    assert q.numel() > 2**31
    words = torch.zeros(1, heads, -(-tokens // 128), -(-tokens // 2048), device="cuda", dtype=torch.int32)
    words[..., ::40] = 5
    out, lse = sparse.forward(q, q, q, words, **choices(q, 128))
    grads = sparse.backward(q, None, q, q, q, out, lse, words, **choices(q, 128))
    last = q[:, :, -1:].contiguous()
    alone = sparse.forward(last, last, last, words[:, -1:].contiguous(), **choices(q, 128))
    assert torch.equal(alone[0], out[:, :, -1:])
    assert torch.equal(alone[1], lse[:, -1:])
    backward = sparse.backward(last, None, last, last, last, *alone, words[:, -1:].contiguous(), **choices(q, 128))
    assert all(torch.equal(a, b[:, :, -1:]) for a, b in zip(backward, grads, strict=True))


def test_peak_memory_is_below_dense():
    q, k, v, dout, words = draw(32_768, 8, 8, 128, query_tile=128, kept=0.1)

    def peak(run) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def run_sparse():
        out, lse = sparse.forward(q, k, v, words, **choices(q, 128))
        sparse.backward(dout, None, q, k, v, out, lse, words, **choices(q, 128))

    def run_dense():
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves)
        torch.autograd.grad(out, leaves, dout.transpose(1, 2))

    run_sparse()
    assert words.numel() * 4 <= 60e6
    assert peak(run_sparse) <= peak(run_dense) + 60e6
