"""Self-attention of LTX-Video in diffusers: video tokens only, already cut into patches by the pipeline.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim.
"""

from typing import Any

from torch import Tensor

from foveate.models.processor import Processor, rotate_pairs
from foveate.tiles import VideoGrid


class LTXProcessor(Processor):
    """As diffusers' LTXVideoAttnProcessor without its cross-attention half; it rotates before heads are split."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states (B, S, H * D) -> the same shape. Raises ValueError for a mask or outside keys."""
        self.refuse(encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask)
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k = attn.norm_q(q), attn.norm_k(k)
        if image_rotary_emb is not None:
            q, k = (rotate_pairs(x.float(), *image_rotary_emb).to(x.dtype) for x in (q, k))
        q, k, v = (x.unflatten(2, (-1, attn.head_dim)) for x in (q, k, v))
        return self.attend(q, k, v, attn.to_out)


def ltx_grid(config: Any, inputs: dict[str, Any]) -> VideoGrid:
    """From the forward's num_frames, height, width: the size of the latent in tokens.

    Raises ValueError where the model is called with video_coords alone.
    """
    frames, height, width = (inputs.get(name) for name in ("num_frames", "height", "width"))
    if frames is None or height is None or width is None:
        raise ValueError("LTX was called without num_frames, height and width, so the token grid is unknown; pass them")
    return VideoGrid(frames, height, width)
