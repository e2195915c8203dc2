"""Schedules: where anchors are placed, files, and runs that they do and do not fit."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foveate import ReuseConfig, Schedule, calibrate, reuse
from foveate.held.calibrate import gram
from foveate.held.schedule import place_anchors
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.sample import generate, schedule


def model(width: int = 64) -> VideoDiT:
    torch.manual_seed(0)
    made = VideoDiT(DiTConfig(width=width, depth=1, heads=2, classes=3))
    for parameter in made.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return made.eval().requires_grad_(False)


def make(target: Any, seed: int = 0, steps: int = 12, shift: float = 3.0, guidance: float = 3.0) -> Tensor:
    noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(seed))
    return generate(
        target, noise, steps=steps, shift=shift, condition=torch.tensor([1, 2]), guidance=guidance, solver="euler"
    )


def test_anchors_are_the_cheapest_of_all() -> None:
    """Against every choice of anchors, with outputs predicted and errors summed from their definition."""
    draw = torch.Generator().manual_seed(0)
    levels = schedule(9, 3.0)[:-1].tolist()
    outputs = [torch.randn(2, 30, generator=draw).cumsum(1) * (1 + step) for step in range(9)]
    ends = [*levels[1:], 0.0]

    def cost(anchors: tuple[int, ...]) -> float:
        total = 0.0
        for step in {*range(9)} - {*anchors}:
            h, i = [one for one in anchors if one < step][-2:]
            ahead = (levels[step] - levels[i]) / (levels[i] - levels[h])
            error = outputs[step] - outputs[i] - ahead * (outputs[i] - outputs[h])
            scale = torch.stack(outputs).square().sum(2).mean(0).sqrt()
            weight = (levels[step] - ends[step]) / (1 - ends[step]) ** 0.5
            total += weight * float((error.norm(dim=1) / scale).mean())
        return total

    for count, required in ((2, ()), (4, ()), (5, ()), (5, (3, 4)), (9, ())):
        rest = [step for step in range(2, 9) if step not in required]
        every = [tuple(sorted((0, 1, *required, *more))) for more in combinations(rest, count - 2 - len(required))]
        best = min(every, key=cost)
        found, total = place_anchors(gram(outputs), levels, count, required)
        assert tuple(found) == best
        assert total == pytest.approx(cost(best), rel=1e-4)
    for wrong in (1, 10):
        with pytest.raises(ValueError, match="steps cannot compute"):
            place_anchors(gram(outputs), levels, wrong)


def test_calibrated_runs_follow_the_file_and_other_runs_are_refused(tmp_path: Path) -> None:
    target, file = model(), tmp_path / "schedule.json"
    plan = calibrate(target, lambda i: make(target, seed=10 + i), clips=2)
    assert plan.gram.shape == (4, 12, 12)  # two clips a run
    exact = make(target)
    plan.schedule(0.5).write(file)
    made = Schedule.read(file)
    assert made == plan.schedule(0.5)
    assert (made.steps, made.calls, made.clips) == (12, 0.5, 4)
    with reuse(target, ReuseConfig(schedule=file)) as handle:
        ours = make(target)
        steps = {record.step for record in handle.report().steps if record.hits == 0}
        assert steps == {*made.anchors}
        with pytest.raises(ValueError, match="for 12 steps, this run has 8"):
            make(target, steps=8)
        with pytest.raises(ValueError, match="another shift"):
            make(target, shift=1.0)
    assert 0 < (ours - exact).norm() < 0.05 * exact.norm()
    assert torch.equal(make(target), exact)
    with pytest.raises(ValueError, match="calibrated with the model"):
        reuse(model(width=96), ReuseConfig(schedule=file))
    for few in (4, 8):  # of distilled models: something is held
        short = calibrate(target, lambda i, n=few: make(target, seed=i, steps=n), clips=1).schedule(0.75)
        with reuse(target, ReuseConfig(schedule=short)) as handle:
            make(target, steps=few)
            assert handle.report().computed == pytest.approx(0.75)


def test_what_is_no_schedule_is_refused(tmp_path: Path) -> None:
    target, file = model(), tmp_path / "schedule.json"
    good = {"model": "m", "scheduler": "", "sigmas": [1.0, 0.5, 0.2], "anchors": [0, 1], "guidance": None, "cost": 0.0}
    for wrong in ({}, {"anchors": [1, 0]}, {"anchors": [0, 3]}, {"anchors": "x"}, {"sigmas": [1.0, 2.0, 0.0]}):
        found = {"kind": "foveate schedule 1", **good, "clips": 1, **wrong} if wrong else good
        file.write_text(json.dumps(found))
        with pytest.raises(ValueError, match="is no schedule"):
            ReuseConfig(schedule=file)
    file.write_text("not json")
    with pytest.raises(ValueError, match="is no schedule"):
        Schedule.read(file)
    plan = calibrate(target, lambda i: make(target, steps=4), clips=1)
    for calls in (0.0, 1.1):
        with pytest.raises(ValueError, match="share of steps"):
            plan.schedule(calls)
    with pytest.raises(ValueError, match="leave interval"):
        ReuseConfig(schedule=plan.schedule(1.0), interval=2)
    with pytest.raises(ValueError, match="same steps"):
        calibrate(target, lambda i: make(target, steps=4 + i), clips=2)
    with pytest.raises(ValueError, match="must generate one clip"):
        calibrate(target, lambda i: None, clips=1)
