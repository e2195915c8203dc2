"""Which host holds the others up: a rank's own time between two steps, without what it waited for others.

Compared over all ranks about every SECONDS, at steps that all ranks work out from the same numbers. Where the host does
the waiting, over gloo; with NCCL it does not, and a slow card shows in its own profiler only.
"""

import logging
import time
from collections.abc import Sequence

import torch

from foveate.parallel.comm import TRAFFIC, Group

log = logging.getLogger("foveate")

SECONDS = 10.0
SLOWER = 1.5  # times the usual rank's own time: named from here on
AGAIN = 600.0  # seconds until the same ranks are named again


class Pace:
    """hosts: the host of every world rank. `tick` once a step, on all ranks alike."""

    def __init__(self, everyone: Group, hosts: Sequence[int]):
        self.everyone, self.hosts = everyone, hosts
        self._began, self._waited, self._left, self._steps = time.perf_counter(), TRAFFIC.waited, 2, 0
        self._named: tuple[list[int], float] = [], 0.0

    def tick(self) -> None:
        self._left, self._steps = self._left - 1, self._steps + 1
        if self._left or self.everyone.size == 1:
            return
        now = time.perf_counter()
        wall, waited = now - self._began, max(0.0, TRAFFIC.waited - self._waited)  # a benchmark may have reset it
        mine = torch.tensor([[max(0.0, wall - waited), wall]], dtype=torch.float64) / self._steps
        found = torch.cat(self.everyone.gather(mine, [1] * self.everyone.size, "own time of a step").wait())
        self._left = max(1, round(SECONDS / max(float(found[:, 1].max()), 1e-3)))
        self._began, self._waited, self._steps = time.perf_counter(), TRAFFIC.waited, 0
        self._name(found[:, 0].tolist())

    def _name(self, own: list[float]) -> None:
        slow = behind(own)
        ranks, since = self._named
        if not slow or (slow == ranks and time.monotonic() - since < AGAIN):
            return
        self._named = slow, time.monotonic()
        if self.everyone.rank == 0:
            places = ", ".join(f"{rank} (host {self.hosts[rank]}, {own[rank]:.2f} s)" for rank in slow)
            log.warning("slow: a step takes rank %s of its own time, the usual rank %.2f s", places, usual(own))


def usual(own: Sequence[float]) -> float:
    """The lower median, so that half of the ranks may be slow."""
    return sorted(own)[(len(own) - 1) // 2]


def behind(own: Sequence[float]) -> list[int]:
    """Ranks whose own time is SLOWER times that of the usual rank."""
    return [rank for rank, seconds in enumerate(own) if seconds > max(SLOWER * usual(own), usual(own) + 0.01)]
