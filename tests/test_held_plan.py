"""Plans of state reuse, and the exchange they ask for: pure functions, on any number of ranks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foveate.held.attention import plan as plans
from foveate.held.attention.exchange import needed, rounds
from foveate.held.attention.layout import one_process, ranks
from foveate.held.attention.plan import History, plan_memory, plan_step

# The exchange, on any number of ranks.


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_key_enters_every_merge_exactly_once(data: st.DataObject) -> None:
    """Random plans, groups, ranks, nodes and uneven shards (text is the end of the last): fresh or held, never both,
    and what travels is what is used, once."""
    world = data.draw(st.integers(1, 8))
    node = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=world, max_size=world))
    groups, local = data.draw(st.integers(1, 8)), data.draw(st.sampled_from(["held", "fresh"]))
    layout = ranks(sizes, 0, groups, node)
    bundles = layout.bundles(data.draw(st.integers(1, 8)))
    fresh = [[data.draw(st.booleans()) for _ in bundles] for _ in range(world)]
    for a, b in itertools.pairwise(range(world)):
        if a // node != b // node:
            assert layout.group_of[a] != layout.group_of[b], "a group crosses a node boundary"
    needs = needed(layout, bundles, fresh, local)
    received = [[(rank - away) % world for away, takes in rounds(needs) if takes[rank]] for rank in range(world)]
    for rank in range(world):
        counts = torch.zeros(layout.tokens, dtype=torch.int64)
        used = torch.zeros(layout.tokens, dtype=torch.bool)
        spans = [
            (span, fresh[rank][b]) for b, bundle in enumerate(bundles) for span in layout.keys(rank, bundle, local)
        ]
        spans += [(layout.group(layout.group_of[rank]), True)] if local == "fresh" else []
        for (a, b), now in spans:
            counts[a:b] += 1
            used[a:b] |= now
        assert bool((counts == 1).all())
        assert sorted(received[rank]) == sorted(set(received[rank])) == needs[rank]
        for other in range(world):
            a, b = layout.part(other)
            assert bool(used[a:b].all()) == bool(used[a:b].any()), "a shard is used in part"
            assert (other in needs[rank]) == (other != rank and bool(used[a:b].any()))


def test_one_process_cuts_as_ranks_do() -> None:
    assert one_process(960, 8).bounds == (0, 128, 256, 384, 512, 640, 768, 896, 960)
    assert one_process(100, 8).bounds == (0, 64, 100)
    with pytest.raises(ValueError, match="nodes"):
        ranks([64] * 6, 0, 2, node=4)


# Plans.


def history(seed: int, shape: tuple[int, int, int] = (6, 4, 5)) -> History:
    draw = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> Tensor:
        return torch.rand(size, generator=draw, dtype=torch.float64)

    made = History.empty(*shape)
    return History(
        last=made.last.nan_to_num(0.0) + 0.5, before=made.before.nan_to_num(0.0) + 0.6, rate=10 ** (4 * rand(*shape)),
        drift=0.5 + rand(shape[0]), age=(8 * rand(*shape)).floor(), spent=0.1 * rand(*shape),
        slopes=rand(shape[0]) < 0.7, held=rand(shape[0]) < 0.8,
    )  # fmt: skip


@given(st.integers(0, 10_000), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_planner_is_monotone_in_quality(seed: int, one: float, other: float) -> None:
    """At fixed measurements whatever a higher quality holds, a lower one holds too; quality 1 holds nothing."""
    known, low, high = history(seed), min(one, other), max(one, other)
    sparse = plan_step(known, 0.4, 0.05, plans.level_between(low), 8).fresh
    exact = plan_step(known, 0.4, 0.05, plans.level_between(high), 8).fresh
    assert bool((sparse <= exact).all())
    assert bool(plan_step(known, 0.4, 0.05, plans.level_between(1.0), 8).fresh.all())


def test_planner_holds_what_is_predicted_to_be_harmless() -> None:
    known = history(0)
    known = History(**{**vars(known), "drift": torch.ones(6), "age": known.age * 0, "held": torch.ones(6).bool()})
    errors = (known.spent + 0.5 * plans.predict(known, 0.4)).sort(-1).values.cumsum(-1).square().mean((0, 1)).sqrt()
    for count in range(1, 5):
        level = float(errors[count - 1 : count + 1].mean())
        fresh = plan_step(known, 0.4, 0.5, level, 8).fresh
        assert bool(((~fresh).sum(-1) == count).all())
    jumped = History(**{**vars(known), "drift": torch.full((6,), 5.0)})
    assert plan_step(jumped, 0.4, 0.5, 1e9, 8).reason == "drift"
    old = History(**{**vars(known), "age": known.age + 8})
    assert bool(plan_step(old, 0.4, 0.5, 1e9, 8).fresh.all())


def test_errors_add_up_between_anchors_and_count_by_what_they_do_to_the_clip() -> None:
    """Held steps spend until one is fresh; long steps and steps at high noise weigh more; the last is cut at 0."""
    known, errors = history(0), torch.full((6, 4, 5), 0.25, dtype=torch.float64)
    nothing, all_fresh = torch.zeros(6, 4, 5, dtype=torch.bool), torch.ones(6, 4, 5, dtype=torch.bool)
    twice = known.renewed(nothing, 0.4, errors).renewed(nothing, 0.3, errors)
    torch.testing.assert_close(twice.spent, known.spent + 0.5)
    assert not twice.renewed(all_fresh, 0.2, errors).spent.any()
    assert plans.step_weight(0.9, 0.8) > plans.step_weight(0.5, 0.4) > plans.step_weight(0.45, 0.4) > 0
    assert plans.step_weight(0.07, 0.01) == pytest.approx(0.01)
    assert plans.step_weight(0.5, 0.5) == plans.step_weight(0.1, 0.0) == 0


@given(st.integers(0, 1000), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_memory_goes_where_it_saves_most(seed: int, room: int) -> None:
    """Within the cap always; slopes with the largest gain are kept, layers with the largest error are left out."""
    draw = torch.Generator().manual_seed(seed)
    plain = torch.rand(12, generator=draw, dtype=torch.float64)
    first = plain * torch.rand(12, generator=draw, dtype=torch.float64)
    found = plan_memory(plain, first, 2, 1, 100, room * 100.0)
    assert found.bytes == 200 * (sum(found.held) + sum(found.slopes)) <= room * 100
    assert found.bytes == 200 * min(24, room // 2), "room is left unused"
    held, slopes = torch.tensor(found.held), torch.tensor(found.slopes)
    assert not bool((slopes & ~held).any())
    if not held.all():
        assert not slopes.any()
        assert not held.any() or plain[held].max() <= plain[~held].min()
    elif slopes.any() and not slopes.all():
        gain = plain - first
        assert gain[slopes].min() >= gain[~slopes].max()
