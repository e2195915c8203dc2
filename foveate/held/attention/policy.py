"""The policy of held attention states: every self-attention is merged from states computed now and states remembered.

Not covered: torch.compile across it (the policy runs outside compiled graphs).

Shapes: B batch, S tokens of this process in tile order, H heads, G key/value heads, D head dim.
"""

from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from foveate.attention import AttnState, Layer, Policy, attend, merge, state_of
from foveate.held.around import said
from foveate.held.attention.budget import Budget
from foveate.held.attention.cache import Span, between
from foveate.held.attention.keys import Keys, joined
from foveate.held.attention.layout import Layout, one_process
from foveate.held.attention.ranks import StateRanks
from foveate.held.attention.sampling import measure
from foveate.held.attention.states import LayerStates
from foveate.held.config import ReuseConfig
from foveate.held.team import Team
from foveate.held.tracker import RUNNING, Branch, Forward, Request


class HoldStates:
    """Policy of one model. The forward that runs says to which request, step and branch its layers belong."""

    def __init__(self, layers: int, config: ReuseConfig, budget: Budget, inner: Policy | None, team: Team | None):
        """inner: another policy, what computes layers afresh. team: the ranks, where there are several."""
        if config.audit and (inner is not None or team is not None):
            raise ValueError("audit computes what is held on one process, with plain attention; leave it off")
        if inner is not None and not config.whole:
            raise ValueError("around another policy layers are held whole: states=1 and local='held'")
        self.inner, self.on = inner, True
        self.ranks = None if team is None or team.parallel is None else StateRanks(team, config)
        self.layers, self.config, self._budget = layers, config, budget
        self._uncompiled: Any = torch.compiler.disable(self._call)

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._uncompiled(layer, q, k, v, False)[0]

    def state(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        return AttnState(*self._uncompiled(layer, q, k, v, True))

    def _call(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """out (B, S, H, D), and where it is asked for its lse (B, H, S)."""
        forward: Forward | None = said(RUNNING)
        if forward is None or not self.on:
            return self._whole(layer, q, k, v, with_lse)
        if torch.is_grad_enabled() and q.requires_grad:
            raise ValueError("reuse is for generation: run it under torch.no_grad(), or remove() it for training")
        if layer.index == 0:
            self._begin(forward, layer, q)
        held: LayerStates | None = forward.branch.held
        if held is None or held.step != forward.place.step:  # the first layer was left out: `took` says so
            return self._whole(layer, q, k, v, with_lse)
        held.ran += 1
        if self.config.exact:
            found = self._whole(layer, q, k, v, with_lse)
        elif self.config.whole:
            found = self._hold_or_compute(held, layer, q, k, v, with_lse)
        else:
            found = self._by_bundle(held, layer, q, k, v, with_lse)
        if layer.index == self.layers - 1:
            ranks, apart = self.ranks, not self.config.whole
            held.end(forward.branch.kept, None if ranks is None else lambda sums: ranks.gather(sums, apart))
        return found

    def _begin(self, forward: Forward, layer: Layer, q: Tensor) -> None:
        """Plan the step. Branches that are called at one are anchored together: the first plans for all."""
        request, branch, place = forward.request, forward.branch, forward.place
        if branch.held is None or branch.held.grid != layer.grid:
            config = replace(self.config, warmup=max(1 + self.config.order, request.warm_until - place.step))
            branch.held = LayerStates(self.layers, self._layout(layer, q), config, place.step, q.device, layer.grid)
            learn(request, branch)
        held: LayerStates = branch.held
        others = [one.held for one in request.branches if one.model == branch.model and one is not branch and one.held]
        alike = [one for one in others if (one.step, one.sigma) == (place.step, place.sigma)]
        team = None if self.ranks is None else self.ranks.team

        def cap() -> float:
            return self._budget.share(request, branch, q.device, team)

        held.begin(
            place.step, place.sigma, request.state.kink == place.step, cap, self._state_bytes(held.layout, q),
            alike[0].plan if alike else None,
        )  # fmt: skip
        branch.kept = held.record(request.number, branch.label)

    def _layout(self, layer: Layer, q: Tensor) -> Layout:
        if self.ranks is not None:
            return self.ranks.layout(layer.grid, apart=not self.config.whole)
        return one_process(q.shape[1], self.config.groups)

    def _state_bytes(self, layout: Layout, q: Tensor) -> int:
        """Of one state on the rank that has the most; the same on all."""
        if self.ranks is None:
            tokens, heads = q.shape[1], q.shape[2]
        else:
            tokens = max(b - a for a, b in map(layout.part, range(layout.parts)))
            heads = q.shape[2] if self.config.whole else -(-q.shape[2] // self.ranks.team.degrees.head)
        return q.shape[0] * tokens * heads * (q.shape[3] * self._dtype(q).itemsize + 4)

    # What one layer does.

    def _whole(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Exact attention over all keys, of all ranks."""
        exact = self.inner if self.ranks is None else self.ranks.team.parallel
        if exact is not None and not with_lse:
            return exact(layer, q, k, v), None
        state = attend(q, k, v, backend=self.config.backend) if exact is None else state_of(exact, layer, q, k, v)
        return state.out, state.lse

    def _hold_or_compute(
        self, held: LayerStates, layer: Layer, q: Tensor, k: Tensor, v: Tensor, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A layer that is held or computed as a whole: its one state weighs against nothing here, so its lse is held
        only where it is merged with attention to other tokens."""
        index = layer.index
        if any(any(row) for row in held.fresh[index]):
            out, lse = self._whole(layer, q, k, v, with_lse)
            alone = AttnState(out, torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device))
            measure(held, index, q, k, v, [alone], None)
            self._remember(held, index, [AttnState(out, lse) if with_lse and lse is not None else alone])
            return out, lse
        measure(held, index, q, k, v, None, None)
        state, ahead, rows = held.states[index][0], held.coefficient(index, 0), (0, q.shape[1])
        if not with_lse:
            return state.moved_out(ahead, rows, q.dtype), None
        moved = state.moved(ahead, rows, self.config.clamp, q.dtype)
        return moved.out, moved.lse

    def _by_bundle(
        self, held: LayerStates, layer: Layer, q: Tensor, k: Tensor, v: Tensor, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A layer of several states, or whose own keys are always fresh."""
        index, ranks, where = layer.index, self.ranks, layer.name or f"layer {layer.index}"
        kv_heads, repeats, fetched = k.shape[2], q.shape[2] // k.shape[2], None
        if ranks is not None:
            q, k, v = ranks.to_heads(q, k, v, layer.grid, where)
            rows = held.plan.fresh[index].tolist() if held.plan is not None else []
            fetched = ranks.fetch(k, v, held.layout, held.bundles, rows, where)
        keys = Keys(held.layout, q, k, v, fetched, self.config.backend)
        states = [self._bundle(held, index, number, q, keys) for number in range(len(held.bundles))]
        own = self._own(held, q, keys) if self.config.local == "fresh" else None
        if fetched is not None:
            fetched.finish()
        measure(held, index, q, k, v, states, own)
        self._remember(held, index, states)
        whole = merge(*states, *([] if own is None else [own]))
        if ranks is None:
            return whole.out, whole.lse
        out = ranks.to_tokens(whole.out, kv_heads, repeats, layer.grid, where)
        if not with_lse:
            return out, None
        lse = ranks.to_tokens(whole.lse.transpose(1, 2).unsqueeze(-1), kv_heads, repeats, layer.grid, where)
        return out, lse.squeeze(-1).transpose(1, 2)

    def _bundle(self, held: LayerStates, index: int, number: int, q: Tensor, keys: Keys) -> AttnState:
        """A bundle's state of all rows, whether computed now or held."""
        pieces = []
        for (fresh, spans), rows in self._runs(held, index, number):
            if fresh:
                pieces.append(keys.attend(q[:, rows[0] : rows[1]], rows, spans))
            else:
                ahead = held.coefficient(index, number)[rows[0] : rows[1]]
                pieces.append(held.states[index][number].moved(ahead, rows, self.config.clamp, q.dtype))
        return joined(pieces)

    def _runs(self, held: LayerStates, index: int, number: int) -> list[tuple[tuple[bool, tuple[Span, ...]], Span]]:
        """Neighbouring parts of this process that do alike: ((fresh, spans of keys), rows from, to)."""
        layout, first = held.layout, held.layout.mine[0]
        keys = [layout.keys(first + local, held.bundles[number], self.config.local) for local in range(len(held.spans))]
        return _grouped(
            held.spans, [(fresh[number] or not k, k) for fresh, k in zip(held.fresh[index], keys, strict=True)]
        )

    def _own(self, held: LayerStates, q: Tensor, keys: Keys) -> AttnState:
        """Every part's attention to its own group's keys."""
        layout, first = held.layout, held.layout.mine[0]
        pieces = [
            keys.attend(q[:, a:b], (a, b), (layout.group(layout.group_of[first + local]),))
            for local, (a, b) in enumerate(held.spans)
        ]
        return joined(pieces)

    def _remember(self, held: LayerStates, index: int, states: list[AttnState]) -> None:
        if not held.stores(index):
            return
        slope, dtype = held.slope(index), self._dtype(states[0].out)
        for number, state in enumerate(states):
            kinds = [
                (fresh[number], again[number])
                for fresh, again in zip(held.fresh[index], held.again[index], strict=True)
            ]
            for (fresh, again), rows in _grouped(held.spans, kinds):
                if fresh:
                    held.states[index][number].renew_rows(
                        between(state, rows), rows, slope=slope, again=again, dtype=dtype
                    )

    def _dtype(self, x: Tensor) -> torch.dtype:
        """Of what is held, for a model whose own is that of x."""
        return x.dtype if self.config.dtype is None else getattr(torch, self.config.dtype)


def _grouped(spans: list[Span], kinds: list[Any]) -> list[tuple[Any, Span]]:
    """Neighbouring parts of one kind, a kind a part: (kind, rows from, to)."""
    runs = [(kind, list(parts)) for kind, parts in groupby(range(len(spans)), key=kinds.__getitem__)]
    return [(kind, (spans[parts[0]][0], spans[parts[-1]][1])) for kind, parts in runs]


def learn(request: Request, branch: Branch) -> None:
    """What the same branch of another model has learned of its errors is where this one begins."""
    for other in request.branches:
        if other.model != branch.model and other.name == branch.name and other.kept_rates is not None:
            branch.held.take_up(other.kept_rates)
