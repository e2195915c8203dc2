"""Where every layer runs: a pure function from measured sparsity, prices and links to a `ParallelPlan`.

A layer's layout is chosen by the time of its slowest rank (`layout.py`), computation and exposed communication
together. Heads in order, and every layout that all layers share, are among the candidates: by its own prices a plan is
never slower than any of them. Ranks are numbered so that the head degree is the inner one, inside a host where it fits.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from foveate.costs import Costs
from foveate.parallel.balance import contiguous
from foveate.parallel.layout import LayerLoad, LayerPlan, Load, lay_out, options
from foveate.parallel.topology import Link, Topology

__all__ = ["LayerLoad", "LayerPlan", "Link", "Load", "ParallelPlan", "Topology", "contiguous", "lay_out",
           "plan_parallel"]  # fmt: skip

log = logging.getLogger("foveate")


@dataclass(frozen=True)
class ParallelPlan:
    """The layout of every layer while it is sparse, and the one of dense calls."""

    layers: tuple[LayerPlan, ...]
    dense: LayerPlan

    @property
    def ms(self) -> float:
        return sum(layer.ms for layer in self.layers)


def plan_parallel(
    profile: Load,
    topology: Topology,
    costs: Costs,
    *,
    head: int | None = None,
    balance: bool = True,
    uniform: bool = False,
) -> ParallelPlan:
    """The fastest layout of every layer, under the memory limit. head: fixes the head degree of all layers.

    balance: heads are assigned by cost where that is faster; False: in order. uniform: one head degree for all layers.
    Raises ValueError where no layout is possible.
    """
    count = len(profile.layers[0].density)
    degrees = [u for u in range(1, min(topology.ranks, count) + 1) if topology.ranks % u == 0]
    if head is not None:
        if head not in degrees:
            raise ValueError(f"a head degree of {head} does not fit {topology.ranks} ranks and {count} heads")
        degrees = [head]
    known: dict[int, list[tuple[LayerPlan, LayerPlan]]] = {}
    by_layer = []
    for layer in profile.layers:  # layers of one load, as a model's dense ones are, are planned once
        if id(layer) not in known:
            known[id(layer)] = options(layer, profile, topology, costs, degrees, balance)
        by_layer.append(known[id(layer)])
    plans = [[pairs[index][spread] for pairs in by_layer] for index in range(len(degrees)) for spread in (0, 1)]
    plans += [[min(pairs[index], key=lambda plan: plan.ms) for pairs in by_layer] for index in range(len(degrees))]
    if not uniform:
        plans.append(_by_layer([[plan for pair in pairs for plan in pair] for pairs in by_layer], topology.memory_gib))
    dense = options(LayerLoad((1.0,) * count), profile, topology, costs, degrees, balance=False)
    return ParallelPlan(tuple(_best(plans, topology.memory_gib)), min((plan for plan, _ in dense), key=lambda x: x.ms))


def _best(plans: Sequence[Sequence[LayerPlan]], memory_gib: float | None) -> Sequence[LayerPlan]:
    """The fastest of those that keep little enough; where none does, the one that keeps least."""
    limit = float("inf") if memory_gib is None else memory_gib * 2**30
    kept = [sum(layer.kept for layer in plan) for plan in plans]
    fitting = [plan for plan, size in zip(plans, kept, strict=True) if size <= limit]
    if fitting:
        return min(fitting, key=lambda plan: sum(layer.ms for layer in plan))
    log.warning("no layout keeps less than %.1f GiB for the backward", min(kept) / 2**30)
    return plans[kept.index(min(kept))]


def _by_layer(by_layer: list[list[LayerPlan]], memory_gib: float | None) -> list[LayerPlan]:
    """The fastest plan of each layer; where they keep too much, exchanges that cost least for what they save."""
    chosen = [min(plans, key=lambda plan: (plan.ms, plan.kept)) for plans in by_layer]
    while memory_gib is not None and sum(plan.kept for plan in chosen) > memory_gib * 2**30:
        swaps = [
            ((other.ms - plan.ms) / (plan.kept - other.kept), index, other)
            for index, (plan, plans) in enumerate(zip(chosen, by_layer, strict=True))
            for other in plans
            if other.kept < plan.kept
        ]
        if not swaps:
            break
        _, index, other = min(swaps, key=lambda swap: swap[:2])
        chosen[index] = other
    return chosen
