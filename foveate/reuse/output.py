"""The whole model's output held: between anchors its prediction is extrapolated and the model is not called at all.

What attention states do for a layer, one state a branch does for the model: a prediction of first order in the noise
level from the last two computed outputs. It costs no attention, no feed-forward, no communication, and two latents of
memory. TaylorSeer (arXiv 2503.06923) predicts so too, at fixed intervals; here the measured error says when to compute.

Shapes: those of the model's output, any.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foveate.reuse.config import ReuseConfig
from foveate.reuse.plan import level_at_a_step
from foveate.reuse.report import StepRecord
from foveate.reuse.request import Generation

log = logging.getLogger("foveate")
Where = Callable[[], tuple[int, float, str]]  # step, noise level, branch of the forward that begins


@dataclass
class Trail:
    """What is remembered of one branch. missed: relative error of the newest prediction, on the device.

    grown: the remainder at the anchor that measured it, 0 where none has.
    """

    last: Tensor  # a copy: what a model returns is the caller's, who may write to it
    sigma: float
    before: Tensor | None = None
    sigma_before: float = 0.0
    missed: Tensor | None = None
    grown: float = 0.0

    def predict(self, sigma: float, config: ReuseConfig) -> Tensor:
        """The output at another noise level, in its dtype."""
        if config.order == 0 or self.before is None:
            return self.last.clone()
        ahead = (sigma - self.sigma) / (self.sigma - self.sigma_before)
        ahead *= 1.0 if config.damping is None else config.damping
        return (self.last.float() + ahead * (self.last.float() - self.before.float())).to(self.last.dtype)

    def renew(self, out: Tensor, sigma: float, config: ReuseConfig) -> None:
        """A computed output: measure what its prediction would have missed, and remember it."""
        if self.before is not None and sigma != self.sigma:
            error = out.float() - self.predict(sigma, config).float()
            self.missed = error.norm() / out.float().norm().clamp(min=1e-30)
            self.grown = self.remainder(sigma, config)
        if sigma != self.sigma:  # a second value at one level says nothing of the slope
            self.before, self.sigma_before = self.last, self.sigma
        self.last, self.sigma = out.clone(), sigma

    def remainder(self, sigma: float, config: ReuseConfig) -> float:
        """How the error of holding grows with the noise level, up to a factor (Newton's remainder)."""
        return abs(sigma - self.sigma) * (abs(sigma - self.sigma_before) if config.order else 1.0)

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.last, self.before) if x is not None)


@dataclass
class Run(Generation):
    """One generation. `held`: step -> whether its forwards are held, decided once for all branches."""

    trails: dict[str, Trail] = field(default_factory=dict)
    held: dict[int, bool] = field(default_factory=dict)
    first: int = 0
    warm_until: int = 0
    anchor: int = -1  # the newest step that was computed
    predicted: float = float("inf")  # error of holding, as the newest decision saw it
    form: Callable[[Tensor], Any] = lambda x: x  # puts a tensor into the form in which the model returns one


