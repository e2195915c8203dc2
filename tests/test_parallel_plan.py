"""The planner: heads spread evenly, layouts chosen by time and memory, all of it pure."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import costs
from foveate.costs import Costs
from foveate.parallel.balance import assign_heads, contiguous, imbalance
from foveate.parallel.layout import Layout, WholeLayer, options
from foveate.parallel.plan import LayerLoad, Link, Load, Topology, lay_out, plan_parallel

COSTS = Costs("arithmetic")
TABLE = costs.load(Path(costs.__file__).parent / "assets" / "kernels_h200_202612.json")


@pytest.mark.parametrize(("heads", "ranks"), [(30, 4), (40, 8), (16, 4), (24, 2), (12, 2), (32, 8)])
def test_half_the_heads_four_times_denser_are_spread_evenly(heads: int, ranks: int) -> None:
    prices = [4.0] * (heads // 2) + [1.0] * (heads - heads // 2)
    assigned = assign_heads(prices, ranks)
    assert sorted(head for own in assigned for head in own) == list(range(heads))
    assert imbalance(prices, assigned) <= 1.05
    assert imbalance(prices, contiguous(heads, ranks)) >= 1.5


def test_search_finds_what_longest_first_misses() -> None:
    """Two ranks, 3 3 2 2 2: longest first gives 7 and 5, the best is 6 and 6."""
    prices = [3.0, 3.0, 2.0, 2.0, 2.0]
    assert imbalance(prices, assign_heads(prices, 2)) == 1.0
    prices = [1 + (7 * i % 11) / 4 for i in range(22)]  # 49.5 in quarters over 4 ranks: 12.5 is the best there is
    assert max(sum(prices[h] for h in own) for own in assign_heads(prices, 4)) == 12.5
    assert assign_heads(prices, 4) == assign_heads(prices, 4)


def test_every_rank_gets_a_head_even_where_most_cost_nothing() -> None:
    for heads, ranks in ((7, 4), (12, 8), (4, 4)):
        assigned = assign_heads([1.0] + [0.0] * (heads - 1), ranks)
        assert all(assigned)
        assert sorted(h for own in assigned for h in own) == list(range(heads))
    with pytest.raises(ValueError, match="cannot be spread"):
        assign_heads([1.0], 2)


def load(*layers: LayerLoad, tokens: int = 131_072) -> Load:
    return Load(layers=layers, tokens=tokens, dim=128)


def test_few_fetched_tiles_make_a_layer_sequence_wise_and_many_head_wise() -> None:
    topology = Topology(ranks=8, per_node=1, inter=Link(30.0, 5.0))  # slow links everywhere: bytes decide
    near = LayerLoad((0.02,) * 16, union=dict.fromkeys((1, 2, 4, 8), 0.05))
    far = LayerLoad((0.02,) * 16, union=dict.fromkeys((1, 2, 4, 8), 0.95))
    plan = plan_parallel(load(near, far), topology, COSTS)
    assert plan.layers[0].sequence == 8
    assert plan.layers[1].head == 8
    assert plan.layers[0].sent < plan.layers[1].sent


def test_the_best_of_all_layouts_is_taken_and_a_degree_can_be_fixed() -> None:
    profile = load(LayerLoad((0.1,) * 8 + (0.02,) * 8), LayerLoad((1.0,) * 16))
    topology = Topology(ranks=8)
    plan = plan_parallel(profile, topology, COSTS)
    for layer, chosen in zip(profile.layers, plan.layers, strict=True):
        assert chosen.ms == min(lay_out(layer, profile, topology, COSTS, head).ms for head in (1, 2, 4, 8))
    assert {layer.head for layer in plan_parallel(profile, topology, COSTS, head=4).layers} == {4}
    with pytest.raises(ValueError, match="does not fit 8 ranks"):
        plan_parallel(profile, topology, COSTS, head=3)


def test_balanced_heads_make_the_slowest_rank_faster() -> None:
    profile = load(LayerLoad((0.4,) * 8 + (0.1,) * 8))
    topology = Topology(ranks=4)
    even, plain = (plan_parallel(profile, topology, COSTS, head=4, balance=b).layers[0] for b in (True, False))
    assert even.imbalance <= 1.05
    assert max(plain.compute_ms) > 1.3 * max(even.compute_ms)


def test_a_memory_limit_trades_time_for_what_is_kept() -> None:
    layers = [LayerLoad((0.1,) * 16, union=dict.fromkeys((1, 2, 4, 8), 0.1)) for _ in range(6)]
    slow = {"per_node": 1, "inter": Link(30.0, 5.0)}
    free = plan_parallel(load(*layers), Topology(ranks=8, **slow), COSTS)
    kept = sum(layer.kept for layer in free.layers)
    assert kept > 0
    limit = kept / 2 / 2**30
    tight = plan_parallel(load(*layers), Topology(ranks=8, memory_gib=limit, **slow), COSTS)
    assert sum(layer.kept for layer in tight.layers) <= limit * 2**30
    assert tight.ms > free.ms


LOADS = st.lists(st.lists(st.floats(0.004, 1.0), min_size=12, max_size=12), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    LOADS, st.sampled_from([(4, 2), (8, 3), (16, 8)]), st.floats(0.5, 100), st.sampled_from([8192, 65_536]),
    st.sampled_from([None, 0.02, 0.2]),
)  # fmt: skip
def test_a_plan_is_never_worse_than_heads_in_order_or_one_layout_for_all(
    densities: list, cluster: tuple, speed: float, tokens: int, memory: float | None
) -> None:
    profile = load(*(LayerLoad(tuple(row)) for row in densities), tokens=tokens)
    topology = Topology(ranks=cluster[0], per_node=cluster[1], inter=Link(30, speed, 2 * speed), memory_gib=memory)
    plan = plan_parallel(profile, topology, COSTS)
    fits = memory is None or sum(layer.kept for layer in plan.layers) <= memory * 2**30
    for head in (u for u in (1, 2, 4, 8) if cluster[0] % u == 0):
        for balance in (False, True):
            whole = [lay_out(layer, profile, topology, COSTS, head, balance) for layer in profile.layers]
            if memory is None or sum(layer.kept for layer in whole) <= memory * 2**30:
                assert fits
                assert plan.ms <= sum(layer.ms for layer in whole) * (1 + 1e-9)


def test_heads_balanced_by_computation_alone_lose_to_heads_in_order_and_ours_do_not() -> None:
    """Two hosts of eight: where a few dense heads sit alone, many sparse ones meet, and the exchange waits for them."""
    profile = load(LayerLoad((0.3,) * 4 + (0.03,) * 28), tokens=32_768)
    topology = Topology(ranks=16, per_node=8, inter=Link(30.0, 10.0))
    layout = Layout(WholeLayer(profile.layers[0], profile, TABLE), topology, 16, "tiles")
    by_price = layout.plan(assign_heads(layout.additive[0].tolist(), 16))
    in_order, ours = options(profile.layers[0], profile, topology, TABLE, [16])[0]
    assert by_price.ms > 1.1 * in_order.ms
    assert ours.ms < 0.9 * in_order.ms


def test_forty_layers_on_128_ranks_are_planned_in_two_seconds() -> None:
    draw = random.Random(0)
    layers = [LayerLoad(tuple(min(1.0, 0.02 * draw.lognormvariate(0, 1)) for _ in range(40))) for _ in range(40)]
    began = time.process_time()
    plan = plan_parallel(load(*layers, tokens=520_000), Topology(ranks=128), TABLE)
    assert time.process_time() - began < 2.0
    assert len(plan.layers) == 40
    assert all(layer.head * layer.sequence == 128 for layer in plan.layers)


def test_one_degree_for_all_layers_is_no_faster_than_a_degree_for_each() -> None:
    near = LayerLoad((0.02,) * 16, union=dict.fromkeys((1, 2, 4, 8), 0.02))
    far = LayerLoad((0.02,) * 16, union=dict.fromkeys((1, 2, 4, 8), 0.95))
    topology = Topology(ranks=8, per_node=1, inter=Link(30.0, 5.0))
    each = plan_parallel(load(near, far), topology, COSTS)
    one = plan_parallel(load(near, far), topology, COSTS, uniform=True)
    assert len({layer.head for layer in one.layers}) == 1 < len({layer.head for layer in each.layers})
    assert each.ms < one.ms


def test_exchanges_take_as_long_as_the_slowest_rank_or_host() -> None:
    """Two hosts of two, 1 GB/s a rank across and 10 inside, no latency; bytes in GB, times in s."""
    slow = Link(0.0, 1.0)
    topology = Topology(ranks=4, per_node=2, intra=Link(0.0, 10.0), inter=slow)
    assert topology.all_to_all_ms(2, [1e9, 1e9]) == pytest.approx(100)  # inside hosts
    assert topology.all_to_all_ms(4, [1e9] * 4) == pytest.approx(2000)  # two peers across
    assert topology.all_to_all_ms(4, [3e9, 0, 0, 0]) == pytest.approx(6000)  # one rank receives from two across
    assert topology.fetch_ms(2, [1e9, 2e9]).tolist() == pytest.approx([1000, 2000])
    assert topology.fetch_ms(1, [3e9]).tolist() == pytest.approx([2000])  # two thirds of it come from across
    assert topology.shift_ms(1, [1e9]).tolist() == pytest.approx([1000])
    assert topology.gather_ms(2, [1e9, 1e9]).tolist() == pytest.approx([1000, 1000])
    shared = Topology(ranks=4, per_node=2, intra=Link(0.0, 10.0), inter=Link(0.0, 1.0, 1.0))
    assert shared.all_to_all_ms(4, [1e9] * 4) == pytest.approx(4000)
    assert shared.shift_ms(1, [1e9]).tolist() == pytest.approx([1000])  # one rank a host sends across
    assert shared.fetch_ms(2, [1e9, 2e9]).tolist() == pytest.approx([3000, 3000])
    uneven = Topology(ranks=4, hosts=(0, 0, 0, 1), intra=Link(0.0, 10.0), inter=slow)
    assert uneven.all_to_all_ms(4, [1e9] * 4) == pytest.approx(3000)  # the lone rank
    assert uneven.all_to_all_ms(2, [1e9] * 2) == pytest.approx(1000)  # ranks 2 and 3
    with pytest.raises(ValueError, match="host of every rank"):
        Topology(ranks=4, hosts=(0, 1))
