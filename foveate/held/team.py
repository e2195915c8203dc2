"""The ranks that make one result together under torchrun, and what they must agree upon.

Exact attention is context parallelism (foveate/parallel), installed here unless the model has it already. cfg=2 makes
two halves of the ranks, one a branch of guidance. A model that has no adapter is computed whole on every rank.
"""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foveate.attention import Dense
from foveate.held.config import ReuseConfig
from foveate.held.tracker import Forward
from foveate.models import adapters
from foveate.parallel.comm import Group, partition, release
from foveate.parallel.handle import ParallelConfig, ParallelHandle, parallelize
from foveate.parallel.hosts import ask_hosts
from foveate.parallel.policy import Parallel, Ranks

log = logging.getLogger("foveate")


@dataclass(frozen=True)
class Degrees:
    """cfg x sequence x head ranks, the last one fastest. node: sequence ranks of one node."""

    cfg: int
    sequence: int
    head: int
    node: int

    @classmethod
    def choose(cls, config: ReuseConfig, heads: int, world: int, local: int) -> "Degrees":
        """Head-wise inside a node, sequence-wise across, where the configuration leaves it open. local: ranks a node.

        With several states on a single node all of it is sequence-wise: there would be no groups otherwise.
        """
        if world % config.cfg:
            raise ValueError(f"cfg={config.cfg} does not divide the {world} ranks of this job")
        count = world // config.cfg
        local = min(local, count)
        head = config.head
        if head is None:
            apart = config.states > 1 and count == local
            head = 1 if apart else max(n for n in range(1, min(local, heads) + 1) if local % n == 0)
        if count % head or head > heads:
            raise ValueError(f"head={head} must divide the {count} ranks of a branch and be at most the {heads} heads")
        sequence = count // head
        node = max(1, local // head)
        return cls(config.cfg, sequence, head, node if sequence % node == 0 else sequence)


class Team:
    """The ranks of one model's results. `parallel` is the policy of exact attention, None where each computes it all.

    half: which branch of guidance this rank computes, with `pair`, the rank of the other half, where cfg=2.
    """

    def __init__(self, model: nn.Module, config: ReuseConfig):
        self._handle: ParallelHandle | None = None
        self.parallel, self.degrees = self._spread(model, config)
        count = 1 if self.parallel is None else self.ranks.count
        world, each = dist.get_world_size(), count * config.cfg
        if world % each:
            raise ValueError(f"cfg={config.cfg} needs {each} ranks, which do not divide the {world} of this job")
        order, starts = ask_hosts().order, range(0, world, each)
        self.everyone = partition([order[s : s + each] for s in starts], "ranks of one result")
        self.pair: Group | None = None
        if config.cfg == 2:
            pairs = [[order[s + i], order[s + count + i]] for s in starts for i in range(count)]
            self.pair = partition(pairs, "CFG branches")
        self.half = order.index(dist.get_rank()) % each // count

    @property
    def ranks(self) -> Ranks:
        assert self.parallel is not None
        return self.parallel.ranks

    def _spread(self, model: nn.Module, config: ReuseConfig) -> tuple[Parallel | None, Degrees]:
        world = dist.get_world_size()
        local = ask_hosts().together
        try:
            found = adapters.installed(model)
        except ValueError as error:
            log.info("reuse: every rank computes the whole of %s: %s", type(model).__name__, error)
            return None, Degrees(config.cfg, 1, 1, 1)
        if found is not None and isinstance(found.policy, Parallel):
            dense = found.policy.plan.dense
            return found.policy, Degrees(config.cfg, dense.sequence, dense.head, dense.sequence)
        if found is not None:
            log.info("reuse: every rank computes the whole model, as a policy is installed that is not of parallelize")
            return None, Degrees(config.cfg, 1, 1, 1)
        if world == config.cfg and config.head in (None, 1):  # a rank a branch: nothing to cut, nothing in the model
            return None, Degrees(config.cfg, 1, 1, 1)
        with adapters.install(model, Dense()) as seen:
            degrees = Degrees.choose(config, seen.heads, world, local)
        plan = ParallelConfig(head=degrees.head, sequence=degrees.sequence, plan="fixed", check_inputs=False)
        self._handle = parallelize(model, plan)
        return self._handle.policy, degrees

    def check(self, forward: Forward) -> None:
        """Once a request: ranks that make one result must be given the same. Raises ValueError where they are not."""
        if self.everyone.size == 1:
            return
        place, inputs = forward.place, forward.inputs
        tensors = [x.value for x in inputs.rest.values() if isinstance(x.value, Tensor)]
        tensors += [x for x in (inputs.clip, inputs.time) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        sums = [fingerprint(x).to(device) for x in tensors]
        about = torch.tensor([place.step, place.sigma, place.steps or 0], dtype=torch.float64, device=device)
        # The number of tensors may differ too, and a collective needs one shape: a sum of sums, weighed by place.
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for number, one in enumerate(sums):
            total += (number + 1) * one
        mine = torch.cat([total, about])[None]
        told = torch.cat(self.everyone.gather(mine, [1] * self.everyone.size, "input check").wait())
        off = [rank for rank, row in zip(self.everyone.ranks, told, strict=True) if not torch.equal(row, told[0])]
        if off:
            raise ValueError(
                f"ranks {off} were given other inputs (prompt, noise or steps) than rank {self.everyone.ranks[0]}, but "
                "make one result with it: give all the same prompt and seed, or let every rank make a result of its "
                "own by ReuseConfig(ranks='independent')"
            )

    def worst(self, found: Tensor) -> Tensor:
        """The largest of the ranks' numbers."""
        return self.everyone.max(found, "held errors")

    def least(self, value: float, device: torch.device) -> float:
        """The smallest of the ranks' values, so that all have one cap."""
        return -float(self.everyone.max(torch.tensor([-value], dtype=torch.float64, device=device), "free memory"))

    def remove(self) -> None:
        for group in (self.pair, self.everyone):
            if group is not None:
                release(group)
        if self._handle is not None:
            self._handle.remove()
            self._handle.ranks.release()


def fingerprint(x: Tensor) -> Tensor:
    """float64 (2,): a sum, and one in which places weigh differently."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1).double()
    return torch.stack([flat.sum(), flat @ torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)])


def team_of(model: nn.Module, config: ReuseConfig) -> Team | None:
    """None where this process works alone: no torchrun, one rank, or independent ones."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1 or config.ranks == "independent"
    if alone and config.cfg == 2:
        raise ValueError("cfg=2 gives each branch of guidance half of the ranks: start two or more by torchrun")
    return None if alone else Team(model, config)
