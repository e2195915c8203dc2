"""The built-in DiT: shapes, tile order, conditioning, the policy seam."""

import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from foveate import Predictor, select
from foveate.attention import Dense, Layer, attend
from foveate.models import dit
from foveate.models.dit import DiTConfig, VideoDiT, rotary_table, rotate
from foveate.tiles import Selection, VideoGrid

SMALL = DiTConfig(width=64, depth=2, heads=2)


def awake(config: DiTConfig) -> VideoDiT:
    """A model whose zero-initialised gates and head are random: otherwise every output is 0."""
    torch.manual_seed(0)
    model = VideoDiT(config)
    for parameter in model.parameters():
        if (parameter == 0).all():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_patches_round_trip() -> None:
    model = VideoDiT(DiTConfig(width=64, depth=1, heads=2, patch=(2, 4, 2)))
    x = torch.randn(2, 3, 4, 8, 12)
    tokens = model._patchify(x)
    assert tokens.shape == (2, 2 * 2 * 6, 3 * 16)
    assert torch.equal(model._unpatchify(tokens, model.config.grid(4, 8, 12)), x)
    assert torch.equal(tokens[0, 1], x[0, :, 0:2, 0:4, 2:4].flatten())


def test_tile_order_inside_changes_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, sigma = awake(SMALL), torch.randn(1, 3, 5, 20, 28), torch.tensor([0.3])
    expected = model(x, sigma)
    dit._tables.cache_clear()
    monkeypatch.setattr("foveate.tiles.VideoGrid.order", lambda grid: torch.arange(grid.tokens))
    assert torch.allclose(model(x, sigma), expected, atol=1e-5)
    assert expected.abs().mean() > 0.01
    dit._tables.cache_clear()


def test_every_self_attention_goes_through_the_policy() -> None:
    seen: list[tuple[Layer, torch.Size]] = []

    class Spy(Dense):
        def __call__(self, layer, q, k, v):
            seen.append((layer, q.shape))
            return super().__call__(layer, q, k, v)

    model = awake(SMALL)
    model.policy = Spy()
    model(torch.randn(2, 3, 4, 8, 8), torch.tensor([0.1, 0.9]))
    assert [layer.index for layer, _ in seen] == [0, 1]
    assert {layer.name for layer, _ in seen} == {"blocks.0", "blocks.1"}
    assert all(shape == (2, 16, 2, 32) for _, shape in seen)


def test_compiled_blocks_share_two_graphs_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's reference backend: the C++ and the Triton one take half a minute, and are gated on a card."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    dit._compiled.cache_clear()
    model, x, sigma = awake(replace(SMALL, depth=3)), torch.randn(1, 3, 4, 16, 16), torch.tensor([0.3])

    def trained() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(x, sigma)
        out.square().mean().backward()
        return [out.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]

    expected, before = trained(), counters["stats"]["unique_graphs"]
    counters["graph_break"].clear()  # of other tests
    model.compile_repeated_blocks()
    found = trained()
    assert counters["stats"]["unique_graphs"] == before + 2
    assert max((a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)) < 1e-5
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(x, sigma), found[0])
    assert counters["stats"]["unique_graphs"] == before + 2  # the copy runs the same two
    assert not counters["graph_break"]
    dit._compiled.cache_clear()


def test_rotation_makes_scores_depend_on_distance_only() -> None:
    grid = SMALL.grid(6, 16, 16)
    table = rotary_table(grid, 32)
    q, k = torch.randn(32), torch.randn(32)

    def score(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
        at = [(f * 4 + y) * 4 + x for f, y, x in (a, b)]
        turned = rotate(torch.stack([q, k])[None, :, None], table[at])[0, :, 0]
        return float(turned[0] @ turned[1])

    assert score((0, 0, 0), (2, 1, 3)) == pytest.approx(score((3, 2, 0), (5, 3, 3)), abs=1e-4)
    assert score((0, 0, 0), (2, 1, 3)) != pytest.approx(score((0, 0, 0), (2, 1, 2)), abs=1e-3)


@pytest.mark.parametrize(
    ("config", "condition", "none"),
    [
        (DiTConfig(width=64, depth=1, heads=2, classes=3), torch.tensor([1]), torch.tensor([3])),
        (DiTConfig(width=64, depth=1, heads=2, text_dim=8), torch.ones(1, 8), torch.zeros(1, 8)),
    ],
)
def test_conditions_matter_and_none_is_none(config, condition, none) -> None:
    model, x, sigma = awake(config), torch.randn(1, 3, 2, 8, 8), torch.tensor([0.5])
    plain = model(x, sigma)
    assert not torch.allclose(model(x, sigma, condition), plain, atol=1e-4)
    if config.classes:
        assert torch.equal(model(x, sigma, none), plain)


def test_a_new_model_predicts_zero() -> None:
    assert (VideoDiT(SMALL)(torch.randn(1, 3, 2, 8, 8), torch.tensor([0.5])) == 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DiTConfig(width=100, heads=3),
        lambda: DiTConfig(classes=2, text_dim=4),
        lambda: DiTConfig(depth=0),
        lambda: SMALL.grid(3, 30, 32),
    ],
)
def test_bad_shapes_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"must|condition|multiples"):
        make()


