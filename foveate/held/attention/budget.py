"""How many bytes of attention states may be held on a device: one cap for all models and requests of a handle."""

import os
from collections.abc import Callable

import torch

from foveate.held.config import ReuseConfig
from foveate.held.team import Team
from foveate.held.tracker import Branch, Request

FREE_SHARE = 0.25  # of the free memory that states may take where no cap is given


class Budget:
    """requests: those that hold something now."""

    def __init__(self, config: ReuseConfig, requests: Callable[[], list[Request]]):
        self._gib, self._requests, self._cap = config.memory_gib, requests, 0.0

    def share(self, request: Request, branch: Branch, device: torch.device, team: Team | None) -> float:
        """Bytes for a branch of a request: an equal share of what is left, for all its branches without states yet."""
        mine = [one for one in request.branches if one is not branch] + [branch]
        others = [one for other in self._requests() if other is not request for one in other.branches]
        plans = [one.held.memory for one in (*mine, *others) if one.held is not None and one.held.memory is not None]
        taken = sum(plan.bytes for plan in plans)
        if self._gib is not None:
            self._cap = self._gib * 2**30
        elif not (taken and self._cap):  # nothing is held: what is free is known
            free = FREE_SHARE * free_bytes(device)
            self._cap = free if team is None else team.least(free, device)
        waiting = sum(one.held is not None and one.held.memory is None for one in mine)
        return max(0.0, self._cap - taken) / waiting


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
