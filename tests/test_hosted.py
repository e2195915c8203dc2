"""Sparse attention for engines that hand over q, k, v: dense first, then the tiles that matter, anew each time."""

import logging
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foveate.sparsity.hosted import Hosted
from foveate.tiles import VideoGrid

GRID = VideoGrid(4, 8, 8)


def qkv(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Raster order; each token looks for those near it, so that few tiles hold most of the mass."""
    draw = torch.Generator().manual_seed(seed)
    axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in (4, 8, 8)), indexing="ij")
    places = torch.stack(axes, -1).flatten(0, 2)  # (S, 3)
    waves = torch.randn(3, 16, generator=draw)
    angles = places @ waves
    near = torch.cat([angles.cos(), angles.sin()], -1)[None, :, None].expand(1, -1, 2, -1)
    noise = [0.1 * torch.randn(1, 256, 2, 32, generator=draw) for _ in range(2)]
    return 2 * near + noise[0], 2 * near + noise[1], torch.randn(1, 256, 2, 32, generator=draw)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale).transpose(1, 2)


def run(hosted: Hosted, steps: range, scale: float | None = None) -> list[Tensor]:
    found = []
    for step in steps:
        q, k, v = qkv(step)
        found.append(hosted.attend(0, GRID, step, q, k, v, lambda q=q, k=k, v=v: exact(q, k, v, scale), scale))
    return found


@torch.no_grad()
def test_all_tiles_are_exact_in_any_scale_and_half_of_them_near() -> None:
    for scale in (None, 0.3):
        right = [exact(*qkv(step), scale) for step in range(4)]
        for found, one in zip(run(Hosted(1.0, dense_steps=2, force=True), range(4), scale), right, strict=True):
            torch.testing.assert_close(found, one, atol=1e-5, rtol=1e-5)
        half = Hosted(0.5, dense_steps=2, force=True)
        found = run(half, range(4), scale)
        assert torch.equal(found[1], right[1])
        error = (found[3] - right[3]).norm() / right[3].norm()
        assert 1e-4 < error < 0.5
        assert half.computed == {"dense": 2, "sparse": 2}


@torch.no_grad()
def test_a_step_that_goes_back_and_another_grid_begin_anew() -> None:
    hosted = Hosted(0.5, dense_steps=1, force=True)
    first = run(hosted, range(3))
    run(hosted, range(5, 7))
    assert all(map(torch.equal, run(hosted, range(3)), first))
    q, k, v = qkv(9)
    wide = VideoGrid(2, 16, 8)
    assert torch.equal(hosted.attend(0, wide, 3, q, k, v, lambda: exact(q, k, v)), exact(q, k, v))
    unnamed = Hosted(0.5, dense_steps=2, force=True)
    for _ in range(3):
        unnamed.attend(0, GRID, None, q, k, v, lambda: exact(q, k, v))
    assert unnamed.computed == {"dense": 2, "sparse": 1}


def test_what_does_not_pay_stays_dense_and_settings_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="foveate")
    hosted = Hosted(0.9, dense_steps=1)
    for found, step in zip(run(hosted, range(3)), range(3), strict=True):
        assert torch.equal(found, exact(*qkv(step)))
    assert caplog.text.count("does not pay at 256 tokens") == 1
    for settings in ({"kept": 0.0}, {"kept": math.nan}, {"kept": 0.5, "dense_steps": 0}):
        with pytest.raises(ValueError, match="must"):
            Hosted(**settings)
