"""All classes of sequence lengths of one run: what is due in each, what is decided, and how that reaches the policy.

Shapes: L layers, H heads.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from foveate.sparsity import controller
from foveate.sparsity.budgets import at_budget, place
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.pairs import gap
from foveate.sparsity.plan import Control, Decision, Plan
from foveate.sparsity.policy import Sparse, length_class
from foveate.sparsity.pricing import Pricing
from foveate.sparsity.profile import SparsityProfile
from foveate.sparsity.track import Measured, Track

log = logging.getLogger("foveate")

Log = Callable[[str, float, int], None]
SLOW = 0.2  # rate of the predictors' lessons in sparse training, relative to dense
CLASSES = 32  # of lengths


class Tracks(dict[int, Track]):
    """By class. log: given the numbers of every measurement of the main class."""

    def __init__(self, config: SparsityConfig, policy: Sparse, pricing: Pricing, log: Log):
        super().__init__()
        self.config, self.policy, self.pricing, self.log = config, policy, pricing, log

    @property
    def main(self) -> Track:
        """The class that most of the attention seen so far belongs to."""
        return max(self.values(), key=lambda track: (track.work, track.tokens)) if self else self._begin(0)

    def _begin(self, step: int) -> Track:
        return Track(controller.begin(self.config, step), self._nothing_known())

    def _nothing_known(self) -> SparsityProfile:
        return SparsityProfile.empty(len(self.policy.learners), constants=self.policy.profiled)

    def due(self, step: int) -> list[int]:
        """The classes whose measurement is due."""
        return [index for index, track in self.items() if step >= track.control.due]

    def is_due(self, tokens: int, step: int) -> bool:
        track = self.get(length_class(tokens))
        return step >= (self.config.warmup if track is None else track.control.due)

    def rank(self, tokens: int) -> float:
        """Which length is wanted most: of the class whose measurement has been due longest."""
        track = self.get(length_class(tokens))
        return -1.0 if track is None else float(track.control.due)

    def meet(self, counts: Sequence[float], step: int) -> None:
        """Lengths were trained on, on some rank: `counts` is the mean over ranks, by class."""
        known = len(self)
        for index, count in enumerate(counts):
            if not count:
                continue
            if index not in self:
                self[index] = self._new(index, step)
            self[index].work += count * 4.0**index
        if len(self) > known:
            self.apply()

    def _new(self, index: int, step: int) -> Track:
        """Given budgets hold for a new class, too, where they pay at its longest."""
        track, main = self._begin(step), self.main
        if self.config.budget is not None and main.decision.plan is not None:
            track.tokens = 2.0**index
            self._give(track, main.decision.plan, step)
            track.control = replace(main.control, decision=track.decision, gap=None)
        return track

    def _give(self, track: Track, plan: Plan, step: int) -> None:
        """The given budget, where it pays. plan: whose constants serve until the heads' own are known."""
        assert self.config.budget is not None
        constants = torch.tensor(plan.constants, dtype=torch.float64)
        budgets = torch.as_tensor(self.config.budget, dtype=torch.float64).expand(constants.shape)
        if None not in track.profile.layers:
            budgets, constants = at_budget(track.profile, self.config.budget, self.config.periphery, plan)
        plan = place(budgets, constants, self.pricing.of(track), None, self.config.dense_layers)
        decision = Decision(step, any(plan.sparse), plan, "as configured")
        track.control = replace(track.control, decision=decision)

    def forget(self, step: int) -> None:
        """Tiles have another shape: nothing that was measured holds."""
        for track in self.values():
            track.control, track.profile = controller.begin(self.config, step), self._nothing_known()
            track.pairs, track.looks = [], 0
        self.apply()

    def stop(self, reason: str, step: int) -> None:
        """Attention is dense from now on."""
        for track in self.values():
            decision = replace(track.decision, step=step, active=False, reason=reason)
            track.control = replace(track.control, decision=decision)
        self.apply()

    def take(self, index: int, measured: Measured, step: int, comparable: bool) -> None:
        """One look of a measurement; after the last one the decision. comparable: losses are compared at all."""
        track = self[index]
        compares = track.compares
        track.take(measured, step)
        if track.looks < (self.config.pairs if compares else 1):
            return
        found = gap(track.pairs, self.config.shift) if compares and comparable and track.pairs else None
        track.pairs, track.looks, before = [], 0, track.control
        track.control = self._advance(track, found, step)
        track.pace = self.pricing.cadence(track)  # steps that are sparse from now on are shorter
        interval = max(track.control.interval, track.pace.often)
        track.control = replace(track.control, interval=interval, due=step + interval)
        if track.decision is not before.decision:
            self.apply()
        self._report(track, before, found, step)

    def _advance(self, track: Track, found: float | None, step: int) -> Control:
        pace, tile = self.pricing.cadence(track), self.policy.kv_tile
        config = replace(self.config, often=pace.often, rare=pace.rare)
        least, price = tile / max(track.tokens, tile), self.pricing.of(track)
        return controller.advance(track.control, config, track.profile, found, step, price, track.influence, least)

    def apply(self) -> None:
        """Put the decisions into the policy."""
        main = self.main
        for length, track in self.items():
            for where in (length, None) if track is main else (length,):
                self.policy.follow(track.decision.plan, where)
        self.policy.active = {length for length, track in self.items() if track.decision.active}
        self.policy.mode = "sparse" if self.policy.active else "dense"
        for learner in self.policy.learners:
            learner.lr = self.policy.rate * (SLOW if main.decision.active else 1.0)

    def _report(self, track: Track, before: Control, found: float | None, step: int) -> None:
        """One line a change; scalars of every measurement of the main lengths."""
        decision, plan = track.decision, track.decision.plan
        kept = plan.kept if plan is not None and decision.active else 1.0
        values = {"kept": kept, "epsilon": track.control.epsilon, "active": float(decision.active)}
        values |= {} if found is None else {"gap": found}
        for name, value in values.items() if track is self.main else ():
            self.log(f"foveate/{name}", value, step)
        if decision is before.decision or plan is None:
            return
        dense = [index for index, on in enumerate(plan.sparse) if not on]
        log.info(
            "step %d: %s at %.0f tokens, %s; %.1f %% of the tiles kept, %d of %d layers sparse%s, error level %.3f, "
            "gap %s; %s",
            step, "sparse" if decision.active else "dense", track.tokens, decision.reason, 100 * plan.kept,
            sum(plan.sparse), len(plan.sparse), f" (dense: {dense})" if dense else "", track.control.epsilon,
            "not measured" if found is None else f"{100 * found:+.3f} %", track.pace,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {str(index): track.to_dict() for index, track in self.items()}

    def load(self, saved: Mapping[str, Any], step: int, same_budget: bool) -> None:
        """Go on from a `to_dict`. same_budget: the one that is given now is the one that was then."""
        self.clear()
        self.update({int(index): Track.from_dict(track, self.policy.profiled) for index, track in saved.items()})
        for track in self.values():
            if self.config.budget is not None and not same_budget and track.decision.plan is not None:
                self._give(track, track.decision.plan, step)
        self.apply()
