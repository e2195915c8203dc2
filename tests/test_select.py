"""Which tiles `select` keeps, by budget and by mass. What its choice is worth: test_predictor.py."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foveate.attention import Layer, attend
from foveate.kernels.select import octant_means, tile_mass
from foveate.sparsity.policy import Sparse
from foveate.sparsity.predictor import Predictor
from foveate.sparsity.select import select, select_random
from foveate.tiles import VideoGrid

GRID = VideoGrid(5, 12, 11)  # 660 tokens: 11 tiles, the last of 20 tokens


def sample(grid=GRID, heads=4, groups=4, dim=32, batch=2):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(batch, grid.tokens, n, dim, generator=generator) * 2 for n in (heads, groups))


def predicted(q, k, query_tile=64):
    octants = (octant_means(x) for x in (q, k))
    return tile_mass(*octants, tokens=q.shape[1], scale=q.shape[-1] ** -0.5, query_tile=query_tile)


def test_budget_keeps_the_heaviest_tiles_and_the_own_one():
    q, k = sample()
    kept = select(q, k, GRID, budget=0.3).to_dense()
    mass = predicted(q, k)
    own = torch.arange(11)
    mass[:, :, own, own] = 2
    expected = torch.zeros_like(kept).scatter_(-1, mass.topk(3).indices, True)
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("budgets", [(0.05, 0.2, 0.5, 1.0), torch.tensor([0.05, 0.2, 0.5, 1.0])])
def test_budget_by_head(budgets):
    q, k = sample()
    selection = select(q, k, GRID, budget=budgets)
    counts = selection.to_dense().sum(-1)
    assert all((counts[:, head] == count).all() for head, count in enumerate((1, 2, 6, 11)))
    one = select(q, k, GRID, budget=0.2)
    assert torch.equal(selection.words[:, 1], one.words[:, 1])


def test_mass_keeps_the_shortest_prefix_that_reaches_it():
    q, k = sample()
    mass = predicted(q, k)
    targets = (0.2, 0.5, 0.9, 1.0)
    kept = select(q, k, GRID, mass=targets).to_dense()
    own = torch.eye(11, dtype=torch.bool)
    order = mass.masked_fill(own, torch.inf).argsort(-1, descending=True)
    sorted_mass, sorted_kept = mass.gather(-1, order), kept.gather(-1, order)
    counts = sorted_kept.sum(-1)
    assert torch.equal(sorted_kept, torch.arange(11) < counts.unsqueeze(-1)), "what is kept must be a prefix"
    sums = sorted_mass.cumsum(-1)
    target = torch.tensor(targets)[:, None, None]
    reached = sums.gather(-1, counts.unsqueeze(-1) - 1)
    assert (reached >= target - 1e-5).all()
    shorter = torch.where(counts > 1, (sums - sorted_mass).gather(-1, counts.unsqueeze(-1) - 1).squeeze(-1), 0.0)
    assert (shorter < target.squeeze(-1) + 1e-5).all()


def test_more_mass_or_budget_only_adds_tiles():
    q, k = sample()
    for name, values in (("mass", (0.1, 0.4, 0.8, 0.99)), ("budget", (0.05, 0.2, 0.6, 1.0))):
        kept = [select(q, k, GRID, **{name: value}).to_dense() for value in values]
        assert all((small <= large).all() for small, large in pairwise(kept))


@pytest.mark.parametrize(("query_tile", "kv_tile"), [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("text", [1, 30, 64, 200])
def test_text_is_kept_and_keeps_all(text, query_tile, kv_tile):
    grid = VideoGrid(5, 12, 11, text=text)
    q, k = sample(grid)
    kept = select(q, k, grid, budget=0.05, query_tile=query_tile, kv_tile=kv_tile).to_dense()
    assert kept[..., grid.text_tiles(kv_tile)].all()
    assert kept[:, :, grid.text_tiles(query_tile)].all()
    columns = torch.arange(grid.tiles(kv_tile))
    assert kept[:, :, columns * kv_tile // query_tile, columns].all(), "own tiles"
    assert not kept[:, :, 0].all()


@pytest.mark.parametrize("grid", [VideoGrid(1, 1, 1), VideoGrid(4, 4, 4), VideoGrid(1, 2, 3, text=9)])
def test_one_tile(grid):
    q, k = sample(grid)
    assert select(q, k, grid, budget=0.01).to_dense().all()
    assert select(q, k, grid, mass=0.01).to_dense().all()
    assert select(q, k, grid, predictor=Predictor.fit(q, k), budget=1.0).to_dense().all()


def test_grouped_keys_are_shared():
    q, k = sample(groups=2)
    predictor = Predictor.fit(q, k, rank=8)
    grouped = select(q, k, GRID, predictor=predictor, budget=0.3)
    expanded = select(q, k.repeat_interleave(2, 2), GRID, predictor=predictor, budget=0.3)
    assert torch.equal(grouped.words, expanded.words)


def test_full_rank_predictor_selects_as_none_does():
    q, k = sample(batch=1)
    eye = torch.eye(32).expand(4, 32, 32).contiguous()
    by_identity = select(q, k, GRID, predictor=Predictor(eye, eye), budget=0.3)
    assert torch.equal(by_identity.words, select(q, k, GRID, budget=0.3).words)


def test_selection_ignores_autocast_and_builds_no_graph():
    q, k = (x.requires_grad_() for x in sample())
    predictor = Predictor.fit(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = select(q, k, GRID, predictor=Predictor.fit(q, k), budget=0.3)
    assert torch.equal(cast.words, select(q, k, GRID, predictor=predictor, budget=0.3).words)
    assert not predictor.a.requires_grad


def test_random_keeps_as_many_uniformly():
    generator = torch.Generator().manual_seed(0)
    before = torch.get_rng_state()
    selection = select_random(GRID, 2, 3, budget=(0.05, 0.3, 1.0), generator=generator, device="cpu", query_tile=128)
    counts = selection.to_dense().sum(-1)
    assert all((counts[:, head] == count).all() for head, count in enumerate((1, 3, 11)))
    options = {"budget": 0.3, "generator": generator, "device": "cpu", "query_tile": 128, "kv_tile": 128}
    assert (select_random(GRID, 1, 1, **options).to_dense().sum(-1) == round(0.3 * GRID.tiles(128))).all()
    many = select_random(GRID, 400, 1, budget=0.3, generator=generator, device="cpu").to_dense().float().mean(0)
    assert (many - 3 / 11).abs().max() < 0.1
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "exactly one"),
        ({"budget": 0.1, "mass": 0.5}, "exactly one"),
        ({"budget": 0.0}, "greater than 0"),
        ({"budget": 1.5}, "at most 1"),
        ({"mass": float("nan")}, "greater than 0"),
        ({"budget": (0.1, 0.2)}, "4 heads"),
        ({"mass": torch.ones(3)}, "4 heads"),
        ({"budget": 0.1, "query_tile": 32}, "query_tile"),
        ({"budget": 0.1, "predictor": Predictor(torch.ones(4, 64, 2), torch.ones(4, 64, 2))}, "predictor is for"),
    ],
)
def test_wrong_arguments_raise(kwargs, message):
    q, k = sample()
    with pytest.raises(ValueError, match=message):
        select(q, k, GRID, **kwargs)


def test_wrong_shapes_raise():
    q, k = sample()
    with pytest.raises(ValueError, match="660 tokens"):
        select(q, k, VideoGrid(1, 2, 3), budget=0.1)
    with pytest.raises(ValueError, match="do not divide"):
        select(q, k[:, :, :3], GRID, budget=0.1)
    with pytest.raises(ValueError, match="must be"):
        select(q, k[:, :8], GRID, budget=0.1)


def test_tiles_of_128_tokens_alike_in_and_out_of_graphs() -> None:
    torch.manual_seed(0)
    grid = VideoGrid(4, 8, 12)
    q, k, v, dout = (torch.randn(1, grid.tokens, 2, 32) for _ in range(4))
    policy = Sparse(1, 2, 32, budget=0.4, query_tile=128)
    policy.mode = "sparse"
    kept = select(q, k, grid, budget=0.4, query_tile=128, kv_tile=128)
    assert kept.to_dense().shape == (1, 2, 3, 3)

    def through(attention) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    layer = Layer(0, "0", grid)
    expected = through(lambda *leaves: attend(*leaves, selection=kept, periphery="pool").out)
    graph = torch.compile(lambda *leaves: policy(layer, *leaves), fullgraph=True, backend="aot_eager")
    for found in (through(lambda *leaves: policy(layer, *leaves)), through(graph)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
