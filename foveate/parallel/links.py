"""The links of a cluster, measured: `torchrun ... -m foveate plan --measure`. Later plans go by them.

All ranks send at once, as in a run: round a ring inside every host, then to the rank at the same place on the next
host, then only the first rank of each host. Time over size is a straight line: its offset is the latency, its slope the
bandwidth. What a host carries in all is told apart from what one rank reaches by the last two. A link that is not there
(one host, one rank a host) keeps what it was taken to be.
"""

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from foveate.parallel.comm import Group, partition
from foveate.parallel.hosts import Hosts, ask_hosts
from foveate.parallel.topology import LINKS, Link

SIZES = {"nccl": (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28), "gloo": (1 << 12, 1 << 16, 1 << 20, 1 << 22)}
REPEATS = 5
SHARED = 0.8  # of one rank's rate: below it ranks of a host hold each other up
Links = tuple[Link, Link]


def saved() -> Path:
    """Where measured links lie, or would."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foveate" / "links.json"


def known(file: Path | None = None) -> Links | None:
    """Links inside hosts and between them as measured here; None where they were not. ValueError for another file."""
    path = file or saved()
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        return Link(**found["intra"]), Link(**found["inter"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no measured links ({error!r}); foveate plan --measure renews it") from error


def read(words: str) -> Links:
    """`INSIDE,BETWEEN`: presets of LINKS, a JSON file of measured links, or `measured`. ValueError says what there is.

    Empty: what was measured here, or else NVLink and 400 Gbit/s InfiniBand.
    """
    if words in ("", "measured"):
        found = known()
        if found is None and words:
            raise ValueError(f"no links were measured here ({saved()}): torchrun ... -m foveate plan --measure")
        return found or (LINKS["nvlink"], LINKS["ib400"])
    if words.endswith(".json"):
        if (found := known(Path(words))) is None:
            raise ValueError(f"there is no file {words}")
        return found
    names = [word.strip() for word in words.split(",")]
    unknown = [name for name in names if name not in LINKS]
    if unknown or len(names) != 2:
        raise ValueError(
            f"--links takes one link inside hosts and one between them, as nvlink,ib400, got {words!r}; there are "
            f"{', '.join(LINKS)}, a file that `foveate plan --measure` has written, or `measured`"
        )
    return LINKS[names[0]], LINKS[names[1]]


def measure_links(sizes: Sequence[int] = (), repeats: int = REPEATS) -> dict[str, Any]:
    """Measured on all ranks alike: {"intra", "inter", "hosts", ...}, the same on every rank. It is not saved."""
    hosts = ask_hosts()
    backend = "nccl" if "nccl" in dist.get_backend_config() else "gloo"
    sizes = sizes or SIZES[backend]
    month = time.strftime("%Y-%m")
    found = {"intra": LINKS["nvlink"], "inter": LINKS["ib400"]}
    points: dict[str, list[tuple[int, float]]] = {}
    for kind, rings in (("intra", inside(hosts)), ("inter", between(hosts)), ("inter, one rank", between(hosts)[:1])):
        if any(len(ring) > 1 for ring in rings):
            rest = set(range(len(hosts.of))) - {rank for ring in rings for rank in ring}
            group = partition([*rings, *([rank] for rank in sorted(rest))], f"links {kind}")
            points[kind] = [(size, _ring_seconds(group, size, repeats)) for size in sizes]
    for kind in ("intra", "inter"):
        if kind in points:
            source = f"measured by {backend}, {len(hosts.of)} ranks on {len(set(hosts.of))} hosts, {month}"
            found[kind] = replace(fit(points[kind]), source=source)
    if "inter" in points:
        per_host = min(map(hosts.of.count, set(hosts.of)))
        alone = fit(points["inter, one rank"]).gb_per_s
        together = found["inter"].gb_per_s
        if per_host > 1 and together < SHARED * alone:
            found["inter"] = replace(found["inter"], gb_per_s=alone, node_gb_per_s=together * per_host)
    return {
        **{kind: asdict(link) for kind, link in found.items()}, "hosts": hosts.of, "backend": backend, "month": month,
        "seconds": points,
    }  # fmt: skip


def fit(points: Sequence[tuple[int, float]]) -> Link:
    """From (bytes, seconds): the line that is off least in relative terms, of latency >= 0."""
    size, seconds = np.array(points, float).T
    rows = np.stack([np.ones_like(size), size], 1) / seconds[:, None]
    latency, slope = np.linalg.lstsq(rows, np.ones_like(size), rcond=None)[0]
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, float(seconds[-1] / size[-1])
    return Link(float(latency) * 1e6, float(1e-9 / slope))


def inside(hosts: Hosts) -> list[list[int]]:
    """The ranks of every host."""
    return [[rank for rank, host in enumerate(hosts.of) if host == each] for each in sorted(set(hosts.of))]


def between(hosts: Hosts) -> list[list[int]]:
    """Ranks at the same place on their hosts: the first of each, the second, and so on; only hosts that have one."""
    by_host = inside(hosts)
    return [[own[place] for own in by_host if place < len(own)] for place in range(max(map(len, by_host)))]


def _ring_seconds(group: Group, size: int, repeats: int) -> float:
    """Median over repeats of the slowest rank's time for `size` bytes to the next rank."""
    cuda = "cpu:" not in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    x, rows = torch.zeros(size, dtype=torch.uint8, device=device), [size] * group.size
    everyone = Group(range(dist.get_world_size()), "all ranks", dist.group.WORLD, group.timeout)
    times = []
    for _ in range(repeats + 1):
        everyone.mean_([torch.zeros(1, device=device)], "start of a measurement")
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        if group.size > 1:
            group.shift(x, rows, "measured links").wait()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    mine = torch.tensor([times[1:]], dtype=torch.float64, device=device)
    slowest = torch.cat(everyone.gather(mine, [1] * everyone.size, "times of links").wait()).amax(0)
    return statistics.median(slowest.tolist())


def tell(values: list[Any], device: torch.device) -> None:
    """Give all ranks what the first one has in `values`, in place."""
    dist.broadcast_object_list(values, src=0, device=device if device.type == "cuda" else None)
