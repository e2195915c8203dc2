"""What a training step and a generated video take on a cluster that need not be there.

Attention and its communication are priced by the functions that plan a run (`layout.py`, `topology.py`, `costs.py`).
What those leave out is arithmetic, and every assumption of it is a number here:

- matrices run at LINEAR operations a second, norms, rotary embeddings and the like included: what is left of a measured
  step of a Wan-shaped model on an H200 once its attention is taken off. On another card, in the ratio of its dense
  attention to the H200's.
- parameters, gradients and optimiser state are sharded over all GPUs (FSDP2): STATE bytes a parameter. A layer's
  weights are gathered in the forward and again in the backward, its gradients are scattered, a ring through all GPUs
  whose hosts use all their links; what the layer's own time does not hide is exposed.
- activations are recomputed in the backward, all of them or all but what attention saves, whichever is faster and fits.
- a step has `batch` sequences, shared out to replicas of `ranks` context-parallel GPUs; a replica takes its sequences
  one after the other. `ranks` is what is fastest and fits.
- a video is made in `steps` steps of two branches of guidance, each on half of the GPUs, with `computed` of them run
  and the others held. Text encoder and VAE are not counted.

Not modelled: jitter between ranks, other jobs on the links, congestion between switches, launches of short kernels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foveate.costs import PASSES, Costs
from foveate.parallel.layout import TILE, LayerLoad, LayerPlan, Layout, Load, Travel, WholeLayer, lay_out
from foveate.parallel.plan import ParallelPlan, plan_parallel
from foveate.parallel.shapes import Model
from foveate.parallel.topology import Topology

# train_step_h200_202612.json: 24.02 s at 131,072 tokens with 30 x (170.5 + 488.0) ms of attention leave 4.27 s for four
# passes (one of them again, recomputed) of 1.25e9 weights.
LINEAR = 3.1e14
REFERENCE_MS = 436.0  # of dense attention, forward + backward, 131,072 x 8 x 128, on that card
STATE = 16  # bytes a parameter: bfloat16 weights and gradients, float32 master weights and two moments
SAVED, KEPT = 1, 5  # widths a token and layer keeps: a block's input; with q, k, v and out besides
WORKING = 12  # widths, besides twice the feed-forward: of the one layer that is recomputed
GUIDANCE = 2  # branches
HELD = 0.01  # of a computed step's time: what a held one takes (docs/reuse.md)
METHODS = ("dense ulysses", "dense ring", "dense usp", "sparse ulysses", "sparse ring", "sparse usp", "foveate")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """kept: mean fraction of the tiles that sparse layers keep; half of the heads keep `skew` times what others do.

    dense_layers: how many stay dense. batch: sequences of a training step. steps, computed: of a generated video.
    """

    model: Model
    tokens: int
    kept: float = 0.1
    skew: float = 4.0
    dense_layers: int = 0
    batch: int = 1
    steps: int = 50
    computed: float = 0.44

    def __post_init__(self) -> None:
        if not (0 < self.kept <= 1 and self.skew >= 1):
            raise ValueError(f"kept is a fraction in (0, 1] and skew at least 1, got {self.kept} and {self.skew}")
        if not 0 <= self.dense_layers <= self.model.layers:
            raise ValueError(f"{self.model.name} has {self.model.layers} layers, {self.dense_layers} cannot be dense")
        if self.tokens < TILE or self.batch < 1 or self.steps < 1 or not 0 < self.computed <= 1:
            raise ValueError(f"tokens from {TILE} on, batch and steps from 1 on, computed in (0, 1], got {self}")

    def load(self, sparse: bool, passes: Sequence[str] = PASSES) -> Load:
        heads, half = self.model.heads, self.model.heads // 2
        few = self.kept * heads / (self.skew * half + heads - half)
        density = tuple(min(1.0, few * self.skew) for _ in range(half)) + (few,) * (heads - half)
        dense, kept = LayerLoad((1.0,) * heads), LayerLoad(density)
        count = self.dense_layers if sparse else self.model.layers
        layers = (dense,) * count + (kept,) * (self.model.layers - count)
        return Load(layers=layers, tokens=self.tokens, dim=self.model.dim, passes=passes)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """gpus, `topology` of them all (its ranks are not read), prices of attention, memory of a GPU."""

    gpus: int
    topology: Topology
    costs: Costs
    memory_gib: float = 126.0

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"a cluster needs a GPU, got {self.gpus}")

    def context(self, ranks: int) -> Topology:
        return replace(self.topology, ranks=ranks)

    @property
    def linear(self) -> float:
        """Operations a second of matrices and what goes with them."""
        return LINEAR * REFERENCE_MS / self.costs.dense(131072, 8, 128)

    def ring_ms(self, size: float) -> float:
        """Of `size` bytes through all GPUs, each receiving nearly all of them."""
        inside, between = self.topology.intra, self.topology.inter
        per_node = min(self.topology.per_node, self.gpus)
        rate = inside.gb_per_s
        if self.gpus > per_node:
            rate = min(rate, between.node_gb_per_s or between.gb_per_s * per_node)
        latency = (between if self.gpus > per_node else inside).latency_us / 1e3
        return (latency + size * (self.gpus - 1) / self.gpus / rate / 1e6) if self.gpus > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One method on one cluster. seconds of a step (or of a video); fits: in memory.

    attention_s, exposed_s, linear_s, weights_s: its parts: slowest rank's attention, communication of context
    parallelism and of weights that nothing hides, everything else. imbalance: slowest rank's attention over the mean.
    """

    method: str
    gpus: int
    ranks: int
    layouts: str
    seconds: float
    attention_s: float
    exposed_s: float
    linear_s: float
    weights_s: float = 0.0
    imbalance: float = 1.0
    memory_gib: float = 0.0
    fits: bool = True
    tokens_per_s: float = 0.0
    recompute: str = ""
    efficiency: float | None = field(default=None)


