"""Tokens are cut over ranks where they enter a model's blocks and joined where they leave, by hooks, as the adapter's
row says (models/sharding.py). No forward is copied.

Each rank computes the model outside its blocks whole, so every rank returns the whole output, and a loss computed from
it is the same on all of them. Gradients: what leaves the blocks is joined by a gather whose backward gives each rank
its own tokens' gradient times P. A parameter inside the blocks, or before them, then has P times the gradient of this
rank's tokens, one behind them its full gradient, on every rank; so the *mean* over ranks, which is what DDP and FSDP
take over data-parallel and context-parallel ranks together, is the gradient of one process.

Shapes: B batch, S tokens in tile order (V video, then text), s tokens of this rank, C width, P context-parallel ranks.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from foveate.models.adapters import Installed
from foveate.models.copies import Hook
from foveate.models.sharding import PerToken, Sharding
from foveate.parallel.comm import Group, Shards
from foveate.tiles import VideoGrid


class TokenShards:
    """Hooks on the blocks of an installed model. cut: how a grid's tokens lie on the ranks of `group`."""

    def __init__(self, installed: Installed, group: Group, cut: Callable[[VideoGrid], Shards]):
        blocks = installed.blocks()
        assert installed.adapter.sharding is not None
        self.installed, self.group, self.cut = installed, group, cut
        self.sharding: Sharding = installed.adapter.sharding
        self._names = tuple(inspect.signature(type(blocks[0]).forward).parameters)[1:]
        disable: Any = torch.compiler.disable  # collectives are no business of a compiled graph
        enter, slice_, leave = (Hook(disable(call)) for call in (self._enter, self._slice, self._leave))
        self._hooks: list[Any] = [block.register_forward_pre_hook(slice_, with_kwargs=True) for block in blocks]
        # Prepended hooks run first: tokens are cut before anything else is told of them, and joined last.
        self._hooks.append(blocks[0].register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self._hooks.append(blocks[-1].register_forward_hook(leave, with_kwargs=True))
        installed.shard = self.mine

    def mine(self, grid: VideoGrid) -> tuple[int, int]:
        """The tokens [first, stop) of this rank."""
        bounds = self.cut(grid).bounds
        return bounds[self.group.rank], bounds[self.group.rank + 1]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.installed.shard = None

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        grid = self._grid(args, kwargs)
        video, text = self._mine(grid, self._device(args, kwargs))
        args, kwargs = self._map(self.sharding.video, args, kwargs, lambda x: _take(x, video, 1))
        if self.sharding.text is not None:
            args, kwargs = self._map(self.sharding.text, args, kwargs, lambda x: x[:, text])
        return args, kwargs

    def _slice(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        grid = self._grid(args, kwargs)
        video, _ = self._mine(grid, self._device(args, kwargs))
        for row in self.sharding.per_token:
            args, kwargs = self._map(row.name, args, kwargs, lambda x, row=row: _per_token(x, row, video, grid.video))
        return args, kwargs

    def _leave(self, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        grid = self._grid(args, kwargs)
        shards = self.cut(grid)
        if self.sharding.text is None:
            return self._in_model_order(Join.apply(output, shards, self.group), grid)
        video, text = output
        whole = Join.apply(torch.cat([video, text], 1), shards, self.group)
        return self._in_model_order(whole[:, : grid.video], grid), whole[:, grid.video :]  # type: ignore[index]

    def _in_model_order(self, x: Any, grid: VideoGrid) -> Tensor:
        return x if self.sharding.in_tile_order else x.index_select(1, _raster(grid, x.device))

    def _mine(self, grid: VideoGrid, device: torch.device) -> tuple[Tensor, slice]:
        """This rank's video tokens, by their place in the model's sequence, and its text tokens."""
        first, stop = self.mine(grid)
        video = _order(grid, self.sharding.in_tile_order, device)[first : min(stop, grid.video)]
        return video, slice(max(first - grid.video, 0), max(stop - grid.video, 0))

    def _grid(self, args: tuple, kwargs: dict[str, Any]) -> VideoGrid:
        name = self.sharding.grid
        if name is None:
            grid = self.installed.grid
        else:
            grid = kwargs[name] if name in kwargs else args[self._names.index(name)]
        if grid is None:
            raise ValueError("a block was called outside its transformer's forward, so its token grid is unknown")
        return grid

    def _device(self, args: tuple, kwargs: dict[str, Any]) -> torch.device:
        name = self.sharding.video
        return (kwargs[name] if name in kwargs else args[self._names.index(name)]).device

    def _map(self, name: str, args: tuple, kwargs: dict[str, Any], function: Callable[[Any], Any]):
        """args and kwargs with one argument replaced, however it was passed; left alone where it was not."""
        if name in kwargs:
            return args, {**kwargs, name: function(kwargs[name])}
        at = self._names.index(name)
        if at >= len(args):
            return args, kwargs
        return (*args[:at], function(args[at]), *args[at + 1 :]), kwargs


class Join(torch.autograd.Function):
    """x (B, s, C) of every rank -> (B, S, C) on all. Backward: own tokens' part of the gradient, times P (above)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, group: Group) -> Tensor:
        ctx.shards, ctx.group = shards, group
        return gather_tokens(x, shards, group, "tokens leaving the blocks")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        first, stop = ctx.shards.bounds[ctx.group.rank : ctx.group.rank + 2]
        return grads[0][:, first:stop] * ctx.group.size, None, None


def gather_tokens(x: Tensor, shards: Shards, group: Group, what: str) -> Tensor:
    """x (B, s, ...) of every rank -> (B, S, ...), on all ranks. Plain function."""
    if group.size == 1:
        return x.clone()
    parts = group.gather(x.movedim(1, 0).contiguous(), shards.sizes, what).wait()
    return torch.cat(parts).movedim(0, 1)


def _per_token(x: Any, row: PerToken, places: Tensor, video: int) -> Any:
    """The entries of this rank's tokens; x may be None, a tensor, or several."""
    if isinstance(x, tuple | list):
        return type(x)(_per_token(part, row, places, video) for part in x)
    if x is None or (row.ndim is not None and x.dim() != row.ndim) or x.shape[row.dim] == 1:
        return x
    if x.shape[row.dim] != video:
        raise ValueError(
            f"{row.name} has {x.shape[row.dim]} entries at dim {row.dim}, the grid {video} video tokens: the adapter's "
            "row does not describe this model (docs/adding-a-model.md)"
        )
    return _take(x, places, row.dim)


def _take(x: Tensor, places: Tensor, dim: int) -> Tensor:
    return x.index_select(dim, places.to(x.device))


@lru_cache(maxsize=32)
def _order(grid: VideoGrid, in_tile_order: bool, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        places = torch.arange(grid.video) if in_tile_order else grid.order()[: grid.video].clone()
        return places.to(device)


@lru_cache(maxsize=32)
def _raster(grid: VideoGrid, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.argsort(grid.order()[: grid.video]).to(device)
