"""A rank that dies or hangs ends the others soon, and they say which rank and which collective."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from worlds import World, Worlds

from foveate.models.dit import DiTConfig, VideoDiT
from foveate.parallel import ParallelConfig, pace, parallelize
from foveate.parallel.comm import TIMEOUT, Group
from foveate.parallel.failure import GRACE

SHORT = 2.0


def job(fault: str) -> None:
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=96, depth=2, heads=3, patch=(1, 2, 2), mlp_ratio=1))
    parallelize(model, ParallelConfig(sequence=3, timeout=SHORT, check_inputs=False))
    x, sigma = torch.randn(1, 3, 3, 20, 20), torch.rand(1)
    model(x, sigma)
    if dist.get_rank() == 1:
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
    model(x, sigma)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_lost_rank_is_named_with_the_collective_and_nobody_waits_on(fault: str) -> None:
    world = World(3)
    try:
        for pipe in world.pipes:
            pipe.send((job, (fault,)))
        assert world.pipes[0].poll(60), "rank 0 hangs"
        began = time.monotonic()
        assert world.pipes[2].poll(60), "rank 2 hangs"
        assert time.monotonic() - began < 2 * SHORT + 5
        told = [world.pipes[rank].recv() for rank in (0, 2)]
    finally:
        world.stop()
    for rank, (fine, text) in zip((0, 2), told, strict=True):
        assert not fine
        assert re.search(rf"CommError: rank {rank}: 'ring keys of blocks\.0' among ranks \[0, 1, 2\]", text), text
    assert any("rank 1 did not answer: it died, hangs" in text for _, text in told), told
    # With a hung rank: its timeout, and the time in which the living report.
    assert TIMEOUT + GRACE < 120


def paced(slow: tuple[int, ...]) -> list[str]:
    """What a rank is told after two steps of 0.02 s, 0.4 s for slow ranks, each with a collective of all."""
    everyone = Group(range(dist.get_world_size()), "all ranks", dist.group.WORLD, 30.0)
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace.log, "warning", lambda message, *values: told.append(message % values))
        watched = pace.Pace(everyone, (0, 0, 1, 1))
        for _ in range(2):
            time.sleep(0.4 if everyone.rank in slow else 0.02)
            everyone.mean_([torch.zeros(1)], "gradients")
            watched.tick()
    return told


def test_a_slow_host_is_named_once_and_equal_ranks_are_not(worlds: Worlds) -> None:
    first, *others = worlds(4).run(paced, (2, 3))
    assert re.search(
        r"slow: a step takes rank 2 \(host 1, 0\.\d+ s\), 3 \(host 1, 0\.\d+ s\) of its own time", first[0]
    )
    assert others == [[], [], []]
    assert pace.behind([1.0, 1.1, 0.9, 1.2]) == []
    assert pace.behind([1.0, 1.0, 2.0, 1.0]) == [2]
    assert pace.behind([0.001, 0.002, 0.001, 0.001]) == []  # too short to tell
