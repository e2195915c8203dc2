"""A captured training run on a GPU: replays of real CUDA graphs give what launches give."""

import pytest
import torch
from torch import Tensor

import foveate as fv
from foveate.models.dit import DiTConfig, VideoDiT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def losses(replaying: bool) -> tuple[list[float], int, dict[str, int]]:
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=128, depth=2, heads=2)).cuda()
    for weight in model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.1)
    config = fv.SparsityConfig(
        budget=0.25, force=True, tile_shape=(4, 4, 4), warmup=3, learn_from=2, often=12, rare=12, teach_every=8
    )
    handle = fv.sparsify(model, config)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.Generator().manual_seed(1)

    def loss_of(video: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return (model(video + sigma * noise, sigma).float() - noise).square().mean()

    step, found = handle.captured(loss_of), []
    for _ in range(40):
        video, noise = torch.randn(2, 1, 3, 8, 32, 32, generator=draw).cuda()
        given = video, noise, torch.rand(1, generator=draw).cuda()
        if replaying:
            loss = step(*given)
        else:
            loss = loss_of(*given)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.step(loss=loss.detach())
        found.append(loss.item())
    return found, step.replays, handle.policy.computed


def test_replays_train_alike() -> None:
    launched, replays, computed = losses(False)
    assert replays == 0
    replayed, replays, same = losses(True)
    assert replays >= 20
    assert same == computed
    assert replayed == pytest.approx(launched, rel=2e-3)
    assert launched[-1] < 0.95 * launched[0]
