"""Does sparse training lose quality, and does it save time? Many arms from one dense checkpoint, one card, minutes.

    python benchmarks/study_footage.py runs/footage.npz
    python benchmarks/study_training.py runs/footage.npz --out runs/study --seconds 540      # resumes where it stopped
    python benchmarks/study_training.py runs/footage.npz --out runs/study --arms dense "5 %, coarse" --seeds 0 1 2
    python benchmarks/study_training.py runs/footage.npz --out runs/tiny --size tiny --device cpu   # a rehearsal
    python benchmarks/study_results.py runs/study

VideoDiT, 512 wide, 8 layers, 8 heads x 64, pixels, windows of 32 x 128 x 128 (32,768 tokens), two a step. A dense
checkpoint is trained first (short windows, then long ones). Every arm (study_arms.py) goes on from its weights and its
optimiser's moments, sees the same clips, noise and noise levels in the same order, and decays its rate to zero over the
same number of steps. Dense attention is the fastest kernel that is installed, timed first. Blocks are compiled, kernels
warmed up before; from then on all of an arm's steps count, its dense warm-up, search for tile shapes, lessons, checks
and teacher included; validation does not. It is on clips, games and maps never trained on, each at every noise level
with fixed noise, of the EMA weights, by each arm's own attention.

Gates, in the same run: gradients of the checkpoint with all tiles kept, by foveate and by the window, are as exact as
dense ones (against float32); every layer really ran sparse in an arm's last step and kept what it should; the
validation's scatter over other noise is printed. Exits with 1 where a gate is red. One line a finished arm goes to
OUT/runs.jsonl; arms in there of the same checkpoint are not run again.

Shapes: B batch, C channels, F frames, Y height, X width, L layers, H heads.
"""

import argparse
import copy
import hashlib
import itertools
import json
import logging
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import study_peers
import study_results
import torch
from study_arms import ARMS, CURVES, QUEUE, Arm
from study_footage import Footage, load, stream
from study_results import LEVELS
from torch import Tensor

import foveate as fv
from foveate import costs
from foveate.attention import Layer, attend, unavailable
from foveate.models.dit import Block, DiTConfig, VideoDiT
from foveate.sparsity.budgets import smallest_budget
from foveate.sparsity.profile import BUDGETS
from foveate.tiles import CUBE

SLACK = 1.3  # a sparse gradient's error may be so many times that of the worse dense kernel
SCATTER = 0.01  # most that the validation loss may move with other noise
EMA, CLIP = 0.9, 1.0


@dataclass(frozen=True)
class Size:
    """Window and batch of an arm's step, (frames, edge, batch) of the short windows before, steps and rates."""

    model: DiTConfig
    frames: int
    edge: int
    batch: int
    short: tuple[int, int, int]
    steps: int
    warmup: int  # dense steps that an arm of foveate begins with
    points: int  # validations of an arm
    windows: int  # of the validation
    long_steps: int  # of the checkpoint, at the end
    lr: float = 3e-4
    lr_short: float = 5e-4
    force: bool = False
    most: int = 1 << 30  # steps of short windows


SIZES = {
    "full": Size(DiTConfig(width=512, depth=8, heads=8), 32, 128, 2, (32, 64, 8), 130, 14, 4, 14, 70),
    "small": Size(DiTConfig(width=128, depth=4, heads=4), 16, 64, 1, (8, 32, 4), 40, 8, 4, 7, 20, force=True),
    "tiny": Size(DiTConfig(width=64, depth=2, heads=2), 8, 32, 1, (8, 16, 2), 8, 3, 2, 2, 2, force=True, most=4),
}


class GateError(RuntimeError):
    """A result is wrong: nothing is reported of it."""


@dataclass(frozen=True)
class Batch:
    """clips and noise (B, C, F, Y, X), sigma (B,)."""

    clips: Tensor
    noise: Tensor
    sigma: Tensor

    @property
    def noisy(self) -> Tensor:
        level = self.sigma.view(-1, 1, 1, 1, 1)
        return (1 - level) * self.clips + level * self.noise


