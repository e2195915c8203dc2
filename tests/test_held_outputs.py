"""The whole model's output held, the default: what is predicted, when it is computed, whose it is."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foveate import ReuseConfig, reuse
from foveate.held.decide import Question, rule
from foveate.held.held import Held
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.sample import generate, schedule


def model() -> VideoDiT:
    torch.manual_seed(0)
    made = VideoDiT(DiTConfig(width=64, depth=2, heads=2, classes=3))
    for parameter in made.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return made.eval().requires_grad_(False)


def noise(size: tuple[int, int, int] = (4, 8, 8), seed: int = 0) -> Tensor:
    return torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(seed))


def make(target: nn.Module, *, label: int = 1, guidance: float = 1.0, steps: int = 14, **start: Any) -> Tensor:
    condition = torch.tensor([label])
    return generate(target, noise(**start), steps=steps, condition=condition, guidance=guidance, solver="euler")


def held(**settings: Any) -> ReuseConfig:
    return ReuseConfig(hold="output", **settings)


class Counted:
    """Forwards that really reached a model's blocks."""

    def __init__(self, target: VideoDiT):
        self.calls = 0
        target.blocks[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize(("order", "damping"), [(0, None), (1, 1.0), (1, 0.5)])
def test_held_steps_follow_the_definition_and_call_nothing(order: Any, damping: float | None) -> None:
    target, label = model(), torch.tensor([1])
    x, known = noise(), []
    for step, (now, then) in enumerate(pairwise(schedule(14, 1.0).tolist())):
        if step < 3 or (step - 2) % 4 == 0:
            slope = target(x, torch.tensor([now]), label)
            known = [*known[-1:], (now, slope)]
        elif order == 0:
            slope = known[-1][1]
        else:
            (first, old), (last, new) = known
            slope = new + (damping or 0.0) * (now - last) / (last - first) * (new - old)
        x = x + (then - now) * slope
    counted = Counted(target)
    with reuse(target, held(interval=4, warmup=3, order=order, damping=damping, mend=False)) as handle:
        torch.testing.assert_close(make(target), x, rtol=1e-4, atol=1e-5)
        report = handle.report()
    assert counted.calls == 5
    assert [record.step for record in report.steps if record.hits == 0] == [0, 1, 2, 6, 10]
    assert report.computed == pytest.approx(5 / 14)
    assert 0 < report.bytes_held <= 2 * noise().numel() * 4


def test_what_held_steps_missed_is_taken_back() -> None:
    """The clip after a computed step is where outputs interpolated between the known ones would have put it."""
    target, label, levels = model(), torch.tensor([1]), schedule(14, 1.0).tolist()
    x, known, wanted = noise(), [], noise()
    for step, (now, then) in enumerate(pairwise(levels)):
        if step < 3 or (step - 2) % 4 == 0:
            value = target(x, torch.tensor([now]), label)
            if known and known[-1][0] != step - 1:  # `wanted` is the clip at the last computed step, settled by now
                nodes = [(levels[i], y) for i, y in (*known[-2:], (step, value))]
                for k in range(known[-1][0] + 1, step):
                    terms = (
                        y * torch.tensor([(levels[k] - b) / (a - b) for b, _ in nodes if b != a]).prod()
                        for a, y in nodes
                    )
                    wanted = wanted + (levels[k + 1] - levels[k]) * sum(terms)
                x = wanted
            known = [*known[-1:], (step, value)]
            x = x + (then - now) * value
            wanted = x
        else:
            (first, old), (last, new) = known
            ahead = (now - levels[last]) / (levels[last] - levels[first])
            x = x + (then - now) * (new + ahead * (new - old))
    with reuse(target, held(interval=4, warmup=3, mend=True)) as handle:
        ours, calls = make(target), handle.report().computed
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-5)
    exact = make(target)
    with reuse(target, held(interval=4, warmup=3)) as handle:  # without being asked, with a schedule only
        plain = make(target)
        assert handle.report().computed == calls
    assert (ours - exact).norm() < 0.7 * (plain - exact).norm()


def test_exact_is_the_plain_model_and_remove_leaves_no_trace() -> None:
    target = model()
    plain = make(target)
    for config in (held(quality=1.0), held(interval=1)):
        with reuse(target, config):
            assert torch.equal(make(target), plain)
    for _ in range(2):
        handle = reuse(target, held(interval=3))
        assert not torch.equal(make(target), plain)
        assert handle.bytes_held() > 0
        handle.remove()
        handle.remove()
        assert "forward" not in vars(target)
        assert handle.bytes_held() == 0
        assert torch.equal(make(target), plain)


def test_an_output_that_is_linear_in_the_noise_level_is_held_without_error() -> None:
    target = model()
    target.forward = lambda x, sigma, condition: torch.ones_like(x) * sigma  # type: ignore[method-assign]
    plain = make(target, steps=40)
    with reuse(target, held(quality=0.99)) as handle:
        torch.testing.assert_close(make(target, steps=40), plain)
        report = handle.report()
    assert vars(target)["forward"]  # another wrapper's, put back
    assert report.hit_rate > 0.7


