"""Whole training steps of foveate's own video DiT on one card: is a sparse step bound by attention, or by the host?

    python benchmarks/bench_train_step_own.py [--out benchmarks/results]
    python benchmarks/bench_train_step_own.py --device cpu --toy      # a minute, no GPU

VideoDiT, 512 wide, 8 layers, 8 heads x 64, patches of 1 x 4 x 4, a random clip of 32 x 128 x 128 pixels (32,768
tokens), batch 1: the step of `foveate train` (bfloat16 autocast, the flow-matching loss, clipping, fused AdamW, EMA,
loss and norm read back, then `handle.step`): eager, with the blocks compiled, and with forward and backward captured
as a CUDA graph besides (`handle.captured`); dense by every kernel that is installed, sparse with 10 % of the tiles kept
and the rest pooled. Of a sparse step: without a lesson, with one, and the mean over a whole interval of the cadence
that sparsify finds by itself, checks, profiles and lessons included.

Launches are kernels of one step in torch.profiler, `kernels_ms` the sum of their times, `asked_by_host` the calls that
launched them (a CUDA graph is one); waits are what torch.cuda.set_sync_debug_mode reports of a step before its loss is
read. Gates, in the same run: gradients of the compiled sparse model at budget 1.0 as exact as those of the eager dense
one (against float32); replays of a graph equal to launched steps after budgets, predictors, weights and clip have
changed; the tiles really kept in each layer. Exits with 1 where a gate is red. Times are wall-clock medians, the device
synchronised.
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
from foveate.sparsity.captured import Captured
from foveate.sparsity.handle import Handle
from foveate.tiles import CUBE

OWN, TOY = DiTConfig(width=512, depth=8, heads=8), DiTConfig(width=64, depth=2, heads=2)
CLIPS = {"own": (32, 128, 128), "own, gate": (8, 64, 64), "toy": (8, 32, 64), "toy, gate": (4, 32, 32)}
BUDGET, NEVER = 0.1, 1 << 30
SAME = 2e-3  # of gradients in bfloat16: cuBLAS may sum in another order inside of graphs
TIMED, MOST = 7, 400  # steps timed; steps of an interval that are waited for at most
OFTEN = None  # steps between checks: as sparsify finds them


@dataclass(frozen=True)
class Engine:
    """A dense kernel, or the tiles of sparse attention; whether blocks are compiled, and steps CUDA graphs."""

    name: str
    compiled: bool
    tile: int = 0
    dense: str = "torch"
    captured: bool = False


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
        self.captures = engine.captured
        self.passes = Captured(self.model, self.autocast_loss) if engine.captured else self.eager
        self.tokens = config.grid(*size).tokens

    def loss(self, video: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """As in `foveate train` (training/flow.py, which wants packages that read video)."""
        level = sigma.view(-1, 1, 1, 1, 1)
        said = self.model((1 - level) * video + level * noise, sigma)
        return (said.float() - (noise - video)).square().mean()

    def autocast_loss(self, *batch: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return self.loss(*batch)

    def eager(self, *batch: Tensor) -> Tensor:
        value = self.autocast_loss(*batch)
        value.backward()
        return value.detach()

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.video, self.noise, self.sigma

    def backward(self) -> Tensor:
        return self.passes(*self.batch)

    def gradients(self, passes: Callable[..., Tensor]) -> Tensor:
        """float64, of all weights, flat."""
        self.model.zero_grad(set_to_none=True)
        passes(*self.batch)
        found = [weight.grad.flatten().double() for weight in self.model.parameters() if weight.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return torch.cat(found)

    def update(self) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
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
        asked = [e for e in profiler.events() or [] if e.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch"))]
        found = {"launches": len(kernels), "kernels_ms": sum(e.time_range.elapsed_us() for e in kernels) / 1e3}
        found["asked_by_host"] = len(asked)
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
        if self.captures:
            self.passes = self.handle.captured(self.autocast_loss)
        for _ in range(6 + 4 * self.captures):
            self.step()
        assert self.handle.decision.active


def gate(config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine) -> dict[str, float]:
    """Relative L2 errors of all gradients against float32: eager and dense, compiled and sparse at budget 1.0."""

    exact = Job(config, size, device, Engine("", False, dense="reference"))
    exact.loss(*exact.batch).backward()
    grads = [weight.grad.flatten().double() for weight in exact.model.parameters() if weight.grad is not None]
    reference = torch.cat(grads)
    plain = Job(config, size, device, Engine("", False))
    dense = plain.gradients(plain.eager)
    job = Job(config, size, device, engine)
    job.optimizer.param_groups[0]["lr"] = 0.0  # the steps that lead to sparse training leave the weights alone
    job.sparsify(engine, teach_every=NEVER, often=NEVER, budget=1.0)
    assert job.handle is not None
    before = job.handle.policy.computed["sparse"]
    found = {"dense": dense, "sparse": job.gradients(job.passes)}
    if job.handle.policy.computed["sparse"] - before != config.depth:
        raise GateError("not every layer ran the sparse kernel")
    errors = {name: float((x - reference).norm() / reference.norm()) for name, x in found.items()}
    if not errors["sparse"] <= SLACK * errors["dense"]:
        raise GateError(f"{engine.name}: errors of gradients against float32: {errors}")
    return errors | (follows(job) if engine.captured and device == "cuda" else {})


def follows(job: Job) -> dict[str, float]:
    """Replays give what launches give, to the rounding of sums, and still do once budgets, predictors, weights and the
    clip have changed, which changes much. Relative L2 differences of all gradients."""
    assert job.handle is not None
    assert isinstance(job.passes, Captured)
    policy, replays = job.handle.policy, job.passes.replays
    far = job.gradients(job.passes)
    with torch.no_grad():
        job.video, job.sigma = job.video.flip(2).clone(), job.sigma + 0.2
        torch._foreach_mul_(list(job.model.parameters()), 1.01)
        for learner in policy.learners:
            learner._weights = torch.randn_like(learner._weights)
    for length in [None, *policy.by_class]:
        for index in range(len(policy.learners)):
            policy.assign(index, [0.125] * policy.heads, [-0.5] * policy.heads, True, length)
    policy.freeze()
    replayed, launched = job.gradients(job.passes), job.gradients(job.eager)
    for learner in policy.learners:  # other tiles by other predictors, and these alone
        learner._weights = torch.randn_like(learner._weights)
    policy.freeze()
    others, others_launched = job.gradients(job.passes), job.gradients(job.eager)
    found = {
        "captured": float((replayed - launched).norm() / launched.norm()),
        "captured, other tiles": float((others - others_launched).norm() / launched.norm()),
        "changed": float((replayed - far).norm() / far.norm()),
        "changed tiles": float((others - replayed).norm() / replayed.norm()),
    }
    if job.passes.replays - replays != 3 or job.passes.captures != 1:
        raise GateError(f"{job.passes.captures} graphs, replayed {job.passes.replays - replays} times, not 3")
    worst = max(found["captured"], found["captured, other tiles"])
    if not worst <= SAME or not min(found["changed"], found["changed tiles"]) > 10 * max(worst, 1e-6):
        raise GateError(f"replays do not follow: {found}")
    return found


def row(config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine) -> dict[str, Any]:
    """Of a dense or a sparse engine, and the memory it takes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = (sparse_row if engine.tile else dense_row)(config, size, device, engine)
    return found | ({"reserved_gib": torch.cuda.max_memory_reserved() / 2**30} if device == "cuda" else {})


