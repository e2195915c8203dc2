"""Generation against flows whose end is known."""

import pytest
import torch
from torch import Tensor, nn

from foveate.sample import generate, schedule


class Straight(nn.Module):
    """The flow from any noise to one clip: velocity (x - clip) / sigma."""

    def __init__(self, clip: Tensor):
        super().__init__()
        self.clip, self.calls = clip, 0

    def forward(self, x: Tensor, sigma: Tensor, condition: Tensor | None = None) -> Tensor:
        self.calls += 1
        clip = self.clip if condition is None else self.clip + condition
        return (x - clip) / sigma.view(-1, 1, 1, 1, 1)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_straight_flows_end_at_the_clip(steps: int) -> None:
    clip = torch.randn(1, 3, 2, 4, 4)
    model, seen = Straight(clip), []
    made = generate(model, torch.randn_like(clip), steps=steps, progress=lambda done, total: seen.append((done, total)))
    assert torch.allclose(made, clip, atol=1e-5)
    assert seen == [(done, steps) for done in range(1, steps + 1)]
    assert model.calls == 2 * steps - 1


def test_guidance_extrapolates_from_the_unconditional_prediction() -> None:
    clip = torch.zeros(1, 1, 1, 2, 2)
    made = generate(Straight(clip), torch.randn_like(clip), steps=3, condition=torch.tensor(1.0), guidance=3.0)
    assert torch.allclose(made, torch.full_like(clip, 3.0), atol=1e-5)


def test_second_order_steps_are_second_order() -> None:
    class Curved(nn.Module):
        def forward(self, x: Tensor, sigma: Tensor, condition: Tensor | None) -> Tensor:
            return 2 * sigma.view(-1, 1, 1, 1, 1) * torch.ones_like(x)  # x(0) = x(1) - 1

    start = torch.zeros(1, 1, 1, 1, 1)
    errors = [abs(float(generate(Curved(), start, steps=steps)) + 1) for steps in (8, 16)]
    assert errors[1] < errors[0] / 3.5


def test_schedules_run_from_noise_to_clip() -> None:
    for shift in (1.0, 3.0):
        levels = schedule(10, shift)
        assert levels[0] == 1
        assert levels[-1] == 0
        assert (levels.diff() < 0).all()
    assert schedule(10, 3.0)[5] > 0.5
    with pytest.raises(ValueError, match="at least 1 step"):
        schedule(0)
