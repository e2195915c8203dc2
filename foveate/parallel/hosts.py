"""Which ranks share a host, asked of the hosts themselves, and the ranks that launchers other than torchrun give.

A host is known by its name and boot id, or by NCCL_HOSTID where that is set: NCCL's own rule, so that both agree which
links are fast. Names are gathered once a job; no launcher's variable is believed about it (srun and mpirun set none of
torchrun's, and a job may have unequal numbers of ranks on its hosts, or ranks dealt out in turns).
"""

import hashlib
import logging
import math
import os
import re
import socket
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foveate.parallel.comm import TIMEOUT, Group

log = logging.getLogger("foveate")

BOOT = Path("/proc/sys/kernel/random/boot_id")
PORT = "29500"
# Launcher -> what it calls RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; the first that is set counts.
LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "mpirun (Open MPI)": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpirun (PMI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip
_known: dict[Any, "Hosts"] = {}


@dataclass(frozen=True)
class Hosts:
    """of: the host of every world rank, hosts numbered by their first rank."""

    of: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """World ranks by position: ranks of a host together, hosts with most ranks first, so that runs of neighbouring
        positions cross hosts as seldom as can be. With equal hosts in order it is 0, 1, 2, ..."""
        count = Counter(self.of)
        return tuple(sorted(range(len(self.of)), key=lambda rank: (-count[self.of[rank]], self.of[rank], rank)))

    @property
    def together(self) -> int:
        """The most ranks such that every run of so many positions (0 ..., then the next) lies in one host."""
        return math.gcd(*Counter(self.of).values())

    def of_replica(self, ranks: int) -> tuple[int, ...]:
        """The host of each of a replica's `ranks` positions, of the replica that lies on most hosts: all plan alike."""
        by_position = [self.of[rank] for rank in self.order]
        replicas = [by_position[at : at + ranks] for at in range(0, len(by_position), ranks)]
        widest = max(replicas, key=lambda hosts: len(set(hosts)))
        number = {host: index for index, host in enumerate(dict.fromkeys(widest))}
        return tuple(number[host] for host in widest)


def this_host() -> str:
    """What tells this host from others."""
    name = os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {BOOT.read_text() if BOOT.exists() else ''}"
    return name.strip()


def ask_hosts(timeout: float = TIMEOUT) -> Hosts:
    """The hosts of all ranks of the job; gathered when first asked for, on all ranks alike."""
    world: Any = dist.group.WORLD
    if world not in _known:
        count = dist.get_world_size()
        digest = hashlib.sha256(this_host().encode()).digest()
        device = "cpu" if "cpu:" in dist.get_backend_config() else f"cuda:{torch.cuda.current_device()}"
        mine = torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64).to(device)
        found = Group(range(count), "all ranks", world, timeout).gather(mine, [1] * count, "host names").wait()
        names = torch.cat(found).tolist()
        number = {name: index for index, name in enumerate(dict.fromkeys(names))}
        _known[world] = hosts = Hosts(tuple(number[name] for name in names))
        sizes = Counter(Counter(hosts.of).values())
        log.info("%d ranks on %s", count, ", ".join(f"{n} hosts of {ranks}" for ranks, n in sorted(sizes.items())))
    return _known[world]


def adopt_launcher(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Set torchrun's variables from those of srun or mpirun where they are missing; the launcher's name, if any.

    Call it before torch.distributed.init_process_group(). Raises ValueError where no rank 0 address can be found.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return None
    for name, variables in LAUNCHERS.items():
        if variables[0] not in environ or variables[1] not in environ:
            continue
        for ours, theirs in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), variables, strict=True):
            if environ.get(theirs, "").isdigit():  # SLURM writes 4(x2),3 where hosts differ
                environ.setdefault(ours, environ[theirs])
        if "MASTER_ADDR" not in environ:
            environ["MASTER_ADDR"] = _first_host(environ, name)
        environ.setdefault("MASTER_PORT", PORT)
        return name
    return None


def _first_host(environ: MutableMapping[str, str], launcher: str) -> str:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") if launcher == "srun" else None
    if nodes:  # n[003-005,9],m1 begins with n003
        first = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
        if first:
            return "".join(part or "" for part in first.groups())
    if environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]:
        return "127.0.0.1"
    raise ValueError(f"{launcher} does not say where rank 0 is: export MASTER_ADDR=<its host> (and MASTER_PORT)")