class Timed:
    """Seconds with the device idle at both ends, added up over `with`s."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, 0.0

    def __enter__(self) -> None:
        self._wait()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds += time.perf_counter() - self._began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Study:
    """What all arms share: footage, validation, checkpoint, teacher."""

    def __init__(self, size: Size, footage: dict[str, Footage], device: torch.device):
        self.size, self.device = size, device
        self.train, self.held_out = footage["train"], footage["held out"]
        self.dense_kernel = fastest_dense(size, device)
        self.weights: dict[str, Tensor] = {}
        self.moments: dict[str, Any] = {}
        self.teacher = VideoDiT(size.model)
        self.about: dict[str, Any] = {}
        self.validation, self.other = (self._validation(seed) for seed in (0, 1))

    def precision(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def model(self, start: str) -> VideoDiT:
        torch.manual_seed(0)
        model = VideoDiT(self.size.model)
        if start == "checkpoint":
            model.load_state_dict(self.weights)
        model.compile_repeated_blocks(self.device.type == "cuda")
        model.policy = Kernel(self.dense_kernel)
        return model.to(self.device)

    def batch(self, step: int, seed: int, window: tuple[int, int, int]) -> Batch:
        frames, edge, count = window
        clips = self.train.batch(step, seed, count, frames, edge).to(self.device)
        draw = stream(seed, step, 2)
        noise = torch.Generator(self.device).manual_seed(int(torch.randint(1 << 60, (), generator=draw)))
        return Batch(
            clips,
            torch.randn(clips.shape, generator=noise, device=self.device),
            torch.randn(count, generator=draw).sigmoid().to(self.device),
        )

    def _validation(self, seed: int) -> list[Batch]:
        """The same windows, spread over all held-out clips, at every level of noise; `seed` is the noise's."""
        size, found = self.size, []
        for place in range(size.windows):
            which = (place + 0.5) / size.windows
            places = torch.rand(3, generator=stream(3, place)).tolist()
            clip = self.held_out.window(which, places, size.frames, size.edge).to(self.device)
            for level in range(LEVELS):
                draw = torch.Generator(self.device).manual_seed(1000 * (seed + 1) + LEVELS * place + level)
                noise = torch.randn(clip.shape, generator=draw, device=self.device)
                found.append((clip, noise, (level + 0.5) / LEVELS))
        rows = [found[i : i + size.batch] for i in range(0, len(found), size.batch)]
        return [
            Batch(torch.stack([r[0] for r in row]), torch.stack([r[1] for r in row]),
                  torch.tensor([r[2] for r in row], device=self.device))
            for row in rows
        ]  # fmt: skip

    @torch.no_grad()
    def losses(self, model: VideoDiT, batches: Sequence[Batch] = ()) -> list[float]:
        """Of each validation pair, with attention as the model's policy has it now. No layer asks for eval()."""
        if isinstance(model.policy, study_peers.Given):
            model.policy.step = 0
        found = []
        with self.precision():
            for batch in batches or self.validation:
                error = model(batch.noisy, batch.sigma).float() - (batch.noise - batch.clips)
                found.append(error.square().mean((1, 2, 3, 4)))
        return torch.cat(found).tolist()

    @torch.no_grad()
    def sparsity(self, model: VideoDiT) -> dict[str, Any]:
        """(L, H): share of the tiles that holds 90 % of the attention mass, and the output error of 10 % kept and
        pooled, both by exact weights, on four validation pairs at middle noise."""
        mass, errors = [], []

        def look(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            draw = torch.Generator(self.device).manual_seed(layer.index)
            found = fv.profile(q, k, v, layer.grid, predictor=None, constants=(0.0,), generator=draw)
            mass.append(1 - found.recall_oracle.cpu())
            errors.append(found.error_oracle[:, 0, BUDGETS.index(0.1)].cpu())
            return attend(q, k, v).out

        policy, model.policy = model.policy, look
        picked = [self.validation[i * len(self.validation) // 4] for i in range(4)]
        with self.precision():
            for batch in (replace(b, sigma=torch.full_like(b.sigma, 0.5)) for b in picked):
                model(batch.noisy, batch.sigma)
        model.policy = policy
        layers, heads = self.size.model.depth, self.size.model.heads
        share = smallest_budget(torch.stack(mass).unflatten(0, (-1, layers)).mean(0), BUDGETS, 0.1)
        error = torch.stack(errors).view(-1, layers, heads).mean(0)
        return {"tiles_of_90_percent": rounded(share), "error_at_10_percent": rounded(error)}


@dataclass(frozen=True)
class Kernel:
    """Dense attention by one backend."""

    backend: str

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, backend=self.backend).out


def rounded(values: Tensor) -> list:
    return [[round(x, 4) for x in row] for row in values.tolist()]


def fastest_dense(size: Size, device: torch.device) -> str:
    """Which dense kernel an arm's own shape runs fastest on, forward and backward; all are printed."""
    tokens = size.model.grid(size.frames, size.edge, size.edge).tokens
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = size.batch, tokens, size.model.heads, size.model.head_dim
    q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(4))
    times = {}
    for backend in ["torch"] + ["fa4"] * (unavailable("fa4", device.type) is None):
        clock, found = Timed(device), [0.0]
        for _ in range(4):
            with clock:
                torch.autograd.grad(attend(q, k, v, backend=backend).out, (q, k, v), dout.detach())
            found.append(clock.seconds)
        times[backend] = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(found[1:]))
    print(json.dumps({"what": "dense attention, one layer, ms", "tokens": tokens, "batch": size.batch, **times}))
    return min(times, key=lambda name: times[name])


