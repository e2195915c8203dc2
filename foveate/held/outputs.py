"""The whole model's output held: between anchors it is predicted, and the model is not called at all.

It costs no attention, no feed-forward, no communication, and two outputs of memory a branch. The path of a forward is:
held? the prediction : the model, and what it gives is remembered. Nothing inside the model is touched.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foveate.held.config import ReuseConfig
from foveate.held.decide import Question, Rule, Verdict, level_at_a_step, warmup
from foveate.held.held import Held
from foveate.held.report import StepRecord
from foveate.held.schedule import Schedule
from foveate.held.tracker import Branch, Forward, Request

log = logging.getLogger("foveate")
TENSOR = object()  # stands where a model's answer has a tensor


class Outputs:
    """What a handle does with the forwards of its models, `names`. worst: of (N,) numbers, over all ranks that make
    one result. A branch keeps its `Held`, and what its model's answer looks like around the tensors.
    """

    def __init__(self, config: ReuseConfig, rule: Rule, names: list[str], worst: Callable[[Tensor], Tensor]):
        self.config, self.rule, self._names, self._worst = config, rule, names, worst
        self._told = False

    def began(self, forward: Forward) -> None:
        """A new request."""
        request = forward.request
        request.warm_until = forward.place.step + warmup(self.config, request.count)
        self._compare(request.guidance)

    def _compare(self, guidance: Any) -> None:
        """Say where a schedule was made at another guidance; its steps are planned for that one's errors."""
        planned = self.config.schedule.guidance if isinstance(self.config.schedule, Schedule) else None
        now = guidance[0] if guidance else None
        if planned is not None and isinstance(now, int | float) and abs(now - planned) > 0.1 * abs(planned):
            log.warning("reuse: the schedule was calibrated at guidance %g, this run has %g", planned, now)

    def decide(self, forward: Forward, guidance: Any) -> Any:
        """What a held forward returns; None where it must be computed."""
        request, branch, place = forward.request, forward.branch, forward.place
        if place.step != request.step or request.verdict is None:
            self._prepare(forward, guidance)
            request.verdict = self._verdict(request, forward)
            request.why[request.verdict.reason] += not request.verdict.hold
        if not request.verdict.hold or branch.held is None or not branch.held.ready:
            return None
        leaves, spec = branch.kept
        found = iter(branch.held.predict(place.sigma))
        branch.held.skipped.append((place.sigma, place.then))
        if self.config.mends and place.then is None and not self._told:
            self._told = True
            log.info("reuse: no Euler sampler of flow matching, so what held steps miss is not taken back (mend)")
        self._note(forward, hold=True)
        return pytree.tree_unflatten([next(found) if x is TENSOR else x for x in leaves], spec)

    def took(self, forward: Forward, result: Any, sent: int, mine: bool = True) -> Any:
        """The model has been called, and sent so many bytes to other ranks. mine: on this rank, not on one
        of the other half. What its caller gets: the result, and in it what held steps missed.
        """
        request, branch, place = forward.request, forward.branch, forward.place
        leaves, spec = pytree.tree_flatten(result)
        values = [x for x in leaves if isinstance(x, Tensor)]
        if any(x.requires_grad for x in values):
            raise ValueError("reuse is for generation: run it under torch.no_grad(), or remove() it for training")
        if branch.held is None:
            branch.held = Held(self.config.order, 1.0 if self.config.damping is None else self.config.damping)
            self._learn(request, branch)
        if branch.held.last and [x.shape for x in branch.held.last] != [x.shape for x in values]:
            branch.held = Held(branch.held.order, branch.held.damping)
        mended = branch.held.mended(values, place.sigma, place.then) if self.config.mends else values
        measured = not self.config.exact and branch.held.renew(values, place.sigma)
        branch.kept = [TENSOR if isinstance(x, Tensor) else x for x in leaves], spec
        branch.sent, request.anchor = sent if mine else 0, place.step
        self._note(forward, hold=False, mine=mine, measured=measured)
        if all(x is y for x, y in zip(mended, values, strict=True)):
            return result
        found = iter(mended)
        return pytree.tree_unflatten([next(found) if isinstance(x, Tensor) else x for x in leaves], spec)

    def _prepare(self, forward: Forward, guidance: Any) -> None:
        """A step begins: branches that ended are dropped, a model that takes over and a bend of guidance warm up."""
        request, branch, step = forward.request, forward.branch, forward.place.step
        request.branches = [one for one in request.branches if one.step >= request.step]
        takes_over = branch.count == 0 and bool(request.branches)
        bent = request.bends(guidance, step)
        if takes_over or bent:
            request.warm_until = max(request.warm_until, step + 1 + self.config.order)
            for one in [] if takes_over else request.branches:
                one.held = None

    def _learn(self, request: Request, branch: Branch) -> None:
        """What the same branch of another model has learned of its error is where this one begins."""
        for other in request.branches:
            if other.model != branch.model and other.name == branch.name and other.held is not None:
                branch.held.missed, branch.held.grown = other.held.missed, other.held.grown

    def _verdict(self, request: Request, forward: Forward) -> Verdict:
        place, model = forward.place, forward.branch.model
        branches = [one for one in request.branches if one.model == model]

        def error() -> float:
            known = [one.held for one in branches if one.held is not None and one.held.missed is not None]
            if len(known) < len(branches):
                return float("inf")
            missed = self._worst(torch.stack([held.missed.float() for held in known])).tolist()
            return max(held.error(place.sigma, one) for held, one in zip(known, missed, strict=True))

        verdict = self.rule(
            Question(
                step=place.step, first=request.first, sigma=place.sigma, steps=place.steps, anchor=request.anchor,
                warm=place.step < request.warm_until, error=error,
            )
        )  # fmt: skip
        ready = branches and all(one.held is not None and one.held.ready for one in branches)
        if verdict.hold and not ready:
            return Verdict(False, "nothing to predict from", verdict.predicted)
        return verdict

    def _note(self, forward: Forward, hold: bool, mine: bool = True, measured: bool = False) -> None:
        request, branch, place = forward.request, forward.branch, forward.place
        one, verdict = (1, 1, 1), request.verdict
        assert verdict is not None
        record = StepRecord(
            request.number, place.step, branch.label, place.sigma, "output held" if hold else verdict.reason,
            torch.full(one, not hold), torch.full(one, verdict.predicted), torch.full((1,), float(mine and not hold)),
            0 if hold else branch.sent, branch.sent, branch.held.bytes(),
            branch.held.missed.reshape(one) if measured else None, self._names[branch.model],
        )  # fmt: skip
        request.records.append(record)

    def joined(self, request: Request) -> None:
        """Both halves of the ranks have both branches' outputs."""

    def settle(self, request: Request) -> None:
        """Nothing is under way."""

    def advice(self, request: Request) -> str:
        least = min((float(record.predicted) for record in request.records), default=float("inf"))
        if self.config.adaptive and least < float("inf"):
            return (
                f"The least error that was predicted is {least:.2g}, quality={self.config.quality} allows "
                f"{level_at_a_step(self.config.quality):.2g}: a lower quality, or an interval, holds more"
            )
        return "A shorter warmup, or an interval, holds more"

    def bytes(self, request: Request) -> int:
        return sum(branch.held.bytes() for branch in request.branches if branch.held is not None)