def train(method: str, work: Workload, cluster: Cluster, ranks: int | None = None) -> Step | None:
    """The fastest of all context degrees (or at `ranks`) that fits, or, where none does, that keeps least.

    None where the method cannot run: more head ranks than heads, fewer tiles than ranks.
    """
    found = list(_training(method, work, cluster, ranks))
    fitting = [step for step in found if step.fits]
    if fitting:
        return min(fitting, key=lambda step: step.seconds)
    return min(found, key=lambda step: step.memory_gib, default=None)


def _training(method: str, work: Workload, cluster: Cluster, given: int | None) -> Iterator[Step]:
    model = work.model
    for ranks in contexts(work, cluster, given):
        replicas = cluster.gpus // ranks
        turns = work.batch / min(replicas, work.batch)
        if work.batch % replicas and replicas > 1:  # some replicas would have nothing to do
            continue
        load = work.load(method == "foveate" or method.startswith("sparse"))
        plan = lay_out_all(method, load, cluster.context(ranks), cluster.costs)
        if plan is None:
            continue
        again = [one_pass(layer, laid, load, cluster.context(ranks), cluster.costs, method)
                 for layer, laid in _different(load, plan)]  # fmt: skip
        counts = [sum(x is layer for x in load.layers) for layer, _ in _different(load, plan)]
        share = work.tokens / ranks
        linear = 2 * model.passed * model.layers * share / cluster.linear  # seconds of a forward
        for recompute in ("but attention", "all"):
            widths, everything = (KEPT, False) if recompute == "but attention" else (SAVED, True)
            attention = sum(max(x.compute_ms) for x in plan) / 1e3
            total = sum(x.ms for x in plan) / 1e3
            if everything:
                attention += sum(n * max(x.compute_ms) for n, x in zip(counts, again, strict=True)) / 1e3
                total += sum(n * x.ms for n, x in zip(counts, again, strict=True)) / 1e3
            layer_bytes = 2 * model.weights / model.layers
            move = cluster.ring_ms(layer_bytes) * model.layers / 1e3
            forward = linear + total / 3
            weights = max(0.0, move - forward) + max(0.0, 2 * move - (3 * linear + total * 2 / 3))
            seconds = turns * (total + 4 * linear + weights)
            kept = sum(x.kept for x in plan) if not everything else max(x.kept for x in plan)
            element = 2 * share * model.width
            memory = STATE * model.weights / cluster.gpus + 2 * layer_bytes + widths * element * model.layers
            memory += WORKING * element + 2 * share * 2 * model.ffn + kept
            yield Step(
                method=method, gpus=cluster.gpus, ranks=ranks, layouts=describe(plan), seconds=seconds,
                attention_s=turns * attention, exposed_s=turns * (total - attention), linear_s=turns * 4 * linear,
                weights_s=turns * weights, imbalance=_imbalance(plan), memory_gib=memory / 2**30,
                fits=memory / 2**30 <= cluster.memory_gib, tokens_per_s=work.batch * work.tokens / seconds,
                recompute=recompute,
            )  # fmt: skip


