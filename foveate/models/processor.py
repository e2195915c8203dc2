"""What all attention processors share: which forward is running, tile order there and back, the call of the policy.

A processor stands where diffusers has its own: it projects, normalises and rotates as the model does, hands q, k, v to
`Processor.attend`. Nothing here is a module or a buffer, so state_dict never sees it.

Shapes: B batch, S tokens (video and joint text), H heads, G key/value heads (G divides H), D head dim.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foveate.attention import AttnState, Layer, Policy, no_autocast, unavailable
from foveate.models.copies import itself
from foveate.tiles import CUBE, VideoGrid

Shard = Callable[[VideoGrid], tuple[int, int]]
"""The tokens [first, stop), in tile order, that this process holds of a grid's. They come to the blocks in that order,
apart from a model's own order of video and text."""

Share = Callable[[AttnState], tuple[AttnState, ...]]
"""From what the same queries on every rank found among this rank's keys to what they found on each rank."""


@dataclass(frozen=True)
class Packed:
    """A grid whose video is a part of one packed sequence. rows: int64 (all tokens,), the places there of the video's
    tokens, in raster order, then of all others."""

    grid: VideoGrid
    rows: Tensor


@dataclass(frozen=True)
class Call:
    """One forward of the transformer: the same for all its layers, and again when checkpointing recomputes one."""

    grid: VideoGrid
    step: int | None
    branch: str
    sigma: float | None
    to_tiles: Tensor | None  # int64 (S,): for each place in tile order the token's place in the model's sequence
    to_model: Tensor | None  # int64 (S,): the way back; both None where the model's sequence is in tile order
    tokens: int  # S: fewer than the grid's where this process holds a shard
    rows: Tensor | None = None  # int64: of a packed sequence, see `Packed`
    unpack: Tensor | None = None  # int64: the way back; None where this process holds a shard, in order already


class Context:
    """What the processors of one installed model share. `policy` may be exchanged between forwards.

    shard: where this process holds a part of every sequence only, says which: see `Shard`; share: see `Share`.
    tile_shape: of the tiles that grids are cut into, (frames, height, width); changed between training steps only.

    Every thread has a forward of its own, and a step, branch and noise level inside `during`; those set outside are for
    all threads. A thread without one (of autograd's, say) takes the forward that began last.
    """

    def __init__(self, policy: Policy, text_first: bool):
        self.policy, self.text_first = policy, text_first
        self._everywhere: tuple[int | None, str, float | None] = (None, "", None)
        self._last: Call | None = None
        self._here = threading.local()
        self.shard: Shard | None = None
        self.share: Share | None = None
        self.tile_shape = CUBE

    @property
    def where(self) -> tuple[int | None, str, float | None]:
        """The denoising step, branch and noise level that a forward is told now."""
        return getattr(self._here, "where", None) or self._everywhere

    @where.setter
    def where(self, where: tuple[int | None, str, float | None]) -> None:
        self._everywhere = where

    @property
    def step(self) -> int | None:
        return self.where[0]

    @property
    def branch(self) -> str:
        return self.where[1]

    @property
    def sigma(self) -> float | None:
        return self.where[2]

    @property
    def call(self) -> Call | None:
        return getattr(self._here, "call", self._last)

    @call.setter
    def call(self, call: Call | None) -> None:
        self._here.call = self._last = call

    def enter(self, found: VideoGrid | Packed, device: torch.device) -> None:
        """A forward begins, on this grid."""
        grid, rows = (found.grid, found.rows) if isinstance(found, Packed) else (found, None)
        grid = replace(grid, cube=self.tile_shape)
        if self.shard is None:
            (there, back), tokens = tile_orders(grid, self.text_first, device), grid.tokens
        else:
            first, stop = self.shard(grid)
            (there, back), tokens = _shard_orders(grid, self.text_first, first, stop, device), stop - first
        unpack = None if rows is None or self.shard is not None else torch.argsort(rows)
        self.call = Call(grid, *self.where, there, back, tokens, rows, unpack)

    def remember(self, output: Tensor) -> None:
        """Let the backward of this forward's output find the call again, whatever ran in between.

        Checkpointing recomputes blocks in the backward. The output's gradient comes first there, so two forwards of
        different sizes with one backward after both are recomputed each on its own grid.
        """
        if output.requires_grad and not torch.compiler.is_compiling():
            call = self.call
            output.register_hook(lambda _: setattr(self, "call", call))

    @contextmanager
    def during(self, step: int | None, branch: str, sigma: float | None = None) -> Iterator[None]:
        """Another step, branch and noise level for the length of a `with`."""
        before = getattr(self._here, "where", None)
        self._here.where = step, branch, sigma
        try:
            yield
        finally:
            self._here.where = before


