"""`reuse`: what earlier denoising steps computed, in place of computing it again, in one call.

handle = fv.reuse(pipe, fv.ReuseConfig(quality=0.9))
video = pipe(...)
print(handle.report())
handle.remove()
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from foveate.held import decide
from foveate.held.around import saying
from foveate.held.attention.mode import AttentionStates
from foveate.held.config import ReuseConfig
from foveate.held.outputs import Outputs
from foveate.held.places import Place
from foveate.held.report import ReuseReport
from foveate.held.schedule import Schedule, identity, scheduler_name
from foveate.held.team import Team, team_of
from foveate.held.tracker import Forward, Request, Tracker
from foveate.held.watched import Mode, Watched

log = logging.getLogger("foveate")


def reuse(target: Any, config: ReuseConfig | None = None) -> "ReuseHandle":
    """Let a diffusers pipeline, or a model, reuse what earlier denoising steps computed, until `remove()`.

    target: a pipeline, all of its transformers (Wan 2.2 has two), with step and noise level from its calls'
    `cache_context` or its scheduler; or any module, whose forwards tell them by `cache_context`, as
    `foveate.sample.generate` enters it, or inside `handle.during`. Before or after offload, caches, LoRA, compiling and
    casting. Under torchrun all ranks call it alike, with the same inputs, and get the whole result. Raises ValueError
    for pipelines without a transformer and models that reuse already, and with `hold="attention"` for models without an
    adapter.
    """
    return ReuseHandle(target, config or ReuseConfig())


class ReuseHandle:
    """What `reuse` gives back; a context manager too, the end of whose `with` removes it. `models` may be read."""

    def __init__(self, target: Any, config: ReuseConfig):
        self.config, self._told, self._warned, self._idle = config, False, False, False
        pipe = None if isinstance(target, nn.Module) else target
        named = {"": target} if isinstance(target, nn.Module) else transformers(target)
        self._tracker = Tracker(self._began, self._ended)
        self._undo: list[Callable[[], Any]] = []
        self.models: list[Watched] = []
        if isinstance(config.schedule, Schedule):
            config.schedule.check(identity(list(named.values())), scheduler_name(pipe))
        try:
            teams = [self._team(module) for module in named.values()]
            self._mode = self._make_mode(list(named), list(named.values()), teams)
            for number, module in enumerate(named.values()):
                watched = Watched(number, module, pipe, self, self._tracker, self._mode, teams[number], self._explain)
                self.models.append(watched)
                self._undo.append(watched.remove)
        except BaseException:
            self.remove()
            raise

    def _team(self, module: nn.Module) -> Team | None:
        team = team_of(module, self.config)
        if team is not None:
            self._undo.append(team.remove)
        return team

    def _make_mode(self, names: list[str], modules: list[nn.Module], teams: list[Team | None]) -> Mode:
        if self.config.hold == "output":
            return Outputs(self.config, decide.rule(self.config), names, self._worst(teams))
        mode = AttentionStates(self.config, names, modules, teams, lambda: list(self._tracker.requests.values()))
        self._undo.append(mode.remove)
        return mode

    def _worst(self, teams: list[Team | None]) -> Callable[[Tensor], Tensor]:
        team = next((team for team in teams if team is not None), None)
        return (lambda found: found) if team is None else team.worst

    def report(self, request: str | None = None) -> ReuseReport:
        """What the newest request did, or the newest of this name; all models in turn. Waits for the device."""
        named = self._tracker.newest if request is None else self._tracker.requests.get(request)
        if named is None:
            self._untouched()
            return ReuseReport([])
        self._mode.settle(named)
        return ReuseReport(named.records)

    def _untouched(self) -> None:
        """Say once that no model of this handle was called, which nobody notices while it goes on."""
        if self._idle or self._tracker.count:
            return
        self._idle = True
        log.warning(
            "reuse: no model of this handle has been called. A pipeline whose transformer was replaced after reuse, or "
            "that calls another module around it, or `forward` past the model's call, computes everything: give "
            "foveate.reuse what is called"
        )

    @contextmanager
    def during(
        self, *, step: int, sigma: float, branch: str = "", steps: int | None = None, then: float | None = None
    ) -> Iterator[None]:
        """Around a forward of one's own loop: the denoising step, its noise level, and the branch of guidance.

        steps: how many the loop has, where it is known. then: the noise level of the next step, in a loop that adds
        `(then - sigma) * output` to the clip and nothing else. It counts for this thread only.
        """
        with saying((self, "during"), Place(step, float(sigma), branch, steps, then=then)):
            yield

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Around the forwards of one of several requests that take turns: each has what it remembers, until `forget`.

        Threads need no names: each has its own requests.
        """
        with saying((self, "name"), name):
            yield

    def forget(self, name: str | None = None) -> None:
        """Free what a request remembers, or all. The next forward begins a new one."""
        self._tracker.drop(name)

    def bytes_held(self) -> int:
        """Bytes remembered on this device now."""
        return sum(self._mode.bytes(request) for request in self._tracker.requests.values())

    def remove(self) -> None:
        """Take what `reuse` added off, wherever others have put theirs since, and free all. Again it does nothing."""
        self.forget()
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            one()

    def _began(self, forward: Forward) -> None:
        self._mode.began(forward)
        module = self.models[forward.branch.model].module
        outputs = self.config.hold == "output" and not self.config.exact
        if outputs and not self._warned and getattr(module, "is_cache_enabled", False):
            self._warned = True
            log.warning(
                "reuse: a cache of diffusers is enabled in the model too (enable_cache): the errors of both add up, "
                "and a cache that counts calls counts only those that reuse makes. disable_cache(), unless that is "
                "wanted"
            )

    def _ended(self, request: Request, why: str) -> None:
        self._mode.settle(request)
        self._explain(request, why)

    def _explain(self, request: Request, why: str = "") -> None:
        """Say once why nothing was held, where something was to be."""
        forwards = len(request.records)
        if self._told or self.config.exact or request.broken or forwards < 2:
            return
        if any(record.hits for record in request.records):
            return
        self._told = True
        reasons = ", ".join(f"{reason}: {count}" for reason, count in request.why.items() if count)
        log.warning(
            "reuse: nothing was held in a request of %d steps (computed for %s)%s. %s", sum(request.why.values()),
            reasons, f"; it ended: {why}" if why else "", self._mode.advice(request),
        )  # fmt: skip

    def __enter__(self) -> "ReuseHandle":
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


def transformers(pipe: Any) -> dict[str, nn.Module]:
    """The transformers of a diffusers pipeline by name. Raises ValueError where there is none."""
    found = {name: getattr(pipe, name, None) for name in ("transformer", "transformer_2")}
    models = {name: model for name, model in found.items() if isinstance(model, nn.Module)}
    if not models:
        raise ValueError(
            f"{type(pipe).__name__} has no transformer; reuse takes a diffusers pipeline that has one, or a module"
        )
    return models