def test_no_hits_are_told_once_where_hits_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    target = model()
    target.forward = lambda x, sigma, condition: torch.randn_like(x)  # type: ignore[method-assign]
    for quality, times in ((1.0, 0), (0.99, 1)):
        caplog.clear()
        with reuse(target, held(quality=quality)):
            make(target, steps=40)
        assert sum("nothing was held" in record.message for record in caplog.records) == times
    with reuse(target, held(interval=3)) as handle:
        make(model())  # another than was given, as where a pipeline's transformer is replaced afterwards
        for _ in range(2):
            assert handle.report().steps == []
    assert sum("no model of this handle has been called" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("order", [0, 1])
def test_a_caller_may_write_to_what_it_gets(order: Any) -> None:
    target, x, label = model(), noise(), torch.tensor([1])

    def outputs(spoil: bool) -> list[Tensor]:
        found = []
        with reuse(target, held(interval=3, warmup=2, order=order)) as handle:
            for step in range(9):
                with handle.during(step=step, sigma=1 - step / 10), torch.no_grad():
                    out = target(x, torch.tensor([1 - step / 10]), label)
                found.append(out.clone())
                if spoil:
                    out.mul_(2)
        return found

    for clean, spoilt in zip(outputs(False), outputs(True), strict=True):
        assert torch.equal(clean, spoilt)


def test_a_branch_that_ended_asks_for_no_anchors() -> None:
    target, x, label = model(), noise(), torch.tensor([1])

    def pattern(branches: Any) -> list[bool]:
        with reuse(target, held(quality=0.5, warmup=3)) as handle, torch.no_grad():
            for step in range(40):
                for branch in branches(step):
                    with handle.during(step=step, sigma=1 - step / 41, branch=branch):
                        target(x, torch.tensor([1 - step / 41]), label)
            return [record.reason == "output held" for record in handle.report().steps if record.branch == "cond"]

    alone, left = pattern(lambda _: ["cond"]), pattern(lambda step: ["cond", "uncond"] if step < 12 else ["cond"])
    assert any(alone[12:])
    assert left == alone


def test_the_next_request_is_what_a_fresh_process_gives() -> None:
    wanted = [{}, {"seed": 5}, {"label": 2}, {"size": (4, 8, 16)}, {"steps": 20}, {"guidance": 3.0}, {}]
    alone = []
    for how in wanted:
        with reuse(target := model(), held(quality=0.5)):
            alone.append(make(target, **how))
    with reuse(target := model(), held(quality=0.5)) as handle:
        for how, expected in zip(wanted, alone, strict=True):
            assert torch.equal(make(target, **how), expected), how
            assert handle.report().hit_rate > 0, how
            with handle.request("other"):
                make(target, label=0, steps=6)


def test_branches_have_their_own_outputs_and_are_held_together() -> None:
    target = model()
    counted = Counted(target)
    plain = make(target, guidance=3.0)
    calls = counted.calls
    with reuse(target, held(interval=2, warmup=3)) as handle:
        ours = make(target, guidance=3.0)
        steps = {record.branch: [] for record in handle.report().steps}
        for record in handle.report().steps:
            steps[record.branch].append(record.hits)
    assert (calls, counted.calls - calls) == (28, 16)
    assert steps["cond"] == steps["uncond"]
    assert (ours - plain).norm() < 0.05 * plain.norm()


def test_decisions_are_monotone_in_quality() -> None:
    for missed in (1e-4, 1e-2, 0.1, 1.0):
        trail = Held(1, 1.0, (noise(),), 0.5, (noise(),), 0.6, torch.tensor(missed), 0.02)
        error = trail.error(0.4, missed)
        assert error == pytest.approx(missed, rel=1e-6)
        told = {"step": 7, "first": 0, "sigma": 0.4, "steps": None, "anchor": 6, "warm": False}
        rules = [rule(held(quality=quality)) for quality in (0.5, 0.7, 0.9, 0.99)]
        holds = [one(Question(**told, error=lambda error=error: error)).hold for one in rules]
        assert holds == sorted(holds, reverse=True)


def test_what_does_not_go_together_is_refused() -> None:
    for wrong in ({"states": 2}, {"local": "fresh"}, {"audit": True}):
        with pytest.raises(ValueError, match="holds no layer"):
            held(**wrong)
    with pytest.raises(ValueError, match="attention or output"):
        ReuseConfig(hold="everything")  # type: ignore[arg-type]
    target = model()
    with reuse(target, held()) as handle, handle.during(step=0, sigma=0.5), pytest.raises(ValueError, match="no_grad"):
        target(noise().requires_grad_(), torch.tensor([0.5]), torch.tensor([1]))
    with reuse(target, held()), pytest.raises(ValueError, match="step and noise level"):
        target(noise(), torch.tensor([0.5]), torch.tensor([1]))


SIZE = (8, 32, 32)  # tokens enough for a tile a rank


def on_ranks() -> tuple[Tensor, list[int]]:
    target = model()
    with reuse(target, held(quality=0.2)) as handle:
        made = make(target, size=SIZE, guidance=2.0, steps=40)
        return made, [record.step for record in handle.report().steps if record.hits == 0]


def test_ranks_hold_at_the_same_steps_and_agree_with_one_process(worlds: Any) -> None:
    alone, anchors = on_ranks()
    assert 0 < len(anchors) < 80
    for ours, theirs in worlds(2).run(on_ranks):
        assert theirs == anchors
        assert (ours - alone).norm() <= 1e-5 * alone.norm()
