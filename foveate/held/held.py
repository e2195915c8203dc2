"""What is remembered of one thing that a model computes at every step: its last two values and their noise levels.

Between computed values it is predicted, to first order in the noise level; each time it is computed again the
prediction is compared with it. TaylorSeer (arXiv 2503.06923) predicts so too, at fixed intervals.

Shapes: those of the values, any; dim 0 of a value of two or more dims are samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foveate.held.mend import Step, mending


@dataclass
class Held:
    """Values are tuples of tensors, renewed together. order 0: held as they are; 1: extrapolated, damped by `damping`.

    missed: relative error of the newest prediction in the worst sample, on the device; grown: the remainder there.
    Both may be another `Held`'s to begin with, of which this one is the continuation. skipped: the steps at which it
    was predicted since it was computed.
    """

    order: int = 1
    damping: float = 1.0
    last: tuple[Tensor, ...] = ()
    sigma: float = float("nan")
    before: tuple[Tensor, ...] = ()
    sigma_before: float = float("nan")
    missed: Tensor | None = None
    grown: float = 0.0
    skipped: list[Step] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether it can be predicted to its order."""
        return bool(self.before if self.order else self.last)

    def predict(self, sigma: float) -> tuple[Tensor, ...]:
        """The values at another noise level, in their dtypes; new tensors, which the caller may write to."""
        if not (self.order and self.before):
            return tuple(x.clone() for x in self.last)
        return tuple(along(x, y, self.ahead(sigma)) for x, y in zip(self.last, self.before, strict=True))

    def ahead(self, sigma: float) -> float:
        """By how much of the last change a prediction goes on from the last value."""
        if not (self.order and self.before):
            return 0.0
        return self.damping * (sigma - self.sigma) / (self.sigma - self.sigma_before)

    def mended(self, values: Sequence[Tensor], sigma: float, then: float | None) -> tuple[Tensor, ...]:
        """Computed values, before they are taken in, and in them what predictions since the last are now seen to have
        missed (mend.py). The values themselves where nothing was predicted or the sampler is not Euler's.
        """
        known = [self.sigma, self.sigma_before] if self.before else [self.sigma] if self.last else []
        weights = mending(self.skipped, sigma, then, known, self.ahead)
        if not weights:
            return tuple(values)
        old = zip(*([self.last, self.before] if self.before else [self.last]), strict=True)
        return tuple(combined(x, (x, *xs), weights) for x, xs in zip(values, old, strict=True))

    def renew(self, values: Sequence[Tensor], sigma: float) -> bool:
        """Take computed values in, copied: what a model returns is its caller's. Whether a prediction was measured."""
        measured = self.ready and sigma != self.sigma
        if measured:
            self.missed, self.grown = worst_miss(self.predict(sigma), values), self.remainder(sigma)
        if sigma != self.sigma:  # a second value at one level says nothing of the slope
            self.before, self.sigma_before = self.last, self.sigma
        self.last, self.sigma = tuple(x.detach().clone() for x in values), sigma
        self.skipped.clear()
        return measured

    def remainder(self, sigma: float) -> float:
        """How the error of a prediction grows with the noise level, up to a factor (Newton's remainder)."""
        return abs(sigma - self.sigma) * (abs(sigma - self.sigma_before) if self.order else 1.0)

    def error(self, sigma: float, missed: float) -> float:
        """The relative error of predicting here, where the newest prediction was `missed` off; infinite if unknown."""
        return missed * self.remainder(sigma) / self.grown if self.grown and self.ready else float("inf")

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.last, *self.before))


def along(last: Tensor, before: Tensor, ahead: float) -> Tensor:
    """last + ahead * (last - before), in float32; a copy of `last` where these are no real numbers."""
    if not last.is_floating_point() or last.shape != before.shape:
        return last.clone()
    now = last.float()
    return (now + ahead * (now - before.float())).to(last.dtype)


def combined(x: Tensor, terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """x + the sum of weights times terms, in float32; x where these are no real numbers of one shape."""
    if not x.is_floating_point() or any(term.shape != x.shape for term in terms):
        return x
    total = x.float().clone()
    for weight, term in zip(weights, terms, strict=True):
        total.add_(term.float(), alpha=weight)
    return total.to(x.dtype)


def worst_miss(predicted: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The largest relative error over samples and tensors, a float32 scalar: one hard sample must not be outvoted."""
    found = []
    for guess, value in zip(predicted, values, strict=True):
        if value.is_floating_point() and guess.shape == value.shape and value.numel():
            rows = 1 if value.ndim > 1 else 0
            off, size = ((x.float().flatten(rows) if rows else x.float()[None]) for x in (guess - value, value))
            found.append((off.norm(dim=-1) / size.norm(dim=-1).clamp(min=1e-30)).max())
    return torch.stack(found).max() if found else torch.zeros(())
