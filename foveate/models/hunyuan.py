"""Self-attention of HunyuanVideo and HunyuanVideo 1.5 in diffusers: the video together with text (and image) tokens.

Shapes: B batch, V video tokens, T other tokens, H heads, D head dim.
"""

from typing import Any

from torch import Tensor

from foveate.models.joint import JointProcessor, Others, split_heads, tail_mask
from foveate.tiles import VideoGrid


class HunyuanVideoProcessor(JointProcessor):
    """As diffusers' HunyuanVideoAttnProcessor2_0 and HunyuanVideo15AttnProcessor2_0.

    Their blocks of one stream have one set of weights for all tokens, those of two streams one for each.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video (B, V, H * D) and other tokens (B, T, H * D) -> the same two. ValueError for a mask of queries."""
        q, k, v = projected(attn, hidden_states, "to_{}", "norm_{}")
        names = ("to_{}", "norm_{}") if attn.add_q_proj is None else ("add_{}_proj", "norm_added_{}")
        valid = tail_mask(attention_mask, encoder_hidden_states.shape[1], self.name)
        others = Others(*projected(attn, encoder_hidden_states, *names), valid)
        rotary = None
        if image_rotary_emb is not None:
            cos, sin = (table[None, :, None] for table in image_rotary_emb)
            rotary = cos, sin
        video, text = self.attend_with(q, k, v, others, attn.to_out or [unchanged], rotary)
        return video, text if attn.to_add_out is None else attn.to_add_out(text)


def projected(attn: Any, x: Tensor, projection: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, S, H, D), normalised by head, of x (B, S, H * D) by the modules of these names."""
    q, k, v = split_heads(attn, *(getattr(attn, projection.format(one))(x) for one in "qkv"))
    norms = [getattr(attn, norm.format(one)) for one in "qk"]
    q, k = (y if module is None else module(y) for y, module in zip((q, k), norms, strict=True))
    return q, k, v


def unchanged(x: Tensor) -> Tensor:
    """The projection of blocks of one stream, which project later."""
    return x


def hunyuan_grid(config: Any, inputs: dict[str, Any]) -> VideoGrid:
    """From hidden_states (B, C, F, Y, X): whole patches."""
    frames, height, width = inputs["hidden_states"].shape[2:]
    return VideoGrid(frames // config.patch_size_t, height // config.patch_size, width // config.patch_size)
