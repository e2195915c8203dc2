"""Attention of MiniMax-H3 in diffusers: one packed sequence of text, conditioning frames, audio and the video.

The video is the clip that is generated, its last rows: only its attention is sparse. All else, conditioning frames
too, is few tokens: their queries see everything, and everything sees them.

Shapes: B batch, S tokens of the sequence, V of them video, H heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from foveate.models.hunyuan import projected
from foveate.models.joint import JointProcessor, Others, split_heads
from foveate.models.processor import Packed
from foveate.tiles import VideoGrid


class MiniMaxH3Processor(JointProcessor):
    """As diffusers' MiniMaxH3AttnProcessor in the main blocks (those that refine text alone keep their own)."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """hidden_states (B, S, width) -> the same shape. Raises ValueError for a mask."""
        self.refuse(attention_mask=attention_mask)
        if attn.fused_projections:
            q, k, v = split_heads(attn, *attn.to_qkv(hidden_states).chunk(3, dim=-1))
            q, k = attn.norm_q(q), attn.norm_k(k)
        else:
            q, k, v = projected(attn, hidden_states, "to_{}", "norm_{}")
        if rotary_emb is not None:
            q, k = (rotate_leading(x, *rotary_emb) for x in (q, k))
        call = self.call()
        if (
            call.rows is not None and call.unpack is not None
        ):  # else this process has its own part of the video, and all else behind it
            q, k, v = (x.index_select(1, call.rows) for x in (q, k, v))
        (q, oq), (k, ok), (v, ov) = (x.tensor_split([call.tokens], dim=1) for x in (q, k, v))
        out, beside = self.attend_with(q, k, v, Others(oq, ok, ov), attn.to_out)
        for follow in attn.to_out:
            beside = follow(beside)
        out = torch.cat([out, beside], 1)
        return out if call.unpack is None else out.index_select(1, call.unpack)


def rotate_leading(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The leading dims of x (B, S, H, D) rotated by tables (S, r), r <= D, whose halves are the pairs; x's dtype."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    cos, sin = (table.to(x.dtype)[None, :, None] for table in (cos, sin))
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def minimax_grid(config: Any, inputs: dict[str, Any]) -> Packed:
    """From position_ids (S, 3) and video_indices: the last frames of one size, in neighbouring rows.

    They are read on the host, at every forward. Raises ValueError where the last frame's rows are no raster.
    """
    disable: Any = torch.compiler.disable
    return disable(read_layout)(inputs["position_ids"], inputs["video_indices"])


def read_layout(positions: Tensor, rows: Tensor) -> Packed:
    """See `minimax_grid`."""
    video = rows.cpu()
    jumps = torch.nonzero(video.diff() != 1).flatten()
    video = video[int(jumps[-1]) + 1 if len(jumps) else 0 :]
    times, places = positions[video.to(positions.device)].cpu().tensor_split([1], dim=1)
    changes = torch.nonzero(times.flatten().diff() != 0).flatten()
    size = len(video) - (int(changes[-1]) + 1 if len(changes) else 0)  # of the last frame
    frames = len(video) // size
    first = len(video) - frames * size
    times, places = times[first:].view(frames, size), places[first:].view(frames, size, 2)
    alike = (places == places[-1]).flatten(1).all(1) & (times == times[:, :1]).all(1)
    frames = int(alike.flip(0).int().cumprod(0).sum())
    width = int((places[-1, :, 0] == places[-1, 0, 0]).sum())
    raster = places[-1].unflatten(0, (-1, width)) if size % width == 0 else None
    if raster is None or (raster[..., 0] != raster[:, :1, 0]).any() or (raster[..., 1] != raster[:1, :, 1]).any():
        raise ValueError(
            "the last frame in video_indices is no raster of height and width by its position_ids, so the token grid "
            "is unknown; video rows must come frame by frame, row by row"
        )
    others = torch.ones(len(positions), dtype=torch.bool)
    own = video[len(video) - frames * size :]
    others[own] = False
    order = torch.cat([own, torch.nonzero(others).flatten()]).to(positions.device)
    return Packed(VideoGrid(frames, size // width, width), order)
