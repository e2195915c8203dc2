"""CFG parallel: one half of the ranks computes the branch with the prompt, the other the one without.

Pipelines call the model once a branch and combine the results after both calls. So a rank returns at once from the
call that the other half computes, with memory that is filled when the halves exchange their results, at the end of the
second call (NaN until then). No pipeline is copied. The first step computes both branches everywhere: it shows whether
there are two.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foveate.models.adapters import Installed
from foveate.parallel.comm import partition

BRANCHES = ("cond", "uncond")


class SplitBranches:
    """In place of an installed model's forward, until `remove()`. On the first half of the ranks `mine` is "cond".

    Raises ValueError from a forward of another branch, and where one of the two calls of a step does not come.
    """

    def __init__(self, installed: Installed, drop: Callable[[str], None]):
        world = dist.get_world_size()
        half = world // 2
        self._pair = partition([[rank, rank + half] for rank in range(half)], "CFG branches")
        self.mine = BRANCHES[dist.get_rank() // half]
        self._installed, self._root, self._drop = installed, installed.root, drop
        self._forward = self._root.forward
        self._root.forward = self._call  # type: ignore[method-assign]
        self._seen: dict[str, Tensor] = {}  # outputs of the step that runs, by branch
        self._split, self._step = False, None

    def remove(self) -> None:
        if vars(self._root).get("forward") == self._call:
            del self._root.forward

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        branch, step = self._installed.branch, self._installed.step
        if branch not in BRANCHES:
            raise ValueError(
                f"cfg=2 needs a pipeline that calls the model for 'cond' and then for 'uncond', got {branch!r}; "
                "use cfg=1"
            )
        if branch == BRANCHES[0]:
            self._begin(step)
        if not self._split:
            output = self._forward(*args, **kwargs)
            self._seen[branch] = _tensor(output)
            self._shape = output
            return output
        output = self._forward(*args, **kwargs) if branch == self.mine else _blank(self._shape)
        self._seen[branch] = _tensor(output)
        if branch == BRANCHES[1]:
            self._exchange(step)
        return output

    def _begin(self, step: int | None) -> None:
        """A step begins: a new generation where it is not after the last one."""
        before, self._step = self._step, step
        seen, self._seen = self._seen, {}
        if before is None or step is None or step <= before:
            self._split = False
            return
        if self._split and len(seen) < 2:
            raise ValueError(
                "cfg=2: the call of one branch did not come, so the other half's result is missing; use cfg=1"
            )
        if not self._split and len(seen) == 2:
            self._split = True
            self._drop(BRANCHES[1] if self.mine == BRANCHES[0] else BRANCHES[0])

    def _exchange(self, step: int | None) -> None:
        """Fill what this half did not compute."""
        mine = self._seen[self.mine]
        parts = self._pair.gather(mine[None].contiguous(), [1, 1], f"CFG branches of step {step}").wait()
        for name, part in zip(BRANCHES, parts, strict=True):
            if name != self.mine:
                self._seen[name].copy_(part[0])


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _blank(like: Any) -> Any:
    """An output of the same kind, NaN until it is filled."""
    blank = torch.full_like(_tensor(like), torch.nan)
    if isinstance(like, Tensor):
        return blank
    return (blank,) if isinstance(like, tuple) else type(like)(sample=blank)
