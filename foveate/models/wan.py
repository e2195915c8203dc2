"""Self-attention of Wan 2.1 and 2.2 in diffusers (and of SkyReels-V2, which took it over): video tokens only.

Shapes: B batch, S tokens, H heads, D head dim.
"""

from typing import Any

from torch import Tensor

from foveate.models.processor import Processor
from foveate.tiles import VideoGrid


class WanProcessor(Processor):
    """As diffusers' WanAttnProcessor without its cross-attention half."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """hidden_states (B, S, H * D) -> the same shape. Raises ValueError for masks, caches and outside keys."""
        self.refuse(encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask, **others)
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        dim = q.shape[-1] // attn.heads
        q, k, v = (x.unflatten(2, (-1, dim)) for x in (attn.norm_q(q), attn.norm_k(k), v))
        return self.attend(q, k, v, attn.to_out, rotary_emb)


def wan_grid(config: Any, inputs: dict[str, Any]) -> VideoGrid:
    """From hidden_states (B, C, F, Y, X): whole patches, as the patch embedding cuts them."""
    sizes = inputs["hidden_states"].shape[2:]
    return VideoGrid(*(size // patch for size, patch in zip(sizes, config.patch_size, strict=True)))
