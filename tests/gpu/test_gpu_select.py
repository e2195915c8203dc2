"""The compiled selection kernels on a card: against torch in float32, at sizes the interpreter cannot reach."""

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_kernels_select import CASES, RULES, check, compare

from foveate.kernels import select, triton_select
from foveate.kernels.bits import unpack

DEVICE = torch.device("cuda")
MORE = {
    "32k": {"tokens": 32768, "heads": 2},
    "odd, text, groups": {"tokens": 33333, "video": 33000, "heads": 4, "groups": 2, "dim": 128},
    "wide": {"tokens": 20000, "query_tile": 128, "kv_tile": 128, "dim": 64},
    "rank 64": {"tokens": 5000, "rank": 64, "dim": 256, "gain": 0.1},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES | MORE)
def test_fused_agrees_with_torch(case, rule):
    compare(triton_select, DEVICE, rule=RULES[rule], **(CASES | MORE)[case])


def test_full_rank_of_bfloat16():
    torch.manual_seed(0)
    # Octants of alike tokens, or all masses would be near ties.
    q, k = (torch.randn(1, 1125, 2, 128, device=DEVICE).repeat_interleave(8, 1).bfloat16() for _ in "qk")
    budget = torch.full((2,), 0.1, device=DEVICE)
    options = {"scale": 128**-0.5, "query_tile": 64, "kv_tile": 64}
    mass = select.tile_mass(select.octant_means(q), select.octant_means(k), tokens=9000, **options)
    forced = select.forced_tiles(9000, 9000, 64, 64, DEVICE)
    words = triton_select.predict_words(q, k, budget=budget, **options)
    check(words, select.keep(mass, forced=forced, budget=budget), mass, forced, None, 1.0)


def test_logits_that_rise_far_after_the_first_block():
    q_oct, k_oct = torch.randn(1, 1, 1000, 16, device=DEVICE), torch.randn(1, 1, 1000, 16, device=DEVICE)
    k_oct[:, :, 500:] *= 100
    budget, options = torch.ones(1, device=DEVICE) / 10, {"tokens": 8000, "scale": 1.0}
    words = triton_select.select_octants(q_oct, k_oct, budget=budget, **options)
    mass = select.tile_mass(q_oct, k_oct, query_tile=64, **options)
    kept = mass * unpack(words, 125)
    best = mass.topk(12, -1).values.sum(-1)
    assert (kept.sum(-1) > best - 0.02).all()


def test_mass_that_is_reached_exactly_is_reached():
    q, k = torch.zeros(1, 1, 8, 8, device=DEVICE), 100 * torch.eye(8, device=DEVICE).repeat_interleave(8, 0)[None, None]
    q[0, 0] = torch.eye(8)
    options = {"tokens": 512, "queries": 64, "scale": 1.0, "mass_target": torch.full((1,), 0.5, device=DEVICE)}
    assert unpack(triton_select.select_octants(q, k, **options), 8).sum() == 4


def test_repeats_bit_by_bit_and_waits_for_nothing():
    q, k = (torch.randn(1, 20000, 2, 64, device=DEVICE).bfloat16() for _ in "qk")
    a, b = (torch.randn(2, 64, 16, device=DEVICE) for _ in "ab")
    options = {"scale": 0.125, "budget": torch.full((2,), 0.2, device=DEVICE)}
    first = triton_select.predict_words(q, k, a, b, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [triton_select.predict_words(q, k, a, b, **options) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, words) for words in again)


def test_in_a_cuda_graph():
    q, k = (torch.randn(1, 5000, 2, 64, device=DEVICE).bfloat16() for _ in "qk")
    options = {"scale": 0.125, "mass_target": torch.full((2,), 0.5, device=DEVICE)}
    expected = triton_select.predict_words(q, k, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words = triton_select.predict_words(q, k, **options)
    graph.replay()
    assert torch.equal(words, expected)
