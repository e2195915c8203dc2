"""Selection: the torch version against plain loops in float64, the fused one (Triton's interpreter) against torch."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foveate.kernels import select
from foveate.kernels.bits import unpack

LENGTHS = (1, 63, 111, 1000)


def naive_mass(q_oct, k_oct, tokens, scale, query_tile, kv_tile):
    """Predicted mass (B, H, R, N), one number at a time."""
    q_oct, k_oct = q_oct.double(), k_oct.double()
    sizes = [min(8, tokens - 8 * o) for o in range(k_oct.shape[2])]
    rows = math.ceil(q_oct.shape[2] * 8 / query_tile)
    mass = torch.zeros(*q_oct.shape[:2], rows, math.ceil(tokens / kv_tile), dtype=torch.float64)
    logits = scale * q_oct @ k_oct.transpose(-1, -2) + torch.tensor(sizes).double().log()
    shares = logits.softmax(-1)
    for i in range(rows):
        own = range(i * query_tile // 8, min((i + 1) * query_tile // 8, q_oct.shape[2]))
        for a in own:
            for b in range(len(sizes)):
                mass[:, :, i, b * 8 // kv_tile] += shares[:, :, a, b] / len(own)
    return mass


def naive_keep(mass, forced, budget, target):
    """Lists of kept tiles for one row of masses, in the order they are taken."""
    order = sorted(range(len(mass)), key=lambda j: (not forced[j], -mass[j], j))
    if budget is not None:
        count = max(1, math.floor(budget * len(mass) + 0.5), sum(forced))
    else:
        sums, count = 0.0, 0
        while count < len(mass) and (count < max(1, sum(forced)) or sums < target):
            sums += mass[order[count]]
            count += 1
    return order[:count]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_octant_means(tokens):
    x = torch.randn(2, 3, tokens, 32).transpose(1, 2)  # strided
    means = select.octant_means(x)
    assert means.dtype == torch.float32
    expected = torch.stack([x[:, start : start + 8].double().mean(1) for start in range(0, tokens, 8)], 2)
    torch.testing.assert_close(means.double(), expected, rtol=1e-5, atol=1e-6)


def test_octant_means_of_bfloat16_are_summed_in_float32():
    x = torch.randn(1, 16, 1, 32).bfloat16()
    torch.testing.assert_close(select.octant_means(x)[0, 0, 1], x[0, 8:, 0].float().mean(0))


@pytest.mark.parametrize(("query_tile", "kv_tile"), [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_tile_mass(tokens, query_tile, kv_tile):
    octants = math.ceil(tokens / 8)
    q, k = torch.randn(2, 2, octants, 5), torch.randn(2, 2, octants, 5)
    options = {"tokens": tokens, "scale": 0.7, "query_tile": query_tile, "kv_tile": kv_tile}
    mass = select.tile_mass(q, k, **options)
    torch.testing.assert_close(mass.double(), naive_mass(q, k, **options), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:-1]))


def test_tile_mass_of_large_logits_and_in_chunks(monkeypatch):
    q, k = 30 * torch.randn(1, 1, 125, 8), 30 * torch.randn(1, 1, 125, 8)
    options = {"tokens": 1000, "scale": 1.0, "query_tile": 64, "kv_tile": 64}
    whole = select.tile_mass(q, k, **options)
    torch.testing.assert_close(whole.double(), naive_mass(q, k, **options), rtol=1e-2, atol=1e-4)
    monkeypatch.setattr(select, "CHUNK", 1)
    torch.testing.assert_close(select.tile_mass(q, k, **options), whole)


def test_forced_tiles():
    plain = select.forced_tiles(256, 256, 64, 64, torch.device("cpu"))
    assert torch.equal(plain, torch.eye(4, dtype=torch.bool))
    wide = select.forced_tiles(256, 256, 128, 64, torch.device("cpu"))
    assert wide.int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    text = select.forced_tiles(300, 250, 64, 64, torch.device("cpu"))
    assert text.int().tolist() == [[1, 0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 0, 1, 1, 1], [1] * 5, [1] * 5]


def test_forced_tiles_of_a_part_are_rows_of_the_whole():
    whole = select.forced_tiles(1000, 900, 64, 64, torch.device("cpu"))
    part = select.forced_tiles(1000, 900, 64, 64, torch.device("cpu"), first=320, queries=680)
    assert torch.equal(part, whole[5:])


@pytest.mark.parametrize("budget", [0.0, 0.01, 0.1, 0.375, 1.0])
def test_keep_by_budget(budget):
    mass = torch.randint(1, 6, (2, 2, 9, 37)).float()  # many ties
    forced = torch.rand(9, 37) < 0.05
    words = select.keep(mass, forced=forced, budget=torch.full((2,), budget))
    kept = unpack(words, 37)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(9)).tolist():
        expected = naive_keep(mass[b, h, i].tolist(), forced[i].tolist(), budget, None)
        assert kept[b, h, i].nonzero().squeeze(-1).tolist() == sorted(expected)


@pytest.mark.parametrize("target", [0.0, 0.3, 0.9, 2.0])
def test_keep_by_mass(target):
    mass = torch.randint(1, 6, (1, 2, 9, 32)).double()
    mass /= 2.0 ** mass.sum(-1, keepdim=True).log2().ceil()  # exact sums
    forced = torch.eye(9, 32, dtype=torch.bool)
    kept = unpack(select.keep(mass.float(), forced=forced, mass_target=torch.full((2,), target)), 32)
    for h, i in torch.cartesian_prod(torch.arange(2), torch.arange(9)).tolist():
        expected = naive_keep(mass[0, h, i].tolist(), forced[i].tolist(), None, target)
        assert kept[0, h, i].nonzero().squeeze(-1).tolist() == sorted(expected)


def test_keep_wants_exactly_one_rule():
    mass, forced = torch.rand(1, 1, 2, 2), torch.eye(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="exactly one"):
        select.keep(mass, forced=forced)
    with pytest.raises(ValueError, match="exactly one"):
        select.keep(mass, forced=forced, budget=torch.ones(1), mass_target=torch.ones(1))


def test_each_head_has_its_own_budget_and_matrices():
    q, k = torch.randn(1, 1000, 4, 32), torch.randn(1, 1000, 2, 32)
    a, b = torch.randn(4, 32, 16), torch.randn(4, 32, 16)
    budget = torch.tensor([0.1, 0.25, 0.5, 1.0])
    words = select.predict_words(q, k, a, b, scale=0.2, budget=budget)
    assert unpack(words, 16).sum(-1).float().mean((0, 2)).tolist() == [2, 4, 8, 16]
    for h in range(4):
        alone = select.predict_words(
            q[:, :, h : h + 1],
            k[:, :, h // 2 : h // 2 + 1],
            a[h : h + 1],
            b[h : h + 1],
            scale=0.2,
            budget=budget[h : h + 1],
        )
        assert torch.equal(words[:, h : h + 1], alone)


def test_a_part_of_the_queries_selects_as_the_whole_does():
    q, k = torch.randn(1, 2, 125, 16), torch.randn(1, 2, 125, 16)
    options = {"tokens": 1000, "video": 950, "scale": 0.5, "budget": torch.full((2,), 0.3)}
    whole = select.select_octants(q, k, **options)
    part = select.select_octants(q[:, :, 40:80], k, first=320, queries=320, **options)
    assert torch.equal(part, whole[:, :, 5:10])


def flips(words, reference, mass, forced):
    """Tiles kept by one of two selections only, and how far their mass is from the row's smallest kept, relative."""
    kept, got = unpack(reference, mass.shape[-1]), unpack(words, mass.shape[-1])
    edge = mass.masked_fill(~kept | forced, math.inf).amin(-1, keepdim=True)
    return ((mass - edge).abs() / edge)[kept != got]


