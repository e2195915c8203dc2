"""Which ranks share a host, what their links carry, and how long the exchanges of context parallelism take on them.

One place for such times: the planner's choice at run time and the prediction for a cluster that is not there both ask
here. Every rank of a group sends at once; what leaves a host also shares the host's own links, where they have a limit.

Shapes: P ranks, by position: the head degree U is the inner one, sequence degree R = P / U.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Link:
    """latency_us: of a collective; gb_per_s: what one rank sends, or receives, a second (10^9 bytes).

    node_gb_per_s: what all ranks of a host send together; None: no other limit. source: where the numbers are from.
    """

    latency_us: float
    gb_per_s: float
    node_gb_per_s: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.latency_us >= 0 and self.gb_per_s > 0 and (self.node_gb_per_s is None or self.node_gb_per_s > 0)):
            raise ValueError(f"a link needs a latency of at least 0 and bandwidths above 0, got {self}")


# What collectives reach, a rank and direction, is less than what a link carries. Reached, by NCCL's maintainers: 370 of
# NVLink 4's 450 GB/s, https://github.com/NVIDIA/nccl-tests/issues/212; 220 of NVLink 3's 300,
# https://github.com/NVIDIA/nccl-tests/issues/228; 160 on an H800, https://github.com/deepseek-ai/DeepSeek-V3/issues/28;
# 48 of 50 GB/s by a 400 Gbit/s adapter, an all-to-all one adapter a GPU,
# https://github.com/NVIDIA/nccl-tests/issues/267; 24 by a 200 Gbit/s one, https://github.com/NVIDIA/nccl/issues/412.
# The others are rates of data sheets times the same share or less. Latencies are of a whole collective with its launch,
# and assumed. `foveate plan --measure` replaces all of it by what a cluster has.
LINKS = {
    "nvlink": Link(15.0, 370.0, source="NVLink 4 (H100, H200), reached by NCCL"),
    "nvlink3": Link(15.0, 220.0, source="NVLink 3 (A100), reached by NCCL"),
    "nvlink-h800": Link(15.0, 160.0, source="NVLink of an H800, reached by NCCL"),
    "nvlink5": Link(15.0, 740.0, source="NVLink 5 (B200), 900 GB/s a direction, 82 % assumed"),
    "pcie4": Link(20.0, 20.0, source="PCIe 4.0 x16, 32 GB/s a direction, 63 % assumed"),
    "pcie5": Link(20.0, 40.0, source="PCIe 5.0 x16, 64 GB/s a direction, 63 % assumed"),
    "ib800": Link(30.0, 90.0, source="InfiniBand XDR, 800 Gbit/s a GPU, 90 % assumed"),
    "ib400": Link(30.0, 48.0, source="InfiniBand NDR, 400 Gbit/s a GPU, reached by NCCL"),
    "ib200": Link(30.0, 24.0, source="InfiniBand HDR, 200 Gbit/s a GPU, reached by NCCL"),
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    "efa400": Link(60.0, 35.0, source="AWS p5, 3,200 Gbit/s for 8 GPUs, 70 % assumed"),
    "efa100": Link(60.0, 8.75, 35.0, source="AWS p4d, 400 Gbit/s for 8 GPUs, 70 % assumed"),
    "eth100": Link(50.0, 10.0, 10.0, source="100 Gbit/s Ethernet a host, 80 % assumed"),
    "eth25": Link(60.0, 2.5, 2.5, source="25 Gbit/s Ethernet a host, 80 % assumed"),
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """ranks: context-parallel ones; per_node of them share a host and its `intra` links, the others `inter`.

    hosts: the host of every rank by position, where hosts have unequal numbers of them; else runs of per_node.
    memory_gib: what all layers together may keep for the backward on a rank; None: any.
    """

    ranks: int
    per_node: int = 8
    intra: Link = LINKS["nvlink"]
    inter: Link = LINKS["ib400"]
    memory_gib: float | None = None
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1:
            raise ValueError(f"a topology needs at least 1 rank and 1 rank a node, got {self.ranks}, {self.per_node}")
        if self.hosts and len(self.hosts) != self.ranks:
            raise ValueError(f"hosts names the host of every rank: {self.ranks} of them, got {len(self.hosts)}")

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        return self.hosts or tuple(rank // self.per_node for rank in range(self.ranks))

    def all_to_all_ms(self, head: int, by_rank: ArrayLike) -> float:
        """Of the head groups: rank u of each gets `by_rank[u]` bytes from every other rank of its group."""
        if head == 1:
            return 0.0
        peers = _peers(self.host_of, head, "head")
        got = np.tile(np.asarray(by_rank, float), self.ranks // head)
        in_host, in_group = (np.bincount(label, weights=got)[label] for label in (peers.here, peers.group))
        near = max((in_host - got).max(), (peers.near * got).max())
        far = np.stack([in_group - in_host, peers.far * got])  # sent, received
        if not (near or far.any()):
            return 0.0
        return self._latency(bool(far.any())) + float(max(near / self.intra.gb_per_s, self._far(far).max())) / 1e6

    def fetch_ms(self, head: int, by_rank: ArrayLike) -> np.ndarray:
        """Of the sequence groups, by rank u of the head groups: each of its ranks gets `by_rank[u]` bytes in all, in
        equal parts from every other rank of its group. Milliseconds (U,)."""
        sequence = self.ranks // head
        if sequence == 1:
            return np.zeros(head)
        peers = _peers(self.host_of, head, "sequence")
        each = np.tile(np.asarray(by_rank, float) / (sequence - 1), sequence)
        times = np.maximum(peers.near * each / self.intra.gb_per_s, self._far(peers.far * each))
        slowest = times.reshape(sequence, head).max(0) / 1e6
        return slowest + np.where(np.asarray(by_rank) > 0, self._latency(bool(peers.far.any())), 0.0)

    def shift_ms(self, head: int, by_rank: ArrayLike) -> np.ndarray:
        """One step of the rings of the sequence groups: each of their ranks sends `by_rank[u]` bytes to the next.

        Milliseconds (U,).
        """
        sequence = self.ranks // head
        if sequence == 1:
            return np.zeros(head)
        hosts = np.array(self.host_of)
        crosses = hosts != np.roll(hosts, -head)
        sent = np.tile(np.asarray(by_rank, float), sequence)
        times = np.maximum(~crosses * sent / self.intra.gb_per_s, self._far(crosses * sent))
        return times.reshape(sequence, head).max(0) / 1e6 + self._latency(bool(crosses.any()))

    def gather_ms(self, head: int, by_rank: ArrayLike) -> np.ndarray:
        """All-gather in the sequence groups, round a ring, of `by_rank[u]` bytes a rank. Milliseconds (U,)."""
        sequence = self.ranks // head
        once = self.shift_ms(head, np.asarray(by_rank, float) * (sequence - 1))
        return once * (np.asarray(by_rank) > 0)

    def _far(self, sent: np.ndarray) -> np.ndarray:
        """Bytes (..., P) that leave hosts, over what a rank's link carries, or its share of the host's. In 1e-6 ms."""
        times = sent / self.inter.gb_per_s
        if self.inter.node_gb_per_s is None:
            return times
        hosts = np.array(self.host_of)
        together = (np.eye(hosts.max() + 1)[hosts].T @ sent.T).T[..., hosts] / self.inter.node_gb_per_s
        return np.where(sent > 0, np.maximum(times, together), 0.0)

    def _latency(self, far: bool) -> float:
        return (self.inter if far else self.intra).latency_us / 1e3


@dataclass(frozen=True)
class Peers:
    """Of every rank (P,): its group, its group and host together, and how many others of the group are in its host
    (near) and in others (far)."""

    group: np.ndarray
    here: np.ndarray
    near: np.ndarray
    far: np.ndarray


@lru_cache(maxsize=256)
def _peers(hosts: tuple[int, ...], head: int, kind: str) -> Peers:
    places = np.arange(len(hosts))
    group = places // head if kind == "head" else places % head
    _, here = np.unique(np.stack([group, np.array(hosts)]), axis=1, return_inverse=True)
    here = here.reshape(-1)
    near = np.bincount(here)[here]
    return Peers(group, here, near - 1, np.bincount(group)[group] - near)
