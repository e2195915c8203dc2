"""What a user's loss is like: whether dense and sparse attention can be compared by it, and by which weight."""

from typing import Any

import torch
from torch import Tensor, nn

from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.pairs import Facts, Run, Sample
from foveate.sparsity.probe import say_once

MISSES = 3  # steps in a row whose loss is no longer understood, before training goes dense
WAY_OUT = (
    "dense and sparse attention cannot be compared by it. Give handle.step(closure) a function that returns the loss "
    "of a fixed batch; or handle.step(loss=loss) or SparsityConfig(loss_weight=w), if it is a mean square times one "
    "number all the same"
)


class Loss:
    """understood: the first steps have shown what it is like. comparable: gaps are measured by it. stopped: why
    attention stays dense for good; empty otherwise."""

    def __init__(self, config: SparsityConfig):
        self.config = config
        self.understood, self.comparable, self.stopped = bool(config.training_free_steps), True, ""
        self._misses, self._why = 0, "another rank's loss is not understood"

    @property
    def lost(self) -> bool:
        """Whether this rank no longer understands it."""
        return self._misses >= MISSES

    def look(self, facts: Facts | None, given: bool) -> tuple[float, float]:
        """Whether a step showed something of the loss, and whether that is not understood. given: by the user."""
        if facts is None or (facts.loss is not None and facts.weight is None):
            return 0.0, 0.0  # not finite, as the first steps of a gradient scaler may be
        if facts.loss is None:
            self._why = "foveate did not see the loss that the backward began from"
            return 1.0, float(self.config.loss_weight is None)
        odd = f"{facts.weight:.6g} would be odd"
        self._why = f"the loss is not w * mean((output - target)^2) with a w that can be told: {odd}"
        return 1.0, float(not given and not facts.simple(self.config.loss_weight or 1.0))

    def understand(self, bad: bool) -> None:
        """What all ranks have seen of it. ValueError where a tolerance cannot be held."""
        self.understood = True
        if not bad:
            return
        if self.config.goal is None:
            self.comparable = False
            say_once(f"{self._why}: gaps are not measured, budgets do not need them. {WAY_OUT}")
            return
        self.stopped = self._why
        raise ValueError(f"{self._why}, so {WAY_OUT}; or SparsityConfig(budget=...) for one that is fixed")

    def run(self, sample: Sample, model: nn.Module, given: Tensor | float | None) -> Run:
        """What computes loss and output of a sample again. Losses that are not understood are NaN."""
        weight = self.config.loss_weight or 1.0
        if self.comparable:
            if given is not None:
                sample.loss = torch.as_tensor(given).detach()
            facts = sample.facts()
            if facts.weight is None:
                weight = weight if facts.loss is None else float("nan")
            elif given is not None or facts.simple(weight):
                weight, self._misses = facts.weight, 0
            else:
                weight, self._misses = float("nan"), self._misses + 1
        return sample.replay(model, weight)

    def lose(self) -> None:
        """It has become one that is not understood, on some rank."""
        if self.config.goal is None:
            self.comparable = False
            return
        self.stopped = "the loss is no longer a weighted mean square of the output"
        say_once(
            f"{self.stopped}: training goes on with dense attention. Give handle.step(closure) a function that "
            "returns the loss of a fixed batch, or set a fixed SparsityConfig(budget=...)"
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("understood", "comparable", "stopped")}

    def load(self, saved: dict[str, Any]) -> None:
        self.understood, self.comparable, self.stopped = (saved[name] for name in self.to_dict())