CASES = {
    "one token": {"tokens": 1},
    "a short tile": {"tokens": 63},
    "two tiles": {"tokens": 111, "heads": 2, "groups": 1},
    "text": {"tokens": 1000, "video": 950, "heads": 2, "groups": 1},
    "two blocks of keys": {"tokens": 1300, "query_tile": 128},
    "wide tiles": {"tokens": 1300, "query_tile": 128, "kv_tile": 128, "video": 1290},
    "batch": {"tokens": 300, "batch": 2, "heads": 2},
    "head dim 96, rank 24": {"tokens": 300, "dim": 96, "rank": 24},
    "large logits": {"tokens": 1000, "gain": 16.0},
}
RULES = {
    "tiny budget": {"budget": 0.001},
    "budget": {"budget": 0.3},
    "budget 1": {"budget": 1.0},
    "mass": {"mass_target": 0.5},
}


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "rule"),
    [(case, "mass" if i % 2 else "budget") for i, case in enumerate(CASES)]
    + [("text", rule) for rule in RULES if rule != "mass"],
)
def test_fused_agrees_with_torch(case, rule):
    triton_select = pytest.importorskip("foveate.kernels.triton_select")
    assert triton_select.INTERPRET
    compare(triton_select, torch.device("cpu"), rule=RULES[rule], **CASES[case])


