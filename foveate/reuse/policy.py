"""The reuse policy: every self-attention is merged from states computed now and states remembered.

Not covered: gradients (this is generation), and torch.compile across it (the policy runs outside compiled graphs).

Shapes: B batch, S tokens of this process in tile order, H heads, G key/value heads, D head dim.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from foveate.attention import AttnState, Layer, attend, merge
from foveate.reuse.branch import Branch
from foveate.reuse.cache import Span
from foveate.reuse.config import ReuseConfig
from foveate.reuse.layout import Layout, one_process
from foveate.reuse.report import ReuseReport, StepRecord

log = logging.getLogger("foveate")

FREE_SHARE = 0.25  # of the free memory that states may take where no cap is given
Place = tuple[int | None, float | None]


@dataclass
class Request:
    """One generation: its branches, and what must not change while it lasts."""

    number: int
    signature: tuple
    branches: dict[str, Branch] = field(default_factory=dict)
    steps: dict[str, tuple[int, float]] = field(default_factory=dict)  # branch -> its newest step and noise level
    guidance: Any = None
    kink: int = -1
    cap: float = 0.0
    called: dict[int, set[str]] = field(default_factory=dict)  # step -> branches that ran
    warned: bool = False


class Reuse:
    """Policy of one model. `place`, `guidance`: where a pipeline stands, for layers that are not told."""

    def __init__(
        self,
        layers: int,
        config: ReuseConfig,
        *,
        place: Callable[[], Place] = lambda: (None, None),
        guidance: Callable[[], Any] = lambda: None,
    ):
        self.layers, self.config, self._place, self._guidance = layers, config, place, guidance
        self.requests: dict[str, Request] = {}
        self.request = ""  # which of them the next forwards belong to
        self.records: list[StepRecord] = []
        self._count = 0
        self._branch: Branch | None = None
        self._record: StepRecord | None = None
        self._uncompiled: Any = torch.compiler.disable(self._call)

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._uncompiled(layer, q, k, v)

    def _call(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled() and q.requires_grad:
            raise ValueError("state reuse is for generation: run it under torch.no_grad(), or remove() it for training")
        if layer.index == 0:
            self._begin(layer, q, k, v)
        branch = self._branch
        if branch is None:
            raise RuntimeError(
                f"{layer.name} was called before the model's first layer: layers must run in their order"
            )
        out = self._attention(branch, layer.index, q, k, v)
        if layer.index == self.layers - 1:
            assert self._record is not None
            branch.end(self._record, None)
            self._branch = None
        return out

    # Which request, branch and step this is.

    def _begin(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> None:
        step, sigma = self._where(layer)
        request = self._find_request(layer, q, k, step, sigma)
        called = request.called.setdefault(step, set())
        called.add(layer.branch)
        kink = self._kinked(request, step)
        branch = request.branches.get(layer.branch)
        if branch is None:
            layout = one_process(q.shape[1], self.config.groups)
            branch = request.branches[layer.branch] = Branch(self.layers, layout, self.config, step, q.device)
        branch.begin(step, sigma, kink, lambda: self._cap(request, branch), _state_bytes(q, self.config))
        request.steps[layer.branch] = step, sigma
        self._branch = branch
        self._record = self._new_record(request, layer, branch, q, k)
        self.records.append(self._record)
        self._warn(request, branch)

    def _where(self, layer: Layer) -> tuple[int, float]:
        step, sigma = layer.step, layer.sigma
        if step is None or sigma is None:
            found = self._place()
            step, sigma = found[0] if step is None else step, found[1] if sigma is None else sigma
        if step is None or sigma is None:
            raise ValueError(
                "reuse needs the denoising step and noise level of every forward: give foveate.reuse the pipeline and "
                "not its transformer, or enter handle.during(step=..., sigma=..., branch=...) around each forward"
            )
        return step, float(sigma)

    def _find_request(self, layer: Layer, q: Tensor, k: Tensor, step: int, sigma: float) -> Request:
        """The request that this forward continues, or a new one in its place: where anything of its key has changed."""
        signature = (tuple(q.shape), tuple(k.shape), q.dtype, q.device, layer.grid)
        request = self.requests.get(self.request)
        newest = None if request is None else request.steps.get(layer.branch)
        if request is not None and request.signature == signature:
            last = max(one for one, _ in request.steps.values())
            if step >= last and (newest is None or (step > newest[0] and sigma <= newest[1])):
                return request
        self.drop(self.request)
        self._count += 1
        self.records = [record for record in self.records if record.request == self._count - 1]
        request = self.requests[self.request] = Request(self._count, signature, guidance=self._guidance())
        return request

    def _kinked(self, request: Request, step: int) -> bool:
        """Whether guidance differs from the step before: another scale, or other branches."""
        scale = self._guidance()
        before = sorted(one for one in request.called if one < step)[-2:]
        other = len(before) == 2 and request.called[before[0]] != request.called[before[1]]
        if (scale != request.guidance or other) and request.kink != step:
            request.kink, request.guidance = step, scale
        return request.kink == step

    def _cap(self, request: Request, branch: Branch) -> float:
        """Bytes that a branch's states may take: an equal share for all that have been seen, or what is left."""
        gib = self.config.memory_gib
        if not request.cap:
            request.cap = FREE_SHARE * _free_bytes(branch.device) if gib is None else gib * 2**30
        taken = sum(one.memory.bytes for one in request.branches.values() if one.memory is not None)
        waiting = sum(one.memory is None for one in request.branches.values())
        return max(0.0, request.cap - taken) / waiting

    def drop(self, name: str | None = None) -> None:
        """Free the states of a request, or of all."""
        for one in [name] if name is not None else list(self.requests):
            request = self.requests.pop(one, None)
            if request is not None:
                self._settle(request)

    def _settle(self, request: Request) -> None:
        for branch in request.branches.values():
            branch.settle()

    def report(self) -> ReuseReport:
        for request in self.requests.values():
            self._settle(request)
        return ReuseReport([record for record in self.records if record.request == self._count])

    # What one layer does.

    def _attention(self, branch: Branch, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config, fresh = self.config, branch.fresh[index]
        everything = all(all(row) for row in fresh)
        if config.exact:
            return attend(q, k, v, backend=config.backend).out
        nothing = not any(any(row) for row in fresh)
        lone = len(branch.bundles) == 1 and config.local == "held"
        if nothing and lone:  # the one state covers all keys: its log-sum-exp weighs against nothing
            if branch.measuring:
                self._measure(branch, index, q, k, v, [None])
            held = branch.states[index][0]
            return held.moved_out(branch.coefficient(index, 0), (0, q.shape[1]))
        states = [self._bundle(branch, index, number, q, k, v) for number in range(len(branch.bundles))]
        own = self._own(branch, q, k, v) if config.local == "fresh" else None
        if branch.measuring:
            self._measure(branch, index, q, k, v, list(states), own)
        self._remember(branch, index, states)
        if lone and everything:
            return states[0].out
        return merge(*states, *([] if own is None else [own])).out

    def _bundle(self, branch: Branch, index: int, number: int, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        """A bundle's state of all rows, whether computed now or held."""
        pieces = []
        for (fresh, spans), rows in self._runs(branch, index, number):
            if fresh:
                pieces.append(self._over(q[:, rows[0] : rows[1]], k, v, spans))
            else:
                ahead = branch.coefficient(index, number)[rows[0] : rows[1]]
                pieces.append(branch.states[index][number].moved(ahead, rows, self.config.clamp))
        return _joined(pieces)

    def _runs(self, branch: Branch, index: int, number: int) -> list[tuple[tuple[bool, tuple[Span, ...]], Span]]:
        """Neighbouring parts of this process that do alike: ((fresh, spans of keys), rows from, to)."""
        layout, first = branch.layout, branch.layout.mine[0]

        def kind(local: int) -> tuple[bool, tuple[Span, ...]]:
            keys = layout.keys(first + local, branch.bundles[number], self.config.local)
            return branch.fresh[index][local][number], keys

        grouped = [(key, list(parts)) for key, parts in groupby(range(len(branch.spans)), key=kind)]
        return [(key, (branch.spans[parts[0]][0], branch.spans[parts[-1]][1])) for key, parts in grouped]

    def _own(self, branch: Branch, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        """Every part's attention to its own group's keys."""
        layout, first = branch.layout, branch.layout.mine[0]
        pieces = [
            self._over(q[:, a:b], k, v, (layout.group(layout.group_of[first + local]),))
            for local, (a, b) in enumerate(branch.spans)
        ]
        return _joined(pieces)

    def _over(self, q: Tensor, k: Tensor, v: Tensor, spans: tuple[Span, ...]) -> AttnState:
        """Attention of some rows over spans of keys; the empty state over none."""
        if not spans:
            return AttnState.empty_like(q)
        if len(spans) == 1:
            a, b = spans[0]
            keys, values = k[:, a:b], v[:, a:b]
        else:
            keys, values = (torch.cat([x[:, a:b] for a, b in spans], dim=1) for x in (k, v))
        return attend(q, keys, values, backend=self.config.backend)

    def _remember(self, branch: Branch, index: int, states: list[AttnState]) -> None:
        if not branch.stores(index):
            return
        slope, dtype = branch.slope(index), self.config.dtype
        dtype = None if dtype is None else getattr(torch, dtype)
        for number, state in enumerate(states):
            first = branch.layout.mine[0]
            parts = range(len(branch.spans))
            for (fresh, again), group in groupby(
                parts,
                key=lambda p: (branch.fresh[index][p][number], branch.again[index][p][number]),
            ):
                run = list(group)
                if fresh:
                    rows = branch.spans[run[0]][0], branch.spans[run[-1]][1]
                    here = slice(*rows)
                    part = AttnState(state.out[:, here], state.lse[..., here])
                    branch.states[index][number].renew(part, rows, slope=slope, again=again, dtype=dtype)
            assert first >= 0

    def _measure(
        self,
        branch: Branch,
        index: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        states: list[AttnState | None] | list[AttnState],
        own: AttnState | None = None,
    ) -> None:
        """Compare the sampled rows' newest states with what extrapolation gave."""
        fresh = branch.fresh_mask[index]
        any_fresh = any(any(row) for row in branch.fresh[index])
        if not (any_fresh or self.config.adaptive or self.config.audit):
            return
        rows, queries = branch.rows, q[:, branch.rows.index]
        sampled = [self._sampled(branch, number, state, queries, k, v) for number, state in enumerate(states)]
        probe = self._probe(branch, rows, queries, k, v) if own is None else _at(own, rows.index)
        out = torch.stack([state.out.float() for state in (*sampled, probe)])
        lse = torch.stack([state.lse for state in (*sampled, probe)])
        seen = torch.ones_like(fresh) if self.config.audit else fresh.clone()
        seen[:, -1] = True
        again = any(flag for row in branch.again[index] for flag in row)
        branch.sums[index] = branch.meters[index].observe(
            AttnState(out, lse), seen, fresh, branch.ahead[index], again=again
        )

    def _sampled(
        self, branch: Branch, number: int, state: AttnState | None, queries: Tensor, k: Tensor, v: Tensor
    ) -> AttnState:
        """A bundle's state of the sampled rows. With `audit` what is held is computed too."""
        if not self.config.audit:
            return AttnState.empty_like(queries) if state is None else _at(state, branch.rows.index)
        layout, first = branch.layout, branch.layout.mine[0]
        pieces = []
        for local in range(branch.rows.parts):
            spans = layout.keys(first + local, branch.bundles[number], self.config.local)
            pieces.append(self._over(queries[:, branch.rows.of(local)], k, v, spans))
        return _joined(pieces)

    def _probe(self, branch: Branch, rows: Any, queries: Tensor, k: Tensor, v: Tensor) -> AttnState:
        layout, first = branch.layout, branch.layout.mine[0]
        spans = [layout.group(layout.group_of[first + local]) for local in range(rows.parts)]
        return _joined([self._over(queries[:, rows.of(local)], k, v, (span,)) for local, span in enumerate(spans)])

    # What is told about it.

    def _new_record(self, request: Request, layer: Layer, branch: Branch, q: Tensor, k: Tensor) -> StepRecord:
        plan, layout = branch.plan, branch.layout
        assert plan is not None
        counts = _key_counts(layout, branch.bundles, self.config.local)
        lengths = torch.tensor([layout.part(part)[1] - layout.part(part)[0] for part in range(layout.parts)])
        own, apart = counts[:, -1], counts[:, :-1]
        pairs = ((plan.fresh * apart).sum(-1) + own) * lengths
        per_token = 2 * k.shape[0] * k.shape[2] * k.shape[3] * k.element_size()
        moved = _remote(layout, branch.bundles)
        return StepRecord(
            request.number, branch.step, layer.branch, branch.sigma, plan.reason, plan.fresh, branch.predicted,
            pairs.sum(-1) / layout.tokens**2,
            bytes_moved=int((plan.fresh * moved).sum()) * per_token,
            bytes_exact=int(moved.sum()) * self.layers * per_token,
        )  # fmt: skip

    def _warn(self, request: Request, branch: Branch) -> None:
        late = branch.step - branch.start >= self.config.warmup + max(self.config.interval or 0, self.config.max_hold)
        if request.warned or self.config.exact or not late:
            return
        if not any(record.hits for record in self.records if record.request == request.number):
            request.warned = True
            log.warning("reuse: no state was held by step %d (%s)", branch.step, branch.plan and branch.plan.reason)


def _at(state: AttnState, rows: Tensor) -> AttnState:
    return AttnState(state.out.index_select(1, rows), state.lse.index_select(2, rows))


def _joined(pieces: list[AttnState]) -> AttnState:
    """States of neighbouring rows as one."""
    if len(pieces) == 1:
        return pieces[0]
    return AttnState(torch.cat([x.out for x in pieces], dim=1), torch.cat([x.lse for x in pieces], dim=2))


def _key_counts(layout: Layout, bundles: tuple[Span, ...], local: str) -> Tensor:
    """Keys of each part's states, and of what it computes at every step besides: (P, N + 1)."""
    rows = []
    for part in range(layout.parts):
        counts = [sum(b - a for a, b in layout.keys(part, bundle, local)) for bundle in bundles]
        rows.append([*counts, layout.tokens - sum(counts)])
    return torch.tensor(rows)


def _remote(layout: Layout, bundles: tuple[Span, ...]) -> Tensor:
    """Tokens of other groups that a part fetches for a bundle: (P, N)."""
    rows = []
    for part in range(layout.parts):
        own = layout.group_of[part]
        counts = []
        for a, b in bundles:
            counts.append(sum(layout.group(g)[1] - layout.group(g)[0] for g in range(a, b) if g != own))
        rows.append(counts)
    return torch.tensor(rows)


def _state_bytes(q: Tensor, config: ReuseConfig) -> int:
    dtype = q.dtype if config.dtype is None else getattr(torch, config.dtype)
    return q.shape[0] * q.shape[1] * q.shape[2] * (q.shape[3] * dtype.itemsize + 4)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
