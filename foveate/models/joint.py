"""Video and other tokens (text, audio) in one attention: what processors of such models share.

The policy sees the video alone, as in models without joint attention, and says which of its keys every video query
sees. Other tokens are few and always kept: video queries attend to all of them, and their own queries to everything.
The parts are states over disjoint keys and merge exactly by lse. A padding token never counts as a key.

With context parallelism the video is spread over ranks; every rank has all other tokens, and computes them alike.

Shapes: B batch, V video tokens, T other tokens, H heads, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foveate.attention import AttnState, attend, attend_masked, merge, no_autocast, state_of
from foveate.models.processor import Processor


@dataclass(frozen=True)
class Others:
    """q, k, v (B, T, H, D) of the tokens that are not video; valid: bool (B, T), which are no padding; None: all."""

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor | None = None


class JointProcessor(Processor):
    """Base of processors whose video attends together with other tokens; they end in `attend_with`."""

    def attend_with(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        others: Others,
        to_out: Sequence[Callable[[Tensor], Tensor]],
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`attend` of the video, q, k, v (B, V, H, D), and of the others: (B, V, width) and (B, T, H * D)."""
        dtype, call = q.dtype, self.call(q.shape[1])
        q, k, v = self.in_tiles(q, k, v, call, rotary)
        with no_autocast(q.device):
            near = state_of(self.context.policy, self.layer(call), q, k, v)
            if others.k.shape[1] == 0:
                return self.project(near.out.to(dtype), to_out, call), others.q.flatten(2)
            oq, ok, ov = (x.to(v.dtype) for x in (others.q, others.k, others.v))
            if others.valid is not None:  # a padding query is read by nobody: what stands in it must not spread
                oq = oq.masked_fill(~others.valid[:, :, None, None], 0)
            out = merge(near, attend_masked(q, ok, ov, others.valid)).out
            beside = merge(attend_masked(oq, ok, ov, others.valid), *self.among_video(oq, k, v)).out
        return self.project(out.to(dtype), to_out, call), beside.to(dtype).flatten(2)

    def among_video(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[AttnState, ...]:
        """Attention of other queries q (B, T, H, D) to all video keys, k and v (B, V, H, D) being this process's."""
        state, share = attend(q, k, v), self.context.share
        return (state,) if share is None else share(state)


class VideoReader(JointProcessor):
    """In place of a cross-attention by which other tokens read the video, as the subclass computes q, k, v."""

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, T, H, D), k and v (B, V, H, D) -> (B, T, H * D)."""
        dtype = q.dtype
        with no_autocast(q.device):
            states = self.among_video(q.to(v.dtype), k.to(v.dtype), v)
            out = states[0].out if len(states) == 1 else merge(*states).out
        return out.to(dtype).flatten(2)


def tail_mask(mask: Tensor | None, tokens: int, name: str) -> Tensor | None:
    """bool (B, T) of the last T tokens, from a mask of keys (B, S) or (B, 1, 1, S). ValueError for other masks."""
    if mask is None:
        return None
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    if mask.dim() != 2 or mask.shape[1] < tokens:
        raise ValueError(
            f"{name} was given a mask {tuple(mask.shape)}; foveate honours masks of other tokens' keys, (B, {tokens})"
        )
    return mask[:, mask.shape[1] - tokens :].bool()


def split_heads(attn: object, *projected: Tensor) -> list[Tensor]:
    """(B, S, H * D) -> (B, S, H, D) of each."""
    return [x.unflatten(2, (attn.heads, -1)) for x in projected]  # type: ignore[attr-defined]
