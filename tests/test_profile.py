"""Profiles against the same numbers from whole attention, and the running profile as a value."""

import json

import pytest
import torch

from foveate.attention import attend
from foveate.sparsity.predictor import Predictor
from foveate.sparsity.profile import BUDGETS, CONSTANTS, DROP, HeadProfile, SparsityProfile, profile
from foveate.sparsity.select import select
from foveate.tiles import Selection, VideoGrid

FIELDS = tuple(HeadProfile.__dataclass_fields__)


def sample(grid, heads=4, groups=2, dim=32, batch=2):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(batch, grid.tokens, n, dim, generator=generator) * 1.5 for n in (heads, groups, groups))


def generator():
    return torch.Generator().manual_seed(5)


def tile_mass(q, k, scale):
    """Exact mass by key tile, (B, H, S, N)."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    shares = (scale * torch.einsum("bqhd,bkhd->bhqk", q, keys)).softmax(-1)
    return torch.stack([part.sum(-1) for part in shares.split(64, -1)], -1)


@pytest.mark.parametrize(
    ("grid", "scale", "ranked"),
    [
        (VideoGrid(5, 12, 11), None, True),
        (VideoGrid(3, 7, 11), 0.4, False),
        (VideoGrid(5, 12, 11, text=30), None, False),
        (VideoGrid(9, 13, 17), 0.3, True),  # two query tiles are drawn
    ],
)
def test_profile_agrees_with_whole_attention(grid, scale, ranked):
    q, k, v = sample(grid)
    predictor = Predictor.fit(q, k, rank=4) if ranked else None
    budgets = (0.1, 0.3, 1.0)
    constants = CONSTANTS if grid.tokens < 1000 else (DROP, -1.0)
    rows, count = 3, max(1, min(3, grid.tiles() // 16))
    options = {"budgets": budgets, "constants": constants, "rows": rows, "scale": scale}
    found = profile(q, k, v, grid, predictor=predictor, generator=generator(), **options)
    drawn = torch.randperm(grid.tiles(), generator=generator())[:count]
    tokens = torch.cat([torch.arange(row * 64, min(row * 64 + 64, grid.tokens)) for row in drawn.tolist()])
    scale = 32**-0.5 if scale is None else scale
    mass = tile_mass(q, k, scale)
    exact = attend(q, k, v, scale=scale, backend="reference").out[:, tokens]
    for column, budget in enumerate(budgets):
        chosen = select(q, k, grid, predictor=predictor, budget=budget, scale=scale)
        oracle = oracle_selection(mass, chosen, grid)
        sides = (
            (chosen, found.error_predicted, found.recall_predicted),
            (oracle, found.error_oracle, found.recall_oracle),
        )
        for selection, errors, recall in sides:
            kept = selection.to_dense()[:, :, tokens // 64]
            expected = (mass[:, :, tokens] * kept).sum(-1).mean((0, 2))
            torch.testing.assert_close(recall[:, column], expected, rtol=0, atol=1e-5)
            for place, periphery in enumerate(constants):
                out = attend(q, k, v, selection, scale=scale, periphery=periphery, backend="reference").out[:, tokens]
                expected = (out - exact).square().sum((0, 1, 3)).sqrt() / exact.square().sum((0, 1, 3)).sqrt()
                error = errors[:, place, column]
                torch.testing.assert_close(error, expected, rtol=0, atol=1e-5)


def oracle_selection(mass, chosen, grid):
    """As many tiles as `chosen` keeps, by true mass, own and text tiles first."""
    by_row = torch.stack([part.mean(2) for part in mass.split(64, 2)], 2)
    tiles = torch.arange(grid.tiles())
    text = grid.text_tiles()
    forced = (tiles[:, None] == tiles) | text | text[:, None]
    rank = by_row.masked_fill(forced, torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return Selection.from_dense(rank < chosen.to_dense().sum(-1, keepdim=True), grid)


@pytest.mark.parametrize("grid", [VideoGrid(1, 1, 1), VideoGrid(4, 4, 5), VideoGrid(2, 3, 5, text=90)])
def test_all_kept_is_exact(grid):
    q, k, v = sample(grid)
    found = profile(q, k, v, grid, predictor=None, budgets=(1.0,), generator=generator())
    for name in FIELDS:
        shape = (4, 1) if name.startswith("recall") else (4, len(CONSTANTS), 1)
        expected = torch.full(shape, 1.0 if name.startswith("recall") else 0.0)
        torch.testing.assert_close(getattr(found, name), expected, rtol=0, atol=1e-5)


def test_profile_is_ordered_and_leaves_the_global_rng_alone():
    grid = VideoGrid(9, 13, 17)
    q, k, v = (x.bfloat16() for x in sample(grid))
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = profile(q, k, v, grid, predictor=Predictor.fit(q, k, rank=2), generator=generator())
    assert torch.equal(before, torch.get_rng_state())
    assert found.recall_oracle.dtype == torch.float32
    assert (found.recall_oracle >= found.recall_predicted - 1e-6).all()
    for recall in (found.recall_oracle, found.recall_predicted):
        assert (recall.diff(dim=-1) >= -1e-6).all(), "recall must grow with the budget"
    assert found.recall_oracle.shape == (4, len(BUDGETS))


def test_wrong_arguments_raise():
    grid = VideoGrid(4, 4, 5)
    q, k, v = sample(grid)
    with pytest.raises(ValueError, match="80 tokens"):
        profile(q[:, :9], k, v, grid, predictor=None, generator=generator())
    with pytest.raises(ValueError, match="budgets"):
        profile(q, k, v, grid, predictor=None, budgets=(0.0, 0.5), generator=generator())


def constant(value):
    return HeadProfile.from_flat(torch.full((2, 2 + 2 * len(CONSTANTS), 3), value))


def test_running_profile_averages_and_survives_json():
    empty = SparsityProfile.empty(2, budgets=(0.1, 0.2, 0.5))
    once = empty.updated(1, constant(1.0), step=10)
    twice = once.updated(1, constant(2.0), step=20, decay=0.75)
    assert empty.layers == (None, None)
    assert empty.steps == (-1, -1)
    assert once.steps == (-1, 10)
    torch.testing.assert_close(once.layers[1].recall_predicted, torch.ones(2, 3))
    torch.testing.assert_close(twice.layers[1].error_predicted, torch.full((2, len(CONSTANTS), 3), 1.25))
    back = SparsityProfile.from_dict(json.loads(json.dumps(twice.to_dict(), allow_nan=False)))
    assert (back.budgets, back.steps, back.layers[0]) == (twice.budgets, twice.steps, None)
    assert all(torch.equal(getattr(back.layers[1], name), getattr(twice.layers[1], name)) for name in FIELDS)
    with pytest.raises(ValueError, match=r"layers \[0\]"):
        twice.stacked()
    assert twice.updated(0, constant(3.0), step=30).stacked().recall_oracle.shape == (2, 2, 3)
    with pytest.raises(ValueError, match="budgets"):
        SparsityProfile.empty(1, budgets=(0.1,)).updated(0, constant(1.0), step=0)
