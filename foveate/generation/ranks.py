"""Ranks under torchrun: which of them share a clip, and which writes it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from foveate.parallel.hosts import adopt_launcher, ask_hosts
from foveate.training.machine import pick_device

log = logging.getLogger("foveate")


@dataclass(frozen=True)
class Spread:
    """`size` ranks share a clip; this is rank `place` of team number `team` of `teams`."""

    size: int = 1
    team: int = 0
    teams: int = 1
    place: int = 0

    @property
    def writes(self) -> bool:
        return self.place == 0


def share(world: int, clips: int, cfg: int, asked: int | None, able: bool) -> int:
    """How many of the ranks share a clip. ValueError where that cannot be.

    able: the model can be spread by context parallelism; without, ranks share nothing but the branches of guidance.
    """
    if world == 1:
        if cfg == 2:
            raise ValueError("--cfg-parallel gives each branch of guidance half of the ranks: start two by torchrun")
        if asked not in (None, 1):
            raise ValueError(f"--ranks-per-video {asked}, but this is one process: start it by torchrun")
        return 1
    if world % cfg:
        raise ValueError(f"--cfg-parallel wants an even number of ranks, this job has {world}")
    if asked is not None:
        if world % asked or asked % cfg:
            even = " and be even for --cfg-parallel" if cfg == 2 else ""
            raise ValueError(f"--ranks-per-video must divide the {world} ranks{even}, got {asked}")
        if asked > cfg and not able:
            raise ValueError(f"--ranks-per-video {asked}: this model cannot be spread; it has no row for it in "
                             "foveate/models/adapters.py (docs/adding-a-model.md)")  # fmt: skip
        return asked
    if not able:
        if clips * cfg < world:
            log.warning("this model cannot be spread over ranks: %d of %d have no clip", world - clips * cfg, world)
        return cfg
    return min(size for size in range(cfg, world + 1, cfg) if world % size == 0 and world // size <= max(1, clips))


def spread(size: int) -> Spread:
    """Where this process stands when teams of `size` ranks are formed."""
    if not dist.is_initialized():
        return Spread()
    order = ask_hosts().order
    place = order.index(dist.get_rank())
    return Spread(size, place // size, len(order) // size, place % size)


@contextmanager
def joined(device: str) -> Iterator[torch.device]:
    """The process group of a job that torchrun, srun or mpirun started, for the length of a `with`; the device."""
    adopt_launcher()
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield torch.device(pick_device(device))
        return
    kind = pick_device(device).partition(":")[0]
    number = f":{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else ""
    here = torch.device(pick_device(kind + number))
    if here.type == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group("nccl" if here.type == "cuda" else "gloo")
    try:
        yield here
    finally:
        dist.destroy_process_group()


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