def compare(
    fused, device, *, rule, tokens, video=None, batch=1, heads=1, groups=None, dim=32, rank=16, gain=1.0, **tiles
):
    generator = torch.Generator().manual_seed(tokens)
    q = gain * torch.randn(batch, heads, tokens, dim, generator=generator).transpose(1, 2).to(device)
    k = torch.randn(batch, tokens, groups or heads, dim, generator=generator).to(device)
    a, b = (torch.randn(heads, dim, rank, generator=generator).to(device) for _ in "ab")
    tiles = {"query_tile": 64, "kv_tile": 64} | tiles
    options = {"scale": dim**-0.5, **tiles}
    rule = {name: torch.full((heads,), value, device=device) for name, value in rule.items()}
    words = fused.predict_words(q, k, a, b, video=video, **options, **rule)
    q_oct = select.project(select.octant_means(q), a, heads)
    k_oct = select.project(select.octant_means(k), b, heads)
    mass = select.tile_mass(q_oct, k_oct, tokens=tokens, **options)
    forced = select.forced_tiles(tokens, tokens if video is None else video, **tiles, device=device)
    reference = select.keep(mass, forced=forced, **rule)
    assert words.shape == reference.shape
    check(words, reference, mass, forced, rule.get("mass_target"), gain)
    again = fused.select_octants(q_oct, k_oct, tokens=tokens, video=video, **options, **rule)
    check(again, reference, mass, forced, rule.get("mass_target"), gain)


def check(words, reference, mass, forced, target, gain):
    """Equal but for near ties: float16 operands and bfloat16 sums move a mass by a fraction of a per cent.

    Where logits are `gain` times larger, so are their errors, and with them the masses' relative ones.
    """
    got, kept = unpack(words, mass.shape[-1]), unpack(reference, mass.shape[-1])
    slack = max(1.0, gain)
    assert (got | ~forced).all()
    assert (got != kept).sum() <= 0.03 * slack**0.5 * kept.sum() + 2
    if target is None:
        assert torch.equal(got.sum(-1), kept.sum(-1))
        gaps = flips(words, reference, mass, forced)
        assert not gaps.numel() or gaps.max() < 0.01 * slack
    else:
        assert ((mass * got).sum(-1) > target[:, None] - 0.003 * slack).all()


def test_mass_that_is_reached_exactly_is_reached():
    """Every octant wants one tile: half of a query tile's octants hold half of its mass, not a rounding less."""
    q, k = torch.zeros(1, 1, 8, 8), 100 * torch.eye(8).repeat_interleave(8, 0)[None, None]
    q[0, 0] = torch.eye(8)
    options = {"tokens": 512, "queries": 64, "scale": 1.0, "mass_target": torch.tensor([0.5])}
    words = select.select_octants(q, k, **options)
    assert unpack(words, 8).sum() == 4


SCRIPT = Path(__file__).parent / "compile_select.py"


def test_compiles_for_every_architecture_without_spills():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
