"""DiTango's own rule for what is computed between anchors, as its authors released it, on one process.

From the "HPDC26" commit (caf2e84) of github.com/thu-pacman/ChituDiffusion, described here and written anew. Every rank
attends to its own keys at every step and keeps one state for each other rank's keys. An anchor computes all of them;
each gets as its weight a softmax over the norms of all log-sum-exps, with their standard deviation as temperature.
A held state's error is that weight times how far the output over the rank's own keys, averaged over the head dim, has
drifted since the state was computed. The step after an anchor holds everything and takes as threshold the quantile
`ratio` of the errors in all layers; later steps compute the states whose error was at least that at the step before.
When the own output has drifted by 0.6 * ratio of its norm, in the mean over layers, the next step is an anchor. Errors
are means over ranks and over both branches of guidance. The first and last five steps compute everything.

States are held as they are. Its error in joining states of three or more groups is left out, so this is what the rule
can do. Ranks are equal runs of tokens, all of them here; a distance is that between the rank of the query and the key.

Shapes: B batch, P ranks, s tokens of one, H heads, D head dim, N distances.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import foveate as fv
from foveate.attention import AttnState, Layer
from foveate.models import adapters

RANKS, WARMUP, COOLDOWN, ANCHOR = 8, 5, 5, 0.6


@dataclass
class Kept:
    """Of one layer and branch. states, seen: by distance, the state and the own output when it was computed."""

    states: list[AttnState] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    anchor: Tensor = field(default_factory=lambda: torch.zeros(0))
    own: Tensor = field(default_factory=lambda: torch.zeros(0))

    def errors(self) -> Tensor:
        """float32 (N,), of every distance but 0."""
        drift = torch.stack([self._norm(self.own - seen) for seen in self.seen])
        return (self.weights * drift).mean(1)

    def drift(self) -> Tensor:
        """Of the own output since the anchor, relative."""
        return (self._norm(self.own - self.anchor) / (self._norm(self.anchor) + 1e-8)).mean()

    @staticmethod
    def _norm(x: Tensor) -> Tensor:
        """(P,): of every rank's part of (B, P, s, H)."""
        return x.square().sum((0, 2, 3)).sqrt()


class Selective:
    """Policy of a model's self-attentions. step(): the denoising step that runs. ratio: of states that are held."""

    def __init__(self, ratio: float, layers: int, steps: int, step: Callable[[], int]):
        self.ratio, self.layers, self.steps, self._step = ratio, layers, steps, step
        self.kept: dict[tuple[str, int], Kept] = {}
        self.anchors, self.threshold = {WARMUP}, float("inf")
        self.plan = torch.zeros(layers, RANKS - 1, dtype=torch.bool)
        self._ended: list[str] = []  # branches of guidance that this step has had
        self.trace: list[float] = []  # share of the other ranks' states computed, by forward and layer

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = self._step()
        if step < WARMUP or step >= self.steps - COOLDOWN:
            self.trace.append(1.0)
            return fv.attend(q, k, v).out
        q, k, v = (_by_rank(x) for x in (q, k, v))
        anchor = step in self.anchors
        kept = self.kept.setdefault((layer.branch, layer.index), Kept())
        own = _at(q, k, v, 0)
        kept.own = own.out.float().mean(-1).unflatten(0, (-1, RANKS))
        wanted = [True] * (RANKS - 1) if anchor else self.plan[layer.index].tolist()
        if anchor:
            kept.states, kept.seen = [own] * (RANKS - 1), [kept.own] * (RANKS - 1)
        for place in [place for place, compute in enumerate(wanted) if compute]:
            kept.states[place], kept.seen[place] = _at(q, k, v, place + 1), kept.own
        if anchor:
            kept.anchor, kept.weights = kept.own, _weights(kept.states, own)
        self.trace.append(sum(wanted) / len(wanted))
        out = fv.merge(own, *kept.states).out
        if layer.index == self.layers - 1:
            self._ended.append(layer.branch)
        if len(self._ended) == 2:
            self._after(step, self._ended)
            self._ended = []
        return out.unflatten(0, (-1, RANKS)).flatten(1, 2)

    def _after(self, step: int, branches: list[str]) -> None:
        """What the next step does, when both branches of this one are through."""
        rows = [[self.kept[branch, layer] for layer in range(self.layers)] for branch in branches]
        errors = torch.stack([torch.stack([kept.errors() for kept in row]) for row in rows]).mean(0).cpu()
        if step in self.anchors:
            self.plan = torch.zeros_like(errors, dtype=torch.bool)
            return
        drift = torch.stack([kept.drift() for row in rows for kept in row]).mean()
        if float(drift) >= ANCHOR * self.ratio:
            self.anchors.add(step + 1)
        if step - 1 in self.anchors:
            ordered = errors.flatten().sort().values
            self.threshold = float(ordered[min(len(ordered) - 1, int(len(ordered) * self.ratio))])
        self.plan = errors >= self.threshold


def _by_rank(x: Tensor) -> Tensor:
    """(B, S, H, D) -> (B * P, s, H, D)."""
    if x.shape[1] % RANKS:
        raise ValueError(f"{x.shape[1]} tokens do not divide over {RANKS} ranks; take another clip size")
    return x.unflatten(1, (RANKS, -1)).flatten(0, 1)


def _at(q: Tensor, k: Tensor, v: Tensor, distance: int) -> AttnState:
    """Every rank's attention to the keys of the rank that is so many places further."""

    def moved(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, RANKS)).roll(-distance, 1).flatten(0, 1)

    return fv.attend(q, moved(k), moved(v))


def _weights(states: list[AttnState], own: AttnState) -> Tensor:
    """float32 (N - 1, P): the own state's is left out, after it has had its share."""
    norms = [state.lse.unflatten(0, (-1, RANKS)).square().sum((0, 2, 3)).sqrt() for state in (*states, own)]
    scores = torch.stack(norms)
    heat = scores.std(0, correction=0).clamp(min=1e-6)
    return ((scores - scores.amax(0)) / heat).softmax(0)[:-1]


def install(pipe: Any, ratio: float, steps: int) -> tuple[Selective, adapters.Installed]:
    """In a pipeline's transformer, until `remove()` of the second."""

    def step() -> int:
        return pipe.scheduler.step_index or 0

    layers = len(pipe.transformer.blocks)
    policy = Selective(ratio, layers, steps, step)
    return policy, adapters.install(pipe.transformer, policy)
