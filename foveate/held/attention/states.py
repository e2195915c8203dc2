"""All layers' held states of one branch of one request, what is known of them, and the plan of the step that runs.

Shapes: L layers, P parts of this process, N states a layer.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foveate.held.attention import plan as plans
from foveate.held.attention.cache import HeldState
from foveate.held.attention.layout import Layout, key_counts
from foveate.held.attention.meter import FIELDS, LayerMeter, Rows, errors
from foveate.held.attention.plan import History, MemoryPlan, StepPlan
from foveate.held.config import ReuseConfig
from foveate.held.report import StepRecord
from foveate.tiles import VideoGrid

log = logging.getLogger("foveate")

DRIFT = (0.25, 16.0)  # of a probe's error over its prediction, how far it is believed
USUAL = 3.0  # largest drift expected without a probe: below plan.ANCHOR_DRIFT, or nothing would ever be held again
BLEND = 0.5  # weight of the newest measurement of a rate, in logarithms


@dataclass
class Pending:
    """Measurements of a step on their way to the host, and what to compare them with."""

    sums: Tensor  # float32 (L, all parts, N + 1, 5)
    arrived: Callable[[], None]
    growth: Tensor
    probe_growth: Tensor
    fresh: Tensor
    record: StepRecord


class LayerStates:
    """Parts, where not said otherwise, are all parts, of every rank. start: the first step; `config.warmup` is its."""

    def __init__(
        self, layers: int, layout: Layout, config: ReuseConfig, start: int, device: torch.device, grid: VideoGrid
    ):
        assert config.warmup is not None
        self.warmup, self.grid = config.warmup, grid
        self.layers, self.layout, self.config, self.start, self.device = layers, layout, config, start, device
        self.memory: MemoryPlan | None = None
        self.plan: StepPlan | None = None
        self.step, self.sigma, self.ran = -1, torch.nan, 0  # ran: layers of the newest forward
        self.kinked_at: int | None = None
        self.plain = torch.full((layers,), torch.nan, dtype=torch.float64)  # measured errors of a plain hold,
        self.first = self.plain.clone()  # and with the slope
        self.usual = torch.ones(layers, dtype=torch.float64)  # drift at the first step after an anchor, smoothed
        self._pending: Pending | None = None
        self._divide(config.states)

    def _divide(self, states: int) -> None:
        """Begin anew with so many states a layer."""
        config, layout = self.config, self.layout
        self.bundles = layout.bundles(states)
        self.history = History.empty(self.layers, layout.parts, len(self.bundles))
        self.probe = History.empty(self.layers, layout.parts, 1)
        self.states = [[HeldState() for _ in self.bundles] for _ in range(self.layers)]
        base, first = layout.rows[0], layout.mine[0]
        spans = [layout.part(first + local) for local in range(layout.mine[1] - first)]
        self.spans = [(a - base, b - base) for a, b in spans]
        self.rows = Rows.spread(self.spans, config.rows, self.device)
        self.meters = [
            LayerMeter(self.rows, len(self.bundles), config.damping, config.local == "fresh", self.device)
            for _ in range(self.layers)
        ]
        lengths = torch.tensor([b - a for a, b in self.spans])
        self.part_of_row = torch.arange(len(self.spans)).repeat_interleave(lengths).to(self.device)

    @property
    def measuring(self) -> bool:
        """Whether sampled rows are compared at all."""
        config = self.config
        fitted = config.order == 1 and config.damping is None
        return not config.exact and (config.adaptive or fitted or config.audit)

    def begin(
        self, step: int, sigma: float, kink: bool, cap: Callable[[], float], state_bytes: int, other: StepPlan | None
    ) -> None:
        """Plan a step. cap: bytes this branch may hold, asked once. other: what a branch planned for this very step."""
        self._take_in()
        self.weight = plans.step_weight(self.sigma, sigma)
        self.step, self.sigma, self.ran = step, sigma, 0
        if kink:
            log.info("step %d: guidance changed, slopes begin anew", step)
            self.kinked_at = step
            self._forget_slopes()
        if self.memory is None and step >= self._storing_from:
            self._plan_memory(cap(), state_bytes)
        history = self.history
        self.predicted = plans.predict(history, sigma)
        self.plan = self._decide() if other is None or not self._follows(other) else replace(other, reason="as other")
        ahead = torch.cat([plans.steps_ahead(history, sigma), plans.steps_ahead(self.probe, sigma)], dim=-1)
        mine = slice(*self.layout.mine)
        self.fresh = self.plan.fresh[:, mine].tolist()
        self.again = (history.last == sigma)[:, mine].tolist()
        self.any_fresh = self.plan.fresh.any(-1, keepdim=True)
        seen = torch.cat([self.plan.fresh, self.any_fresh], -1)
        self.ahead = ahead[:, mine].float().to(self.device, non_blocking=True)
        self.fresh_mask = seen[:, mine].to(self.device, non_blocking=True)
        self._growth = plans.growth(history, sigma), plans.growth(self.probe, sigma)
        self.history = history.renewed(self.plan.fresh, sigma, self.predicted * self.weight)
        self.probe = self.probe.renewed(self.any_fresh, sigma)
        self.sums: list[Tensor | None] = [None] * self.layers

    @property
    def _storing_from(self) -> int:
        """The first step whose states are kept: as many before the end of warm-up as the order asks for."""
        return self.start + self.warmup - 1 - self.config.order

    def stores(self, layer: int) -> bool:
        return self.memory is not None and self.memory.held[layer]

    def slope(self, layer: int) -> bool:
        return self.memory is not None and self.memory.slopes[layer]

    def coefficient(self, layer: int, state: int) -> Tensor:
        """How far each row of this process goes along its last change: ahead times damping, float32 (S,)."""
        return (self.ahead[layer, :, state] * self.meters[layer].damping[:, state])[self.part_of_row]

    def _follows(self, other: StepPlan) -> bool:
        """Whether this branch does what another one planned for this step.

        Guidance multiplies the difference of two branches: what holding does to both alike it leaves as it is, and what
        it does to one of them it enlarges.
        """
        possible = (
            bool((other.fresh | ~self.history.last.isnan()).all()) and other.fresh.shape == self.history.rate.shape
        )
        return self.config.adaptive and self.step - self.start >= self.warmup and possible

    def _decide(self) -> StepPlan:
        config, step = self.config, self.step
        since = step - self.start
        if config.exact:
            return plans.anchor(self.history, "exact")
        if since < self.warmup:
            return plans.anchor(self.history, "warm-up")
        if self.kinked_at is not None and step - self.kinked_at <= config.order:
            return plans.anchor(self.history, "guidance")
        if config.interval is not None:
            if (since - self.warmup + 1) % config.interval == 0:
                return plans.anchor(self.history, "interval")
            return plans.hold_all(self.history)
        level = plans.level_between(config.quality)
        return plans.plan_step(self.history, self.sigma, self.weight, level, config.max_hold)

    def _plan_memory(self, cap: float, state_bytes: int) -> None:
        config = self.config
        if config.exact:
            return
        states = plans.fit_states(self.layers, config.states, config.order, state_bytes, cap)
        if states != len(self.bundles):
            log.info(
                "reuse: %d states a layer in place of %d, to stay within the memory cap", states, len(self.bundles)
            )
            self._divide(states)
        room = len(self.bundles)
        memory = plans.plan_memory(self.plain, self.first, room, config.order, state_bytes, cap)
        self.memory = memory
        if not all(memory.held) or (config.order and not all(memory.slopes)):
            log.warning("reuse: the memory cap of %.2f GiB a branch allows %s", cap / 2**30, memory)
        held, slopes = torch.tensor(memory.held), torch.tensor(memory.slopes)
        # Layers without states, or without slopes, are predicted as such from now on.
        self.history = replace(self.history, held=held, slopes=slopes, rate=self._rates_without(slopes, self.history))

    def _rates_without(self, slopes: Tensor, history: History) -> Tensor:
        """Rates are per growth: where slopes are dropped, those measured for first order mean nothing."""
        return torch.where(slopes[:, None, None], history.rate, torch.inf)

    def _forget_slopes(self) -> None:
        self.history, self.probe = self.history.kinked(), self.probe.kinked()
        for meter in self.meters:
            meter.forget_changes()

    def record(self, request: int, name: str) -> StepRecord:
        """What the step that begins computes. name: this branch's."""
        plan, layout = self.plan, self.layout
        assert plan is not None
        counts = key_counts(layout, self.bundles, self.config.local)
        lengths = torch.tensor([layout.part(part)[1] - layout.part(part)[0] for part in range(layout.parts)])
        own, apart = counts[:, -1], counts[:, :-1]
        pairs = ((plan.fresh * apart).sum(-1) + own) * lengths
        return StepRecord(
            request, self.step, name, self.sigma, plan.reason, plan.fresh, self.predicted,
            pairs.sum(-1) / layout.tokens**2, 0, 0,
        )  # fmt: skip

    def end(self, record: StepRecord, gather: Callable[[Tensor], Tensor] | None) -> None:
        """After the last layer: send the measurements off. gather: from this rank's parts (L, 1, N + 1, 5) to all."""
        assert self.plan is not None
        record.bytes_held = self.bytes()
        if not any(found is not None for found in self.sums):
            return
        blank = torch.zeros(len(self.spans), len(self.bundles) + 1, len(FIELDS), device=self.device)
        mine = torch.stack([blank if found is None else found for found in self.sums])
        sums, arrived = _to_host(mine if gather is None else gather(mine))
        self._pending = Pending(sums, arrived, *self._growth, self.plan.fresh, record)

    def _take_in(self) -> None:
        """Read the last step's measurements: the one wait for the device in a step."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.arrived()
        first, plain = errors(pending.sums)
        pending.record.actual = first[..., :-1]
        slopes = self.history.slopes[:, None, None]
        self.history = self._rated(
            self.history, torch.where(slopes, first, plain)[..., :-1], pending.growth, pending.fresh
        )
        self._note(plain[..., :-1], first[..., :-1], pending.fresh)
        probe, at = torch.where(slopes, first, plain)[..., -1:], pending.probe_growth
        fresh = pending.fresh.any(-1, keepdim=True)
        expected = (self.probe.rate * at).square().nanmean((1, 2)).sqrt()
        drift = probe.square().nanmean((1, 2)).sqrt() / expected
        renewed = fresh.flatten(1).any(1)
        seen = drift.isfinite() & ~renewed
        drift = torch.where(seen, drift, 1.0).clamp(*DRIFT)
        # The first step after an anchor has no probe yet: what it was off at such steps before is what is expected.
        first_held = seen & (self.history.age.amax((1, 2)) == 1)
        self.usual = torch.where(first_held, (self.usual * drift).sqrt(), self.usual).clamp_max(USUAL)
        self.history = replace(self.history, drift=torch.where(renewed, self.usual, drift))
        self.probe = self._rated(self.probe, probe, at, fresh)

    def _rated(self, history: History, error: Tensor, growth: Tensor, fresh: Tensor) -> History:
        """The rates with a step's errors taken in, in logarithms."""
        found = (error / growth).clamp_min(1e-12)  # a state that did not move at all may be held, and may move later
        usable = fresh & found.isfinite()
        mixed = torch.where(history.rate.isfinite(), history.rate ** (1 - BLEND) * found**BLEND, found)
        return replace(history, rate=torch.where(usable, mixed, history.rate))

    def _note(self, plain: Tensor, first: Tensor, fresh: Tensor) -> None:
        """Errors by layer, for the choice of layers that memory allows."""
        for name, found in (("plain", plain), ("first", first)):
            mean = torch.where(fresh, found, torch.nan).square().nanmean((1, 2)).sqrt()
            setattr(self, name, torch.where(mean.isfinite(), mean, getattr(self, name)))

    def bytes(self) -> int:
        return sum(state.bytes() for layer in self.states for state in layer)

    def learned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Measured rates of error, and errors by layer, of a plain hold and with the slope."""
        self._take_in()
        return self.history.rate, self.plain, self.first

    def take_up(self, learned: tuple[Tensor, Tensor, Tensor]) -> None:
        """Begin with what another model's states have learned, where it has as many."""
        rate, plain, first = learned
        if rate.shape == self.history.rate.shape:
            self.history, self.plain, self.first = replace(self.history, rate=rate), plain, first

    def settle(self) -> None:
        """Take in what is still on its way, for a report."""
        self._take_in()


def _to_host(x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
    """A copy on the host, asynchronous where the device is not the host, and how to wait for it."""
    if x.device.type != "cuda":
        return x.cpu(), lambda: None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.synchronize
