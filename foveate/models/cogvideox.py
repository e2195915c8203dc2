"""Self-attention of CogVideoX in diffusers: joint with the text, which the model puts before the video.

Shapes: B batch, T text tokens, V video tokens, S = T + V, H heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from foveate.models.processor import Processor, rotate_pairs
from foveate.tiles import VideoGrid


class CogVideoXProcessor(Processor):
    """As diffusers' CogVideoXAttnProcessor2_0 and its fused twin."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video (B, V, H * D) and text (B, T, H * D) -> the same two. Raises ValueError for a mask."""
        self.refuse(attention_mask=attention_mask)
        text = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        if attn.fused_projections:
            q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        dim = q.shape[-1] // attn.heads
        q, k, v = (part.unflatten(2, (-1, dim)) for part in (q, k, v))
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        if image_rotary_emb is not None:
            q, k = rotate_video(q, text, image_rotary_emb), rotate_video(k, text, image_rotary_emb)
        out = self.attend(q, k, v, attn.to_out)
        return out[:, text:], out[:, :text]


def rotate_video(x: Tensor, text: int, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, S, H, D) with its video tokens rotated in float32 by tables (V, D), its text tokens as they are."""
    cos, sin = (table[:, None].to(x.device) for table in tables)
    return torch.cat([x[:, :text], rotate_pairs(x[:, text:].float(), cos, sin).to(x.dtype)], dim=1)


def cogvideox_grid(config: Any, inputs: dict[str, Any]) -> VideoGrid:
    """From hidden_states (B, F, C, Y, X) and encoder_hidden_states (B, T, ...); frames are patched in 1.5 only."""
    _, frames, _, height, width = inputs["hidden_states"].shape
    patch = config.patch_size
    return VideoGrid(
        frames // (config.patch_size_t or 1),
        height // patch,
        width // patch,
        text=inputs["encoder_hidden_states"].shape[1],
    )
