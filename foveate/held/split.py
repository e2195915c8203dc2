"""CFG parallel: one half of the ranks computes one branch of guidance, the other half the other.

At the first call of a step both halves know what the second will be: the clip and the time of this one, with what the
other branch was conditioned on at the step before. So each half computes its own branch at once, the halves exchange
the results, and the second call finds its own waiting. No pipeline is copied, nothing is filled in later, and where the
second call does not come, or is another one, nothing is wrong: it is computed on all ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foveate.held.tracker import CLIP, TIME, Branch, Forward, Inputs
from foveate.parallel.comm import Group


class Split:
    """Of one model. half: 0 computes the branch that is called first. name: of a top-level input, by its place."""

    def __init__(self, pair: Group, half: int, names: Callable[[], list[str]]):
        self._pair, self.half, self._names = pair, half, names

    def waiting(self, forward: Forward) -> tuple[Any, int] | None:
        """This call's result and the bytes it took, where it was computed at the first call of the step."""
        branch, ready = forward.branch, forward.branch.ready
        branch.ready = None
        if ready is None or ready[0] != forward.place.step or not _same_clip(ready[1], forward.inputs):
            return None
        return ready[2]

    def other(self, forward: Forward) -> Branch | None:
        """The branch that will be called after this one at this step; None where that is not known."""
        request, branch = forward.request, forward.branch
        live = [one for one in request.live(branch.model) if one.step == request.step]
        if request.step != forward.place.step - 1 or len(live) != 2 or branch not in live:
            return None
        first, second = live
        if branch is not first or second.given is None or not second.alike:
            return None
        args, kwargs = second.given
        inputs = forward.inputs
        return second if len(args) == len(inputs.args) and kwargs.keys() == inputs.kwargs.keys() else None

    def mine(self, forward: Forward, other: Branch) -> tuple[Forward, tuple, dict[str, Any]]:
        """What this half computes: the forward as it is, or the other branch's with this one's clip and time."""
        inputs = forward.inputs
        if self.half == 0:
            return forward, inputs.args, inputs.kwargs
        names = self._names()
        args, kwargs = other.given
        args = tuple(
            now if _follows(names[i] if i < len(names) else "", now, inputs) else old
            for i, (old, now) in enumerate(zip(args, inputs.args, strict=True))
        )
        kwargs = {
            name: inputs.kwargs[name] if _follows(name, inputs.kwargs[name], inputs) else old
            for name, old in kwargs.items()
        }
        return Forward(forward.request, other, replace(forward.place, branch=other.name), inputs), args, kwargs

    def exchange(self, forward: Forward, other: Branch, result: Any, sent: Callable[[], int]) -> Any:
        """This call's result; the other's is put aside for the second call."""
        leaves, spec = pytree.tree_flatten(result)
        mine = [x for x in leaves if isinstance(x, Tensor)]
        both: list[list[Tensor]] = [[], []]
        for x in mine:
            parts = self._pair.gather(x[None].contiguous(), [1, 1], f"CFG branches of step {forward.place.step}").wait()
            for half in (0, 1):
                both[half].append(x if half == self.half else parts[half][0].clone())
        first, second = (_put(leaves, spec, found) for found in both)
        other.ready = forward.place.step, forward.inputs, (second, sent())
        return first

    def remember(self, forward: Forward) -> None:
        """What the second call of a step was given, and whether it had the first one's clip."""
        request, branch = forward.request, forward.branch
        live = [one for one in request.branches if one.model == branch.model and one.step == forward.place.step]
        if len(live) < 2 or branch is live[0]:
            branch.clip_now = forward.inputs.clip
            return
        branch.given = forward.inputs.args, forward.inputs.kwargs
        branch.alike = _same(live[0].clip_now, forward.inputs.clip)


def _follows(name: str, value: Any, inputs: Inputs) -> bool:
    return value is inputs.clip or bool(CLIP.fullmatch(name) or TIME.fullmatch(name))


def _same_clip(before: Inputs, now: Inputs) -> bool:
    return _same(before.clip, now.clip)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and (a is b or (a.shape == b.shape and torch.equal(a, b)))


def _put(leaves: list[Any], spec: Any, tensors: list[Tensor]) -> Any:
    found = iter(tensors)
    return pytree.tree_unflatten([next(found) if isinstance(x, Tensor) else x for x in leaves], spec)


def telling(around: Any, forward: Forward, as_given: Forward) -> AbstractContextManager:
    """The other branch's `cache_context`, for what inside the model keeps states by its name."""
    told = around.told()
    if forward is as_given or told is None:
        return nullcontext()
    where = {name: value for name, value in told.items() if name != "name"}
    return around.telling(forward.place.branch, **where)