class Processor:
    """Base of the processors: subclasses are called as diffusers calls its own and end in `attend`."""

    def __init__(self, context: Context, index: int, name: str):
        self.context, self.foveate_layer, self.name = context, index, name
        self.original: Any = None  # the model's own, which copies of the model have

    def __reduce__(self) -> Any:
        return itself, (self.original,)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        to_out: Sequence[Callable[[Tensor], Tensor]],
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """q (B, S, H, D), k and v (B, S, G, D) in the model's token order -> (B, S, width) in that order.

        to_out: the model's projection of (B, S, H * D), and what follows it. Tokens go back into the model's order
        between the two: that way the projection keeps for its backward the very output that attention keeps, where a
        reordered copy would be one activation more.
        rotary: tables (1, S, 1, D) of cosines and sines, each angle written twice, by which q and k are still to be
        rotated (`rotate_pairs`); on a card that takes one pass over each, with their reordering.
        q and k take the dtype of v, as torch's own attention does under autocast, where norms return float32. The
        policy itself runs without autocast: what it measures and accumulates in float32 stays float32.
        """
        dtype, call = q.dtype, self.call(q.shape[1])
        q, k, v = self.in_tiles(q, k, v, call, rotary)
        with no_autocast(q.device):
            out = self.context.policy(self.layer(call), q, k, v)
        return self.project(out.to(dtype), to_out, call)

    def call(self, tokens: int | None = None) -> Call:
        """The forward that runs. ValueError where there is none, or it has not so many tokens here."""
        call = self.context.call
        if call is None:
            raise ValueError(f"{self.name} was called outside its transformer's forward, so its grid is unknown")
        if tokens is not None and tokens != call.tokens:
            raise ValueError(
                f"{self.name} got {tokens} tokens where {call.grid} has {call.tokens} here: is the sequence "
                "sharded, or extended, by something else? Remove that, or see docs/adding-a-model.md"
            )
        return call

    def layer(self, call: Call) -> Layer:
        """What the policy is told."""
        # To the compiler a name is a constant, for which every block would be compiled anew.
        name = "" if torch.compiler.is_compiling() else self.name
        return Layer(self.foveate_layer, name, call.grid, call.step, call.branch, call.sigma)

    def in_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v rotated, in tile order and in the dtype of v."""
        q, k = (_rotated(x, rotary, call) for x in (q, k))
        return q.to(v.dtype), k.to(v.dtype), _reorder(v, call.to_tiles, call.to_model)

    def project(self, out: Tensor, to_out: Sequence[Callable[[Tensor], Tensor]], call: Call) -> Tensor:
        """out (B, S, H, D) in tile order -> (B, S, width) in the model's."""
        first, *rest = to_out
        out = _reorder(first(out.flatten(2)), call.to_model, call.to_tiles)
        for follow in rest:
            out = follow(out)
        return out

    def refuse(self, **inputs: Any) -> None:
        """A ValueError where the model asks for what no policy would honour, a mask for example."""
        given = [name for name, value in inputs.items() if value is not None]
        if given:
            raise ValueError(
                f"{self.name} was given {', '.join(given)}, which foveate does not honour: masked, causal and "
                "KV-cached self-attention stay with the model's own processors (call remove(), or drop the argument)"
            )


