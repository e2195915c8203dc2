"""Which generation a forward belongs to: what must not change while it lasts."""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("foveate")


@dataclass
class Generation:
    """One request. signature: shapes, dtypes, devices. guidance: the scale in use.

    steps, prompts: of every branch, its newest step and noise level, and what its forwards are conditioned on.
    """

    number: int
    signature: tuple
    guidance: Any
    steps: dict[str, tuple[int, float]] = field(default_factory=dict)
    prompts: dict[str, list[Tensor]] = field(default_factory=dict)

    def continues(self, signature: tuple, branch: str, step: int, sigma: float, conditions: list[Tensor]) -> bool:
        """Whether a forward is the next of this generation: nothing of its key has changed, and time goes on."""
        if self.signature != signature or not self._same_prompt(branch, step, conditions):
            return False
        newest = self.steps.get(branch)
        last = max(one for one, _ in self.steps.values())
        return step >= last and (newest is None or (step > newest[0] and sigma <= newest[1]))

    def seen(self, branch: str, step: int, sigma: float, conditions: list[Tensor]) -> None:
        self.steps[branch], self.prompts[branch] = (step, sigma), conditions

    def _same_prompt(self, branch: str, step: int, given: list[Tensor]) -> bool:
        """Whether a branch's conditions are those of its forward before; compared only where the tensors are others."""
        before = self.prompts.get(branch)
        if before is None:
            return True
        pairs = zip(before, given, strict=False)
        same = len(before) == len(given) and all(
            a is b or (a.shape == b.shape and a.device == b.device and torch.equal(a, b)) for a, b in pairs
        )
        if not same and self.steps[branch][0] < step:
            log.info("reuse: another prompt within a request, its states are dropped")
        return same
