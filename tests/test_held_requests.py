"""Whose forward it is: requests that fail, stop, begin in the middle, take turns or run in threads are never given
another one's outputs."""

import itertools
import logging
import threading
from typing import Any

import pytest
import torch
from test_held_outputs import make, model, noise
from torch import Tensor, nn

from foveate import ReuseConfig, reuse

SETTINGS: dict[str, Any] = {"interval": 3, "warmup": 2}


def loop(handle: Any, target: nn.Module, seed: int, first: int = 0, last: int = 20, steps: int = 20) -> Any:
    """One's own loop, two unnamed calls a step (with the label, and without); a generator of clips, a step each."""
    x = noise(seed=seed)
    for step in range(first, last):
        level = 1 - step / steps
        with torch.no_grad(), handle.during(step=step, sigma=level):
            time = torch.tensor([level])
            wanted, plain = target(x, time, torch.tensor([1])), target(x, time, torch.tensor([2]))
        x = x - (plain + 2 * (wanted - plain)) / steps
        yield x


def result(*args: Any, **how: Any) -> Tensor:
    *_, last = loop(*args, **how)
    return last


def fresh(**how: Any) -> Tensor:
    with reuse(target := model(), ReuseConfig(**SETTINGS)) as handle:
        return result(handle, target, **how)


def test_unnamed_branches_are_told_apart_and_held() -> None:
    with reuse(target := model(), ReuseConfig(**SETTINGS)) as handle:
        result(handle, target, 1)
        steps = handle.report().steps
    assert {record.branch for record in steps} == {"", "#2"}
    assert [record.hits for record in steps[::2]] == [record.hits for record in steps[1::2]]
    assert sum(record.hits for record in steps[::2]) == 12


def test_a_request_that_begins_where_another_stopped_is_its_own() -> None:
    """As strength does: same prompt, same shape, the next step."""
    with reuse(target := model(), ReuseConfig(**SETTINGS)) as handle:
        for stop in (10, 5, 2):
            result(handle, target, 1, last=stop)
            assert torch.equal(result(handle, target, 2, first=stop), fresh(seed=2, first=stop)), stop


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_forward_that_fails_ends_its_request(at: int) -> None:
    expected = fresh(seed=2)
    with reuse(target := model(), ReuseConfig(**SETTINGS)) as handle:
        calls = itertools.count()

        def fail(*_: Any) -> None:
            if next(calls) == at:
                raise torch.OutOfMemoryError("made up")

        hook = target.blocks[0].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            result(handle, target, 1)
        hook.remove()
        assert torch.equal(result(handle, target, 2), expected)


def test_requests_in_threads_have_their_own(caplog: pytest.LogCaptureFixture) -> None:
    expected, found = {seed: fresh(seed=seed) for seed in (1, 2, 3)}, {}
    with reuse(target := model(), ReuseConfig(**SETTINGS)) as handle:

        def work(seed: int) -> None:
            found[seed] = result(handle, target, seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for seed, wanted in expected.items():
        assert torch.equal(found[seed], wanted)


def test_requests_that_take_turns_in_one_thread_are_right_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Without names, same prompt and shape: nothing of one is used for the other."""
    plain = {}
    for seed in (1, 2):
        with reuse(target := model(), ReuseConfig(quality=1.0)) as handle:
            plain[seed] = result(handle, target, seed)
    with caplog.at_level(logging.WARNING, "foveate"), reuse(target := model(), ReuseConfig(**SETTINGS)) as handle:
        turns = zip(loop(handle, target, 1), loop(handle, target, 2), strict=True)
        *_, (one, two) = turns
    for ours, theirs in ((one, plain[1]), (two, plain[2])):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_noise_levels_that_turn_round_begin_anew() -> None:
    levels = [1.0, 0.9, 0.8, 0.7, 0.9, 0.8, 0.7, 0.6]
    with reuse(target := model(), ReuseConfig(**SETTINGS)) as handle:
        x = noise()
        for step, level in enumerate(levels):
            with torch.no_grad(), handle.during(step=step, sigma=level):
                target(x, torch.tensor([level]), torch.tensor([1]))
        assert handle.report().steps[0].step == 4


def test_the_worst_sample_decides() -> None:
    """A sample that is hard among easy ones has the error that it has alone."""
    anchors = []
    for easy in (0, 15):
        target = model()
        hard = torch.linspace(0, 6, 40).sin()
        calls = itertools.count()

        def forward(x: Tensor, sigma: Tensor, condition: Any, hard: Tensor = hard, calls: Any = calls) -> Tensor:
            out = torch.ones_like(x)
            out[0] = 1 + hard[round((1 - float(sigma)) * 40)]
            next(calls)
            return out

        target.forward = forward  # type: ignore[method-assign]
        with reuse(target, ReuseConfig(quality=0.98)) as handle:
            for step in range(40):
                with torch.no_grad(), handle.during(step=step, sigma=1 - step / 40):
                    target(noise().expand(1 + easy, -1, -1, -1, -1), torch.tensor([1 - step / 40]), None)
            anchors.append([record.step for record in handle.report().steps if not record.hits])
    assert anchors[0] == anchors[1]
    assert len(anchors[0]) < 40


@pytest.mark.parametrize("steps", [4, 8, 13])
def test_short_schedules_hold_something_or_say_why(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    for config in (ReuseConfig(), ReuseConfig(interval=2), ReuseConfig(quality=0.9999)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "foveate"), reuse(target := model(), config) as handle:
            for _ in range(2):
                make(target, steps=steps)
            held = handle.report().hit_rate
        told = sum("nothing was held" in record.message for record in caplog.records)
        assert told == (held == 0)
        assert config.interval is None or held > 0


def test_two_models_of_a_pipeline_warm_up_once_and_are_reported_apart() -> None:
    import tiny_pipelines

    pipe, given = tiny_pipelines.made("wan 2.2")
    with reuse(pipe, ReuseConfig(quality=0.2)) as handle:
        tiny_pipelines.call(pipe, given, steps=30)
        steps = [record for record in handle.report().steps if record.branch == "cond"]
    first, second = ([r for r in steps if r.model == name] for name in ("transformer", "transformer_2"))
    assert first[-1].step + 1 == second[0].step
    assert [record.hits for record in second[:3]] == [0, 0, 1], "two values for a slope, and the first one's error"
