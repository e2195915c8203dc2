"""Dense attention round a ring: keys and values pass from rank to rank while each attends to what it holds
(Ring Attention, arXiv 2310.01889), merged by lse in float32. Shards may be uneven.

Shapes: B batch, s tokens of this rank, t of the rank whose keys are here, H heads, G key/value heads, D head dim.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foveate.attention import AttnState, merge
from foveate.parallel.comm import Group, Shards
from foveate.parallel.sequence import Kernel, Pair


def attend_ring(q: Tensor, k: Tensor, v: Tensor, shards: Shards, group: Group, kernel: Kernel, where: str) -> Tensor:
    """Dense attention of q (B, s, H, D) over all ranks' k, v (B, s, G, D): out (B, s, H, D), differentiable."""
    return RingAttention.apply(q, k, v, shards, group, kernel, where)  # type: ignore[return-value]


class RingAttention(torch.autograd.Function):
    """`attend_ring`. In the backward float32 gradients of keys and values travel with them, and end at their owner."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, shards: Shards, group: Group, kernel: Kernel, where: str
    ) -> Tensor:
        out, lse = ring_forward(q, k, v, shards, group, kernel, where)
        ctx.rest = shards, group, kernel, where
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        return *ring_backward(grads[0], q, k, v, (out, lse), *ctx.rest), None, None, None, None


def around(k: Tensor, v: Tensor, shards: Shards, group: Group, where: str) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(rank, its k, its v (B, t, G, D)) for every rank of the group, this one first, then the one before it, and so on.

    The next pair is under way while the caller works with this one.
    """
    held = torch.stack([k, v]).movedim(2, 0).contiguous()  # (t, 2, B, G, D): rows are tokens
    for step in range(group.size):
        owner = (group.rank - step) % group.size
        # After `step` shifts every rank holds the shard `step` places behind its own.
        rows = [shards.sizes[(rank - step) % group.size] for rank in range(group.size)]
        last = step == group.size - 1
        coming = None if last else group.shift(held, rows, f"ring keys of {where}")
        keys, values = held.movedim(0, 2).unbind(0)
        yield owner, keys, values
        if coming is not None:
            held = coming.wait()


def ring_forward(q: Tensor, k: Tensor, v: Tensor, shards: Shards, group: Group, kernel: Kernel, where: str) -> Pair:
    """out (B, s, H, D) in q's dtype and lse (B, H, s)."""
    state = None
    for _, keys, values in around(k, v, shards, group, where):
        out, lse = kernel.forward(q, keys, values, None, None)
        part = AttnState(out.float(), lse)
        state = part if state is None else merge(state, part)
    assert state is not None
    return state.out.to(q.dtype), state.lse


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Pair, shards: Shards, group: Group, kernel: Kernel, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the inputs' dtypes."""
    dq, travelling = None, None
    for step, (_, keys, values) in enumerate(around(k, v, shards, group, where)):
        dq_part, dk, dv = kernel.backward(dout.contiguous(), q, keys, values, state, None, None)
        dq = dq_part.float() if dq is None else dq + dq_part.float()
        total = torch.stack([dk.float(), dv.float()]).movedim(2, 0)
        if travelling is not None:
            total = travelling.wait() + total
        # The sums move with the keys they belong to, and one place further, home, after the last.
        rows = [shards.sizes[(rank - step) % group.size] for rank in range(group.size)]
        travelling = group.shift(total.contiguous(), rows, f"ring gradients of {where}")
    assert dq is not None
    assert travelling is not None
    dk, dv = travelling.wait().movedim(0, 2).unbind(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