def _reorder(x: Tensor, order: Tensor | None, inverse: Tensor | None) -> Any:
    return x if order is None else _Reorder.apply(x, order, inverse)


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor] | None, call: Call) -> Tensor:
    """x (B, S, H, D) rotated and in tile order, in its own dtype; the rotation itself in the tables'."""
    if rotary is not None and _fused(x, *rotary, call):
        return _RotateReorder.apply(x, *(table[0, :, 0] for table in rotary), call.to_tiles, call.to_model)
    turned = x if rotary is None else rotate_pairs(x, *rotary).to(x.dtype)
    return _reorder(turned, call.to_tiles, call.to_model)


def _fused(x: Tensor, cos: Tensor, sin: Tensor, call: Call) -> bool:
    """Whether one kernel can rotate and reorder. Compiled code has no need of it."""
    if not x.is_cuda or torch.compiler.is_compiling() or call.to_tiles is None:
        return False
    fits = all(table.shape == (1, x.shape[1], 1, x.shape[3]) and table.dtype == torch.float32 for table in (cos, sin))
    return fits and not (cos.requires_grad or sin.requires_grad) and unavailable("triton", "cuda") is None


class _RotateReorder(torch.autograd.Function):
    """`rotate_pairs` and `_Reorder` in one pass; its backward is the rotation back, on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        from foveate.kernels import triton_rotary

        ctx.save_for_backward(cos, sin, inverse)
        return triton_rotary.rotate(x, order, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        from foveate.kernels import triton_rotary

        cos, sin, inverse = ctx.saved_tensors
        return triton_rotary.rotate(dout, inverse, cos, sin, back=True), None, None, None, None


class _Reorder(torch.autograd.Function):
    """x (B, S, ...) -> x[:, order]. Its backward is a gather too: index_select's own would add into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        order, inverse = ctx.saved_tensors
        return _Reorder.apply(grads[0], inverse, order), None, None


def share_compiled_blocks() -> None:
    """Let torch.compile keep one graph for all blocks, where it compiles them one by one.

    It takes a module's integers for constants, and would compile every block anew for its layer's number. This names
    that one number, and nothing else, to it as an input.
    """
    config: Any = torch.compiler.config
    ours = r".*\.foveate_layer"
    if ours not in config.dynamic_sources:
        config.dynamic_sources = ",".join(filter(None, [config.dynamic_sources, ours]))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last dim of x by tables of the same width, each angle written twice."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def tile_orders(grid: VideoGrid, text_first: bool, device: torch.device) -> Tensor:
    """int64 (2, S): for each place in tile order the token's place in the model's sequence, and the way back."""
    if torch.compiler.is_compiling():
        return torch.ops.foveate.tile_orders(
            [grid.frames, grid.height, grid.width, grid.text], list(grid.cube), text_first, device
        )
    return _tile_orders(grid, text_first, device)


@lru_cache(maxsize=16)
def _tile_orders(grid: VideoGrid, text_first: bool, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for training too, which cannot save inference tensors
        order = grid.order().clone()
        if text_first:
            order = torch.where(order < grid.video, order + grid.text, order - grid.video)
        return torch.stack([order, torch.argsort(order)]).to(device)


@lru_cache(maxsize=64)
def _shard_orders(
    grid: VideoGrid, text_first: bool, first: int, stop: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Of a shard, whose video is in tile order already: text may have to move behind it, and back."""
    video = min(stop, grid.video) - min(first, grid.video)
    text = stop - first - video
    if not (text_first and video and text):
        return None, None
    with torch.inference_mode(False):
        order = torch.arange(stop - first, device=device).roll(-text)
        return order, torch.argsort(order)


@torch.library.custom_op("foveate::tile_orders", mutates_args=())
def _compiled_tile_orders(sizes: list[int], cube: list[int], text_first: bool, device: torch.device) -> Tensor:
    """Opaque to the compiler, which would otherwise sort tokens at every forward. A copy: it may reuse the memory."""
    return _tile_orders(VideoGrid(*sizes, cube=(cube[0], cube[1], cube[2])), text_first, device).clone()


@_compiled_tile_orders.register_fake
def _(sizes, cube, text_first, device):
    frames, height, width, text = sizes
    return torch.empty(2, frames * height * width + text, dtype=torch.int64, device=device)
