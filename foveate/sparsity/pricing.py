"""What attention of one model costs, from the card's table of costs: how a sparse layer compares, how often to look.

Times are in milliseconds a sequence. Shapes: H heads.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from foveate import costs as prices
from foveate.sparsity import cadence
from foveate.sparsity.budgets import Price
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.policy import Sparse
from foveate.sparsity.profile import DROP
from foveate.sparsity.track import Track
from foveate.tiles import TILE

log = logging.getLogger("foveate")


@dataclass
class Pricing:
    """model: whose parameters every token meets. costs: the table; the saved one of the model's device where None."""

    config: SparsityConfig
    policy: Sparse
    model: nn.Module
    costs: prices.Costs | None = None

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def table(self) -> prices.Costs:
        if self.costs is None:
            self.costs = prices.here(self._device)
        return self.costs

    def of(self, track: Track) -> Price:
        """Prices at the lengths of a track."""
        return lambda budgets, pooled: self.layer(track.tokens, budgets, pooled)

    def layer(self, tokens: float, budgets: Sequence[float], pooled: Sequence[bool]) -> tuple[float, float]:
        """Of a layer, sparse and dense. Where no forward has shown its length yet, sparse is free."""
        if self.config.force or not tokens:
            return 0.0, 1.0
        passes = ("forward_ms",) if self.config.training_free_steps else prices.PASSES
        sparse = self._sparse(round(tokens), budgets, pooled, passes)
        return sparse, self.table.dense(round(tokens), self.policy.heads, self.policy.dim, passes=passes)

    def _sparse(
        self, tokens: int, budgets: Sequence[float], pooled: Sequence[bool], passes: Sequence[str] = prices.PASSES
    ) -> float:
        density, share = sum(budgets) / len(budgets), sum(pooled) / len(pooled)
        return self.table.sparse(tokens, self.policy.heads, self.policy.dim, density, pooled=share, passes=passes)

    def cadence(self, track: Track) -> cadence.Cadence:
        """Steps between checks and lessons, by what they cost at the lengths of a track."""
        config, heads, dim = self.config, self.policy.heads, self.policy.dim
        plan, layers = track.decision.plan, len(self.policy.learners)
        tokens = max(TILE, round(track.tokens))
        dense = self.table.dense(tokens, heads, dim)
        forward = self.table.dense(tokens, heads, dim, passes=("forward_ms",))
        now, sparse = layers * dense, layers * forward
        if plan is not None and track.decision.active:
            both = [self._sparse(tokens, *row) for row in zip(plan.budgets, plan.pooled, strict=True)]
            now = sum(ours if on else dense for ours, on in zip(both, plan.sparse, strict=True))
            sparse = forward * now / dense
        parameters = sum(x.numel() for x in self.model.parameters())
        work = cadence.Work(tokens, layers, heads, dim, parameters, self._device.type)
        fixed = config.often, config.rare, config.teach_every
        return cadence.plan(work, self.table, (now, sparse), config.pairs, *fixed)

    def place(self) -> None:
        """Training-free: at the length that a dense forward has shown, is sparse attention worth it in each layer?"""
        setting, tokens = self.policy.default, max(self.policy.tokens.values())
        for index, (budget, constants) in enumerate(zip(setting.budgets, setting.constants, strict=True)):
            sparse, dense = self.layer(tokens, budget.tolist(), (constants > DROP).tolist())
            setting.sparse_layers[index] = index not in self.config.dense_layers and sparse < dense
        if not any(setting.sparse_layers):
            log.info("sparse attention does not pay at %d tokens: all layers stay dense", tokens)