class Run:
    """One training: a model, its optimiser, its handle."""

    def __init__(self, study: Study, arm: Arm, seed: int, steps: int, moments: bool = True, lr: float | None = None):
        self.study, self.arm, self.seed, self.steps, self.done = study, arm, seed, steps, 0
        size = study.size
        self.lr, self.window = size.lr if lr is None else lr, (size.frames, size.edge, size.batch)
        self.model, self.handle, extra = study.model(arm.start), None, list[Tensor]()
        tile = costs.here(study.device).tile
        if arm.kind == "foveate":
            given = {"warmup": size.warmup, "learn_from": max(1, size.warmup // 3), "force": size.force}
            self.handle = fv.sparsify(self.model, fv.SparsityConfig(**{**given, **arm.sparsity}), log=self._note)
            if arm.branch:
                extra = list(study_peers.add_branch(self.model, self.handle, arm.branch).parameters())
        elif arm.kind != "dense":
            choose = {"window": study_peers.window, "random": study_peers.random}[arm.kind]
            self.model.policy = study_peers.Given(arm.budget, tile, choose)
        own = list[Tensor](self.model.parameters())
        self.optimizer = torch.optim.AdamW(own, lr=self.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        if moments and arm.start == "checkpoint":
            self.optimizer.load_state_dict(copy.deepcopy(study.moments))
        if extra:
            self.optimizer.add_param_group({"params": extra})
        self.weights = own + extra
        self.ema = [weight.detach().clone() for weight in self.weights]
        self.clock, self.times, self.loss, self.plans = Timed(study.device), list[float](), 0.0, list[dict]()

    def _note(self, name: str, value: float, step: int) -> None:
        """Sparsify has measured: what every head keeps from now on."""
        if name != "foveate/kept" or self.handle is None:
            return
        decision = self.handle.decision
        plan = decision.plan
        if plan is not None:
            kept = [list(r) if on and decision.active else [1.0] * len(r)
                    for r, on in zip(plan.budgets, plan.sparse, strict=True)]  # fmt: skip
            self.plans.append({"step": step, "kept": rounded(torch.tensor(kept)), "reason": decision.reason})

    def step(self) -> None:
        batch = self.study.batch(self.done, self.seed, self.window)
        rate = self.lr * min(1.0, (self.done + 1) / self._rise) * self._fall()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if isinstance(self.model.policy, study_peers.Given):
            self.model.policy.step = self.done + 1
        before = self.clock.seconds
        with self.clock:
            noisy = batch.noisy
            target = self._target(batch, noisy)
            with self.study.precision():
                said = self.model(noisy, batch.sigma)
            value = (said.float() - target).square().mean()
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.weights, CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            torch._foreach_lerp_(self.ema, self.weights, 1 - min(EMA, (1 + self.done) / (10 + self.done)))
            self.loss = value.item()
            if self.handle is not None:
                self.handle.step(loss=value.detach())
        self.done += 1
        self.times.append(self.clock.seconds - before)

    @property
    def _rise(self) -> int:
        return 1 if self.arm.start == "checkpoint" and self.study.moments else max(1, min(60, self.steps // 5))

    def _fall(self) -> float:
        """Down to zero, linearly; not while the checkpoint is made (`Forever`)."""
        return 1 - self.done / self.steps

    def _target(self, batch: Batch, noisy: Tensor) -> Tensor:
        objective = self.arm.objective
        if objective == "flow" or (objective == "distilled 1 in 8" and self.done % 8):
            return batch.noise - batch.clips
        with torch.no_grad(), self.study.precision():
            return self.study.teacher(noisy, batch.sigma).float()

    def validate(self) -> list[float]:
        """Of the EMA weights."""
        held = [weight.detach().clone() for weight in self.weights]
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.ema)
            found = self.study.losses(self.model)
            torch._foreach_copy_(self.weights, held)
        return found

    def watched_step(self) -> list[float]:
        """A step; of each layer the share of tiles that its kernel was given, 1 where it was dense."""
        policy, kept = self.model.policy, [1.0] * self.study.size.model.depth
        if isinstance(policy, study_peers.Given):
            before = policy.computed
            self.step()
            return [policy.kept] * (policy.computed - before)
        if self.handle is None:
            self.step()
            return kept
        sparse: Any = self.handle.policy
        compute = sparse.compute

        def watch(layer: Layer, mode: str, selection: fv.Selection | None, *qkv: Tensor) -> Any:
            if torch.is_grad_enabled() and selection is not None:
                kept[layer.index] = float(selection.density().mean())
            return compute(layer, mode, selection, *qkv)

        sparse.compute = watch
        self.step()
        sparse.compute = compute
        return kept

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()


class Forever(Run):
    """The training of the checkpoint: its rate does not fall."""

    def _fall(self) -> float:
        return 1.0


# The checkpoint


def pretrain(study: Study, seconds: float, file: Path | None) -> None:
    """Dense training: short windows for most of the seconds, then long ones; or what `file` holds of an earlier run."""
    size = study.size
    if file is not None and file.exists():
        saved = torch.load(file, map_location=study.device)
        study.weights, study.moments, study.about = saved["weights"], saved["moments"], saved["about"]
    else:
        dense, until = Arm(name="checkpoint", kind="dense", start="scratch"), time.perf_counter() + seconds
        run = Forever(study, dense, 99, 1000, lr=size.lr_short)
        run.window = size.short
        seen: list[dict] = []
        while time.perf_counter() < until and run.done < size.most:
            run.step()
            if run.done % 100 == 0:
                seen.append({"step": run.done, "loss": run.loss, "seconds": round(run.clock.seconds, 1)})
                print(json.dumps({"what": "checkpoint, short windows", **seen[-1]}), flush=True)
        short, run.window, run.lr = run.done, (size.frames, size.edge, size.batch), size.lr
        for _ in range(size.long_steps):
            run.step()
        study.weights = {name: x.detach().clone() for name, x in run.model.state_dict().items()}
        study.moments = copy.deepcopy(run.optimizer.state_dict())
        study.about = {"short_steps": short, "long_steps": size.long_steps, "seconds": round(run.clock.seconds, 1)}
        study.about |= {"training": seen, "id": identity(study.weights)}
        if file is not None:
            torch.save({"weights": study.weights, "moments": study.moments, "about": study.about}, file)
    study.teacher = study.model("checkpoint")


def identity(weights: dict[str, Tensor]) -> str:
    parts = (x.float().cpu().numpy().tobytes() for x in weights.values())
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:12]


def judge(study: Study) -> None:
    """The checkpoint's validation loss, how far it moves with other noise, and its sparsity."""
    first, second = (study.losses(study.teacher, batches) for batches in (study.validation, study.other))
    loss, other = statistics.mean(first), statistics.mean(second)
    study.about |= {"validation": loss, "scatter": abs(other / loss - 1), "pairs": len(first)}
    study.about |= study.sparsity(study.teacher)
    tiles = torch.tensor(study.about["tiles_of_90_percent"])
    shown = {name: study.about[name] for name in ("id", "validation", "scatter", "pairs", "short_steps")}
    print(json.dumps({"what": "checkpoint", **shown, "tiles_of_90_percent": rounded(tiles.mean(1, keepdim=True))}))
    if study.about["scatter"] > SCATTER:
        print(f"the validation loss moves by {study.about['scatter']:.2%} with other noise: more pairs are wanted")


# Gates


def gate(study: Study) -> dict[str, float]:
    """Relative errors of all gradients against float32, with all tiles kept; blocks' gates are opened for it, so that a
    young model's gradients depend on attention, too."""
    batch = study.batch(0, 7, (study.size.frames, study.size.edge, study.size.batch))

    def gradients(run: Run, exact: bool = False) -> Tensor:
        run.optimizer.zero_grad(set_to_none=True)
        with nullcontext() if exact else study.precision():
            said = run.model(batch.noisy, batch.sigma)
        (said.float() - (batch.noise - batch.clips)).square().mean().backward()
        found = [w.grad.flatten().double() for w in run.model.parameters() if w.grad is not None]
        run.optimizer.zero_grad(set_to_none=True)
        return torch.cat(found)

    def still(arm: Arm) -> Run:
        run = Run(study, arm, seed=7, steps=1000, lr=0.0)
        for block in run.model.blocks:
            assert isinstance(block, Block)
            torch.nn.init.constant_(block.modulation.bias, 0.5)
        return run

    dense = still(ARMS["dense"])
    if study.device.type == "cuda":
        dense.model.compile_repeated_blocks(False)
    dense.model.policy = Kernel("torch")
    reference = gradients(dense, exact=True)
    found, other = {"dense": gradients(still(ARMS["dense"]))}, still(ARMS["dense"])
    other.model.policy = Kernel("torch")
    found["dense, torch"] = gradients(other)
    found["window"] = gradients(still(replace(ARMS["10 %, window"], budget=1.0)))
    soon = {"budget": 1.0, "periphery": "drop", "warmup": 3, "learn_from": 1, "tile_shape": CUBE, "force": True}
    sparse = still(replace(ARMS["10 %, drop"], sparsity=soon))
    for _ in range(4):
        sparse.step()
    assert sparse.handle is not None
    before = sparse.handle.policy.computed["sparse"]
    found["foveate"] = gradients(sparse)
    if sparse.handle.policy.computed["sparse"] - before != study.size.model.depth:
        raise GateError("not every layer ran the sparse kernel")
    sparse.remove()
    errors = {name: float((x - reference).norm() / reference.norm()) for name, x in found.items()}
    worse = max(errors["dense"], errors["dense, torch"], 1e-5)
    if not all(error <= SLACK * worse for error in errors.values()):  # NaN is red, too
        raise GateError(f"errors of gradients against float32: {errors}")
    return errors


def rehearse(study: Study, failed: list[str]) -> None:
    """Every kind of kernel once, thrown away: no arm pays for compiling."""

    def once(arm: Arm) -> None:
        if arm.kind == "foveate":
            arm = replace(arm, sparsity={**arm.sparsity, "warmup": 3, "learn_from": 1, "force": True})
        run = Run(study, arm, 7, 1000, lr=0.0)
        while run.done < 8 and (run.handle is None or run.handle.policy.mode != "sparse"):
            run.step()
        run.step()
        study.losses(run.model, study.validation[:2])
        run.remove()

    for name in ("10 %, weighed pool", "10 %, drop", "10 %, coarse", "10 %, linear", "10 %, random"):
        attempt(f"rehearsal of {name}", partial(once, ARMS[name]), failed)


def attempt(what: str, job: Callable[[], Any], failed: list[str]) -> Any:
    """What a job returns, None where it fails: the others shall not be lost with it, and the exit code tells."""
    try:
        return job()
    except (GateError, RuntimeError, ValueError, AssertionError) as error:
        failed.append(what)
        traceback.print_exc()
        print(json.dumps({"what": f"failed: {what}", "why": str(error)[:300]}), flush=True)
        return None


# Arms


def train(study: Study, arm: Arm, seed: int, steps: int, until: float) -> dict[str, Any] | None:
    """One arm from its start to its end; None where the time is over first."""
    run, curve, kept = Run(study, arm, seed, steps), list[dict](), list[float]()
    count = study.size.points if arm.name in CURVES and not seed else 1
    points = {round(steps * (i + 1) / count) for i in range(count)}
    losses = list[float]()
    while run.done < steps:
        if time.perf_counter() > until:
            run.remove()
            return None
        if run.done == steps - 1:
            kept = run.watched_step()
        else:
            run.step()
        if run.done in points:
            losses = run.validate()
            curve.append({"step": run.done, "seconds": run.clock.seconds, "loss": statistics.mean(losses)})
    row: dict[str, Any] = {"arm": arm.name, "seed": seed, "steps": steps, "seconds": run.clock.seconds}
    row |= {"step_ms": 1e3 * statistics.median(run.times[len(run.times) // 2 :]), "kept": kept}
    row |= {"curve": curve, "loss": statistics.mean(losses), "losses": [round(x, 6) for x in losses]}
    check_kept(study, arm, run, kept)
    if run.handle is not None:
        plan = run.handle.decision.plan
        row |= {"plans": run.plans, "shape": run.handle.search.shape, "calls": dict(run.handle.policy.computed)}
        row["constants"] = None if plan is None else plan.to_dict()["constants"]
    if count > 1:
        row |= study.sparsity(run.model)
    run.remove()
    return row


def check_kept(study: Study, arm: Arm, run: Run, kept: Sequence[float]) -> None:
    """Of the last step, tiles that were really computed."""
    depth = study.size.model.depth
    if len(kept) != depth:
        raise GateError(f"{arm.name}: {len(kept)} layers ran, not {depth}")
    if arm.kind == "dense" or (arm.kind == "foveate" and "budget" not in arm.sparsity):
        return
    tile = costs.here(study.device).tile if run.handle is None else run.handle.policy.kv_tile
    tiles = -(-study.size.model.grid(study.size.frames, study.size.edge, study.size.edge).tokens // tile)
    wanted = max(1, round(arm.budget * tiles)) / tiles
    if any(abs(found - wanted) > 0.51 / tiles for found in kept):
        raise GateError(f"{arm.name}: kept {kept}, not {wanted:.4f} of the tiles")


def steps_of(arm: Arm, rows: Sequence[dict], steps: int) -> int | None:
    """Of an arm that has the time of another; None while that, or its own twin, has not been run."""
    if arm.in_time_of is None:
        return steps
    found = {row["arm"]: row for row in rows if row["seed"] == 0}
    if not set(arm.in_time_of) <= found.keys():
        return None
    longer, twin = (found[name] for name in arm.in_time_of)
    return max(steps // 2, twin["steps"] + int(1e3 * (longer["seconds"] - twin["seconds"]) / twin["step_ms"]))


def go_on(
    study: Study, queue: Sequence[tuple[str, int]], file: Path, until: float, facts: dict[str, Any], failed: list[str]
) -> None:
    rows = [row for row in study_results.read(file) if row["checkpoint"]["id"] == study.about["id"]]
    pace: float = 0.0  # seconds of a sparse arm, everything in it
    for name, seed in queue:
        arm = ARMS[name]
        steps = steps_of(arm, rows, study.size.steps)
        if steps is None or any((row["arm"], row["seed"]) == (name, seed) for row in rows):
            continue
        dear = arm.kind == "dense" or (arm.kind == "foveate" and "budget" not in arm.sparsity)
        slow = (2.8 if dear else 1.8 if "distilled" in name else 1.0) * steps / study.size.steps
        if time.perf_counter() + slow * pace > until:
            continue
        began = time.perf_counter()
        row = attempt(name, partial(train, study, arm, seed, steps, until), failed)
        if row is None:
            continue
        took = time.perf_counter() - began
        pace = max(pace, took / slow) if arm.kind == "foveate" else pace
        rows.append({**row, "took": round(took, 1), "checkpoint": study.about, **facts})
        with file.open("a") as lines:
            lines.write(json.dumps(rows[-1]) + "\n")
        print(study_results.line(rows[-1], rows), flush=True)
        if study.device.type == "cuda":
            torch.cuda.empty_cache()


def main(given: Sequence[str] | None = None) -> int:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("footage", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help="; ".join(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="with --arms")
    parser.add_argument("--steps", type=int, help="of an arm, instead of the size's")
    parser.add_argument("--seconds", type=float, default=1e9, help="of everything; arms that do not fit are left")
    parser.add_argument("--pretrain", type=float, default=100.0, help="seconds of the checkpoint's short windows")
    parser.add_argument("--checkpoint", type=Path, help="taken from here, or put here once made")
    asked = parser.parse_args(given)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("needs an NVIDIA GPU; --device cpu --size tiny is a rehearsal")
        return 2
    logging.basicConfig(format="%(message)s")
    logging.getLogger("foveate").setLevel(logging.INFO)  # what sparsify decides, and which kernels run
    size, device = SIZES[asked.size], torch.device(asked.device)
    size = size if asked.steps is None else replace(size, steps=asked.steps)
    torch._dynamo.config.automatic_dynamic_shapes = False  # short and long windows, each compiled for itself
    torch._dynamo.config.cache_size_limit = 32
    asked.out.mkdir(parents=True, exist_ok=True)
    study = Study(size, load(asked.footage, device), device)
    facts = {"size": asked.size, "card": costs.name_of(device) or "cpu", "torch": torch.__version__}
    facts |= {"month": time.strftime("%Y-%m"), "model": asdict(size.model), "dense_kernel": study.dense_kernel}
    facts |= {"batch": size.batch, "lr": size.lr, "window": [size.frames, size.edge, size.edge]}
    queue = [(name, seed) for seed in asked.seeds for name in asked.arms] if asked.arms else QUEUE

    def stage(what: str, job: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = job()
        print(json.dumps({"what": what, "seconds": round(time.perf_counter() - start, 1), "found": found}), flush=True)
        return found

    failed = list[str]()
    try:
        stage("checkpoint", lambda: pretrain(study, asked.pretrain, asked.checkpoint))
        stage("validation", lambda: judge(study))
        facts["gate"] = stage("gate", lambda: gate(study))
        stage("rehearsal", lambda: rehearse(study, failed))
        go_on(study, queue, asked.out / study_results.FILE, began + asked.seconds, facts, failed)
    except GateError as error:
        print(json.dumps({"what": "red gate", "why": str(error)}))
        return 1
    print(study_results.table(study_results.read(asked.out / study_results.FILE)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
