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

from foveate.attention import AttnState, Layer, Policy, attend, merge
from foveate.reuse.branch import Branch
from foveate.reuse.cache import Span, between
from foveate.reuse.config import ReuseConfig
from foveate.reuse.keys import Keys, joined
from foveate.reuse.layout import Layout, one_process
from foveate.reuse.ranks import Team
from foveate.reuse.report import ReuseReport, StepRecord
from foveate.reuse.request import Generation
from foveate.reuse.sampling import measure

log = logging.getLogger("foveate")

FREE_SHARE = 0.25  # of the free memory that states may take where no cap is given
Place = tuple[int | None, float | None]


@dataclass
class Request(Generation):
    """One generation: its branches, and what must not change while it lasts."""

    branches: dict[str, Branch] = field(default_factory=dict)
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
        inner: Policy | None = None,
        team: Team | None = None,
        place: Callable[[], Place] = lambda: (None, None),
        guidance: Callable[[], Any] = lambda: None,
    ):
        """inner: another policy, what computes layers afresh. team: the ranks, where there are several."""
        if config.audit and (inner is not None or team is not None):
            raise ValueError("audit computes what is held on one process, with plain attention; leave it off")
        if inner is not None and not config.whole:
            raise ValueError("around another policy layers are held whole: states=1 and local='held'")
        self.inner, self.team = inner, team
        self.layers, self.config, self._place, self._guidance = layers, config, place, guidance
        self.requests: dict[str, Request] = {}
        self.request = ""  # which of them the next forwards belong to
        self.records: list[StepRecord] = []
        self._count = 0
        self.conditions: list[Tensor] = []  # of the forward that begins: what it is conditioned on
        self._step = 0
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
        if self.config.exact:
            out = self._whole(layer, q, k, v)
        elif self.config.whole:
            out = self._hold_or_compute(branch, layer, q, k, v)
        else:
            out = self._by_bundle(branch, layer, q, k, v)
        if layer.index == self.layers - 1:
            assert self._record is not None
            team, apart = self.team, not self.config.whole
            branch.end(self._record, None if team is None else lambda sums: team.gather(sums, apart))
            self._branch = None
        return out

    # Which request, branch and step this is.

    def _begin(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> None:
        step, sigma = self.place(layer.step, layer.sigma)
        self._step = step
        request = self._find_request(layer, q, k, step, sigma)
        called = request.called.setdefault(step, set())
        called.add(layer.branch)
        kink = self._kinked(request, step)
        branch = request.branches.get(layer.branch)
        if branch is None:
            layout = self._layout(layer, q)
            branch = request.branches[layer.branch] = Branch(self.layers, layout, self.config, step, q.device)
        # Branches called at one step and noise level are anchored together: the first plans for all.
        alike = [
            one for one in request.branches.values() if one is not branch and (one.step, one.sigma) == (step, sigma)
        ]
        other = alike[0].plan if alike else None
        branch.begin(step, sigma, kink, lambda: self._cap(request, branch), self._state_bytes(branch.layout, q), other)
        request.seen(layer.branch, step, sigma, self.conditions)
        self._branch = branch
        self._record = branch.record(request.number, layer.branch, k)
        self.records.append(self._record)
        self._warn(request, branch)

    def _layout(self, layer: Layer, q: Tensor) -> Layout:
        if self.team is not None:
            return self.team.layout(layer.grid, apart=not self.config.whole)
        return one_process(q.shape[1], self.config.groups)

    def _state_bytes(self, layout: Layout, q: Tensor) -> int:
        """Of one state on the rank that has the most; the same on all."""
        if self.team is None:
            tokens, heads = q.shape[1], q.shape[2]
        else:
            tokens = max(b - a for a, b in map(layout.part, range(layout.parts)))
            heads = q.shape[2] if self.config.whole else -(-q.shape[2] // self.team.degrees.head)
        return q.shape[0] * tokens * heads * (q.shape[3] * self._dtype(q).itemsize + 4)

    def place(self, step: int | None, sigma: float | None) -> tuple[int, float]:
        """Step and noise level, from the pipeline where a layer was not told."""
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
        signature = (q.shape[0], q.shape[2:], k.shape[2], q.dtype, q.device, layer.grid)
        request = self.requests.get(self.request)
        if request is not None and request.continues(signature, layer.branch, step, sigma, self.conditions):
            return request
        self.drop(self.request)
        self._count += 1
        self.records = [record for record in self.records if record.request == self._count - 1]
        request = self.requests[self.request] = Request(self._count, signature, self._guidance())
        return request

    def _kinked(self, request: Request, step: int) -> bool:
        """Whether guidance differs from the step before: another scale, or other branches."""
        scale = self._guidance()
        before = sorted(one for one in request.called if one < step)[-2:]
        apart = self.config.cfg == 2  # then a rank sees one branch
        other = not apart and len(before) == 2 and request.called[before[0]] != request.called[before[1]]
        if (scale != request.guidance or other) and request.kink != step:
            request.kink, request.guidance = step, scale
        return request.kink == step

    def _cap(self, request: Request, branch: Branch) -> float:
        """Bytes that a branch's states may take: an equal share for all that have been seen, or what is left."""
        gib = self.config.memory_gib
        if not request.cap:
            free = _free_bytes(branch.device) if gib is None else 0.0
            if self.team is not None and gib is None:
                free = self.team.least(free, branch.device)
            request.cap = FREE_SHARE * free if gib is None else gib * 2**30
        taken = sum(one.memory.bytes for one in request.branches.values() if one.memory is not None)
        waiting = sum(one.memory is None for one in request.branches.values())
        return max(0.0, request.cap - taken) / waiting

    def drop(self, name: str | None = None) -> None:
        """Free the states of a request, or of all."""
        for one in [name] if name is not None else list(self.requests):
            request = self.requests.pop(one, None)
            if request is not None:
                self._settle(request)

    def drop_branch(self, name: str) -> None:
        """Free a branch of the request that runs: other ranks compute it from now on."""
        request = self.requests.get(self.request)
        if request is not None:
            request.branches.pop(name, None)
            request.steps.pop(name, None)

    def _settle(self, request: Request) -> None:
        for branch in request.branches.values():
            branch.settle()

    def report(self) -> ReuseReport:
        for request in self.requests.values():
            self._settle(request)
        return ReuseReport([record for record in self.records if record.request == self._count])

    # What one layer does.

    def _whole(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exact attention over all keys, of all ranks."""
        exact = self.inner if self.team is None else self.team.parallel
        return attend(q, k, v, backend=self.config.backend).out if exact is None else exact(layer, q, k, v)

    def _hold_or_compute(self, branch: Branch, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A layer that is held or computed as a whole: its one state weighs against nothing, so no lse is needed."""
        index = layer.index
        if any(any(row) for row in branch.fresh[index]):
            out = self._whole(layer, q, k, v)
            state = AttnState(out, torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device))
            measure(branch, index, q, k, v, [state], None)
            self._remember(branch, index, [state])
            return out
        measure(branch, index, q, k, v, None, None)
        return branch.states[index][0].moved_out(branch.coefficient(index, 0), (0, q.shape[1]), q.dtype)

    def _by_bundle(self, branch: Branch, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A layer of several states, or whose own keys are always fresh."""
        index, team, where = layer.index, self.team, layer.name or f"layer {layer.index}"
        kv_heads, repeats, fetched = k.shape[2], q.shape[2] // k.shape[2], None
        if team is not None:
            q, k, v = team.to_heads(q, k, v, layer.grid, where)
            rows = branch.plan.fresh[index].tolist() if branch.plan is not None else []
            fetched = team.fetch(k, v, branch.layout, branch.bundles, rows, where)
        keys = Keys(branch.layout, q, k, v, fetched, self.config.backend)
        states = [self._bundle(branch, index, number, q, keys) for number in range(len(branch.bundles))]
        own = self._own(branch, q, keys) if self.config.local == "fresh" else None
        if fetched is not None:
            fetched.finish()
        measure(branch, index, q, k, v, states, own)
        self._remember(branch, index, states)
        out = merge(*states, *([] if own is None else [own])).out
        return out if team is None else team.to_tokens(out, kv_heads, repeats, layer.grid, where)

    def _bundle(self, branch: Branch, index: int, number: int, q: Tensor, keys: Keys) -> AttnState:
        """A bundle's state of all rows, whether computed now or held."""
        pieces = []
        for (fresh, spans), rows in self._runs(branch, index, number):
            if fresh:
                pieces.append(keys.attend(q[:, rows[0] : rows[1]], rows, spans))
            else:
                ahead = branch.coefficient(index, number)[rows[0] : rows[1]]
                pieces.append(branch.states[index][number].moved(ahead, rows, self.config.clamp, q.dtype))
        return joined(pieces)

    def _runs(self, branch: Branch, index: int, number: int) -> list[tuple[tuple[bool, tuple[Span, ...]], Span]]:
        """Neighbouring parts of this process that do alike: ((fresh, spans of keys), rows from, to)."""
        layout, first = branch.layout, branch.layout.mine[0]
        keys = [
            layout.keys(first + local, branch.bundles[number], self.config.local) for local in range(len(branch.spans))
        ]
        return _grouped(
            branch.spans, [(fresh[number] or not k, k) for fresh, k in zip(branch.fresh[index], keys, strict=True)]
        )

    def _own(self, branch: Branch, q: Tensor, keys: Keys) -> AttnState:
        """Every part's attention to its own group's keys."""
        layout, first = branch.layout, branch.layout.mine[0]
        pieces = [
            keys.attend(q[:, a:b], (a, b), (layout.group(layout.group_of[first + local]),))
            for local, (a, b) in enumerate(branch.spans)
        ]
        return joined(pieces)

    def _remember(self, branch: Branch, index: int, states: list[AttnState]) -> None:
        if not branch.stores(index):
            return
        slope, dtype = branch.slope(index), self._dtype(states[0].out)
        for number, state in enumerate(states):
            kinds = [
                (fresh[number], again[number])
                for fresh, again in zip(branch.fresh[index], branch.again[index], strict=True)
            ]
            for (fresh, again), rows in _grouped(branch.spans, kinds):
                if fresh:
                    branch.states[index][number].renew(
                        between(state, rows), rows, slope=slope, again=again, dtype=dtype
                    )

    def _dtype(self, x: Tensor) -> torch.dtype:
        """Of what is held, for a model whose own is that of x."""
        return x.dtype if self.config.dtype is None else getattr(torch, self.config.dtype)

    def _warn(self, request: Request, branch: Branch) -> None:
        late = branch.step - branch.start >= self.config.warmup + max(self.config.interval or 0, self.config.max_hold)
        if request.warned or self.config.exact or not late:
            return
        if not any(record.hits for record in self.records if record.request == request.number):
            request.warned = True
            log.warning("reuse: no state was held by step %d (%s)", branch.step, branch.plan and branch.plan.reason)


def _grouped(spans: list[Span], kinds: list[Any]) -> list[tuple[Any, Span]]:
    """Neighbouring parts of one kind, a kind a part: (kind, rows from, to)."""
    runs = [(kind, list(parts)) for kind, parts in groupby(range(len(spans)), key=kinds.__getitem__)]
    return [(kind, (spans[parts[0]][0], spans[parts[-1]][1])) for kind, parts in runs]


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
