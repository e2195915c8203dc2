"""One model of a handle: what happens when it is called.

Place and request of the forward, the mode's decision, then a held answer, or the model, on one half of the ranks where
each computes one branch of guidance, and what it gave is remembered.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foveate.held.around import Around, said, saying
from foveate.held.places import ADVICE, NoPlaceError, Place, place
from foveate.held.split import Split, telling
from foveate.held.team import Team
from foveate.held.tracker import RUNNING, Branch, Forward, Request, Tracker, input_names, read_inputs
from foveate.models import adapters
from foveate.parallel.comm import TRAFFIC

log = logging.getLogger("foveate")


NOTHING = torch.zeros(())


def compiled_frame(x: Tensor) -> Tensor:
    """torch.compile(fullgraph=True) around this layer wants something to have been compiled in every call: this is."""
    return x + 1


class Mode(Protocol):
    """What a handle remembers: outputs or attention states. `took` gives what the caller of the model gets."""

    def began(self, forward: Forward) -> None: ...
    def decide(self, forward: Forward, guidance: Any) -> Any: ...
    def took(self, forward: Forward, result: Any, sent: int, mine: bool = True) -> Any: ...
    def bytes(self, request: Request) -> int: ...
    def settle(self, request: Request) -> None: ...
    def advice(self, request: Request) -> str: ...
    def joined(self, request: Request) -> None: ...


@dataclass
class Call:
    """A call that runs: its forward, what the model is given, and whose forward that is (the other branch's, split)."""

    forward: Forward
    args: tuple
    kwargs: dict[str, Any]
    running: Forward
    other: Branch | None
    before: int  # bytes sent until now
    told: ExitStack


class Watched:
    """A model, between `install()` and `remove()`. guidance: the scale in use, of a pipeline."""

    def __init__(
        self,
        number: int,
        module: nn.Module,
        pipe: Any,
        key: Any,
        tracker: Tracker,
        mode: Mode,
        team: Team | None,
        finished: Callable[[Request], None],
    ):
        self.number, self.module, self.pipe, self._key = number, module, pipe, key
        self._tracker, self._mode, self.team, self._finished = tracker, mode, team, finished
        self.split = None
        if team is not None and team.pair is not None:
            self.split = Split(team.pair, team.half, lambda: input_names(module))
        disable: Any = torch.compiler.disable
        self._begin, self._end, self._failed = map(disable, (self._before, self._after, self._broke))
        self._strange = False
        self.around = Around(module, self._answer)

    def _answer(self, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        result, running = self._begin(args, kwargs)
        if running is None:
            if result is None:
                return call(*args, **kwargs)
            compiled_frame(NOTHING)
            return result
        try:
            return self._end(running, call(*running.args, **running.kwargs))
        except BaseException:
            self._failed(running)
            raise

    def _before(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Call | None]:
        """An answer, or the call that is to be made; neither: the model is called and nothing is remembered."""
        inputs = read_inputs(self.module, args, kwargs)
        if torch.is_grad_enabled() and inputs.clip is not None and inputs.clip.requires_grad:
            raise ValueError("reuse is for generation: run it under torch.no_grad(), or remove() it for training")
        try:
            where = self._place(inputs.time)
        except NoPlaceError as reason:
            if not self._strange:
                self._strange = True
                log.warning("reuse: %s. It computes. %s", reason, ADVICE)
            return None, None
        name = said((self._key, "name"), "")
        forward = self._tracker.begin(name, self.number, where, inputs, self._guidance())
        try:
            if forward.request.step == -1:
                if (found := self._installed()) is not None:
                    found.restart()
                if self.team is not None:
                    self.team.check(forward)
            answer = self._mode.decide(forward, self._guidance())
            if answer is None and self.split is not None:
                given = self.split.waiting(forward)
                if given is not None:
                    answer, sent = given
                    answer = self._mode.took(forward, answer, sent, mine=self.split.half == 1)
        except BaseException:
            forward.request.broken = True
            raise
        if answer is not None:
            self._done(forward)
            return answer, None
        return None, self._call(forward, args, kwargs)

    def _call(self, forward: Forward, args: tuple, kwargs: dict[str, Any]) -> Call:
        other = self.split.other(forward) if self.split is not None else None
        running = forward
        if self.split is not None and other is None and forward.request.split:
            self._mode.joined(forward.request)
            forward.request.split = False
        if self.split is not None and other is not None:
            forward.request.split = True
            running, args, kwargs = self.split.mine(forward, other)
        told, where = ExitStack(), running.place
        if (found := self._installed()) is not None:  # whose policy may go by the step, which many pipelines do not say
            told.enter_context(found.telling(where.step, where.branch, where.sigma))
        told.enter_context(saying(RUNNING, running))
        told.enter_context(telling(self.around, running, forward))
        return Call(forward, args, kwargs, running, other, TRAFFIC.total, told)

    def _after(self, call: Call, result: Any) -> Any:
        call.told.close()
        forward, mine = call.forward, True
        if self.split is not None and call.other is not None:
            result = self.split.exchange(forward, call.other, result, lambda: TRAFFIC.total - call.before)
            mine = self.split.half == 0
        result = self._mode.took(forward, result, TRAFFIC.total - call.before, mine)
        self._done(forward)
        return result

    def _broke(self, call: Call) -> None:
        call.told.close()
        call.forward.request.broken = True

    def _done(self, forward: Forward) -> None:
        self._tracker.done(forward)
        if self.split is not None:
            self.split.remember(forward)
        if forward.place.steps == forward.place.step + 1:
            self._finished(forward.request)

    def _installed(self) -> adapters.Installed | None:
        try:
            return adapters.installed(self.module)
        except ValueError:
            return None

    def _place(self, time: Any) -> Place:
        during = said((self._key, "during"))
        return during if during is not None else place(self.around.told(), self.pipe, _plain(time))

    def _guidance(self) -> tuple:
        second = self.pipe is not None and getattr(self.pipe, "transformer_2", None) is self.module
        return tuple(
            getattr(self.pipe, name, None) for name in (["_guidance_scale_2"] if second else ["_guidance_scale"])
        )

    def remove(self) -> None:
        self.around.remove()


def _plain(time: Any) -> Any:
    return time if isinstance(time, Tensor | float | int) else None
