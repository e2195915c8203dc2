"""A rank that dies or hangs ends the others soon, and they say which rank and which collective."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from worlds import World

from foveate.models.dit import DiTConfig, VideoDiT
from foveate.parallel import ParallelConfig, parallelize
from foveate.parallel.comm import TIMEOUT
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
