"""Attention of LTX-2 in diffusers: self-attention of the video, and audio that reads the video of all ranks.

Shapes: B batch, S video tokens, T audio tokens, H heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from foveate.models.joint import VideoReader, split_heads
from foveate.models.ltx import ltx_grid
from foveate.models.processor import Processor, rotate_pairs
from foveate.tiles import VideoGrid

Tables = tuple[Tensor, Tensor]


class LTX2Processor(Processor):
    """As diffusers' LTX2AudioVideoAttnProcessor and LTX2PerturbedAttnProcessor, in the video's self-attention."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: Tables | None = None,
        key_rotary_emb: Tables | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: bool | Tensor | None = None,
    ) -> Tensor:
        """hidden_states (B, S, H * D) -> the same shape. Raises ValueError for a mask or outside keys.

        perturbation_mask: 0 where a sequence's attention is left out and its values taken (1 elsewhere), as
        spatio-temporal guidance does; all_perturbed: it is 0 everywhere.
        """
        self.refuse(encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask)
        value = attn.to_v(hidden_states)
        if all_perturbed is None:
            all_perturbed = perturbation_mask is not None and bool((perturbation_mask == 0).all())
        if all_perturbed:
            return finish(attn, hidden_states, value)
        q, k, v = projected(attn, hidden_states, hidden_states, value, query_rotary_emb, key_rotary_emb)
        if perturbation_mask is None and attn.to_gate_logits is None:
            return self.attend(q, k, v, attn.to_out)
        out = self.attend(q, k, v, [torch.clone])
        if perturbation_mask is not None:
            out = torch.lerp(value, out, perturbation_mask)
        return finish(attn, hidden_states, out)


class LTX2Reader(VideoReader):
    """The same processors in the cross-attention whose queries are audio, and whose keys are the video."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        query_rotary_emb: Tables | None = None,
        key_rotary_emb: Tables | None = None,
    ) -> Tensor:
        """Audio (B, T, width) and video (B, S, width) -> (B, T, width). Raises ValueError for a mask."""
        self.refuse(attention_mask=attention_mask)
        value = attn.to_v(encoder_hidden_states)
        q, k, v = projected(attn, hidden_states, encoder_hidden_states, value, query_rotary_emb, key_rotary_emb)
        return finish(attn, hidden_states, self.read(q, k, v))


def projected(
    attn: Any, x: Tensor, read: Tensor, value: Tensor, query_tables: Tables | None, key_tables: Tables | None
) -> list[Tensor]:
    """q of x, k of `read`, and values, each (B, S, H, D), normalised over all heads and rotated."""
    q, k = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(read))
    if query_tables is not None:
        turn = rotate_split if attn.rope_type == "split" else rotate_interleaved
        q, k = turn(q, *query_tables), turn(k, *(query_tables if key_tables is None else key_tables))
    return split_heads(attn, q, k, value)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, S, H * D) by tables of the same width, each angle written twice."""
    return rotate_pairs(x.float(), cos, sin).to(x.dtype)


def rotate_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, S, H * D) by tables (B, H, S, D / 2): the halves of each head are the pairs."""
    cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    first, second = x.unflatten(2, (cos.shape[2], -1)).float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype).flatten(2)


def finish(attn: Any, hidden_states: Tensor, out: Tensor) -> Tensor:
    """Gates of each head, where the model has them, and the projection of out (B, S, H * D)."""
    if attn.to_gate_logits is not None:
        gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))
        out = (out.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2)
    return attn.to_out[1](attn.to_out[0](out))


def ltx2_grid(config: Any, inputs: dict[str, Any]) -> VideoGrid:
    """From the forward's num_frames, height, width, the size of the latent, in whole patches."""
    grid = ltx_grid(config, inputs)
    across = config.patch_size
    return VideoGrid(grid.frames // config.patch_size_t, grid.height // across, grid.width // across)
