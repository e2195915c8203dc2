"""flash-attn-4 behind `attend` on a card: dense and at 128-token tiles. Skipped where it is not installed."""

import pytest
import torch

from foveate import Selection, VideoGrid, attend
from foveate.attention import unavailable

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or unavailable("fa4", "cuda") is not None, reason="needs a CUDA card and flash-attn-4"
)


# tokens, query heads, key/value heads, batch
SHAPES = [(1024, 4, 4, 1), (1111, 4, 2, 1), (300, 2, 2, 2)]
PERIPHERIES = {"dense": None, "drop": "drop", "pool": "pool", "mixed": [-0.7, "drop"]}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", PERIPHERIES)
def test_equals_the_oracle_with_gradients_into_lse(shape: tuple, dim: int, kind: str) -> None:
    torch.manual_seed(0)
    tokens, heads, groups, batch = shape
    q, k, v, dout = (
        torch.randn(batch, tokens, n, dim, device="cuda").bfloat16() for n in (heads, groups, groups, heads)
    )
    grid = VideoGrid(1, 1, tokens)
    mask = torch.rand(batch, heads, grid.tiles(128), grid.tiles(128), device="cuda") < 0.4
    mask[..., 1], mask[..., 0] = False, True  # a tile that nobody wants
    mask[:, 0, 1], mask[:, -1, 0] = False, kind == "pool"  # rows with nothing near, and with nothing far
    selection = Selection.from_dense(mask, grid, query_tile=128, kv_tile=128) if kind != "dense" else None
    names = PERIPHERIES[kind] or "drop"
    periphery = names if isinstance(names, str) else names * (heads // 2)
    dlse = torch.randn(batch, heads, tokens, device="cuda")
    found = []
    for backend, dtype in (("fa4", torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        state = attend(leaves[0], leaves[1], leaves[2], selection, backend=backend, periphery=periphery)
        finite = state.lse.isfinite()
        weights = torch.where(finite, dlse, 0.0).to(state.lse.dtype)
        grads = torch.autograd.grad((state.out, state.lse), leaves, (dout.to(dtype), weights))
        found.append([state.out.detach(), torch.where(finite, state.lse.detach(), 0.0), *grads])
        assert torch.equal(finite, state.out.abs().sum(-1).transpose(1, 2) > 0)
    for got, true, allowed in zip(*found, (4e-3, 1e-4, 8e-3, 8e-3, 8e-3), strict=True):
        assert (got.double() - true).norm() <= allowed * true.norm()


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
