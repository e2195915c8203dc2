"""Joint attention on a card: masked keys, and states of sparse video attention merged with them, against float64."""

import pytest
import torch
from torch import Tensor

from foveate.attention import attend, attend_masked, merge
from foveate.tiles import Selection, VideoGrid

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

# Relative L2 error against float64: out, gradients.
TOLERANCE = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (6e-3, 1.5e-2)}


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("sparse", [False, True])
def test_video_and_masked_tokens_against_float64(dtype: torch.dtype, dim: int, sparse: bool) -> None:
    torch.manual_seed(0)
    grid, heads, text = VideoGrid(4, 12, 16), 4, 77
    q, k, v = (torch.randn(2, grid.tokens + text, heads, dim, device="cuda").to(dtype) for _ in range(3))
    valid = torch.arange(text, device="cuda") < torch.tensor([[9], [text]], device="cuda")
    tiles = grid.tiles()
    kept = torch.rand(2, heads, tiles, tiles, device="cuda") < (0.4 if sparse else 2.0)
    kept |= torch.eye(tiles, dtype=torch.bool, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    (qv, qo), (kv, ko), (vv, vo) = (x.split([grid.tokens, text], 1) for x in leaves)
    near = attend(qv, kv, vv, Selection.from_dense(kept, grid) if sparse else None)
    out = merge(near, attend_masked(qv, ko, vo, valid)).out
    beside = merge(attend_masked(qo, ko, vo, valid), attend(qo, kv, vv)).out
    dout = torch.randn(2, grid.tokens + text, heads, dim, device="cuda").to(dtype)
    dout[0, grid.tokens + 9 :] = 0  # padding queries are read by nobody
    grads = torch.autograd.grad((torch.cat([out, beside], 1) * dout).sum(), leaves)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    logits = torch.einsum("bqhd,bkhd->bhqk", *exact[:2]) * dim**-0.5
    near_mask = kept.repeat_interleave(64, -1).repeat_interleave(64, -2)[..., : grid.tokens, : grid.tokens]
    seen = torch.ones_like(logits, dtype=torch.bool)
    seen[..., : grid.tokens, : grid.tokens] = near_mask
    seen[..., grid.tokens :] = valid[:, None, None]
    truth = torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), exact[2])
    true_grads = torch.autograd.grad((truth * dout).sum(), exact)
    for_out, for_grads = TOLERANCE[dtype]
    assert relative(out, truth[:, : grid.tokens]) <= for_out
    assert relative(beside[1], truth[1, grid.tokens :]) <= for_out
    for grad, true in zip(grads, true_grads, strict=True):
        assert relative(grad, true) <= for_grads
