"""What foveate is compared with in study_training.py: other ways to choose tiles, and learned branches for the rest.

Window and random tiles need no predictor. The branches are added to foveate's own sparse attention (its predictor, its
tiles, its kernels, periphery dropped), so that an arm differs from foveate's in one thing: what becomes of the tiles
that are not kept. They are plain torch: their quality at equal steps is what they are here for; a fused kernel would
make them faster.

Shapes: B batch, S tokens in tile order, H heads, D head dim, N tiles of t tokens, W width.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foveate as fv
from foveate.attention import Layer, attend, no_autocast
from foveate.models.dit import Block, VideoDiT
from foveate.sparsity.select import select_random
from foveate.tiles import Selection, VideoGrid


class Given:
    """A policy whose tiles need no predictor, the others dropped. `step` is the training step, 0 in validation."""

    def __init__(self, budget: float, tile: int, choose: Callable[["Given", Layer, Tensor], Selection]):
        self.budget, self.tile, self.choose, self.step = budget, tile, choose, 0
        self.computed, self.kept = 0, 0.0

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        selection = self.choose(self, layer, q)
        if not self.computed:
            self.kept = float(selection.density().mean())
        self.computed += 1
        with no_autocast(q.device):
            return attend(q, k, v, selection, periphery="drop").out


def window(policy: Given, layer: Layer, q: Tensor) -> Selection:
    """The tiles nearest in time, height and width, by the distance between tiles' middles."""
    return _window(layer.grid, q.shape[0], q.shape[2], policy.budget, policy.tile, q.device)


@functools.lru_cache(maxsize=16)
def _window(grid: VideoGrid, batch: int, heads: int, budget: float, tile: int, device: torch.device) -> Selection:
    places = torch.stack(torch.unravel_index(grid.order(), (grid.frames, grid.height, grid.width)), -1).float()
    middles = torch.stack([part.mean(0) for part in places.split(tile)])
    nearest = torch.cdist(middles, middles).topk(max(1, round(budget * len(middles))), largest=False).indices
    kept = torch.zeros(len(middles), len(middles), dtype=torch.bool).scatter_(1, nearest, True)
    return Selection.from_dense(
        kept.to(device).expand(batch, heads, -1, -1).contiguous(), grid, query_tile=tile, kv_tile=tile
    )


def random(policy: Given, layer: Layer, q: Tensor) -> Selection:
    """Other tiles in every layer and step."""
    draw = torch.Generator(q.device).manual_seed(1000 * policy.step + layer.index)
    tiles = {"query_tile": policy.tile, "kv_tile": policy.tile}
    return select_random(
        layer.grid, q.shape[0], q.shape[2], budget=policy.budget, generator=draw, device=q.device, **tiles
    )


class Coarse(nn.Module):
    """Attention between the means of all tiles, times a gate of the block's input, added to the sparse part.

    As VSA trains it (arXiv 2505.13389, its compressed branch): linear gates by token, head and column, zero at first.
    Its tiles are chosen by foveate's predictor here, by the same coarse attention there.
    """

    def __init__(self, model: VideoDiT):
        super().__init__()
        width = model.config.width
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in model.blocks)
        for gate in self.gates.parameters():
            nn.init.zeros_(gate)

    def forward(self, index: int, selection: Selection, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        means_q, means_k, means_v = (_tiles(part, selection.kv_tile).mean(-2) for part in (q, k, v))
        coarse = F.scaled_dot_product_attention(means_q, means_k, means_v).transpose(1, 2)  # (B, N, H, D)
        gate = self.gates[index](F.layer_norm(x, x.shape[-1:])).unflatten(-1, q.shape[2:])
        return gate * coarse.repeat_interleave(selection.kv_tile, 1)


class Linear(nn.Module):
    """Linear attention over the tiles that are not kept, through a projection that is zero at first.

    After SLA (arXiv 2509.24006): softmax features, one D x D projection a layer. SLA leaves a part of the tiles out
    altogether; here all that are not kept take part.
    """

    def __init__(self, model: VideoDiT):
        super().__init__()
        dim = model.config.head_dim
        self.project = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in model.blocks)
        for weight in self.project.parameters():
            nn.init.zeros_(weight)

    def forward(self, index: int, selection: Selection, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with no_autocast(q.device):
            features = [_tiles(part.float().softmax(-1).to(part.dtype), selection.kv_tile) for part in (q, k)]
            values = features[1].mT @ _tiles(v, selection.kv_tile)  # (B, H, N, D, D)
            totals = features[1].float().sum(-2)  # (B, H, N, D)
            rest = ~selection.to_dense()  # (B, H, N, N)
            values = (rest.to(values.dtype) @ values.flatten(-2)).unflatten(-1, values.shape[-2:])
            size = features[0].float() @ (rest.float() @ totals).unsqueeze(-1)
            out = (features[0] @ values).float() / size.clamp_min(1e-6)
            out = out.to(v.dtype).flatten(2, 3).transpose(1, 2)
        return self.project[index](out)


def _tiles(x: Tensor, tile: int) -> Tensor:
    """(B, S, H, D) -> (B, H, N, t, D). S must be whole tiles."""
    return x.transpose(1, 2).unflatten(2, (-1, tile))


BRANCHES: dict[str, Callable[[VideoDiT], nn.Module]] = {"coarse": Coarse, "linear": Linear}


def add_branch(model: VideoDiT, handle: fv.Handle, kind: str) -> nn.Module:
    """A branch on every sparse call of the model; its weights are to be trained beside the model's."""
    branch = BRANCHES[kind](model).to(next(model.parameters()).device)
    inputs: dict[int, Tensor] = {}

    def remember(block: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(block, Block)
        inputs[block.index] = args[0]

    for block in model.blocks:
        block.register_forward_pre_hook(remember)
    policy: Any = handle.policy
    compute = policy.compute

    def both(layer: Layer, mode: str, selection: Selection | None, *qkv: Tensor) -> Any:
        state = compute(layer, mode, selection, *qkv)
        if selection is None:
            return state
        return fv.AttnState(state.out + branch(layer.index, selection, inputs[layer.index], *qkv), state.lse)

    policy.compute = both
    return branch
