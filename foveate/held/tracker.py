"""Which request, step and branch a forward belongs to. Where anything leaves a doubt, a new request begins.

A request is a run of forwards of one thread (or under one name), with one schedule, whose steps follow each other and
whose clip moves no more than it did before. In it, branches of guidance are told apart by the names that pipelines give
them and by what the forwards are conditioned on; unnamed ones too.

Not covered: two requests of one thread that take turns with the same prompt and shape, without names: they are noticed,
nothing is held.
"""

import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foveate.held.decide import Verdict
from foveate.held.places import Place

CLIP = re.compile(r"((audio|video|action)_)?hidden_states|sample|latents|x")  # inputs that follow the trajectory
TIME = re.compile(r".*(time|sigma|noise_level|controlnet|residual).*|t")
TEXT = re.compile(r"(encoder_|condition|prompt|pooled|text|class_|label|context).*|y|c")  # never taken for one of those
SAMPLE = 4096  # numbers of a clip that are remembered to see it move
JUMP = 4.0  # times the fastest move so far: a clip that jumps so is another one's
RUNNING = object()  # `said`: the forward that runs in this thread
MOST = 8  # calls of a step with the same inputs


@dataclass
class Seen:
    """An input: a tensor, with what changes when it is written to, or a plain value."""

    value: Any
    version: float = 0.0

    @classmethod
    def of(cls, value: Any) -> "Seen":
        if not isinstance(value, Tensor):
            return cls(value)
        return cls(value, float(value.double().sum()) if value.is_inference() else value._version)

    def same(self, other: "Seen") -> bool:
        a, b = self.value, other.value
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return type(a) is type(b) and a == b
        if a is b:
            return self.version == other.version
        return _form(a) == _form(b) and torch.equal(a, b)


@dataclass
class Branch:
    """One of a step's forwards, from step to step. label: its name, with a number where several have one.

    inputs: of the newest, without the clip and the time. clip: `SAMPLE` numbers of it. speeds: the first and the
    largest change of them over that of the noise level. held: what the mode remembers. sent: bytes that computing it
    sent to other ranks. kept: the form of its answer, or its step's record. kept_rates: what its states had learned.
    given, alike, clip_now, ready: for held/split.py, of the newest step: args and kwargs; whether the step's first call
    had this one's clip; the clip; the result that waits for the second call.
    """

    model: int
    name: str
    label: str
    form: Any
    inputs: dict[str, Seen]
    step: int = -1
    sigma: float = float("nan")
    way: float = 0.0
    clip: Tensor | None = None
    speeds: tuple[float, float] | None = None
    free: set[str] = field(default_factory=set)
    count: int = 0
    held: Any = None
    sent: int = 0
    kept: Any = None
    kept_rates: Any = None
    given: Any = None
    alike: bool = False
    clip_now: Tensor | None = None
    ready: Any = None


@dataclass
class Request:
    """One generation. step, anchor, changed: the newest, the newest computed, and that at which guidance changed.

    verdict: of the newest. warm_until: steps before it are computed. why: for how many steps which reason decided.
    state: what the mode keeps. split: the newest step was computed by halves of the ranks.
    """

    number: int
    place: Place
    guidance: Any
    step: int = -1
    changed: int = -2
    anchor: int = -1
    warm_until: int = 0
    branches: list[Branch] = field(default_factory=list)
    verdict: Verdict | None = None
    broken: bool = False
    records: list[Any] = field(default_factory=list)
    why: Counter = field(default_factory=Counter)
    state: Any = None
    split: bool = False

    @property
    def first(self) -> int:
        return self.place.step

    @property
    def count(self) -> int | None:
        """How many steps it has in all, where that is known."""
        return None if self.place.steps is None else self.place.steps - self.place.step

    def bends(self, guidance: Any, step: int) -> bool:
        """Whether guidance has changed at this step, so that the trajectory bends; not where it does at every step."""
        if guidance == self.guidance:
            return False
        before, self.guidance, self.changed = self.changed, guidance, step
        return before != step - 1

    def live(self, model: int) -> list[Branch]:
        """The branches of a model that were called at the newest step or the one before."""
        return [branch for branch in self.branches if branch.model == model and branch.step >= self.step - 1]


