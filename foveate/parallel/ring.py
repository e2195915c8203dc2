"""Attention round a ring: keys and values pass from rank to rank while each attends to what it holds (Ring Attention,
arXiv 2310.01889), merged by lse in float32. Shards may be uneven. Dense, or of kept tiles only: then everything travels
all the same, which is what a ring without selected exchange costs (benchmarks/bench_parallel.py).

Shapes: B batch, s tokens of this rank, t of the rank whose keys are here, H heads, G key/value heads, D head dim.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foveate.attention import AttnState, merge
from foveate.kernels.bits import pack, unpack
from foveate.parallel.comm import Group, Shards
from foveate.parallel.fetch import Place
from foveate.parallel.sequence import Kernel, Pair


def attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    group: Group,
    kernel: Kernel,
    where: str,
    words: Tensor | None = None,
) -> AttnState:
    """Attention of q (B, s, H, D) over all ranks' k, v (B, s, G, D): out (B, s, H, D) and lse, differentiable.

    words: int32 (B, H, R, W), the tiles of the whole sequence that this rank's query tiles keep; None: all.
    """
    return AttnState(*RingAttention.apply(q, k, v, words, shards, group, kernel, where))  # type: ignore[misc]


class RingAttention(torch.autograd.Function):
    """`attend_ring`. In the backward float32 gradients of keys and values travel with them, and end at their owner."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, words: Tensor | None, *rest: Any) -> Pair:
        out, lse = ring_forward(q, k, v, words, *rest)
        ctx.rest = rest
        ctx.save_for_backward(q, k, v, out, lse, words)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        q, k, v, out, lse, words = ctx.saved_tensors
        dout, dlse = torch.zeros_like(out) if grads[0] is None else grads[0], grads[1]
        dqkv = ring_backward(dout, q, k, v, (out, lse), words, *ctx.rest, dlse=dlse)
        return *dqkv, None, None, None, None, None


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


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, words: Tensor | None, shards: Shards, group: Group, kernel: Kernel, where: str
) -> Pair:
    """out (B, s, H, D) in q's dtype and lse (B, H, s)."""
    state = None
    for owner, keys, values in around(k, v, shards, group, where):
        part = AttnState(*kernel.forward(q, keys, values, _words_of(words, owner, shards, kernel), None))
        state = part if state is None else merge(state, part)
    assert state is not None
    return state.out.to(q.dtype), state.lse


def ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Pair,
    words: Tensor | None,
    shards: Shards,
    group: Group,
    kernel: Kernel,
    where: str,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the inputs' dtypes."""
    dq, travelling = None, None
    for step, (owner, keys, values) in enumerate(around(k, v, shards, group, where)):
        here = _words_of(words, owner, shards, kernel)
        dq_part, dk, dv = kernel.backward(dout.contiguous(), q, keys, values, state, here, None, dlse=dlse)
        dq = dq_part if dq is None else dq + dq_part
        total = torch.stack([dk, dv]).movedim(2, 0)
        if travelling is not None:
            total = travelling.wait() + total
        # The sums move with the keys they belong to, and one place further, home, after the last.
        rows = [shards.sizes[(rank - step) % group.size] for rank in range(group.size)]
        travelling = group.shift(total.contiguous(), rows, f"ring gradients of {where}")
    assert dq is not None
    assert travelling is not None
    dk, dv = travelling.wait().movedim(0, 2).unbind(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _words_of(words: Tensor | None, owner: int, shards: Shards, kernel: Kernel) -> Tensor | None:
    """What is kept of one rank's tiles."""
    if words is None:
        return None
    place = Place(shards, owner, kernel.kv_tile)
    return pack(place.split(unpack(words, place.tiles))[0])