class HeldOutput:
    """In place of a transformer's `forward`, until `remove()`.

    where, conditions, guidance: of the forward that begins. name: of the request that it belongs to. together: all
    ranks make one result, and so must decide alike.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ReuseConfig,
        where: Where,
        conditions: Callable[[], list[Tensor]],
        guidance: Callable[[], Any],
        name: Callable[[], str],
        together: bool = False,
    ):
        self.config, self._model, self._where = config, model, where
        self._conditions, self._guidance, self._name, self._together = conditions, guidance, name, together
        # Whatever compiles the model leaves these as they are.
        disable: Any = torch.compiler.disable
        self._begin, self._end = disable(self._hold), disable(self._remember)
        self._now: tuple[Run, int, float, str]
        self.runs: dict[str, Run] = {}
        self.records: list[StepRecord] = []
        self._count = 0
        self._own = vars(model).get("forward")  # another wrapper's, to be put back
        self._forward: Any = model.forward

        @functools.wraps(self._forward)  # keeps the signature that others inspect
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        model.forward = forward

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        held = self._begin(args, kwargs)
        if held is not None:
            return held
        result = self._forward(*args, **kwargs)
        self._end(result)
        return result

    def _hold(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """What a held forward returns; None where it must be computed."""
        step, sigma, branch = self._where()
        run = self._find(step, sigma, branch, args, kwargs)
        if step not in run.held:
            run.held[step] = self._decide(run, step, sigma)
            self._warn(run, step)
        self._now = run, step, sigma, branch
        trail = run.trails.get(branch)
        if trail is None or not run.held[step]:
            return None
        self._note(hold=True)
        return run.form(trail.predict(sigma, self.config))

    def _remember(self, result: Any) -> None:
        run, step, sigma, branch = self._now
        out, run.form, run.anchor = _tensor(result), _form(result), step
        trail = run.trails.get(branch)
        if trail is None:
            run.trails[branch] = Trail(out.clone(), sigma)
        else:
            trail.renew(out, sigma, self.config)
        self._note(hold=False)

    def _note(self, hold: bool) -> None:
        run, step, sigma, branch = self._now
        run.seen(branch, step, sigma, self._conditions())
        self._record(run, step, sigma, branch, hold)

    def _find(self, step: int, sigma: float, branch: str, args: tuple, kwargs: Mapping[str, Any]) -> Run:
        """The generation that this forward continues, or a new one where anything of its key has changed."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(x.requires_grad for x in tensors) and torch.is_grad_enabled():
            raise ValueError("state reuse is for generation: run it under torch.no_grad(), or remove() it for training")
        signature = tuple((x.shape, x.dtype, x.device) for x in tensors[:1])
        run, guidance = self.runs.get(self._name()), self._guidance()
        if run is not None and run.continues(signature, branch, step, sigma, self._conditions()):
            if guidance != run.guidance:  # a kink of the trajectory: two anchors, for a slope of its own
                run.guidance, run.warm_until = guidance, max(run.warm_until, step + 2)
                run.trails.clear()
            return run
        self._count += 1
        run = Run(self._count, signature, guidance, first=step, warm_until=step + self.config.warmup)
        self.runs[self._name()] = run
        self.records = []
        return run

    def _decide(self, run: Run, step: int, sigma: float) -> bool:
        """Whether all branches are held at this step."""
        config = self.config
        called = {name: last for name, (last, _) in run.steps.items()}
        newest = max(called.values(), default=step)
        for branch in [name for name in run.trails if called.get(name, newest) < newest]:
            del run.trails[branch]  # no longer called: it must neither ask for anchors nor be gone on from
        usable = all(trail.before is not None or config.order == 0 for trail in run.trails.values())
        if config.exact or step < run.warm_until or not run.trails or not usable:
            return False
        if config.interval is not None:
            return (step - (run.first + config.warmup - 1)) % config.interval != 0
        if step - run.anchor >= config.max_hold:
            return False
        run.predicted = self._error(run, sigma)
        return run.predicted <= level_at_a_step(config.quality)

    def _warn(self, run: Run, step: int) -> None:
        late = step - run.first == self.config.warmup + self.config.max_hold
        if late and not self.config.exact and not any(run.held.values()):
            log.warning("reuse: the output was held at none of the first %d steps", len(run.held))

    def _error(self, run: Run, sigma: float) -> float:
        """Predicted error of holding, relative to the output, of the worst branch; the same on all ranks."""
        trails = list(run.trails.values())
        if not all(trail.grown for trail in trails):
            return float("inf")
        missed = torch.stack([trail.missed for trail in trails if trail.missed is not None])
        if self._together:
            dist.all_reduce(missed, dist.ReduceOp.MAX)
        growth = [trail.remainder(sigma, self.config) / trail.grown for trail in trails]
        return max(error * factor for error, factor in zip(missed.tolist(), growth, strict=True))

    def _record(self, run: Run, step: int, sigma: float, branch: str, hold: bool) -> None:
        trail, one = run.trails[branch], (1, 1, 1)
        record = StepRecord(
            run.number, step, branch, sigma, "output held" if hold else "anchor", torch.full(one, not hold),
            torch.full(one, run.predicted), torch.full((1,), float(not hold)), 0, 0, trail.bytes(),
            None if hold or trail.missed is None else trail.missed.reshape(one),
        )  # fmt: skip
        self.records.append(record)

    def bytes(self) -> int:
        return sum(trail.bytes() for run in self.runs.values() for trail in run.trails.values())

    def drop(self, name: str | None = None) -> None:
        """Forget a request, or all."""
        for one in [name] if name is not None else list(self.runs):
            self.runs.pop(one, None)

    def remove(self) -> None:
        """Give the model its forward back. A second call does nothing."""
        if self._forward is not None:
            del self._model.forward
            if self._own is not None:
                self._model.forward = self._own
        self._forward = None
        self.drop()


def _tensor(result: Any) -> Tensor:
    """The output proper of a tensor, a tuple, or diffusers' output class."""
    if isinstance(result, Tensor):
        return result
    return result[0]


def _form(result: Any) -> Callable[[Tensor], Any]:
    """What puts a tensor into the form in which the model returned one."""
    if isinstance(result, Tensor):
        return lambda x: x
    if isinstance(result, tuple):
        return lambda x: (x,)
    return type(result)