@dataclass
class Forward:
    """One call of a model: to which branch of which request it belongs, and its inputs."""

    request: Request
    branch: Branch
    place: Place
    inputs: "Inputs"


@dataclass
class Inputs:
    """A call's inputs by path: the clip's tensor, the time, and the rest."""

    args: tuple
    kwargs: dict[str, Any]
    clip: Tensor | None
    time: Any
    rest: dict[str, Seen]

    @property
    def form(self) -> Any:
        return None if self.clip is None else _form(self.clip)


class Tracker:
    """Of one handle, all its models. began(request), ended(request): told of every new request, and of its end.
    count: of requests so far.
    """

    def __init__(self, began: Callable[[Forward], None], ended: Callable[[Request, str], None]):
        self.requests: dict[Any, Request] = {}
        self.newest: Request | None = None
        self._began, self._ended = began, ended
        self._lock, self.count = threading.RLock(), 0

    def begin(self, name: str, model: int, place: Place, inputs: Inputs, guidance: Any) -> Forward:
        """The forward that begins. Its branch is registered by `done`, when the model has not failed."""
        key = name or threading.get_ident()
        with self._lock:
            request = self.requests.get(key)
            doubt = "" if request is None else self._doubt(request, place)
            branch = None if request is None or doubt else self._match(request, model, place, inputs)
            if request is not None and branch is not None:
                return Forward(request, branch, place, inputs)
            if request is not None:
                self._end(key, doubt or "other inputs, or another clip")
            alive = {thread.ident for thread in threading.enumerate()}
            for other in [one for one in self.requests if isinstance(one, int) and one not in alive]:
                self._end(other, "its thread is gone")
            self.count += 1
            request = self.requests[key] = self.newest = Request(self.count, place, guidance)
            forward = Forward(request, _branch(model, place, inputs), place, inputs)
        self._began(forward)
        return forward

    def done(self, forward: Forward) -> None:
        """The model has answered: what it was given is what the next forward is compared with."""
        request, branch, place, inputs = forward.request, forward.branch, forward.place, forward.inputs
        with self._lock:
            if branch.count == 0:
                request.branches.append(branch)
            if branch.sigma == branch.sigma and place.sigma != branch.sigma:
                branch.way = place.sigma - branch.sigma
            branch.inputs, branch.clip = inputs.rest, sampled(inputs.clip)
            branch.step, branch.sigma, branch.count = place.step, place.sigma, branch.count + 1
            request.step = place.step

    def drop(self, name: str | None = None) -> None:
        """Forget a request, or all."""
        with self._lock:
            for key in [name] if name is not None else list(self.requests):
                if key in self.requests:
                    self._end(key, "it was dropped")

    def _end(self, key: Any, why: str) -> None:
        request = self.requests.pop(key)
        self._ended(request, why)
        request.branches.clear()

    def _doubt(self, request: Request, place: Place) -> str:
        if request.broken:
            return "the last forward failed"
        if request.place.schedule is not place.schedule:
            return "another schedule"
        if place.step not in (request.step, request.step + 1):
            return f"step {place.step} after step {request.step}"
        return ""

    def _match(self, request: Request, model: int, place: Place, inputs: Inputs) -> Branch | None:
        """The branch that this forward goes on with, a new one of this request, or None: it is another request's."""
        named = [one for one in request.live(model) if one.name == place.branch]
        waiting = [(one, _goes_on(one, place, inputs)) for one in named if one.step < place.step]
        fits = [(one, new) for one, new in waiting if new is not None]
        if fits:
            least = min(len(new) for _, new in fits)
            pool = [(one, new) for one, new in fits if len(new) == least]
            chosen, new = pool[0] if len(pool) == 1 else min(pool, key=lambda pair: _distance(pair[0], inputs))
            chosen.free |= new
            return chosen if _moves_on(chosen, place, inputs) else None
        called = [one for one in request.branches if one.step == place.step]
        if not called:  # the first call of a step, and no branch is its own: a model that takes over, or a new request
            taken_over = not any(one.model == model for one in request.branches) and place.schedule is not None
            return _branch(model, place, inputs) if taken_over else None
        alike = [one for one in named if one.step == place.step and _changed(one, inputs) == set()]
        if len(alike) >= MOST or any(_distance(one, inputs) for one in alike):
            return None
        return _branch(model, place, inputs, len(named))