def generate(method: str, work: Workload, cluster: Cluster, computed: float = 1.0) -> Step | None:
    """One video on the GPUs, or on as many of them as make it fastest; both branches of guidance at once from 2 GPUs.

    computed: share of the steps that run the model. None where the method cannot run.
    """
    best = None
    halves = GUIDANCE if cluster.gpus >= GUIDANCE else 1
    for ranks in contexts(work, replace(cluster, gpus=cluster.gpus // halves), None):
        load = work.load(method == "foveate" or method.startswith("sparse"), PASSES[:1])
        plan = lay_out_all(method, load, cluster.context(ranks), cluster.costs)
        if plan is None:
            continue
        model, share = work.model, work.tokens / ranks
        linear = 2 * model.passed * model.layers * share / cluster.linear
        attention, total = (sum(x) / 1e3 for x in ([max(p.compute_ms) for p in plan], [p.ms for p in plan]))
        times = work.steps * (GUIDANCE / halves) * (computed + (1 - computed) * HELD)
        memory = 2 * model.weights + (WORKING * model.width + 2 * model.ffn) * 2 * share
        step = Step(
            method=method, gpus=cluster.gpus, ranks=halves * ranks, layouts=describe(plan),
            seconds=times * (linear + total), attention_s=times * attention, exposed_s=times * (total - attention),
            linear_s=times * linear, imbalance=_imbalance(plan), memory_gib=memory / 2**30,
            fits=memory / 2**30 <= cluster.memory_gib,
        )  # fmt: skip
        best = step if best is None or step.seconds < best.seconds else best
    return best


def contexts(work: Workload, cluster: Cluster, given: int | None) -> list[int]:
    """Context degrees: divisors of the GPUs with a tile for each rank."""
    if given is not None:
        if given < 1 or cluster.gpus % given:
            raise ValueError(f"--context {given} does not divide {cluster.gpus} GPUs")
        return [given]
    tiles = -(-work.tokens // TILE)
    return [ranks for ranks in range(1, min(cluster.gpus, tiles) + 1) if cluster.gpus % ranks == 0]


def lay_out_all(method: str, load: Load, topology: Topology, costs: Costs) -> Sequence[LayerPlan] | None:
    """Every layer's plan; None where the method cannot run on so many ranks."""
    if method in ("foveate", "foveate exact"):
        return plan_parallel(load, topology, costs).layers
    ranks, heads = topology.ranks, len(load.layers[0].density)
    degrees = {
        "ulysses": [ranks] if ranks <= heads else [],
        "ring": [1],
        "usp": [u for u in range(1, min(ranks, heads) + 1) if ranks % u == 0 and (1 < u < ranks or ranks < 4)],
    }[method.partition(" ")[2]]
    known: dict[int, list[LayerPlan]] = {}
    for layer in load.layers:
        if id(layer) not in known:
            known[id(layer)] = [lay_out(layer, load, topology, costs, u, False, "ring") for u in degrees]
    options = [[known[id(layer)][index] for layer in load.layers] for index in range(len(degrees))]
    return min(options, key=lambda plans: sum(plan.ms for plan in plans), default=None)


def one_pass(layer: LayerLoad, plan: LayerPlan, load: Load, topology: Topology, costs: Costs, method: str) -> LayerPlan:
    """The forward alone, in the layout of both passes."""
    whole = WholeLayer(layer, replace(load, passes=PASSES[:1]), costs)
    travel: Travel = "tiles" if method.startswith("foveate") else "ring"
    return Layout(whole, topology, plan.head, travel).plan(plan.heads)


def _different(load: Load, plan: Sequence[LayerPlan]) -> list[tuple[LayerLoad, LayerPlan]]:
    return list({id(layer): (layer, laid) for layer, laid in zip(load.layers, plan, strict=True)}.values())


def _imbalance(plan: Sequence[LayerPlan]) -> float:
    mean = sum(sum(x.compute_ms) / len(x.compute_ms) for x in plan)
    return sum(max(x.compute_ms) for x in plan) / mean


def describe(plan: ParallelPlan | Sequence[LayerPlan]) -> str:
    """Head x sequence degrees, with how many layers take each where there are several."""
    layers = plan.layers if isinstance(plan, ParallelPlan) else plan
    found: dict[str, int] = {}
    for layer in layers:
        name = f"{layer.head}x{layer.sequence}"
        found[name] = found.get(name, 0) + 1
    several = len(found) > 1
    return ", ".join(f"{name} ({count})" if several else name for name, count in found.items())


def sizes(gpus: int, node: int) -> list[int]:
    """Cluster sizes up to `gpus`: nodes doubled from one on."""
    found = [min(node, gpus)]
    while found[-1] * 2 < gpus:
        found.append(found[-1] * 2)
    return found if found[-1] == gpus else [*found, gpus]
