"""Whole training steps of foveate's own video DiT on one card: is a sparse step bound by attention, or by the host?

    python benchmarks/bench_train_step_own.py [--out benchmarks/results]
    python benchmarks/bench_train_step_own.py --device cpu --toy      # a minute, no GPU

VideoDiT, 512 wide, 8 layers, 8 heads x 64, patches of 1 x 4 x 4, a random clip of 32 x 128 x 128 pixels (32,768
tokens), batch 1: the step of `foveate train` (bfloat16 autocast, the flow-matching loss, clipping, fused AdamW, EMA,
loss and norm read back, then `handle.step`), eager and with the blocks compiled, dense by every kernel that is
installed, sparse with 10 % of the tiles kept and the rest pooled. Of a sparse step: without a lesson, with one, and the
mean over a whole interval of the cadence that sparsify finds by itself, checks, profiles and lessons included.

Launches are kernels of one step in torch.profiler, `kernels_ms` the sum of their times; waits are what
torch.cuda.set_sync_debug_mode reports of a step before its loss is read. Gates, in the same run: gradients of the
compiled sparse model at budget 1.0 as exact as those of the eager dense one (against float32), and the tiles really
kept in each layer. Exits with 1 where a gate is red. Times are wall-clock medians, the device synchronised.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_train_step import SLACK, GateError, card, counted, free
from torch import Tensor
from torch.autograd import DeviceType
from train_step_model import Always

import foveate as fv
from foveate.attention import unavailable
from foveate.models import dit
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.sparsity.handle import Handle
from foveate.tiles import CUBE

OWN, TOY = DiTConfig(width=512, depth=8, heads=8), DiTConfig(width=64, depth=2, heads=2)
CLIPS = {"own": (32, 128, 128), "own, gate": (8, 64, 64), "toy": (8, 32, 64), "toy, gate": (4, 32, 32)}
BUDGET, NEVER = 0.1, 1 << 30
TIMED, MOST = 7, 400  # steps timed; steps of an interval that are waited for at most
OFTEN = None  # steps between checks: as sparsify finds them


@dataclass(frozen=True)
class Engine:
    """A dense kernel, or the tiles of sparse attention; and whether blocks are compiled."""

    name: str
    compiled: bool
    tile: int = 0
    dense: str = "torch"


class Job:
    """A model, what trains it, and one clip."""

    def __init__(self, config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine):
        torch.manual_seed(0)
        self.model, self.device = VideoDiT(config).to(device), device
        for weight in self.model.parameters():  # gates and head are zero at first, and nothing would depend on q and k
            if not weight.any():
                torch.nn.init.normal_(weight, std=0.1)
        self.model.compile_repeated_blocks(engine.compiled)
        self.model.policy = Always(engine.dense)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.ema = [weight.detach().clone() for weight in self.model.parameters()]
        self.video, self.noise = torch.randn(2, 1, config.channels, *size, device=device)
        self.sigma = torch.full((1,), 0.4, device=device)
        self.handle: Handle | None = None
        self.tokens = config.grid(*size).tokens

    def loss(self) -> Tensor:
        """As in `foveate train` (training/flow.py, which wants packages that read video)."""
        level = self.sigma.view(-1, 1, 1, 1, 1)
        said = self.model((1 - level) * self.video + level * self.noise, self.sigma)
        return (said.float() - (self.noise - self.video)).square().mean()

    def backward(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            value = self.loss()
        value.backward()
        return value.detach()

    def update(self) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(self.ema, list(self.model.parameters()), 0.001)
        return norm

    def step(self) -> None:
        value = self.backward()
        torch.stack([value, self.update()]).tolist()
        if self.handle is not None:
            self.handle.step(loss=value)

    def timed(self) -> float:
        """Milliseconds of a step, median."""
        return statistics.median(self.milliseconds() for _ in range(TIMED))

    def milliseconds(self) -> float:
        self.wait()
        began = time.perf_counter()
        self.step()
        self.wait()
        return 1e3 * (time.perf_counter() - began)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def counts(self) -> dict[str, Any]:
        """Launches of a step and the sum of their times, or operators on the CPU; how often the host waits."""
        kinds = ["CPU", "CUDA"] if self.device == "cuda" else ["CPU"]
        activities = [getattr(torch.profiler.ProfilerActivity, kind) for kind in kinds]
        with torch.profiler.profile(activities=activities) as profiler:
            self.step()
            self.wait()
        if self.device != "cuda":
            top = [e for e in profiler.events() or [] if e.cpu_parent is None]
            return {"operators": len(top)}
        kernels = [
            e for e in profiler.events() or [] if e.device_type == DeviceType.CUDA and not e.name.startswith("Mem")
        ]
        found = {"launches": len(kernels), "kernels_ms": sum(e.time_range.elapsed_us() for e in kernels) / 1e3}
        return found | {"waits": self.waits()}

    def waits(self) -> int:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                self.backward()
                self.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(w.message) for w in seen)

    def sparsify(self, engine: Engine, *, teach_every: int | None, often: int | None, budget: float = BUDGET) -> None:
        """The model in sparse training, after four dense steps."""
        config = fv.SparsityConfig(
            budget=budget, periphery="pool", query_tile=engine.tile, force=True, warmup=4, learn_from=2,
            teach_every=teach_every, often=often, rare=often, tile_shape=CUBE,
        )  # fmt: skip
        self.handle = fv.sparsify(self.model, config)
        for _ in range(6):
            self.step()
        assert self.handle.decision.active


def gate(config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine) -> dict[str, float]:
    """Relative L2 errors of all gradients against float32: eager and dense, compiled and sparse at budget 1.0."""

    def gradients(job: Job) -> Tensor:
        job.model.zero_grad(set_to_none=True)
        job.backward()
        found = [weight.grad.flatten().double() for weight in job.model.parameters() if weight.grad is not None]
        job.model.zero_grad(set_to_none=True)
        return torch.cat(found)

    exact = Job(config, size, device, Engine("", False, dense="reference"))
    exact.loss().backward()
    grads = [weight.grad.flatten().double() for weight in exact.model.parameters() if weight.grad is not None]
    reference = torch.cat(grads)
    dense = gradients(Job(config, size, device, Engine("", False)))
    job = Job(config, size, device, engine)
    job.optimizer.param_groups[0]["lr"] = 0.0  # the steps that lead to sparse training leave the weights alone
    job.sparsify(engine, teach_every=NEVER, often=NEVER, budget=1.0)
    assert job.handle is not None
    before = job.handle.policy.computed["sparse"]
    found = {"dense": dense, "sparse": gradients(job)}
    if job.handle.policy.computed["sparse"] - before != config.depth:
        raise GateError("not every layer ran the sparse kernel")
    errors = {name: float((x - reference).norm() / reference.norm()) for name, x in found.items()}
    if not errors["sparse"] <= SLACK * errors["dense"]:
        raise GateError(f"{engine.name}: errors of gradients against float32: {errors}")
    return errors


def dense_row(config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine) -> dict[str, Any]:
    job = Job(config, size, device, engine)
    job.step()
    return {"engine": engine.name, "ms": job.timed(), **job.counts()}


def sparse_row(config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine) -> dict[str, Any]:
    """A step without a lesson, and what one costs."""
    job = Job(config, size, device, engine)
    job.sparsify(engine, teach_every=NEVER, often=NEVER)
    assert job.handle is not None
    with counted(job.handle) as kept:
        job.step()
    tiles = -(-job.tokens // engine.tile)
    wanted = max(1, round(BUDGET * tiles)) / tiles
    if any(abs(found - wanted) > 0.5 / tiles for found in kept.values()) or len(kept) != config.depth:
        raise GateError(f"{engine.name}: kept {kept}, not {wanted:.4f} of the tiles")
    row = {"engine": engine.name, "kept": wanted, "ms": job.timed(), **job.counts()}
    job.handle.remove()
    job.sparsify(engine, teach_every=1, often=NEVER)
    row["with_lesson_ms"], counts = job.timed(), job.counts()
    return row | {f"with_lesson_{name}": value for name, value in counts.items()}


def average_row(config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine) -> dict[str, Any]:
    """The mean step from one check to the next at the cadence that sparsify finds; steps cut off are as their mean."""
    job = Job(config, size, device, engine)
    job.sparsify(engine, teach_every=None, often=OFTEN)
    assert job.handle is not None
    before, usual, times = job.handle.main.control, job.timed(), []
    while job.handle.main.control.due == before.due and len(times) < MOST:
        times.append(job.milliseconds())
    if job.handle.main.control.due == before.due:
        return {"engine": engine.name, "failed": f"no check in {MOST} steps"}
    pairs = job.handle.config.pairs
    plain, checks = statistics.mean(times[:-pairs]), sum(times[-pairs:])
    average = (plain * (before.interval - pairs) + checks) / before.interval
    row = {"engine": engine.name, "average_ms": average, "without_checks_ms": plain, "checks_ms": checks}
    row |= {"without_lessons_ms": usual, "share": 1 - usual / average, "interval": before.interval}
    return row | {"cadence": str(job.handle.main.pace)}


def engines(device: str) -> tuple[list[Engine], list[Engine]]:
    """Dense and sparse ones, without those that are not installed; the last sparse one is what `auto` takes."""
    dense = [Engine("dense, eager", False), Engine("dense, compiled", True)]
    sparse = [Engine("sparse, eager, tiles of 64", False, 64), Engine("sparse, compiled, tiles of 64", True, 64)]
    if unavailable("fa4", device) is None:
        dense.append(Engine("dense by flash-attn-4, compiled", True, dense="fa4"))
        sparse.append(Engine("sparse, compiled, tiles of 128", True, 128))
    return dense, sparse


def summary(rows: list[dict]) -> dict[str, Any]:
    """How many times faster than each dense run, best sparse engine without lessons, with one, and on average."""
    dense = {row["engine"]: row["ms"] for row in rows if row["what"] == "dense"}
    sparse = [row for row in rows if row["what"] == "sparse"]
    averages = [row["average_ms"] for row in rows if "average_ms" in row]
    best = {
        "without lessons": min((row["ms"] for row in sparse), default=None),
        "with a lesson": min((row["with_lesson_ms"] for row in sparse), default=None),
        "average": min(averages, default=None),
    }
    return {name: {kind: ms / ours for kind, ms in dense.items()} | {"ms": ours} for name, ours in best.items() if ours}


def run(rows: list[dict], device: str, toy: bool, write: Callable[[], None]) -> None:
    name, config = ("toy", TOY) if toy else ("own", OWN)
    dense, sparse = engines(device)

    def add(what: str, row: dict[str, Any]) -> None:
        rows.append({"what": what, **row})
        print(json.dumps(rows[-1]), flush=True)
        write()
        free(device)

    for engine in sparse:
        if engine.compiled:
            errors = gate(config, CLIPS[f"{name}, gate"], device, engine)
            add("gate", {"engine": engine.name, "gradients": errors, "budget": 1.0})
    torch.compiler.reset()  # graphs for one length, as a run of one length has them
    dit._compiled.cache_clear()
    for engine in reversed(dense):  # what matters most comes first, should time run out
        add("dense", dense_row(config, CLIPS[name], device, engine))
    for engine in reversed(sparse):
        add("sparse", sparse_row(config, CLIPS[name], device, engine))
        if engine is sparse[-1]:
            add("average", average_row(config, CLIPS[name], device, engine))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--toy", action="store_true", help="a model and a clip of toy size")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs an NVIDIA GPU; --device cpu --toy is a rehearsal")
        return 2
    rows: list[dict] = []
    facts = {"card": card(options.device), "torch": torch.__version__, "month": time.strftime("%Y-%m")}
    facts |= {"model": (TOY if options.toy else OWN).to_dict()}

    def write() -> None:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            file = options.out / f"train_step_own_{facts['card']}_{facts['month'].replace('-', '')}.json"
            file.write_text(json.dumps({**facts, "summary": summary(rows), "rows": rows}, indent=1) + "\n")

    try:
        run(rows, options.device, options.toy, write)
    except GateError as error:
        print(json.dumps({"what": "red gate", "why": str(error)}))
        return 1
    print(json.dumps(summary(rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
