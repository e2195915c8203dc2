"""The Triton kernels in Triton's interpreter, on the CPU, against the oracle in float64: numbers and all gradients.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own (test_interpreter.py).
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from foveate.kernels import bits, reference
from foveate.kernels import triton_lists as lists
from foveate.kernels import triton_sparse as sparse

interpreted = pytest.mark.interpreted

# Relative L2 error against float64: out, lse, gradients. The interpreter cuts bfloat16 off where a card rounds it:
# tests/gpu has the tolerances that count.
TOLERANCE = {torch.float32: (2e-6, 1e-6, 5e-6), torch.float16: (1e-3, 1e-4, 2e-3), torch.bfloat16: (8e-3, 4e-4, 16e-3)}


def draw(batch, tokens, heads, groups, dim, *, query_tile=64, kv_tile=64, dtype=torch.float32, kept=0.5, seed=0):
    """q, k, v and a bitmap that differs from head to head."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, tokens, heads, dim, generator=generator).to(dtype)
    k, v = (torch.randn(batch, tokens, groups, dim, generator=generator).to(dtype) for _ in range(2))
    rows, columns = -(-tokens // query_tile), -(-tokens // kv_tile)
    mask = torch.rand(batch, heads, rows, columns, generator=generator) < kept
    mask[..., 0] |= ~mask.any(-1)
    return q, k, v, mask


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def oracle(q, k, v, dout, dlse, words, **options):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference.forward(*leaves, words, **options)
    finite = lse.isfinite()
    loss = (out * dout.double()).sum() + torch.where(finite, lse, 0.0).mul(dlse.double()).sum()
    return out, lse, torch.autograd.grad(loss, leaves)


def compare(q, k, v, mask, *, query_tile=64, kv_tile=64, pooled=None, scale=None, slack=1):
    options = {
        "query_tile": query_tile, "kv_tile": kv_tile, "scale": scale or q.shape[-1] ** -0.5, "pooled": pooled,
    }  # fmt: skip
    words = bits.pack(mask)
    out, lse = sparse.forward(q, k, v, words, **options)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(q.dtype)
    dlse = torch.randn(lse.shape, generator=generator)
    grads = sparse.backward(dout, dlse, q, k, v, out, lse, words, **options)
    true_out, true_lse, true_grads = oracle(q, k, v, dout, dlse, words, **options)
    finite = true_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert not out[~finite.transpose(1, 2)].any()
    for_out, for_lse, for_grads = (slack * x for x in TOLERANCE[q.dtype])
    assert relative(out, true_out) <= for_out
    assert relative(lse[finite], true_lse[finite]) <= for_lse
    for grad, true, x in zip(grads, true_grads, (q, k, v), strict=True):
        assert grad.dtype == x.dtype
        assert grad.shape == x.shape
        assert relative(grad, true) <= for_grads


@pytest.fixture
def any_order(monkeypatch):
    """Work starts in a random order: results may not depend on it, and sorting is the slowest thing to interpret."""
    generator = torch.Generator().manual_seed(0)
    shuffled = lambda counts: torch.rand(counts.shape, generator=generator).argsort(-1).to(counts.dtype)  # noqa: E731
    monkeypatch.setattr(sparse, "hot_first", shuffled)


@interpreted
@pytest.mark.usefixtures("any_order")
class TestAttention:
    @pytest.mark.parametrize("tokens", [1, 63, 111, 128, 200])
    @pytest.mark.parametrize("query_tile", [64, 128])
    def test_lengths(self, tokens, query_tile):
        compare(*draw(1, tokens, 1, 1, 32, query_tile=query_tile), query_tile=query_tile)

    @pytest.mark.parametrize("tokens", [150, 256])
    def test_key_tiles_of_128_tokens(self, tokens):
        drawn = draw(1, tokens, 2, 1, 32, query_tile=128, kv_tile=128)
        compare(*drawn, query_tile=128, kv_tile=128, pooled=torch.tensor([-0.7, -torch.inf]))

    def test_results_in_float32_are_the_same_before_rounding(self):
        q, k, v, mask = draw(1, 200, 2, 1, 32, dtype=torch.float16)
        words, pooled = bits.pack(mask), torch.tensor([-0.7, -torch.inf])
        options = {"query_tile": 64, "kv_tile": 64, "scale": 0.2, "pooled": pooled}
        out, lse = sparse.forward(q, k, v, words, **options)
        wide, wide_lse = sparse.forward(q, k, v, words, **options, dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert torch.equal(wide.half(), out)
        assert torch.equal(wide_lse, lse)
        grads = sparse.backward(out, None, q, k, v, out, lse, words, **options)
        wide_grads = sparse.backward(out, None, q, k, v, out, lse, words, **options, dtype=torch.float32)
        for grad, wide_grad in zip(grads, wide_grads, strict=True):
            assert wide_grad.dtype == torch.float32
            assert torch.equal(wide_grad.half(), grad)

    @pytest.mark.parametrize("tokens", [63, 200])
    def test_pooled_heads_beside_dropped_ones(self, tokens):
        compare(*draw(1, tokens, 2, 2, 32, kept=0.3), pooled=torch.tensor([-0.7, -torch.inf]))

    def test_batch_grouped_heads_and_a_mask_for_each(self, monkeypatch):
        monkeypatch.undo()  # with the kernels' own order
        compare(*draw(2, 130, 4, 2, 32), pooled=torch.tensor([-torch.inf, -0.7, 0.0, -torch.inf]))

    def test_rows_without_keys_are_empty_and_harmless(self):
        q, k, v, mask = draw(1, 150, 2, 1, 32)
        mask[:, 0, 1] = False
        mask[:, 1] = False
        compare(q, k, v, mask)
        compare(q, k, v, mask, pooled=torch.tensor([-torch.inf, -0.7]))

    def test_head_dim_that_is_no_power_of_two(self):
        compare(*draw(1, 70, 1, 1, 96), pooled=torch.tensor([-0.7]))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        drawn = draw(1, 200, 2, 1, 64, query_tile=128, dtype=dtype)
        compare(*drawn, query_tile=128, pooled=torch.tensor([-0.7, -torch.inf]))

    @pytest.mark.parametrize("factor", [4, 16])
    def test_large_logits(self, factor):
        q, k, v, mask = draw(1, 111, 1, 1, 32)
        # Weights are as exact as float32 logits of this size, which grow with the square of the factor.
        compare(q * factor, k * factor, v, mask, pooled=torch.tensor([-0.7]), slack=factor)

    def test_scale(self):
        compare(*draw(1, 70, 1, 1, 32), scale=0.01)

    def test_strided_views(self):
        _, _, _, mask = draw(1, 111, 2, 2, 32)
        fused = torch.randn(1, 111, 3 * 2 * 32)
        q, k, v = (x.unflatten(-1, (2, 32)) for x in fused.chunk(3, -1))
        compare(q, k, v, mask)
        compare(*(torch.randn(1, 111, 2, 33)[..., 1:] for _ in range(3)), mask)
        compare(*(torch.randn(1, 2, 32, 111).permute(0, 3, 1, 2) for _ in range(3)), mask)

    def test_pointers_instead_of_the_copy_engine(self, monkeypatch):
        monkeypatch.setattr(sparse.Job, "tma", property(lambda self: False, lambda self, value: None), raising=False)
        compare(*draw(1, 111, 2, 1, 96), pooled=torch.tensor([-0.7, -torch.inf]))
        compare(*(torch.randn(1, 2, 32, 111).permute(0, 3, 1, 2) for _ in range(3)), draw(1, 111, 2, 2, 32)[3])

    def test_blocks_smaller_than_tiles(self, monkeypatch):
        monkeypatch.setattr(sparse, "FLOAT32", sparse.Config(32, 16, 4, 1))
        compare(*draw(1, 111, 1, 1, 32, query_tile=128), query_tile=128, pooled=torch.tensor([-0.7]))
        monkeypatch.setattr(sparse, "FLOAT32", sparse.Config(64, 64, 4, 1))
        compare(*draw(1, 111, 1, 1, 32, query_tile=128), query_tile=128, pooled=torch.tensor([-0.7]))

    def test_parts_of_a_larger_attention(self):
        """Two disjoint selections, each run backward with the merged (out, lse), give the union's gradients."""
        q, k, v, mask = draw(1, 200, 1, 1, 32, kept=1.0)
        part = draw(1, 200, 1, 1, 32, kept=0.5, seed=3)[3]
        options = {"query_tile": 64, "kv_tile": 64, "scale": 0.2, "pooled": None}
        out, lse = sparse.forward(q, k, v, bits.pack(mask), **options)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        both = [bits.pack(kept) for kept in (part, mask & ~part)]
        parts = [sparse.backward(dout, dlse, q, k, v, out, lse, words, **options) for words in both]
        _, _, whole = oracle(q, k, v, dout, dlse, bits.pack(mask), **options)
        for first, second, true in zip(*parts, whole, strict=True):
            assert relative(first + second, true) <= 2e-6

    def test_without_gradient_of_lse_and_with_repeats_bit_equal(self):
        q, k, v, mask = draw(1, 111, 1, 1, 32)
        options = {"query_tile": 64, "kv_tile": 64, "scale": 0.2, "pooled": torch.tensor([-0.7])}
        words = bits.pack(mask)
        out, lse = sparse.forward(q, k, v, words, **options)
        dout = torch.ones(()).expand(out.shape)
        first, again = (sparse.backward(dout, None, q, k, v, out, lse, words, **options) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        _, _, true = oracle(q, k, v, dout, torch.zeros_like(lse), words, **options)
        assert all(relative(a, b) <= 2e-6 for a, b in zip(first, true, strict=True))


@interpreted
class TestLists:
    @pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 31), (140, 70), (3, 2100)])
    def test_both_orientations(self, rows, columns):
        mask = torch.rand(2, 1, rows, columns, generator=torch.Generator().manual_seed(0)) < 0.2
        mask[0, 0, 0] = True
        for build, dense in ((lists.query_lists, mask), (lists.key_lists, mask.transpose(-1, -2))):
            flat, counts = build(bits.pack(mask), columns)
            assert torch.equal(counts, dense.sum(-1, dtype=torch.int32))
            index = flat[: dense.numel()].view(dense.shape)
            for row, count, kept in zip(index.flatten(0, 2), counts.flatten(), dense.flatten(0, 2), strict=True):
                assert row[:count].tolist() == kept.nonzero().squeeze(-1).tolist()

    def test_stray_bits_past_the_last_column_are_ignored(self):
        words = torch.full((1, 1, 2, 1), -1, dtype=torch.int32)
        assert lists.query_lists(words, 5)[1].tolist() == [[[5, 5]]]
        assert lists.key_lists(words, 5)[1].tolist() == [[[2] * 5]]

    @pytest.mark.parametrize("size", [1, 7, 2500])
    def test_hot_first(self, size):
        counts = torch.randint(0, 3000, (1, 2, size), dtype=torch.int32) // torch.randint(1, 999, (1, 2, size)).int()
        counts[0, 0, 0] = 200_000
        order = lists.hot_first(counts).long()
        assert torch.equal(order.sort(-1).values, torch.arange(size).expand(1, 2, size))
        level = counts.gather(-1, order).clamp(1, 2**16).double().log2().floor()
        assert (level.diff() <= 0).all()
        same = level.diff() == 0
        assert (order.diff()[same] > 0).all()

    def test_row_stats(self):
        dout, out = torch.randn(2, 2, 70, 3, 32).unbind(0)
        lse, dlse = torch.randn(2, 3, 70), torch.randn(2, 3, 70)
        lse[0, 0, 3] = -torch.inf
        lse2, delta = lists.row_stats(dout, dlse, out, lse, 128)
        assert lse2.shape == delta.shape == (6, 128)
        assert torch.isposinf(lse2[:, 70:]).all()
        assert not delta[:, 70:].any()
        assert torch.isposinf(lse2[0, 3])
        lse[0, 0, 3] = torch.inf
        torch.testing.assert_close(lse2[:, :70], lse.flatten(0, 1) / 0.6931471805599453)
        torch.testing.assert_close(delta[:, :70], ((dout * out).sum(-1).transpose(1, 2) - dlse).flatten(0, 1))

    def test_tile_means(self):
        x = torch.randn(2, 150, 3, 96)
        true = reference.tile_means(x.transpose(1, 2), 64).transpose(1, 2)
        torch.testing.assert_close(lists.tile_means(x, 64), true)


class TestCheck:
    def run(self, device="cpu", dtype=torch.float32, **options):
        q = torch.zeros(1, 64, 1, 64, device=device, dtype=dtype)
        defaults = {"pooled": None, "deterministic": True, "query_tile": 64, "kv_tile": 64, "scale": 1.0}
        sparse.check(q, q, q, **(defaults | options))

    def test_other_tiles_are_refused(self):
        with pytest.raises(ValueError, match="64 or 128 tokens, got 32"):
            self.run(kv_tile=32)

    def test_negative_scale_is_refused(self):
        with pytest.raises(ValueError, match="negate q"):
            self.run(scale=-1.0)

    @pytest.mark.skipif(sparse.INTERPRETED, reason="the interpreter takes CPU tensors")
    def test_cpu_tensors_are_refused(self):
        with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
            self.run()

    @pytest.mark.skipif(sparse.INTERPRETED, reason="the interpreter takes CPU tensors")
    def test_old_cards_are_refused(self, monkeypatch):
        monkeypatch.setattr(sparse, "_card", lambda device: ((7, 5), 65_536))
        with FakeTensorMode(), pytest.raises(ValueError, match="this card has"):
            self.run(device="cuda")
