"""A small video diffusion transformer, readable in one sitting: what foveate's own training and demo run on.

Single-device code. It knows nothing of sparsity or parallelism: every self-attention goes through `model.policy`.
What a block computes before and after it are two functions without side effects, which all blocks share once compiled
(`compile_repeated_blocks`): the policy stays out of the compiler's sight, so nothing in it breaks a graph.

Shapes: B batch, C channels, F frames, Y height, X width (pixels or latents), S tokens, H heads, D head dim, W width.
Tokens are put into tile order once, at entry, together with everything that is per token (the rotary table), and back
into raster order once, at exit.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.attention import HEAD_DIMS, Dense, Layer, Policy
from foveate.tiles import CUBE, VideoGrid


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Shape of a `VideoDiT`."""

    channels: int = 3
    """Channels of the video: 3 for colours."""
    patch: tuple[int, int, int] = (1, 4, 4)
    """Frames, height and width of the patch that becomes one token."""
    width: int = 128
    """Width of the residual stream."""
    depth: int = 6
    """Blocks, one after the other."""
    heads: int = 4
    """Attention heads; width / heads is the head dim, even, 6 to 256."""
    mlp_ratio: int = 4
    """Width of a block's MLP, in multiples of the width."""
    classes: int = 0
    """Classes that it can be told, 0 for none."""
    text_dim: int = 0
    """Width of the text embedding that it can be told, 0 for none."""

    def __post_init__(self) -> None:
        least = {"channels": 1, "width": 1, "depth": 1, "heads": 1, "mlp_ratio": 1, "classes": 0, "text_dim": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"model.{name} must be at least {lowest}, got {getattr(self, name)}")
        if len(self.patch) != 3 or min(self.patch) < 1:
            raise ValueError(f"model.patch must be three sizes of at least 1 (frames, height, width), got {self.patch}")
        even = self.width % self.heads == 0 and self.head_dim % 2 == 0
        if not even or not 6 <= self.head_dim <= max(HEAD_DIMS):
            raise ValueError(
                f"model.width {self.width} must split over model.heads {self.heads} into an even head dim of 6 to "
                f"{max(HEAD_DIMS)}, which is what attention kernels take"
            )
        if self.classes and self.text_dim:
            raise ValueError("condition the model on model.classes or on model.text_dim, not on both")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "DiTConfig":
        return cls(**{**values, "patch": tuple(values["patch"])})

    def grid(self, frames: int, height: int, width: int) -> VideoGrid:
        """The token grid of a video of frames x height x width; a ValueError where the patches do not fit."""
        sizes = (frames, height, width)
        if any(size % edge for size, edge in zip(sizes, self.patch, strict=True)):
            raise ValueError(f"frames, height, width {sizes} must be multiples of model.patch {self.patch}")
        if min(sizes) < 1:
            raise ValueError(f"frames, height, width must be at least 1, got {sizes}")
        return VideoGrid(frames // self.patch[0], height // self.patch[1], width // self.patch[2])


class VideoDiT(nn.Module):
    """Predicts the flow-matching velocity (noise - clip) of a noisy clip.

    forward(x (B, C, F, Y, X), sigma (B,) in 0 ... 1, condition) -> (B, C, F, Y, X). condition: int64 labels (B,) in
    0 ... classes, where `classes` itself means none; or a text embedding (B, text_dim), zeros for none; or None.
    x and embeddings are cast to the weights' dtype; give sigma in float32, 16 bits blur its steps. The result has the
    dtype that the last layer computes in.
    """

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        self.policy: Policy = Dense()
        self.tile_shape = CUBE  # of the tiles that `policy` sees; a policy may ask for others
        patch_dim = config.channels * math.prod(config.patch)
        self.embed = nn.Linear(patch_dim, config.width)
        self.time = nn.Sequential(nn.Linear(256, config.width), nn.SiLU(), nn.Linear(config.width, config.width))
        if config.classes:
            self.label = nn.Embedding(config.classes + 1, config.width)
        if config.text_dim:
            self.text = nn.Linear(config.text_dim, config.width)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.depth))
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self.head = nn.Linear(config.width, patch_dim)
        self._init()

    def _init(self) -> None:
        """adaLN-zero: every block starts as the identity, the output as zero."""
        zeros = [self.modulation, self.head, *(block.modulation for block in self.blocks)]
        for layer in zeros:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, sigma: Tensor, condition: Tensor | None = None) -> Tensor:
        grid = replace(self.config.grid(*x.shape[2:]), cube=self.tile_shape)
        order, inverse, rotary = _tables(grid, self.config.head_dim, x.device)
        tokens = self.embed(self._patchify(x)[:, order].to(self.embed.weight.dtype))
        signal = F.silu(self._condition(sigma, condition))
        for block in self.blocks:
            tokens = block(tokens, signal, rotary, grid, self.policy)
        shift, scale = self.modulation(signal).unsqueeze(1).chunk(2, dim=-1)
        tokens = self.head(modulate(tokens, shift, scale))
        return self._unpatchify(tokens[:, inverse], grid)

    def compile_repeated_blocks(self, compiled: bool = True) -> None:
        """Let torch.compile fuse what the blocks compute around attention, once for all of them; False undoes it.

        The first steps then take a minute longer, for training and for evaluation each. Nothing else changes: weights,
        copies and pickles stay as they are.
        """
        for block in self.blocks:
            assert isinstance(block, Block)
            block.compiled = compiled

    def _condition(self, sigma: Tensor, condition: Tensor | None) -> Tensor:
        signal = self.time(sinusoids(sigma, 256).to(self.embed.weight.dtype))
        if self.config.classes:
            none = torch.full_like(sigma, self.config.classes, dtype=torch.int64)
            return signal + self.label(none if condition is None else condition)
        if self.config.text_dim and condition is not None:
            return signal + self.text(condition.to(self.embed.weight.dtype))
        return signal

    def _patchify(self, x: Tensor) -> Tensor:
        """(B, C, F, Y, X) -> raster tokens (B, S, C * patch)."""
        f, y, w = self.config.patch
        cut = x.unflatten(4, (-1, w)).unflatten(3, (-1, y)).unflatten(2, (-1, f))
        return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)

    def _unpatchify(self, tokens: Tensor, grid: VideoGrid) -> Tensor:
        f, y, w = self.config.patch
        cut = tokens.unflatten(2, (self.config.channels, f, y, w)).unflatten(1, (grid.frames, grid.height, grid.width))
        return cut.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class Block(nn.Module):
    """Self-attention and MLP, each scaled, shifted and gated by the conditioning signal (adaLN-zero)."""

    def __init__(self, config: DiTConfig, index: int):
        super().__init__()
        width = config.width
        self.index, self.heads, self.compiled = index, config.heads, False
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.LayerNorm(config.head_dim, eps=1e-6)
        self.k_norm = nn.LayerNorm(config.head_dim, eps=1e-6)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, config.mlp_ratio * width), nn.GELU("tanh"), nn.Linear(config.mlp_ratio * width, width)
        )

    def forward(self, x: Tensor, signal: Tensor, rotary: Tensor, grid: VideoGrid, policy: Policy) -> Tensor:
        before, after = _compiled() if self.compiled else (Block.before, Block.after)
        q, k, v, modulation = before(self, x, signal, rotary)
        out = policy(Layer(self.index, f"blocks.{self.index}", grid), q, k, v)
        return after(self, x, out, modulation)

    def before(self, x: Tensor, signal: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, S, H, D) of tokens x (B, S, W), and six modulations (B, 1, 6 W)."""
        modulation = self.modulation(signal).unsqueeze(1)
        shift, scale, *_ = modulation.chunk(6, dim=-1)
        q, k, v = self.qkv(modulate(x, shift, scale)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = rotate(self.q_norm(q), rotary).to(v.dtype), rotate(self.k_norm(k), rotary).to(v.dtype)
        return q, k, v, modulation

    def after(self, x: Tensor, out: Tensor, modulation: Tensor) -> Tensor:
        """Tokens (B, S, W) with attention's out (B, S, H, D) and the MLP's."""
        *_, gate_a, shift, scale, gate_m = modulation.chunk(6, dim=-1)
        x = x + gate_a * self.project(out.flatten(2))
        return x + gate_m * self.mlp(modulate(x, shift, scale))


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`Block.before` and `Block.after`, fused. Neither asks which block it is, so all of them share one graph."""
    return torch.compile(Block.before, fullgraph=True), torch.compile(Block.after, fullgraph=True)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without parameters, then the signal's scale and shift."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:]), 1 + scale)