def dense_row(config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine) -> dict[str, Any]:
    job = Job(config, size, device, engine)
    for _ in range(1 + 4 * engine.captured):
        job.step()
    return {"engine": engine.name, "ms": job.timed(), **job.counts()}


def sparse_row(config: DiTConfig, size: tuple[int, int, int], device: str, engine: Engine) -> dict[str, Any]:
    """A step without a lesson, and what one costs."""
    job = Job(config, size, device, engine)
    job.sparsify(engine, teach_every=NEVER, often=NEVER)
    assert job.handle is not None
    with counted(job.handle) as kept:  # of launched kernels: replays call nothing
        job.eager(*job.batch)
    job.model.zero_grad(set_to_none=True)
    tiles = -(-job.tokens // engine.tile)
    wanted = max(1, round(BUDGET * tiles)) / tiles
    if any(abs(found - wanted) > 0.5 / tiles for found in kept.values()) or len(kept) != config.depth:
        raise GateError(f"{engine.name}: kept {kept}, not {wanted:.4f} of the tiles")
    found = {"engine": engine.name, "kept": wanted, "ms": job.timed(), **job.counts()}
    job.handle.remove()
    job.sparsify(engine, teach_every=1, often=NEVER)
    found["with_lesson_ms"], counts = job.timed(), job.counts()
    return found | {f"with_lesson_{name}": value for name, value in counts.items()}


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
    if device == "cuda":
        dense.append(Engine("dense, compiled, captured", True, captured=True))
        sparse.append(Engine("sparse, compiled, captured, tiles of 64", True, 64, captured=True))
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
    usual = [engine for engine in (*reversed(sparse), *reversed(dense)) if engine.compiled]
    for engine in usual:  # what matters most comes first, should time run out
        add("sparse" if engine.tile else "dense", row(config, CLIPS[name], device, engine))
    for engine in usual:
        if engine.tile:
            add("average", average_row(config, CLIPS[name], device, engine))
    for engine in (*sparse, *dense):
        if not engine.compiled:
            add("sparse" if engine.tile else "dense", row(config, CLIPS[name], device, engine))


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
