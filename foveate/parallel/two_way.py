"""An all-to-all over gloo in which both directions of a pair of ranks are under way at once.

gloo's own all-to-all posts a rank's send before its receive. Where the other rank came first, the send starts at once,
and the word that this rank can receive waits behind it: the two directions follow each other, which takes up to twice
as long over a slow link (docs/log.md, Context parallelism). With receives posted first neither direction waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Works:
    """Several transfers under way, and what they read: sent memory must live until they are done."""

    works: list[Any]
    given: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def exchange(out: Tensor, given: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Works:
    """`given` (bytes,), cut by `send`, to the group's ranks in ascending order; what they send, by `receive`, to `out`.

    On all ranks of the group alike, in one order with its other calls.
    """
    me = dist.get_rank(group)
    come, go = out.split(list(receive)), given.split(list(send))
    come[me].copy_(go[me])
    others = [(me + step) % len(come) for step in range(1, len(come))]
    works = [dist.irecv(come[rank], group=group, group_src=rank) for rank in reversed(others) if receive[rank]]
    works += [dist.isend(go[rank], group=group, group_dst=rank) for rank in others if send[rank]]
    return Works(works, given)
