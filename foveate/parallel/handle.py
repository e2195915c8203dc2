"""`parallelize`: one model on many ranks by context parallelism, under torchrun.

    handle = fv.sparsify(model, fv.SparsityConfig())                                      # optional, first
    parallel = fv.parallelize(model, fv.ParallelConfig(head=4, sequence=2))
    for block in model.blocks: fully_shard(block)                                         # or DDP, or neither
    ...
    noise = torch.randn(shape, generator=parallel.generator(seed, step))                  # alike in a replica
    loss.backward(); optimizer.step(); handle.step(); parallel.step()

Every rank of a replica is given the same inputs and returns the whole output. Gradients are right once they are
averaged over all ranks, as DDP and FSDP do; `parallel.reduce_gradients()` does it for a model in neither (shard.py).

Not covered: a second backward through attention; torch.compile(fullgraph=True), the hooks break graphs.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foveate import costs as prices
from foveate.attention import Dense
from foveate.models import adapters
from foveate.models.copies import Hook
from foveate.parallel import links
from foveate.parallel.comm import TIMEOUT, TRAFFIC, Group
from foveate.parallel.pace import Pace
from foveate.parallel.plan import LayerLoad, LayerPlan, Load, ParallelPlan, Topology, contiguous, plan_parallel
from foveate.parallel.policy import Parallel, Ranks
from foveate.parallel.shard import TokenShards
from foveate.sparsity import ranks
from foveate.sparsity.policy import Sparse

log = logging.getLogger("foveate")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is spread. The job's ranks, those of a host together, are replicas (data-parallel) x sequence x head,
    the last one fastest.

    head: ranks that share the heads of the same tokens; sequence: runs of tokens, each on `head` ranks.
    plan: what is decided from measured sparsity every `replan` calls of `step`: nothing (`fixed`: heads in order),
        which `heads` each rank computes, or `all`, the degrees of every layer too (head * sequence stays).
    fetch_cap: at most this fraction of the other ranks' tiles is fetched for a head, in (0, 1]. That changes the
        selection, so it is off by default and logged.
    timeout: seconds after which a rank that does not answer ends the job, with names.
    check_inputs: compare the inputs of the first forwards over the ranks of a replica.
    """

    head: int = 1
    sequence: int = 1
    plan: Literal["fixed", "heads", "all"] = "heads"
    replan: int = 200
    fetch_cap: float | None = None
    timeout: float = TIMEOUT
    check_inputs: bool = True

    def __post_init__(self) -> None:
        if self.head < 1 or self.sequence < 1 or self.replan < 1:
            raise ValueError(f"head, sequence and replan must be at least 1, got {self}")
        if self.plan not in ("fixed", "heads", "all"):
            raise ValueError(f"plan must be fixed, heads or all, got {self.plan!r}")
        if self.fetch_cap is not None and not 0 < self.fetch_cap <= 1:
            raise ValueError(f"fetch_cap is a fraction of the tiles elsewhere, in (0, 1], got {self.fetch_cap}")
        if self.timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}")

    @property
    def ranks(self) -> int:
        return self.head * self.sequence


def parallelize(
    model: nn.Module,
    config: ParallelConfig,
    *,
    topology: Topology | None = None,
    costs: prices.Costs | None = None,
) -> "ParallelHandle":
    """Run every self-attention of a model, and its blocks' tokens, on head x sequence ranks. On all ranks alike.

    model: any that models/adapters.py has a row with a Sharding for, on its device; `sparsify` it before, wrap it in
    DDP or FSDP before or after. topology: links, for the planner; without it the hosts are asked who shares one, and
    links are those that `foveate plan --measure` found here, or else NVLink and 400 Gbit/s a GPU. Raises ValueError for
    models that cannot be sharded, degrees that do not divide the job's ranks, and more head ranks than heads.
    """
    if not dist.is_initialized():
        raise ValueError("start the job with torchrun and call torch.distributed.init_process_group() first")
    return ParallelHandle(model, config, topology, costs)


