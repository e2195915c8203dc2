"""`foveate plan`: what training and generation would take on a cluster, in a table, a picture or JSON.

The numbers are predictions: `parallel/scale.py` says from what. `--measure`, under torchrun, replaces the tables of
kernels and links by this cluster's own.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foveate import costs
from foveate.parallel import links, shapes
from foveate.parallel.hosts import adopt_launcher
from foveate.parallel.scale import METHODS, Cluster, Step, Workload, generate, sizes, train
from foveate.parallel.topology import Topology

MOST_GPUS = 16384
DENSE_SHARE = 5 / 32  # of the layers: what DSV's 2.7B model leaves dense (arXiv 2502.07590)
RUNS = (("exact ulysses", "dense ulysses", False), ("exact ring", "dense ring", False),
        ("exact usp", "dense usp", False), ("foveate exact", "foveate exact", False),
        ("foveate reuse", "foveate exact", True), ("foveate reuse, sparse", "foveate", True))  # fmt: skip
Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The cluster and the work that `foveate plan` prices.

    Attributes:
        gpus: GPUs of the largest cluster; smaller ones are planned too, in nodes doubled from one on.
        node: GPUs of a node.
        tokens: Tokens of a sequence, after patching: frames x height x width of the latent grid.
        model: A preset (wan-1.3b, wan-14b, hunyuanvideo, cogvideox-2b, cogvideox-5b, ltx-2b, ltx-13b) or
            LAYERSxHEADSxDIM.
        links: Link inside a node and between nodes, as nvlink,ib400; a JSON file of measured ones; `measured`. Without
            it those that were measured here, or else nvlink,ib400.
        card: The GPU by its name, as torch.cuda.get_device_name() has it.
        memory_gib: What a GPU may hold.
        batch: Sequences of a training step, for every node.
        context: GPUs that share a sequence in training; 0: what is fastest and fits, for each method.
        kept: Mean fraction of the tiles that sparse layers keep.
        skew: How many times denser half of the heads are than the other half.
        dense_layers: Layers that stay dense; -1: 5 in 32.
        steps: Denoising steps of a video.
        computed: Share of them that reuse computes.
    """

    gpus: int = 128
    node: int = 8
    tokens: int = 520_000
    model: str = "wan-14b"
    links: str = ""
    card: str = "NVIDIA H200"
    memory_gib: float = 126.0
    batch: int = 1
    context: int = 0
    kept: float = 0.1
    skew: float = 4.0
    dense_layers: int = -1
    steps: int = 50
    computed: float = 0.44

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MOST_GPUS or self.node < 1:
            raise ValueError(f"--gpus takes 1 to {MOST_GPUS}, --node 1 or more, got {self.gpus} and {self.node}")
        if self.gpus > self.node and self.gpus % self.node:
            raise ValueError(f"--gpus {self.gpus} are no whole nodes of {self.node}; change one of them")
        if self.memory_gib <= 0 or self.batch < 1:
            raise ValueError(f"--memory-gib above 0, --batch from 1 on, got {self.memory_gib} and {self.batch}")


