"""A schedule from exact runs of the user's own pipeline: `foveate.calibrate`.

The runs compute everything; of the outputs of all steps only their inner products are kept, from which the error of
predicting any step from any two others follows (held/schedule.py). So any number of schedules can be made afterwards.

Shapes: N steps, S samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from foveate.held import handle
from foveate.held.config import ReuseConfig
from foveate.held.outputs import Outputs
from foveate.held.schedule import Schedule, identity, place_anchors, scheduler_name
from foveate.held.tracker import Forward

CHUNK = 1 << 20  # numbers of an output that are multiplied in float64 at once


@dataclass(frozen=True)
class Calibration:
    """What exact runs said. gram: inner products of the outputs, guided where guidance is known, float64 (S, N, N).

    switches: steps at which another of the pipeline's transformers takes over.
    """

    model: str
    scheduler: str
    sigmas: tuple[float, ...]
    guidance: float | None
    gram: Tensor
    switches: tuple[int, ...] = ()

    def schedule(self, calls: float) -> Schedule:
        """The one that computes this share of the steps. Raises ValueError for a share that cannot be."""
        if not 0 < calls <= 1:
            raise ValueError(f"calls is the share of steps that compute, in (0, 1], got {calls}")
        required = {step + extra for step in self.switches for extra in (0, 1)} & {*range(len(self.sigmas))}
        anchors, cost = place_anchors(self.gram, self.sigmas, round(calls * len(self.sigmas)), required)
        return Schedule(
            model=self.model, scheduler=self.scheduler, sigmas=self.sigmas, anchors=tuple(anchors),
            guidance=self.guidance, cost=cost, clips=len(self.gram),
        )  # fmt: skip


def calibrate(target: Any, run: Callable[[int], Any], *, clips: int = 4) -> Calibration:
    """Run exactly and watch.

        plan = fv.calibrate(pipe, lambda i: pipe(prompt=prompts[i], num_inference_steps=50), clips=4)
        plan.schedule(calls=0.4).write("schedule.json")
        fv.reuse(pipe, fv.ReuseConfig(schedule="schedule.json"))

    target: as `reuse`'s. run(i): generate clip i, of another prompt and seed than the others; several clips in a batch
    count as one run. All must have the same steps and guidance. Raises ValueError where they have not.
    """
    if clips < 1:
        raise ValueError(f"a calibration needs at least 1 clip, got {clips}")
    found: list[Calibration] = []
    recording = Recording(target, ReuseConfig(quality=1.0))
    with recording:
        for number in range(clips):
            run(number)
            found.append(recording.take())
    first = found[0]
    for other in found[1:]:
        same = len(other.sigmas) == len(first.sigmas) and other.switches == first.switches
        levels = same and all(abs(a - b) < 1e-3 for a, b in zip(first.sigmas, other.sigmas, strict=True))
        if not levels or other.guidance != first.guidance:
            raise ValueError("all runs of a calibration must have the same steps, noise levels and guidance")
    return Calibration(
        first.model, first.scheduler, first.sigmas, first.guidance, torch.cat([one.gram for one in found]),
        first.switches,
    )  # fmt: skip


class Recorder(Outputs):
    """Everything is computed, and a copy of each output kept until `take`."""

    taken: list[tuple[Forward, Tensor]]

    def took(self, forward: Forward, result: Any, sent: int, mine: bool = True) -> Any:
        given = super().took(forward, result, sent, mine)
        first = next(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
        self.taken.append((forward, first.detach().to("cpu", torch.float32, copy=True)))
        return given


class Recording(handle.ReuseHandle):
    """A handle that holds nothing."""

    def _make_mode(self, names: list[str], modules: list[nn.Module], teams: list) -> Recorder:
        self._modules = modules
        self._recorder = Recorder(self.config, handle.decide.rule(self.config), names, self._worst(teams))
        self._recorder.taken = []
        return self._recorder

    def take(self) -> Calibration:
        """What one run said. Raises ValueError for one that was no generation."""
        taken, self._recorder.taken = self._recorder.taken, []
        last = taken[-1][0].request if taken else None
        taken = [(forward, out) for forward, out in taken if forward.request is last]
        steps = sorted({forward.place.step for forward, _ in taken})
        if len(steps) < 3 or steps != list(range(len(steps))):
            raise ValueError(f"run(i) must generate one clip from step 0 on, in 3 steps or more; it made steps {steps}")
        by_step = [[(f, out) for f, out in taken if f.place.step == step] for step in steps]
        models = [calls[0][0].branch.model for calls in by_step]
        guidance = last.guidance[0] if last is not None and last.guidance else None
        guidance = float(guidance) if isinstance(guidance, int | float) else None
        pipe = self.models[0].pipe
        return Calibration(
            identity(self._modules), scheduler_name(pipe),
            tuple(calls[0][0].place.sigma for calls in by_step), guidance,
            gram([guided(calls, guidance) for calls in by_step]),
            tuple(step for step in steps[1:] if models[step] != models[step - 1]),
        )  # fmt: skip


def guided(calls: list[tuple[Forward, Tensor]], guidance: float | None) -> Tensor:
    """What a step's calls come to: the guided output (S, ...), or the calls' outputs side by side where it is unknown.

    A pipeline calls the model with its prompt and without ("uncond", "negative"), and goes on from without to with.
    """
    without = ["uncond" in f.place.branch or "neg" in f.place.branch for f, _ in calls]
    if len(calls) == 2 and sum(without) == 1 and guidance is not None and calls[0][1].shape == calls[1][1].shape:
        plain, wanted = (
            next(out for (_, out), no in zip(calls, without, strict=True) if no is x) for x in (True, False)
        )
        return plain + guidance * (wanted - plain)
    return torch.cat([out.flatten(1) for _, out in calls], 1)


def gram(outputs: list[Tensor]) -> Tensor:
    """Inner products (S, N, N), float64, of N outputs (S, ...). Raises ValueError where their shapes differ."""
    if len({out.shape for out in outputs}) > 1:
        raise ValueError("steps of a run differ in the number or the size of their outputs, so none predicts another")
    rows = torch.stack([out.flatten(1) for out in outputs], 1)
    parts = (part.double() for part in rows.split(CHUNK, 2))
    return torch.stack([part @ part.transpose(1, 2) for part in parts]).sum(0)
