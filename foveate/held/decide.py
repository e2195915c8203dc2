"""Whether a step is computed or held. Pure: rules are told numbers that all ranks share, so all decide alike.

A rule is asked once a step, for all branches of guidance: guidance multiplies their difference, so what holding does to
both alike it leaves as it is, and what it does to one of them it enlarges.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from foveate.held.config import ReuseConfig
from foveate.held.schedule import Schedule

LEVEL = 0.5  # relative error of the output that quality 0 allows


@dataclass(frozen=True, kw_only=True)
class Question:
    """A step, about which a rule is asked.

    step, first, sigma: this step, the request's first one, and the noise level here. steps: how many the schedule has
    in all (the last is steps - 1), None where nobody said. anchor: the newest step that was computed. warm: whether
    the request (or its model, or its guidance) is still new. error: the relative error that holding here is predicted
    to bring, of the worst sample and branch; infinite where unknown. Asking for it waits for the device.
    """

    step: int
    first: int
    sigma: float
    steps: int | None
    anchor: int
    warm: bool
    error: Callable[[], float]


@dataclass(frozen=True)
class Verdict:
    """hold: no branch of this step is computed. predicted: the error, where the rule asked for it."""

    hold: bool
    reason: str
    predicted: float = float("inf")


class Rule(Protocol):
    """Called once a step, in order. A step is held only where all branches have values to predict it from."""

    def __call__(self, question: Question) -> Verdict: ...


@dataclass(frozen=True)
class Exact:
    def __call__(self, question: Question) -> Verdict:
        return Verdict(False, "exact")


@dataclass(frozen=True)
class Every:
    """Anchors every so many steps, counted from the end of warm-up."""

    interval: int

    def __call__(self, question: Question) -> Verdict:
        if question.warm:
            return Verdict(False, "warm-up")
        return Verdict(question.step - question.anchor < self.interval, "interval")


@dataclass(frozen=True)
class Planned:
    """As a schedule says. Raises ValueError at a step that it was not planned for."""

    schedule: Schedule

    def __call__(self, question: Question) -> Verdict:
        self.schedule.check_step(question.step, question.sigma, question.steps)
        if question.warm:
            return Verdict(False, "guidance changed")
        return Verdict(question.step not in self.schedule.anchors, "schedule")


@dataclass(frozen=True)
class ByError:
    """Held where the predicted error is within `level`, at most `longest` steps in a row."""

    level: float
    longest: int

    def __call__(self, question: Question) -> Verdict:
        if question.warm:
            return Verdict(False, "warm-up")
        if question.step - question.anchor > self.longest:
            return Verdict(False, f"held {self.longest} steps")
        error = question.error()
        return Verdict(error <= self.level, "predicted error", error)


def rule(config: ReuseConfig) -> Rule:
    """What a configuration asks for, of held outputs."""
    if config.exact:
        return Exact()
    if config.interval is not None:
        return Every(config.interval)
    if isinstance(config.schedule, Schedule):
        return Planned(config.schedule)
    return ByError(level_at_a_step(config.quality), config.max_hold - 1)


def level_at_a_step(quality: float) -> float:
    """The relative error that the model's output may have where it is held: 0 at quality 1."""
    return LEVEL * (1 - quality)


def warmup(config: ReuseConfig, count: int | None) -> int:
    """First steps of a request of `count` steps that are computed: a tenth or so, but enough to predict from."""
    if config.schedule is not None:
        return 0
    if config.warmup is not None:
        return config.warmup
    least = 1 + config.order
    return 5 if count is None else max(least, min(5, round(count / 5)))
