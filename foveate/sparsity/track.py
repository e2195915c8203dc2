"""What a handle knows and has decided of one class of sequence lengths.

Shapes: L layers, H heads, K budgets of a profile.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from foveate.sparsity.cadence import Cadence
from foveate.sparsity.pairs import Pair
from foveate.sparsity.plan import Control, Decision
from foveate.sparsity.profile import BUDGETS, CONSTANTS, HeadProfile, SparsityProfile, plain

log = logging.getLogger("foveate")

MEMORY = 0.5  # what a profile keeps of its past at each measurement


@dataclass
class Track:
    """tokens: of its sequences, mean over ranks. pairs: of the measurement that has begun, `looks` steps of it so far.
    work: of the attention seen so far. influence: (L, H) of all ranks, at the last measurement. pace: from then on."""

    control: Control
    profile: SparsityProfile
    tokens: float = 0.0
    work: float = 0.0
    looks: int = 0
    pairs: list[Pair] = field(default_factory=list)
    influence: Tensor | None = None
    pace: Cadence | None = None

    @property
    def decision(self) -> Decision:
        return self.control.decision

    @property
    def compares(self) -> bool:
        """Whether there is a plan to measure against dense attention."""
        return self.decision.plan is not None and any(self.decision.plan.sparse)

    def take(self, found: "Measured", step: int) -> None:
        """Take in one step's measurement, reduced over ranks."""
        # The looks of one measurement are a few steps apart: together they are one look at the model.
        decay = MEMORY if not self.looks else 1 - (1 - MEMORY) / (self.looks + 1)
        for index, layer in enumerate(found.heads):
            self.profile = self.profile.updated(index, HeadProfile.from_flat(layer), step, decay)
        self.influence, self.tokens, self.looks = found.influence, found.tokens, self.looks + 1
        if found.pair is not None:
            self.pairs.append(found.pair)

    def to_dict(self) -> dict[str, Any]:
        influence = None if self.influence is None else self.influence.tolist()
        return {
            "control": self.control.to_dict(), "profile": self.profile.to_dict(), "tokens": self.tokens,
            "work": self.work, "looks": self.looks, "pairs": [asdict(pair) for pair in self.pairs],
            "influence": influence, "pace": None if self.pace is None else asdict(self.pace),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], constants: Sequence[float] = CONSTANTS) -> "Track":
        """constants: of the periphery, that profiles measure now."""
        control, found = Control.from_dict(saved["control"]), saved["profile"]
        if (found["budgets"], found.get("constants")) == (list(BUDGETS), plain(constants)):
            profile = SparsityProfile.from_dict(found)
        else:
            log.warning("the saved profile is of other budgets or constants than are measured now: it begins anew")
            profile = SparsityProfile.empty(len(found["layers"]), constants=constants)
        influence = None if saved["influence"] is None else torch.tensor(saved["influence"])
        pairs = [Pair(**pair) for pair in saved["pairs"]]
        pace = None if saved["pace"] is None else Cadence(**saved["pace"])
        return cls(control, profile, saved["tokens"], saved["work"], saved["looks"], pairs, influence, pace)


@dataclass(frozen=True)
class Measured:
    """heads: a model's profiles (L, H, 2 + 2 P, K). pair: None where losses were not compared. influence: (L, H)."""

    heads: Tensor
    influence: Tensor
    tokens: float
    pair: Pair | None = None

    def flat(self) -> Tensor:
        """Everything as one float32 tensor, to reduce over ranks in one go."""
        losses = (0.0, 0.0, 0.0) if self.pair is None else astuple(self.pair)
        others = torch.tensor([*losses, float(self.pair is not None), self.tokens], device=self.heads.device)
        return torch.cat([self.heads.flatten(), self.influence.to(self.heads.device).flatten(), others])

    @classmethod
    def from_flat(cls, flat: Tensor, layers: int, heads: int) -> "Measured":
        *losses, compared, tokens = flat[-5:].tolist()
        profiled, influence = flat[:-5].split([flat.numel() - 5 - layers * heads, layers * heads])
        pair = Pair(*(x / compared for x in losses)) if compared else None
        return cls(profiled.view(layers, heads, -1, len(BUDGETS)), influence.view(layers, heads), tokens, pair)