def test_dense_policy_is_attend() -> None:
    q, k, v = torch.randn(3, 1, 9, 2, 32)
    assert torch.equal(Dense()(Layer(0, "x", SMALL.grid(1, 4, 4)), q, k, v), attend(q, k, v).out)


def test_training_works_after_generating_on_the_same_grid() -> None:
    model, x, sigma = awake(SMALL), torch.randn(1, 3, 3, 12, 20), torch.tensor([0.3])
    with torch.inference_mode():
        model(x, sigma)
    model(x, sigma).sum().backward()
    assert model.embed.weight.grad is not None


def test_autocast_reaches_the_linear_layers_and_leaves_attention_alone() -> None:
    grid = SMALL.grid(4, 16, 20)
    model, x, sigma = awake(SMALL), torch.randn(1, 3, 4, 16, 20), torch.tensor([0.3])
    tiles = grid.tiles()
    selection = Selection.from_dense(torch.ones(1, 2, tiles, tiles, dtype=torch.bool), grid)
    exact = model(x, sigma)
    model.policy = lambda layer, q, k, v: attend(q, k, v, selection, periphery="pool").out
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x, sigma)
    rounded.sum().backward()
    assert (rounded - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_dtype_works_whole(dtype: torch.dtype) -> None:
    config = DiTConfig(width=72, depth=1, heads=1, classes=3)  # a head dim that GPU kernels do not have
    model, x, sigma, label = awake(config), torch.randn(1, 3, 4, 16, 20), torch.tensor([0.3]), torch.tensor([1])
    exact = model(x, sigma, label)
    out = model.to(dtype)(x, sigma, label)
    out.float().square().mean().backward()
    assert out.dtype == dtype
    assert (out.double() - exact.double()).norm() / exact.norm() < (0.02 if dtype == torch.bfloat16 else 2e-3)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_default_dtype_changes_no_table() -> None:
    grid = VideoGrid(2, 3, 4)
    table = rotary_table(grid, 24)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(rotary_table(grid, 24), table)
        model = VideoDiT(DiTConfig(width=48, depth=1, heads=2, text_dim=4))
        assert model(torch.randn(1, 3, 1, 4, 4), torch.tensor([0.3]), torch.ones(1, 4)).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("dials", "named"),
    [
        ({"depth": 0}, "model.depth"),
        ({"heads": 0}, "model.heads"),
        ({"heads": -2}, "model.heads"),
        ({"classes": -1}, "model.classes"),
        ({"mlp_ratio": 0}, "model.mlp_ratio"),
        ({"patch": (1, 4)}, "model.patch"),
        ({"patch": (1, 0, 4)}, "model.patch"),
        ({"width": 128, "heads": 3}, "model.width 128 must split over model.heads 3"),
        ({"width": 4, "heads": 1}, "head dim of 6 to 256"),
        ({"width": 516, "heads": 2}, "head dim of 6 to 256"),
    ],
)
def test_bad_dials_are_named_before_there_is_a_model(dials: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DiTConfig(**dials)


def test_a_head_dim_of_72_is_chosen_for_and_attended() -> None:
    grid = VideoGrid(4, 8, 9)
    q, k, v = torch.randn(3, 1, grid.tokens, 2, 72, generator=torch.Generator().manual_seed(0))
    kept = select(q, k, grid, predictor=Predictor.fit(q, k, rank=16), budget=0.4)
    assert 0.3 < float(kept.to_dense().float().mean()) < 0.5
    out, truth = (attend(q, k, v, kept, periphery="pool", backend=name).out for name in ("torch", "reference"))
    assert (out - truth).norm() / truth.norm() < 1e-5
