"""What each head is worth to the model, from the gradients of training, however the model is run."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foveate.attention import Dense, Layer
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.sparsity.budgets import by_error, smallest_budget
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.handle import sparsify
from foveate.sparsity.influence import WINDOW, Influence
from foveate.sparsity.profile import POOL, HeadProfile, SparsityProfile

SIZE = (1, 3, 4, 16, 16)  # 256 tokens
SIGMA = torch.tensor([0.5])


def make_model() -> VideoDiT:
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=64, depth=2, heads=2, patch=(1, 2, 2)))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.05)
    return model


def clips(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(SIZE) for _ in range(count)]


def expected(clips: list[Tensor]) -> Tensor:
    """The same by plain autograd: sums of squares of outputs times those of their gradients, 1 on average."""
    found = torch.zeros(2, 2)
    for clip in clips:
        model, outs = make_model(), []
        dense = Dense()

        def keep(layer: Layer, *qkv: Tensor, dense=dense, outs=outs) -> Tensor:
            outs.append(dense(layer, *qkv))
            return outs[-1]

        model.policy = keep
        gradients = torch.autograd.grad(model(clip, SIGMA).square().mean(), outs)
        found += torch.stack(
            [o.square().sum((0, 1, 3)) * g.square().sum((0, 1, 3)) for o, g in zip(outs, gradients, strict=True)]
        )
    return found / found.mean()


@pytest.mark.parametrize("how", ["eager", "checkpoint", "reentrant", "compiled", "two clips a step"])
def test_it_is_what_gradients_say(how: str) -> None:
    model, given = make_model(), clips(2 if how.startswith("two") else 1)
    run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    handle = sparsify(run, SparsityConfig(tolerance=0.01, warmup=100))  # type: ignore[arg-type]
    if how in ("checkpoint", "reentrant"):
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=how == "reentrant")
    for clip in given:
        run(clip, SIGMA).square().mean().backward()
    handle.step()
    assert handle.policy.influence.count == 1
    assert torch.allclose(handle.policy.influence.mean, expected(given), rtol=1e-4)  # type: ignore[arg-type]


def test_it_is_a_running_mean_that_overflow_does_not_spoil() -> None:
    influence = Influence(1, 2)
    influence.take()
    assert influence.mean is None
    for share in (1.0, 3.0):
        influence.note(0, torch.tensor([1.0, share]), torch.ones(1, 1, 2, 1))
        influence.take()
    assert influence.mean.tolist() == [pytest.approx([0.75, 1.25])]  # type: ignore[union-attr]
    influence.note(0, torch.tensor([1.0, torch.inf]), torch.ones(1, 1, 2, 1))
    influence.take()
    assert influence.mean.tolist() == [pytest.approx([0.75, 1.25])]  # type: ignore[union-attr]
    assert influence.count < WINDOW


def test_layers_without_gradients_count_as_usual() -> None:
    influence = Influence(2, 2)
    influence.note(1, torch.tensor([1.0, 3.0]), torch.ones(1, 1, 2, 1))
    influence.take()
    assert influence.mean.tolist() == [pytest.approx([1.0, 1.0]), pytest.approx([0.5, 1.5])]  # type: ignore[union-attr]


def test_heads_of_influence_keep_more() -> None:
    error = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.1]).expand(2, -1)
    points = (0.05, 0.1, 0.2, 0.3, 0.5)
    profile = SparsityProfile.empty(1, points, (POOL,))
    profile = profile.updated(0, HeadProfile.from_flat(error[:, None].expand(-1, 4, -1)), 0)
    alike, _ = by_error(profile, 0.3, "pool")
    assert alike[0, 0] == alike[0, 1] == pytest.approx(0.2)
    budgets, _ = by_error(profile, 0.3, "pool", torch.tensor([[0.5, 2.0]]))  # 0.8 on average
    weight = (torch.tensor([0.5, 2.0]) / 1.25).sqrt()
    for budget, factor in zip(budgets[0], weight, strict=True):
        assert float(budget) == pytest.approx(float(smallest_budget(error[0], profile.budgets, 0.3 / factor)))
    assert budgets[0, 0] < 0.2 < budgets[0, 1]
