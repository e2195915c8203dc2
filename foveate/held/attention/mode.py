"""Attention states held, layer by layer (DiTango, arXiv 2607.15650): what a handle does with `hold="attention"`.

Inside a model: its self-attentions are computed by `HoldStates`, put in by the model's adapter.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from foveate.attention import Dense
from foveate.held.attention.budget import Budget
from foveate.held.attention.policy import HoldStates
from foveate.held.config import ReuseConfig
from foveate.held.decide import warmup
from foveate.held.team import Team
from foveate.held.tracker import Forward, Request
from foveate.models import adapters

log = logging.getLogger("foveate")


@dataclass
class Course:
    """Of a request: the step at which guidance last bent, and the branches of the step before the newest."""

    kink: int = -1
    called: set[str] = field(default_factory=set)


class AttentionStates:
    """Installed in all models of a handle until `remove()`."""

    def __init__(
        self,
        config: ReuseConfig,
        names: list[str],
        models: list[nn.Module],
        teams: list[Team | None],
        requests: Callable[[], list[Request]],
    ):
        self.config, self._names, self._told = config, names, False
        self._undo: list[Callable[[], Any]] = []
        self.policies: list[HoldStates] = []
        budget = Budget(config, requests)
        try:
            for model, team in zip(models, teams, strict=True):
                self._install(model, team, budget)
        except BaseException:
            self.remove()
            raise

    def _install(self, model: nn.Module, team: Team | None, budget: Budget) -> None:
        found = adapters.installed(model)
        installed = adapters.install(model, Dense()) if found is None else found
        if found is None:
            self._undo.append(installed.remove)
        before = installed.policy
        spread = team is not None and team.parallel is before
        inner = None if found is None or spread else before
        policy = HoldStates(len(installed.layers), self.config, budget, inner, team)
        self._undo.append(partial(_take_out, installed, policy, before))
        installed.policy = policy
        self.policies.append(policy)

    def began(self, forward: Forward) -> None:
        request = forward.request
        request.state = Course()
        request.warm_until = forward.place.step + warmup(self.config, request.count)

    def decide(self, forward: Forward, guidance: Any) -> None:
        """Nothing is held here: layers decide. A step begins: branches end, a model takes over, guidance bends."""
        request, step = forward.request, forward.place.step
        if step == request.step:
            return
        request.branches = [one for one in request.branches if one.step >= request.step]
        bent = request.bends(guidance, step)
        if forward.branch.count == 0 and request.branches:
            request.warm_until = max(request.warm_until, step + 1 + self.config.order)
            for one in request.branches:  # it never comes back in this request
                one.kept_rates = None if one.held is None else one.held.learned()
                one.held = None
            request.state.called = set()
        else:
            now, before = {one.name for one in request.branches}, request.state.called
            others = self.config.cfg == 1 and before and now != before  # with cfg 2 a rank sees one branch
            if others or bent:
                request.state.kink = step
            request.state.called = now

    def took(self, forward: Forward, result: Any, sent: int, mine: bool = True) -> Any:
        branch, record = forward.branch, forward.branch.kept
        whole = record is not None and branch.held.ran == branch.held.layers
        if mine and not whole and not self.config.exact:
            self._left_out(forward)
        if not mine or record is None or not whole:  # the other ranks have its states now, or some were not renewed
            branch.held = branch.kept = None
            return result
        forward.request.why[record.reason] += record.hits == 0
        branch.sent = sent if bool(record.fresh.all()) else branch.sent
        record.bytes_moved, record.bytes_exact, record.model = sent, branch.sent, self._names[branch.model]
        forward.request.records.append(record)
        branch.kept = None
        if not self.config.exact:
            forward.request.anchor = forward.place.step if record.hits == 0 else forward.request.anchor
        return result

    def _left_out(self, forward: Forward) -> None:
        forward.request.why["layers left out inside the model"] += 1
        if not self._told:
            self._told = True
            log.warning(
                "reuse: not all attention layers ran in a forward (step %d): something inside the model, such as "
                "enable_cache, leaves layers out too. Held attention states begin anew after every such forward; use "
                "one of the two: disable_cache(), or hold='output', the default", forward.place.step,
            )  # fmt: skip

    def joined(self, request: Request) -> None:
        for branch in request.branches:
            branch.held = None

    def settle(self, request: Request) -> None:
        for branch in request.branches:
            if branch.held is not None:
                branch.held.settle()

    def bytes(self, request: Request) -> int:
        return sum(branch.held.bytes() for branch in request.branches if branch.held is not None)

    def advice(self, request: Request) -> str:
        plans = [one.held.memory for one in request.branches if one.held is not None and one.held.memory is not None]
        if plans and not any(any(plan.held) for plan in plans):
            return "The memory cap leaves no layer room: raise memory_gib, or forget() requests that have ended"
        return "A lower quality, a shorter warmup, or an interval holds more"

    def remove(self) -> None:
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            one()


def _take_out(installed: adapters.Installed, policy: HoldStates, before: Any) -> None:
    """Out of the model, or, where another policy has been put around it, out of the way."""
    policy.on = False
    if installed.policy is policy:
        installed.policy = before
