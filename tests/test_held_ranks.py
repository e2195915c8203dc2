"""State reuse on gloo ranks against one process."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import Worlds

from foveate import ReuseConfig, reuse
from foveate.held.attention.exchange import needed
from foveate.held.attention.layout import ranks
from foveate.held.attention.plan import StepPlan
from foveate.held.attention.states import LayerStates
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.parallel.comm import TRAFFIC, Shards
from foveate.parallel.handle import ParallelConfig, parallelize
from foveate.sample import generate

SIZE = (1, 3, 8, 20, 24)  # 960 tokens in patches of 1 x 2 x 2: 15 tiles, uneven on 2, 4 and 8 ranks
TOLERANCE = 1e-5
holding = partial(ReuseConfig, hold="attention")
STEPS = 7


def model() -> VideoDiT:
    torch.manual_seed(0)
    made = VideoDiT(DiTConfig(width=128, depth=2, heads=4, patch=(1, 2, 2), classes=2))
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.05)
    return made.eval().requires_grad_(False)


def video(config: dict, plans: int | None = None, guidance: float = 1.0) -> tuple[Tensor, dict]:
    """What this process generates, and its report. plans: seed of random plans in place of the planner's."""
    made, noise = model(), torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    original = LayerStates._decide
    if plans is not None:
        LayerStates._decide = lambda held: random_plan(held, plans)  # type: ignore[method-assign]
    try:
        with reuse(made, holding(**config)) as handle:
            label = torch.tensor([1])
            out = generate(made, noise, steps=STEPS, solver="euler", condition=label, guidance=guidance)
            report = handle.report()
    finally:
        LayerStates._decide = original  # type: ignore[method-assign]
    fresh = [record.fresh for record in report.steps]
    return out, {"computed": report.computed, "moved": report.bytes_moved, "fresh": fresh}


def random_plan(held: LayerStates, seed: int) -> StepPlan:
    """Any states fresh, on any ranks; the same on all of them."""
    draw = torch.Generator().manual_seed(1000 * seed + held.step)
    shape = held.history.rate.shape
    fresh = torch.rand(shape, generator=draw) < torch.rand((), generator=draw)
    return StepPlan(fresh if held.step - held.start >= held.warmup else torch.ones_like(fresh), "random")


def plain(guidance: float = 1.0) -> Tensor:
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    return generate(model(), noise, steps=STEPS, solver="euler", condition=torch.tensor([1]), guidance=guidance)


def on_ranks(worlds: Worlds, size: int, *args: Any) -> list[tuple[Tensor, dict]]:
    """Every rank's result; that they agree is part of every test."""
    found = worlds(size).run(video, *args)
    for out, report in found[1:]:
        assert torch.equal(out, found[0][0])
        assert all(torch.equal(a, b) for a, b in zip(report["fresh"], found[0][1]["fresh"], strict=True))
    return found


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {"head": 2}),
        (2, {"states": 2}),
        (4, {"head": 2}),
        (4, {"head": 1, "local": "fresh"}),
        (4, {"head": 2, "states": 2}),
        (4, {"head": 1, "states": 3, "groups": 3}),
        (8, {"head": 1, "states": 8}),
    ],
    ids=str,
)
def test_everything_fresh_equals_one_process(worlds: Worlds, size: int, config: dict) -> None:
    expected = plain()
    for settings in ({"quality": 1.0}, {"interval": STEPS, "warmup": STEPS})[size == 8 :]:
        for out, report in on_ranks(worlds, size, {**config, **settings}):
            torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
            assert report["computed"] == pytest.approx(1.0)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("local", ["held", "fresh"])