def sinusoids(sigma: Tensor, dim: int) -> Tensor:
    """Sine and cosine features (B, dim), float32, of a noise level in 0 ... 1."""
    rates = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=sigma.device, dtype=torch.float32) / (dim // 2))
    angles = 1000.0 * sigma.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # as for the tile order: cached, so it must serve training too
def _tables(grid: VideoGrid, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tile order, its inverse and the rotary table in tile order, on the device: nothing is copied at every step."""
    order = grid.order()
    return order.to(device), grid.inverse().to(device), rotary_table(grid, dim)[order].to(device)


def rotary_table(grid: VideoGrid, dim: int) -> Tensor:
    """Cosines and sines to rotate neighbouring pairs by, float32 (S, 2, dim), raster order; a third for each axis.

    Every pair has its cosine twice, and its sine with the sign that its first and its second element want.
    """
    pairs = dim // 2
    shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    places = (torch.arange(size, dtype=torch.float32) for size in (grid.frames, grid.height, grid.width))
    axes = torch.meshgrid(*places, indexing="ij")
    angles = [
        axis.flatten()[:, None] * torch.exp(-math.log(100.0) * torch.arange(share, dtype=torch.float32) / max(share, 1))
        for axis, share in zip(axes, shares, strict=True)
    ]
    angle = torch.cat(angles, dim=-1)
    sine = torch.stack([-angle.sin(), angle.sin()], -1).flatten(-2)
    return torch.stack([angle.cos().repeat_interleave(2, -1), sine], 1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x (B, S, H, D) by the table (S, 2, D), in float32 (float64 is kept)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = rotary[:, None].unbind(2)
    return torch.addcmul(x * cos, x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), sin)
