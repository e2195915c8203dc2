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
import re
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from foveate.attention import AttnState
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
        self._disable: Any = torch.compiler.disable  # collectives are no business of a compiled graph
        slice_ = self._hook(self._slice)
        self._hooks: list[Any] = [
            block.register_forward_pre_hook(slice_, with_kwargs=True) for block in blocks.values()
        ]
        # Prepended hooks run first: tokens are cut before anything else is told of them, and joined last.
        for name, block in blocks.items():
            for argument in self._entering(name, first=next(iter(blocks))):
                enter = self._hook(partial(self._enter, argument))
                self._hooks.append(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        if self.sharding.leaves:
            last = installed.root.get_submodule(self.sharding.leaves)
            self._hooks.append(last.register_forward_pre_hook(self._hook(self._join_first)))
        else:
            last = list(blocks.values())[-1]
            self._hooks.append(last.register_forward_hook(self._hook(self._leave), with_kwargs=True))
        installed.shard = self.mine
        if group.size > 1:
            installed.share = self._disable(partial(share, group=group))

    def mine(self, grid: VideoGrid) -> tuple[int, int]:
        """The tokens [first, stop) of this rank."""
        bounds = self.cut(grid).bounds
        return bounds[self.group.rank], bounds[self.group.rank + 1]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.installed.shard = self.installed.share = None

    def _hook(self, call: Callable[..., Any]) -> Hook:
        return Hook(self._disable(call))

    def _entering(self, name: str, first: str) -> list[str]:
        """The arguments of a block in which whole tokens come in."""
        enters = self.sharding.enters or ((re.escape(first), self.sharding.video),)
        return [argument for pattern, argument in enters if re.fullmatch(pattern, name)]

    def _enter(self, argument: str, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        grid = self._grid(block, args, kwargs)
        for name in self.sharding.whole:
            if _argument(block, name, args, kwargs) is not None:
                raise ValueError(
                    f"{type(block).__name__} was given {name}, which says where tokens lie in the whole sequence; a "
                    "model that uses it cannot be run with context parallelism"
                )
        device = self._device(block, args, kwargs)
        places = self._places(grid, device)
        args, kwargs = _map(block, argument, args, kwargs, lambda x: _take(x, places, 1))
        if self.sharding.text is not None:
            _, text = self._mine(grid, device)
            args, kwargs = _map(block, self.sharding.text, args, kwargs, lambda x: x[:, text])
        return args, kwargs

    def _slice(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        grid = self._grid(block, args, kwargs)
        places = self._places(grid, self._device(block, args, kwargs))
        count = grid.video if self._rows is None else len(self._rows)
        for row in self.sharding.per_token:
            args, kwargs = _map(block, row.name, args, kwargs, lambda x, row=row: _per_token(x, row, places, count))
        return args, kwargs

    def _leave(self, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        grid = self._grid(block, args, kwargs)
        if self.sharding.text is not None:
            video, text = output
            whole = Join.apply(torch.cat([video, text], 1), self.cut(grid), self.group)
            return self._in_model_order(whole[:, : grid.video], grid), whole[:, grid.video :]  # type: ignore[index]
        if isinstance(output, tuple):
            return self._join(output[0], grid), *output[1:]
        return self._join(output, grid)

    def _join_first(self, module: nn.Module, args: tuple) -> tuple:
        grid = self.installed.grid
        assert grid is not None
        return self._join(args[0], grid), *args[1:]

    def _join(self, x: Tensor, grid: VideoGrid) -> Tensor:
        """x (B, s, C), the video of this rank (with all other tokens behind it, where they are packed) -> (B, S, C)."""
        shards = self.cut(grid)
        own = shards.sizes[self.group.rank]
        video = self._in_model_order(Join.apply(x[:, :own], shards, self.group), grid)
        if self._rows is None:
            return video
        return torch.cat([video, x[:, own:]], 1).index_select(1, torch.argsort(self._rows))

    def _device(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.device:
        return _argument(block, self.sharding.video, args, kwargs).device

    @property
    def _rows(self) -> Tensor | None:
        return self.installed.rows if self.sharding.packed else None

    def _in_model_order(self, x: Any, grid: VideoGrid) -> Tensor:
        return x if self.sharding.in_tile_order else x.index_select(1, _raster(grid, x.device))

    def _mine(self, grid: VideoGrid, device: torch.device) -> tuple[Tensor, slice]:
        """This rank's video tokens, by their place in the model's sequence, and its text tokens."""
        first, stop = self.mine(grid)
        video = _order(grid, self.sharding.in_tile_order, device)[first : min(stop, grid.video)]
        return video, slice(max(first - grid.video, 0), max(stop - grid.video, 0))

    def _places(self, grid: VideoGrid, device: torch.device) -> Tensor:
        """Of what this rank has of the sequence that holds the video, by place in it."""
        video, _ = self._mine(grid, device)
        rows = self._rows
        return video if rows is None else torch.cat([rows[: grid.video][video], rows[grid.video :]])

    def _grid(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> VideoGrid:
        name = self.sharding.grid
        grid = self.installed.grid if name is None else _argument(block, name, args, kwargs)
        if grid is None:
            raise ValueError("a block was called outside its transformer's forward, so its token grid is unknown")
        return grid


@cache
def _names(block: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(block.forward).parameters)[1:]


def _argument(block: nn.Module, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A block's argument, however it was passed; None where it was not, or the block knows none of this name."""
    if name in kwargs:
        return kwargs[name]
    names = _names(type(block))
    return args[names.index(name)] if name in names and names.index(name) < len(args) else None


def _map(block: nn.Module, name: str, args: tuple, kwargs: dict[str, Any], function: Callable[[Any], Any]):
    """args and kwargs with one argument replaced, however it was passed; left alone where it was not."""
    if name in kwargs:
        return args, {**kwargs, name: function(kwargs[name])}
    names = _names(type(block))
    if name not in names or names.index(name) >= len(args):
        return args, kwargs
    at = names.index(name)
    return (*args[:at], function(args[at]), *args[at + 1 :]), kwargs


def share(state: AttnState, group: Group) -> tuple[AttnState, ...]:
    """From the state of the same queries over this rank's keys to those over every rank's; differentiable.

    Each rank's gradient of what it makes of them counts: they are summed, as Join's backward has made them P times.
    """
    both = torch.cat([state.out.float(), state.lse.transpose(1, 2).unsqueeze(-1)], -1)
    parts = Gather.apply(both, group)
    return tuple(
        AttnState(part[..., :-1].to(state.out.dtype), part[..., -1].transpose(1, 2))
        for part in parts.unbind(0)  # type: ignore[union-attr]
    )


class Gather(torch.autograd.Function):
    """x of every rank, all of one shape -> (P, ...) on all of them. Backward: the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return torch.cat(group.gather(x.unsqueeze(0), [1] * group.size, "attention of other tokens").wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        ones = [1] * ctx.group.size
        what = "gradients of attention of other tokens"
        return ctx.group.all_to_all(grads[0].contiguous(), ones, ones, what).wait().sum(0), None


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