def test_random_plans_equal_one_process(worlds: Worlds, size: int, local: str) -> None:
    """The same plan on one process and on ranks is the same video: nothing is missed, counted twice or read too early.

    What one process computes is held against an oracle in test_held_attention.py.
    """
    for seed in range(2):
        config = {"warmup": 2, "damping": 1.0, "groups": size, "states": max(2, size // (1 + seed)), "local": local}
        alone, told = video(config, seed)
        for out, report in on_ranks(worlds, size, {**config, "head": 1}, seed):
            torch.testing.assert_close(out, alone, rtol=0, atol=TOLERANCE)
            assert report["computed"] == pytest.approx(told["computed"])
            assert report["moved"] > told["moved"] == 0


@pytest.mark.parametrize("config", [{"interval": 3}, {"quality": 0.05}], ids=str)
def test_layers_held_whole_equal_one_process(worlds: Worlds, config: dict) -> None:
    """Plans come from numbers of all ranks, and are those of one process that looks at the same rows."""
    settings = {"warmup": 3, "damping": 1.0, "groups": 4, "rows": 400, **config}
    alone, told = video(settings)
    assert told["computed"] < 1
    for out, report in on_ranks(worlds, 4, {**settings, "head": 2}):
        torch.testing.assert_close(out, alone, rtol=0, atol=TOLERANCE)
        assert all(torch.equal(a, b) for a, b in zip(report["fresh"], told["fresh"], strict=True))


def test_nothing_moves_that_is_not_used(worlds: Worlds) -> None:
    """Bytes on the wire are those of the schedule: shards that a fresh state needs, once each. The report has all."""
    for keys, expected, sent, told in worlds(4).run(traffic):
        assert keys == expected > 0
        assert sent == told


def traffic() -> tuple[int, int, int, int]:
    """Bytes of keys that this rank sent, what the plans ask of it; bytes of all kinds, and the report's."""
    TRAFFIC.reset()
    config = {"warmup": 2, "damping": 1.0, "groups": 4, "states": 4, "head": 1}
    _, report = video(config, 3)
    layout = ranks(Shards.cut(960, 4).sizes, torch.distributed.get_rank(), 4)
    me, (first, last) = layout.mine[0], layout.rows
    expected = 0
    for fresh in report["fresh"]:
        for rows in fresh.tolist():
            wanted = needed(layout, layout.bundles(4), rows, "held")
            expected += sum(me in needs for needs in wanted) * (last - first) * 2 * 128 * 4
    return TRAFFIC.sent["keys"], expected, TRAFFIC.total - TRAFFIC.sent["input check"], report["moved"]


def two_branches(config: dict) -> tuple[Tensor, float, list[str]]:
    """With guidance: the video twice in a row, and the branches that this rank computed after the first step."""
    made, noise = model(), torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    forward = made.forward
    with reuse(made, holding(**config)) as handle:
        for _ in range(2):
            out = generate(made, noise, steps=STEPS, solver="euler", condition=torch.tensor([1]), guidance=3.0)
        report = handle.report()
    assert made.forward == forward
    return out, report.computed, sorted({record.branch for record in report.steps if record.step > 0})


@pytest.mark.parametrize(("size", "config"), [(2, {}), (4, {"head": 2}), (4, {"states": 2, "head": 1})], ids=str)
def test_branches_on_halves_of_the_ranks(worlds: Worlds, size: int, config: dict) -> None:
    expected = plain(guidance=3.0)
    for settings in ({"quality": 1.0}, {"interval": 3, "warmup": 3, "damping": 1.0}):
        found = worlds(size).run(two_branches, {"cfg": 2, **config, **settings})
        alone = expected
        if "interval" in settings:  # one process with as many groups as a branch has sequence ranks
            alone, _ = video({**settings, "groups": max(1, size // 2), "states": config.get("states", 1)}, guidance=3.0)
        for rank, (out, computed, branches) in enumerate(found):
            torch.testing.assert_close(out, alone, rtol=0, atol=2 * TOLERANCE)
            assert branches == [("cond", "uncond")[rank >= size // 2]]
            assert (computed < 1) == ("interval" in settings)


def around_parallel() -> tuple[Tensor, float]:
    """`parallelize` first: its ranks and its exact attention are kept."""
    made, noise = model(), torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    spread = parallelize(made, ParallelConfig(head=2, sequence=2))
    with reuse(made, holding(interval=3, warmup=3, damping=1.0)) as handle:
        out = generate(made, noise, steps=STEPS, solver="euler", condition=torch.tensor([1]))
        computed = handle.report().computed
    assert spread.installed.policy is spread.policy
    spread.remove()
    return out, computed


def test_around_parallelize(worlds: Worlds) -> None:
    alone, told = video({"interval": 3, "warmup": 3, "damping": 1.0})
    for out, computed in worlds(4).run(around_parallel):
        torch.testing.assert_close(out, alone, rtol=0, atol=TOLERANCE)
        assert computed == pytest.approx(told["computed"])


# Outputs held on ranks.


def halves(guided: int, config: dict) -> tuple[Tensor, int, set]:
    """Guidance ends after `guided` steps: the clip, bytes that this rank sent, branches that it computed."""
    made, x = model(), torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    TRAFFIC.reset()
    with reuse(made, ReuseConfig(**config)) as handle, torch.no_grad():
        x = loop(made, x, guided)
        report = handle.report()
    computed = {record.branch for record in report.steps if float(record.computed) and record.step > 0}
    if guided == 12 and "interval" in config:
        assert report.bytes_moved == TRAFFIC.total - TRAFFIC.sent["input check"]
    return x, TRAFFIC.total - TRAFFIC.sent["input check"], computed


def loop(made: nn.Module, x: Tensor, guided: int, steps: int = 12) -> Tensor:
    for step in range(steps):
        level, told = 1 - step / steps, {"step_index": step, "sigma": 1 - step / steps, "num_inference_steps": steps}

        def call(name: str, label: int, x: Tensor = x, level: float = level, told: dict = told) -> Tensor:
            with made.cache_context(name, **told) if hasattr(made, "cache_context") else nullcontext():
                return made(x, torch.tensor([level]), torch.tensor([label]))

        out = call("cond", 1)
        if step < guided:
            out = out + 2 * (out - call("uncond", 0))
        x = x - out / steps
    return x


@pytest.mark.parametrize(("size", "guided"), [(2, 12), (2, 5), (4, 12)])
def test_branches_on_halves_of_the_ranks_with_outputs_held(worlds: Worlds, size: int, guided: int) -> None:
    """As one process holds them, whether guidance ends or not; the link carries one output a computed step."""
    made, x = model(), torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    with reuse(made, ReuseConfig(interval=3, warmup=3)), torch.no_grad():
        alone = loop(made, x, guided)
    config = {"interval": 3, "warmup": 3, "cfg": 2, "head": 1}
    for rank, (out, sent, computed) in enumerate(worlds(size).run(halves, guided, config)):
        torch.testing.assert_close(out, alone, rtol=0, atol=2 * TOLERANCE)
        if (size, guided) == (2, 12):
            assert computed == {("cond", "uncond")[rank]}
            assert 0 <= sent - 5 * x.numel() * 4 < 100, "steps 1, 2, 5, 8 and 11; both compute step 0"
            exact = worlds(2).run(halves, guided, {"quality": 1.0, "head": 2})[rank][1]
            assert sent <= 0.03 * exact, f"{sent} of {exact} bytes"


def leaking() -> list[int]:
    made, counts = model(), []
    for _ in range(3):
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
        with reuse(made, ReuseConfig(cfg=2, head=1)):
            pass
    return counts


def test_process_groups_go_with_their_handle(worlds: Worlds) -> None:
    for counts in worlds(2).run(leaking):
        assert len(set(counts)) == 1


def other_inputs(ranks: str) -> str:
    rank = torch.distributed.get_rank()
    with reuse(made := model(), ReuseConfig(ranks=ranks)):
        noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))
        try:
            ours = generate(made, noise, steps=4, solver="euler", condition=torch.tensor([1]))
        except ValueError as error:
            return str(error)
    alone = generate(model(), noise, steps=4, solver="euler", condition=torch.tensor([1]))
    return f"{float((ours - alone).norm() / alone.norm()) < 0.1}"


def test_other_inputs_on_ranks_are_an_error_or_asked_for(worlds: Worlds) -> None:
    for said in worlds(2).run(other_inputs, "together"):
        assert "same prompt and seed" in said
        assert "ranks='independent'" in said
    assert worlds(2).run(other_inputs, "independent") == ["True", "True"]


def replicas() -> int:
    """Two replicas of two ranks; guidance in one of them only."""
    made = model()
    spread = parallelize(made, ParallelConfig(head=2, sequence=1))
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(spread.replica))
    with reuse(made, ReuseConfig(quality=0.5)) as handle:
        generate(made, noise, steps=9, solver="euler", condition=torch.tensor([1]), guidance=1.0 + 2 * spread.replica)
        forwards = len(handle.report().steps)
    spread.remove()
    return forwards


def test_replicas_decide_for_themselves(worlds: Worlds) -> None:
    assert worlds(4).run(replicas) == [9, 9, 18, 18]
