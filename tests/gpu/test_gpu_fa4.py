"""flash-attn-4 behind `attend` on a card: dense and at 128-token tiles. Skipped where it is not installed."""

import pytest
import torch

from foveate import Selection, VideoGrid, attend
from foveate.attention import unavailable

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or unavailable("fa4", "cuda") is not None, reason="needs a CUDA card and flash-attn-4"
)


@pytest.mark.parametrize("tokens", [1024, 1111])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("sparse", [False, True])
def test_equals_the_oracle_with_gradients_into_lse(tokens: int, dim: int, sparse: bool) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, tokens, 4, dim, device="cuda").bfloat16() for _ in range(4))
    grid = VideoGrid(1, 1, tokens)
    mask = torch.rand(1, 4, grid.tiles(128), grid.tiles(128), device="cuda") < 0.4
    mask[..., 0] = True
    selection = Selection.from_dense(mask, grid, query_tile=128, kv_tile=128) if sparse else None
    dlse = torch.randn(1, 4, tokens, device="cuda")
    found = []
    for backend, dtype in (("fa4", torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        state = attend(leaves[0], leaves[1], leaves[2], selection, backend=backend)
        grads = torch.autograd.grad((state.out, state.lse), leaves, (dout.to(dtype), dlse.to(state.lse.dtype)))
        found.append([state.out.detach(), state.lse.detach(), *grads])
    for got, true, bar in zip(*found, (4e-3, 1e-5, 8e-3, 8e-3, 8e-3), strict=True):
        assert (got.double() - true).norm() <= bar * true.norm()


def test_what_it_cannot_do_is_refused() -> None:
    q = torch.randn(1, 256, 2, 96, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="head dim"):
        attend(q, q, q, backend="fa4")
    q = q[..., :64].contiguous()
    with pytest.raises(ValueError, match="atomics"):
        attend(q, q, q, backend="fa4", deterministic=True)
    tiles = Selection.from_dense(torch.ones(1, 2, 4, 4, device="cuda", dtype=torch.bool), VideoGrid(1, 1, 256))
    with pytest.raises(ValueError, match="128"):
        attend(q, q, q, tiles, backend="fa4")
