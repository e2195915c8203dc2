"""Self-attention of Mochi in diffusers: the video together with the text, every head with its own rotary table.

Shapes: B batch, V video tokens, T text tokens, H heads, D head dim.
"""

from typing import Any

from torch import Tensor

from foveate.models.hunyuan import projected
from foveate.models.joint import JointProcessor, Others, tail_mask
from foveate.models.processor import rotate_pairs
from foveate.tiles import VideoGrid


class MochiProcessor(JointProcessor):
    """As diffusers' MochiAttnProcessor2_0, which drops padding from one sequence after the other; here it is masked.

    Text tokens stay in their places. Diffusers moves those that are no padding to the front, which is the same where
    padding comes last, as its tokenizer puts it.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video (B, V, H * D) and text (B, T, width) -> the same two, the text as attention leaves it in the last."""
        q, k, v = projected(attn, hidden_states, "to_{}", "norm_{}")
        if image_rotary_emb is not None:
            tables = [table.repeat_interleave(2, -1) for table in image_rotary_emb]  # (V, H, D)
            q, k = (rotate_pairs(x.float(), *tables).to(x.dtype) for x in (q, k))
        valid = tail_mask(attention_mask, encoder_hidden_states.shape[1], self.name)
        others = Others(*projected(attn, encoder_hidden_states, "add_{}_proj", "norm_added_{}"), valid)
        video, text = self.attend_with(q, k, v, others, attn.to_out)
        return video, attn.to_add_out(text) if hasattr(attn, "to_add_out") else text


def mochi_grid(config: Any, inputs: dict[str, Any]) -> VideoGrid:
    """From hidden_states (B, C, F, Y, X); frames are not patched."""
    frames, height, width = inputs["hidden_states"].shape[2:]
    return VideoGrid(frames, height // config.patch_size, width // config.patch_size)
