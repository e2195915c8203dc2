"""Hooks on a model: which of its forwards train, a sample of one when asked for, and signs of a loop gone wrong.

A forward trains when a backward reaches its output, whatever mode the module is in: LoRA recipes train in eval(), and
evaluations may forget to switch gradients off.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from foveate.models.copies import Hook
from foveate.sparsity.pairs import LOSSES, Facts, Sample, facts, first_tensor
from foveate.sparsity.policy import Forward, Sparse

log = logging.getLogger("foveate")

FORGOTTEN = 4, 64  # updates of the weights, or else backwards, without a step of the handle
WINDOW = 20  # steps after which the weights must have changed
WATCHED = 16  # parameters that are asked whether they changed


class Probe:
    """model: the outermost module that training calls; hooks inside a module that is compiled whole do nothing.

    before: called at the start of every forward. wanted: asked with a forward's length whether it is better a sample
    than one of the length (or None) that is kept.
    """

    def __init__(self, model: nn.Module, policy: Sparse, before: Callable[[], None] = lambda: None):
        self.model, self.policy, self.before = model, policy, before
        self.backwards = self.updates = self.steps = self.changes = 0  # since the last step; of the window
        self.sampling, self.checking = False, False
        self.wanted: Callable[[int, int | None], bool] = lambda tokens, kept: kept is None
        self.sample: Sample | None = None
        self.lengths: set[int] = set()  # of this step's training forwards
        self._found: tuple[Tensor, Tensor | None] | None = None
        self._busy = self._watching = False
        self._weights: list[Tensor] = []
        self._version, self._values = -1, torch.empty(0)
        self._hooks = [
            model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True),
            model.register_forward_hook(Hook(self._end)),
        ]
        self._look_at_weights()
        self._values = self._some_values()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._rest()
        self.policy.forward, self.sample = None, None

    def next_step(self, sampling: bool, checking: bool) -> None:
        """A new training step begins; is a sample of it wanted, or only what its loss looks like?"""
        self.sampling, self.checking = sampling, checking
        self.sample, self._found, self.backwards = None, None, 0
        self.lengths.clear()
        self._rest()
        if self.steps < 3 or self.steps % 100 == 0:
            self._look_at_weights()

    def ready(self) -> bool:
        """Whether a sample with its gradient is there."""
        return self.sample is not None and self.sample.gradient is not None

    def seen_loss(self, loss: Tensor | float | None) -> Facts | None:
        """What this step's backward says of the loss; `loss` is the user's word for it."""
        if self._found is None:
            return None
        gradient, seen = self._found
        return facts(gradient, seen if loss is None else torch.as_tensor(loss).detach())

    def notice(self, used: bool) -> None:
        """At a step of the handle: say once what cannot be right. used: a closure was given."""
        self._note_updates()
        inside, self.policy.inside_graphs = self.policy.inside_graphs, 0
        if inside and not self.backwards and not used:
            raise ValueError(
                "the model is compiled with foveate's hooks inside, where they see nothing, so it would stay dense: "
                "call remove(), then fv.sparsify(torch.compile(model)); or give handle.step a closure"
            )
        if not (self.backwards or inside):
            say_once(
                "handle.step() was called, but since the last one the model given to sparsify has had no forward and "
                "backward: is another copy of it trained, or step called twice? foveate goes by training forwards"
            )
        self.steps += 1
        self.changes += self.updates > 0
        self.updates = 0
        if self.steps % WINDOW == 0:
            before, self._values = self._values, self._some_values()
            if not self.changes and _equal(before, self._values):
                say_once(
                    f"no weight of the model has changed in {WINDOW} calls of handle.step(): does the optimiser hold "
                    "this model's parameters, and does it step?"
                )
            elif 0 < self.changes <= 0.6 * WINDOW:  # 0: an optimiser that does not count, as fused ones do not
                say_once(
                    f"the weights changed in few of {WINDOW} calls of handle.step(): call it once after each optimiser "
                    "step, not after every backward; cadences are counted in it"
                )
            self.changes = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forwards inside are ours: they are neither training nor samples."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def replayed(self, tokens: int) -> None:
        """A training forward and its backward were replayed by a CUDA graph, which calls no hook."""
        self._note_updates()
        self._note_forgotten()
        self.backwards += 1
        self.lengths.add(tokens)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._busy:
            return
        self.before()
        live = torch.is_grad_enabled()
        self.policy.forward = Forward(live)
        if live:
            self._note_updates()
            self._note_forgotten()
            if self.sampling:
                self.policy.forward.sample = Sample.of(args, kwargs)

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        if torch.compiler.is_compiling() or self._busy:
            return
        forward, self.policy.forward = self.policy.forward, None
        if forward is None or not forward.live:
            return
        y = first_tensor(output)
        if y is None:
            forward.sample = None
            self._arrived(forward, None)  # there is no telling, so it is believed
            return
        if not y.requires_grad:
            return
        if forward.sample is not None:
            forward.sample.output, forward.sample.tokens = y.detach().clone(), forward.tokens
        if (self.sampling or self.checking) and not self._watching:
            self._watching = True
            LOSSES.watch()
        y.register_hook(lambda gradient: self._arrived(forward, gradient.detach()))

    def _arrived(self, forward: Forward, gradient: Tensor | None) -> None:
        """A backward has come to the output of a forward, so that one trains."""
        sample, forward.sample = forward.sample, None
        self.policy.arrived(forward)
        self.backwards += 1
        self.lengths.add(forward.tokens)
        if gradient is None or not (self.sampling or self.checking):
            return
        if self._found is None:
            self._found = gradient, LOSSES.current
        kept = self.sample
        if sample is not None and self.wanted(sample.tokens, None if kept is None else kept.tokens):
            sample.gradient, sample.loss = gradient, LOSSES.current
            self.sample, self._found = sample, (gradient, LOSSES.current)

    def _rest(self) -> None:
        if self._watching:
            self._watching = False
            LOSSES.stop()

    def _look_at_weights(self) -> None:
        trained = (x for x in self.model.parameters() if x.requires_grad)
        self._weights = [x for x, _ in zip(trained, range(WATCHED), strict=False)]
        self._version = self._versions()

    def _versions(self) -> int:
        return sum(getattr(x, "_local_tensor", x)._version for x in self._weights)

    def _some_values(self) -> Tensor:
        """A few numbers of the watched weights: fused optimisers change them without counting it."""
        local = (getattr(x, "_local_tensor", x).detach().flatten()[:64] for x in self._weights)
        return torch.cat([torch.empty(0), *(x.float().cpu() for x in local if x.device.type != "meta")])

    def _note_updates(self) -> None:
        version = self._versions()
        self.updates += version != self._version
        self._version = version

    def _note_forgotten(self) -> None:
        updates, backwards = FORGOTTEN
        if self.policy.free_steps or (self.updates < updates and self.backwards < backwards):
            return
        what = f"{updates} optimiser steps" if self.updates >= updates else f"{backwards} backwards"
        say_once(
            f"{what} and no handle.step(): call it after each optimiser step, or attention stays as it is now and "
            "nothing more is learned"
        )


@cache
def say_once(message: str) -> None:
    log.warning(message)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())
