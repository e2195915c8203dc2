"""Dense attention by torch's kernels on a card: strides, dtypes, the gradient of lse, parts of a larger attention."""

import pytest
import torch
from torch import Tensor

from foveate.kernels import dense, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

# Relative L2 error against float64: out, gradients.
TOLERANCE = {torch.float32: (2e-6, 1e-5), torch.float16: (1e-3, 2e-3), torch.bfloat16: (4e-3, 8e-3)}


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def strided(kind: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v (1, S, H, D): each for itself, views of one projection, or views that start off 16 bytes."""
    torch.manual_seed(0)
    if kind == "fused":
        fused = torch.randn(1, tokens, 3 * heads * dim, device="cuda").to(dtype)
        return [x.unflatten(-1, (heads, dim)) for x in fused.chunk(3, -1)]
    extra = 1 if kind == "odd" else 0
    return [torch.randn(1, tokens, heads, dim + extra, device="cuda").to(dtype)[..., extra:] for _ in range(3)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["apart", "fused", "odd"])
@pytest.mark.parametrize("slopes", [False, True])
def test_strides_dtypes_and_the_gradient_of_lse(dtype: torch.dtype, kind: str, slopes: bool) -> None:
    q, k, v = strided(kind, 333, 4, 64, dtype)
    k, v = k[:, :, :2], v[:, :, :2]  # two query heads to a key head
    out, lse = dense.forward(q, k, v, scale=0.1)
    dout = torch.randn(4, 333, 64, device="cuda").to(dtype).movedim(0, 1)[None]
    dlse = torch.randn_like(lse) if slopes else None
    grads = dense.backward(dout, dlse, q, k, v, out, lse, scale=0.1)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    true_out, true_lse = reference.forward(*leaves, None, query_tile=64, kv_tile=64, scale=0.1, pooled=None)
    loss = (true_out * dout).sum() + (0.0 if dlse is None else (true_lse * dlse).sum())
    for_out, for_grads = TOLERANCE[dtype]
    assert relative(out, true_out) <= for_out
    assert relative(lse, true_lse) <= 1e-5
    for grad, true in zip(grads, torch.autograd.grad(loss, leaves), strict=True):
        assert relative(grad, true) <= for_grads


def test_a_part_takes_the_whole_ones_state() -> None:
    q, k, v = strided("apart", 512, 2, 128, torch.bfloat16)
    out, lse = dense.forward(q, k, v, scale=0.1)
    dout = torch.randn_like(out)
    whole = dense.backward(dout, None, q, k, v, out, lse, scale=0.1)
    halves = [
        dense.backward(dout, None, q, k[:, s], v[:, s], out, lse, scale=0.1) for s in (slice(256), slice(256, 512))
    ]
    assert relative(halves[0][0].float() + halves[1][0].float(), whole[0]) <= 8e-3
    for index in (1, 2):
        assert relative(torch.cat([half[index] for half in halves], 1), whole[index]) <= 8e-3