def predict(config: PlanConfig) -> dict[str, Any]:
    """Training and generation on every cluster size: {"assumptions", "training", "generation"}, rows as dicts."""
    model = shapes.find(config.model)
    intra, inter = links.read(config.links)
    prices = costs.for_device("cuda", config.card)
    dense = round(model.layers * DENSE_SHARE) if config.dense_layers < 0 else config.dense_layers
    work = Workload(
        model=model, tokens=config.tokens, kept=config.kept, skew=config.skew, dense_layers=dense, steps=config.steps,
        computed=config.computed,
    )  # fmt: skip
    topology = Topology(ranks=config.node, per_node=config.node, intra=intra, inter=inter)
    training, generation = [], []
    for gpus in sizes(config.gpus, config.node):
        cluster = Cluster(gpus=gpus, topology=topology, costs=prices, memory_gib=config.memory_gib)
        batch = config.batch * max(1, gpus // config.node)
        context = min(config.context, gpus) or None
        training += [train(method, replace(work, batch=batch), cluster, context) for method in METHODS]
        for name, method, reuse in RUNS:
            made = generate(method, work, cluster, config.computed if reuse else 1.0)
            generation.append(made and replace(made, method=name))
    return {
        "assumptions": {
            "model": asdict(model), "tokens": config.tokens, "node": config.node, "costs": prices.source,
            "tile": prices.tile, "linear_flops": cluster.linear,
            "links": {"intra": asdict(intra), "inter": asdict(inter)},
            "memory_gib": config.memory_gib, "kept": config.kept, "skew": config.skew, "dense_layers": dense,
            "sequences_a_node": config.batch, "steps": config.steps, "computed": config.computed,
        },
        "training": [asdict(step) for step in _with_efficiency(training, weak=True)],
        "generation": [asdict(step) for step in _with_efficiency(generation, weak=False)],
    }  # fmt: skip


def _with_efficiency(steps: Sequence[Step | None], weak: bool) -> list[Step]:
    """Against the same method on its smallest cluster: tokens a second and GPU, or a video's seconds times GPUs."""
    first: dict[str, Step] = {}
    found = []
    for step in steps:
        if step is None:
            continue
        base = first.setdefault(step.method, step)
        ratio = step.tokens_per_s / base.tokens_per_s if weak else base.seconds / step.seconds
        found.append(replace(step, efficiency=ratio * base.gpus / step.gpus))
    return found


def table(found: dict[str, Any], gpus: int) -> str:
    """The largest cluster's methods, and how ours scales, for a terminal."""
    about = found["assumptions"]
    lines = [
        f"{about['model']['name']}, {about['tokens']} tokens, {gpus} GPUs in nodes of {about['node']}; predicted from "
        f"{about['costs']}; links {' and '.join(x['source'].split(' (')[0] for x in about['links'].values())}",
        f"{about['dense_layers']} of {about['model']['layers']} layers dense, the others keep {about['kept']:.1%}, "
        f"half of the heads {about['skew']:g} times what others do; a step has {about['sequences_a_node']} a node",
    ]
    for kind, unit in (("training", "step"), ("generation", "video")):
        title = f"{kind}, seconds of a {unit}"
        lines += ["", f"{title:30}{'total':>9}{'attention':>11}{'exposed':>9}{'rest':>8}{'balance':>9}{'GiB':>6}"
                  f"{'scaling':>9}  ranks, head x sequence"]  # fmt: skip
        for row in found[kind]:
            if row["gpus"] == gpus:
                lines.append(_line(row))
        best = [row for row in found[kind] if row["gpus"] == gpus and row["fits"]]
        plain = [row["seconds"] for row in best if not row["method"].startswith(("foveate", "sparse"))]
        for row in best:
            if plain and row["method"].startswith("foveate"):
                lines.append(f"{row['method']}: {min(plain) / row['seconds']:.2f} times the best dense layout")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    times = row["seconds"], row["attention_s"], row["exposed_s"], row["linear_s"] + row["weights_s"], row["imbalance"]
    numbers = "".join(f"{value:{width}.2f}" for value, width in zip(times, (9, 11, 9, 8, 9), strict=True))
    where = f"{row['ranks']}: {row['layouts']}" + ("" if row["fits"] else "; DOES NOT FIT")
    return f"{row['method']:30}{numbers}{row['memory_gib']:6.0f}{row['efficiency']:9.0%}  {where}"


def plot(found: dict[str, Any], file: Path) -> None:
    """Training throughput and a video's time over GPUs, as a PNG (or what else the name ends in)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, kind in ((left, "training"), (right, "generation")):
        for method in dict.fromkeys(row["method"] for row in found[kind]):
            rows = [row for row in found[kind] if row["method"] == method and row["fits"]]
            values = [row["tokens_per_s"] if kind == "training" else row["seconds"] for row in rows]
            ours = method.startswith("foveate")
            style = "-" if ours else (":" if method.startswith("sparse") else "--")
            axes.plot(
                [row["gpus"] for row in rows], values, style, marker="o", ms=3, lw=2 if ours else 1.2, label=method
            )
        axes.set(xscale="log", yscale="log", xlabel="GPUs")
        ticks = sorted({row["gpus"] for row in found[kind]})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    about = found["assumptions"]
    left.set(ylabel="tokens a second", title=f"training, {about['sequences_a_node']} sequences a node and step")
    right.set(
        ylabel="seconds a video", title=f"one video, {about['steps']} steps, {about['computed']:.0%} computed by reuse"
    )
    figure.suptitle(f"{about['model']['name']}, {about['tokens']} tokens: predicted, not measured", fontsize=10)
    figure.savefig(file)


def measure(say: Say) -> Path | None:
    """Measure this cluster, under torchrun: attention kernels on the first rank, links among all; the file of links.

    None where a single process measured its kernels only. ValueError where no launcher started it.
    """
    import torch.distributed as dist

    from foveate.training.measure import measure as measure_kernels

    adopt_launcher()
    cuda = torch.cuda.is_available()
    if cuda and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if cuda else "cpu")
    first = int(os.environ.get("RANK", 0)) == 0
    kernels = measure_kernels(device, say) if first else None
    if "RANK" not in os.environ:
        say("one process: no links to measure; torchrun --nproc-per-node N -m foveate plan --measure does")
        return None
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        found = links.measure_links()
        texts: list[Any] = [kernels.read_text() if kernels else None]
        links.tell(texts, device)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once a host
            for path, text in (
                (costs.own_table(device.type, costs.name_of(device)), texts[0]),
                (links.saved(), json.dumps(found, indent=1) + "\n"),
            ):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    finally:
        dist.destroy_process_group()
    if first:
        for kind in ("intra", "inter"):
            link = found[kind]
            say(f"{kind}: {link['latency_us']:.0f} us, {link['gb_per_s']:.3g} GB/s a rank; {link['source']}")
    return links.saved()