class ParallelHandle:
    """What `parallelize` gives back. `policy`, `ranks` and `installed` may be read."""

    def __init__(self, model: nn.Module, config: ParallelConfig, topology: Topology | None, costs: prices.Costs | None):
        self.config, self.steps = config, 0
        if topology is not None and topology.ranks != config.ranks:
            raise ValueError(f"the topology has {topology.ranks} ranks, head * sequence is {config.ranks}")
        found = adapters.installed(model)
        if found is not None and isinstance(found.policy, Parallel):
            raise ValueError("the model is parallelized already: remove() that first")
        heads = _heads(model, found)
        if config.head > heads:
            raise ValueError(f"{heads} heads cannot be spread over head={config.head} ranks; use sequence instead")
        self.ranks = Ranks(config.ranks, config.timeout)
        hosts = self.ranks.hosts.of_replica(config.ranks)
        intra, inter = links.read("")
        self.topology = topology or Topology(ranks=config.ranks, hosts=hosts, intra=intra, inter=inter)
        self._everyone = Group(range(dist.get_world_size()), "all ranks", dist.group.WORLD, config.timeout)
        gloo = "nccl" not in dist.get_backend_config()
        self._pace = Pace(self._everyone, self.ranks.hosts.of) if gloo else None
        self._own = found is None
        self.installed = found or adapters.install(model, Dense())
        self._inner = self.installed.policy
        first = LayerPlan(head=config.head, sequence=config.sequence, heads=contiguous(heads, config.head))
        plan = ParallelPlan((first,) * len(self.installed.layers), first)
        try:
            self.policy = Parallel(self._inner, self.ranks, plan, config.fetch_cap)
            self._shards = TokenShards(self.installed, self.ranks.context, self.policy.cut)
        except ValueError:
            if self._own:
                self.installed.remove()
            raise
        self.installed.policy = self.policy
        self._costs, self._checks = costs, 2 if config.check_inputs and config.ranks > 1 else 0
        self._hook = model.register_forward_pre_hook(Hook(self._check), with_kwargs=True)
        self.ranks.of(config.head)
        if config.fetch_cap is not None:
            log.warning(
                "fetch_cap: at most %.0f %% of the other ranks' tiles are fetched for a head; where more are chosen "
                "the selection is not the one of a single process", 100 * config.fetch_cap,
            )  # fmt: skip

    @property
    def _device(self) -> torch.device:
        return next(self.installed.root.parameters()).device

    @property
    def plan(self) -> ParallelPlan:
        return self.policy.plan

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to: its data-parallel rank. Data is sampled by it, not by the rank."""
        return self.ranks.replica

    def mesh(self) -> Any:
        """A DeviceMesh ("data", "sequence", "head") over all ranks, for FSDP and checkpoints; on all ranks alike."""
        sizes = (self.ranks.replicas, self.config.sequence, self.config.head)
        places = torch.tensor(self.ranks.order).view(sizes)
        return dist.device_mesh.DeviceMesh(self._device.type, places, mesh_dim_names=("data", "sequence", "head"))

    def generator(self, *numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
        """A random stream for these numbers (seed, step, ...): the same on all ranks of a replica, others elsewhere."""
        seed = hash((*numbers, self.replica)) & 0x7FFF_FFFF_FFFF_FFFF
        return torch.Generator(device).manual_seed(seed)

    def reduce_gradients(self) -> None:
        """Average the model's gradients over all ranks, for a model in neither DDP nor FSDP. After backward.

        ValueError where FSDP has sharded them: it has averaged them too.
        """
        from torch.distributed.tensor import DTensor

        parameters = [p for p in self.installed.root.parameters() if p.requires_grad]
        if any(isinstance(p, DTensor) for p in parameters):
            raise ValueError("the parameters are sharded by FSDP, which averages their gradients over its mesh itself")
        for p in parameters:  # a rank may hold no token that reaches a parameter, but takes part all the same
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            self._everyone.mean_([p.grad for p in parameters if p.grad is not None and p.dtype == dtype], "gradients")

    def step(self) -> None:
        """Call after every optimiser step, on all ranks alike: at the cadence the layouts are planned anew. Over gloo
        slow ranks are named."""
        self.steps += 1
        if self._pace is not None:
            self._pace.tick()
        if self.config.plan != "fixed" and self.steps % self.config.replan == 0:
            self.replan()

    def replan(self) -> None:
        """Plan from what was measured since the last time, on rank 0, and take the plan up everywhere."""
        load = self._load()
        if load is None:
            return
        holder: list[Any] = [None]
        if dist.get_rank() == 0:
            table = self._costs or prices.here(self._device)
            degree = self.config.head if self.config.plan == "heads" else None
            holder = [plan_parallel(load, self.topology, table, head=degree)]
        dist.broadcast_object_list(holder, src=0, device=self._device if self._device.type == "cuda" else None)
        plan: ParallelPlan = holder[0]
        for degree in sorted({layer.head for layer in (*plan.layers, plan.dense)}):
            self.ranks.of(degree)
        if [(x.head, x.heads) for x in plan.layers] != [(x.head, x.heads) for x in self.policy.plan.layers]:
            log.info("step %d: %s", self.steps, describe(plan))
        self.policy.plan = plan

    def _load(self) -> Load | None:
        """What the planner is told: reduced over ranks. None before any forward, or where nothing is sparse."""
        inner, policy = self._inner, self.policy
        if not (isinstance(inner, Sparse) and policy.shape and policy.grid):
            return None
        degrees = [u for u in range(1, self.config.ranks + 1) if self.config.ranks % u == 0]
        keys = [(layer, degree) for layer in range(len(self.installed.layers)) for degree in degrees]
        got, others = policy.fetched.got, policy.fetched.others
        counts = torch.tensor([[got.get(key, 0.0), others.get(key, 0.0)] for key in keys], device=self._device)
        self._everyone.mean_([counts], "fetched tiles")
        union = {key: g / n for key, (g, n) in zip(keys, counts.tolist(), strict=True) if n}
        policy.fetched.got.clear()
        policy.fetched.others.clear()
        layers = []
        for index, (budget, constants) in enumerate(zip(inner.default.budgets, inner.default.constants, strict=True)):
            sparse = inner.mode != "dense" and inner.default.sparse_layers[index]
            density = tuple(budget.tolist()) if sparse else (1.0,) * inner.heads
            known = {degree: union[index, degree] for degree in degrees if (index, degree) in union}
            layers.append(LayerLoad(density, tuple((constants > -torch.inf).tolist()), known))
        batch, _, dim, width = policy.shape
        return Load(layers=tuple(layers), tokens=policy.grid.tokens, dim=dim, batch=batch, width=width)

    def _check(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The inputs of a replica's ranks must be the same: noise and noise level above all."""
        if not self._checks or torch.compiler.is_compiling():
            return
        self._checks -= 1
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        sums = [x.detach().double().sum() + x.detach().double().square().sum() for x in given]
        mine = torch.stack([x.to(self._device) for x in sums]).unsqueeze(0)
        group = self.ranks.context
        all_sums = torch.cat(group.gather(mine, [1] * group.size, "input check").wait())
        if not torch.equal(all_sums, all_sums[:1].expand_as(all_sums)):
            different = [r for r, row in zip(group.ranks, all_sums, strict=True) if not torch.equal(row, all_sums[0])]
            raise ValueError(
                f"ranks {different} were given other inputs than rank {group.ranks[0]}, but share its sequence: sample "
                "data by handle.replica, and noise and noise levels from handle.generator(seed, step)"
            )

    def summary(self) -> str:
        """The plan in words, and the bytes this rank has sent since the traffic was last reset."""
        sent = ", ".join(f"{what} {count / 1e6:.1f}" for what, count in sorted(TRAFFIC.sent.items()))
        return f"{describe(self.plan)}; MB sent by this rank: {sent or 'none'}"

    def remove(self) -> None:
        """Give the model back as it was before `parallelize`. A second call does nothing."""
        self._hook.remove()
        self._shards.remove()
        if self.installed.policy is self.policy:
            self.installed.policy = self._inner
        if self._own:
            self.installed.remove()


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean of a tensor over all ranks of the job: what `sparsify` takes by itself where there are several."""
    total = tensor.clone()
    _everyone(dist.group.WORLD).mean_([total], "reduced decisions")
    return total


@lru_cache(maxsize=1)
def _everyone(world: Any) -> Group:
    return Group(range(dist.get_world_size()), "all ranks", world, TIMEOUT)


def _several() -> Any:
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    return None if alone else mean_over_ranks


ranks.offer(_several)


def describe(plan: ParallelPlan) -> str:
    """One line: layouts with their layers, and the worst balance of heads."""
    by_layout: dict[str, list[int]] = {}
    for index, layer in enumerate(plan.layers):
        by_layout.setdefault(f"head {layer.head} x sequence {layer.sequence}", []).append(index)
    worst = max((layer.imbalance for layer in plan.layers if layer.compute_ms), default=None)
    balance = "" if worst is None else f"; slowest rank's attention at most {worst:.2f} of the mean"
    return ", ".join(f"{name}: {len(layers)} layers" for name, layers in by_layout.items()) + balance


def _heads(model: nn.Module, found: adapters.Installed | None) -> int:
    if found is not None:
        return found.heads
    with adapters.install(model, Dense()) as seen:
        return seen.heads
