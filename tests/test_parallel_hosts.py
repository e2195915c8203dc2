"""Who shares a host: asked of the hosts, whatever the launcher says, and ranks laid out by the answer."""

import socket

import pytest
import torch.distributed as dist
from test_parallel import assert_same, on_ranks, one_process
from worlds import Worlds

from foveate.parallel import hosts
from foveate.parallel.hosts import Hosts, adopt_launcher, ask_hosts, this_host
from foveate.parallel.policy import Ranks


@pytest.mark.parametrize(
    ("of", "order", "together"),
    [
        ((0, 0, 1, 1), (0, 1, 2, 3), 2),
        ((0, 1, 0, 1), (0, 2, 1, 3), 2),  # dealt out in turns
        ((0, 1, 1, 0), (0, 3, 1, 2), 2),
        ((0, 0, 1, 1, 1, 1), (2, 3, 4, 5, 0, 1), 2),  # unequal hosts: pairs stay inside
        ((0, 0, 0, 1, 1), (0, 1, 2, 3, 4), 1),
        ((0,) * 4, (0, 1, 2, 3), 4),
    ],
)
def test_ranks_of_a_host_lie_together(of: tuple, order: tuple, together: int) -> None:
    assert Hosts(of).order == order
    assert Hosts(of).together == together


def test_the_replica_on_most_hosts_is_planned_for() -> None:
    assert Hosts((0, 0, 0, 0, 0, 0, 1, 1)).of_replica(4) == (0, 0, 1, 1)
    assert Hosts((0, 1, 0, 1)).of_replica(4) == (0, 0, 1, 1)


def test_a_host_is_known_by_name_and_boot_or_as_nccl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert this_host().startswith(socket.gethostname())
    monkeypatch.setenv("NCCL_HOSTID", "left")
    assert this_host() == "left"


def as_on_hosts(names: str, *layout) -> tuple:
    """This rank as if on the host its letter says; torchrun's own variables would call it one host, or lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "_known", {})
        patch.setenv("NCCL_HOSTID", names[dist.get_rank()])
        patch.setenv("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
        ranks = Ranks(dist.get_world_size())
        groups = [group.ranks for group in ranks.of(2)]
        return ask_hosts().of, groups, on_ranks("dit", *layout)


@pytest.mark.parametrize("names", ["abab", "abba"])
def test_head_groups_stay_inside_hosts_however_ranks_were_dealt(names: str, worlds: Worlds) -> None:
    truth = one_process("dit")
    for of, (inner, outer), ours in worlds(4).run(as_on_hosts, names, 2, 2):
        assert [names[rank] for rank in range(4)] == ["ab"[host] for host in of]
        assert len({names[rank] for rank in inner}) == 1
        assert len({names[rank] for rank in outer}) == 2
        assert_same(ours, truth)


@pytest.mark.parametrize(
    ("given", "rank", "master"),
    [
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu-[07-09,12],m1"},
         ("3", "8", "1"), "gpu-07"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "a.b.c,d",
          "SLURM_NTASKS_PER_NODE": "1(x2)"}, ("0", "2", "0"), "a.b.c"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("1", "2", "1"), "127.0.0.1"),
        ({"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "2", "MASTER_ADDR": "n1"}, ("5", "6", "2"), "n1"),
    ],
)  # fmt: skip
def test_ranks_of_other_launchers_are_adopted(given: dict, rank: tuple, master: str) -> None:
    assert adopt_launcher(given)
    assert (given["RANK"], given["WORLD_SIZE"], given["LOCAL_RANK"]) == rank
    assert given["MASTER_ADDR"] == master
    assert given["MASTER_PORT"] == "29500"


def test_torchrun_is_left_alone_and_an_unknown_rank_0_is_asked_for() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}
    assert adopt_launcher(dict(torchrun)) is None
    assert adopt_launcher({}) is None
    spread = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        adopt_launcher(spread)