def _branch(model: int, place: Place, inputs: Inputs, others: int = 0) -> Branch:
    """A new one. others: branches of this name that there are already."""
    label = f"{place.branch}#{others + 1}" if others else place.branch
    return Branch(model, place.branch, label, inputs.form, inputs.rest)


def _goes_on(branch: Branch, place: Place, inputs: Inputs) -> set[str] | None:
    """As `_changed`, None also where noise levels turn round."""
    return _changed(branch, inputs) if branch.way * (place.sigma - branch.sigma) >= 0 else None


def _changed(branch: Branch, inputs: Inputs) -> set[str] | None:
    """Inputs that changed and may, as they belong to the trajectory. None: the forward is not this branch's."""
    before, now = branch.inputs, inputs.rest
    if branch.form != inputs.form or before.keys() != now.keys():
        return None
    changed = {path for path, value in now.items() if path not in branch.free and not value.same(before[path])}
    may = branch.count == 1 and all(_may_follow(path, now[path].value, inputs.clip) for path in changed)
    return changed if may or not changed else None


def _may_follow(path: str, value: Any, clip: Tensor | None) -> bool:
    """Whether an input that changed from the first step to the second may be one that does so at every step."""
    if TEXT.fullmatch(path.partition(".")[0]):
        return False
    small = not isinstance(value, Tensor) or value.numel() <= (1 if clip is None else len(clip))
    return small or (clip is not None and value.shape == clip.shape)


def sampled(clip: Tensor | None) -> Tensor | None:
    """Evenly spread numbers of a clip, float32 (SAMPLE,) at most, a copy."""
    if clip is None:
        return None
    flat = clip.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].float().clone()


def _distance(branch: Branch, inputs: Inputs) -> float:
    now = sampled(inputs.clip)
    return 0.0 if now is None or branch.clip is None else float((now - branch.clip).norm())


def _moves_on(branch: Branch, place: Place, inputs: Inputs) -> bool:
    """Whether the clip moves as fast as it did, by the noise level. Remembers how fast. Waits for the device."""
    way = abs(place.sigma - branch.sigma)
    if branch.clip is None or inputs.clip is None or way == 0:
        return True
    speed, slack = _distance(branch, inputs) / way, 1e-3 * float(branch.clip.norm()) / way
    if branch.speeds is not None:
        first, fastest = branch.speeds
        settling = branch.count == 2 and speed * JUMP + slack < first
        if speed > JUMP * fastest + slack or settling:
            return False
    first, fastest = branch.speeds or (speed, 0.0)
    branch.speeds = first, max(speed, fastest)
    return True


def _form(x: Tensor) -> Any:
    return x.shape, x.dtype, x.device


def read_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Inputs:
    """A call's inputs, sorted by the names that the model's forward has for them."""
    leaves: dict[str, Any] = {}
    names = input_names(module)
    for place, value in enumerate(args):
        _flatten(names[place] if place < len(names) else str(place), value, leaves)
    for name, value in kwargs.items():
        _flatten(name, value, leaves)
    clip = next((leaves[name] for name in ("hidden_states", "sample") if isinstance(leaves.get(name), Tensor)), None)
    if clip is None:
        clip = next((value for value in leaves.values() if isinstance(value, Tensor)), None)
    time = next((v for name, v in leaves.items() if re.fullmatch("timestep|time|t", name)), None)
    rest = {
        name: Seen.of(value) for name, value in leaves.items()
        if value is not clip and not CLIP.fullmatch(name) and not TIME.fullmatch(name)
    }  # fmt: skip
    return Inputs(args, kwargs, clip, time, rest)


def input_names(module: Any) -> list[str]:
    while "_orig_mod" in getattr(module, "_modules", {}):
        module = module._orig_mod
    parameters = inspect.signature(type(module).forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]


def _flatten(path: str, value: Any, leaves: dict[str, Any]) -> None:
    """Tensors and plain values by path; other objects (caches, processors) are not looked at."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            _flatten(f"{path}.{key}", one, leaves)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            _flatten(f"{path}.{index}", one, leaves)
    elif isinstance(value, Tensor | str | int | float | bool) or value is None:
        leaves[path] = value
