"""The demo's runs: train a small video DiT dense, turn it sparse, judge it, generate with it.

Three runs from one seed. All share stage 1, which is dense, so the twins continue from the sparse run's checkpoint at
the switch: bit for bit what training them from the first step would give.

    sparse    the predictor chooses the tiles
    dense     the twin it is judged by
    random    as many tiles, chosen at random: it must fail the check that the sparse run must pass
"""

import shutil
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from foveate.sample import generate
from foveate.training.flow import fixed_batches, stream
from foveate.training.loop import Trainer, open_clips
from foveate.training.progress import watch
from foveate.training.recipes import TrainConfig

TOLERANCE = 0.01  # of the dense twin's validation loss
SPEEDUP = 1.5
STAGE_2_STEPS = 60
TURNS = 9  # further steps that sparse and dense take in turns, for their times


@dataclass(frozen=True)
class Run:
    """A finished run: its name, history, final trainer, and its validation loss in the mode it was trained in.

    seconds: of further steps, taken in turns with another run's.
    """

    name: str
    trainer: Trainer
    history: list[dict]
    validation: float = float("nan")
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Check:
    """A promise of the demo, whether this run kept it, and the numbers."""

    name: str
    passed: bool
    detail: str


def train_three(config: TrainConfig, console: Console) -> list[Run]:
    """The sparse run, and, if the switch came, its dense twin and its random control."""
    sparse = train(replace(config, out=config.out / "sparse"), "sparse", console)
    switch = switch_step(sparse.history)
    if switch is None:
        return [sparse]
    runs = [sparse]
    for name, change in (("dense", {"sparse": False}), ("random", {"control": True})):
        # Twins decide nothing, so they are measured less often.
        twin = replace(config, out=config.out / name, check_every=2 * config.check_every, **change)
        fork(sparse.trainer.config.out, twin.out, switch)
        runs.append(train(twin, name, console, resume=switch))
    return runs


def switch_step(history: list[dict]) -> int | None:
    """The step after which stage 2 began, None if it never did."""
    return next((row["step"] for row in history if row.get("switched")), None)


def fork(source: Path, target: Path, step: int) -> None:
    """Start a run from another's checkpoint at its switch, and its history."""
    shutil.rmtree(target, ignore_errors=True)
    name = f"step-{step:06d}"
    shutil.copytree(source / "switch" / name, target / "checkpoints" / name)
    shutil.copy(source / "history.jsonl", target)


def train(config: TrainConfig, name: str, console: Console, resume: int | None = None) -> Run:
    with watch(console, f"{name:6}", config.steps) as show:
        trainer = Trainer(config, on_step=show)
        if resume is not None:
            trainer.resume(resume)
        history = trainer.fit()
    if trainer.interrupted:
        raise KeyboardInterrupt
    return Run(name, trainer, history)


def judge(runs: list[Run], clips: int) -> list[Run]:
    """Validation losses after training: `clips` held-out windows, four noise levels each, noise paired over runs."""
    batches = fixed_batches(open_clips(runs[0].trainer.config, "val"), clips)
    return [replace(run, validation=run.trainer.validate(run.name, batches)) for run in runs]


def take_turns(runs: list[Run], steps: int = TURNS) -> list[Run]:
    """Time sparse and dense steps, one after the other on the same batches, so that other load hits both alike.

    They are steps like all others and change the models, so this comes last.
    """
    sparse, dense, random = runs
    first, times = sparse.trainer.step, []
    for batch in sparse.trainer.batches.loader(range(first, first + steps), 0):
        times.append([run.trainer.train_step(batch.to(run.trainer.device))["seconds"] for run in (sparse, dense)])
    fast, slow = zip(*times, strict=True)
    return [replace(sparse, seconds=fast), replace(dense, seconds=slow), random]


def times_faster(runs: list[Run]) -> float:
    """Median over the turns of a dense step's time over a sparse one's."""
    sparse, dense, _ = runs
    return statistics.median(slow / fast for fast, slow in zip(sparse.seconds, dense.seconds, strict=True))


def checks(runs: list[Run]) -> list[Check]:
    """Every promise, measured. The last one is the control: without it the loss check would prove nothing."""
    sparse = runs[0]
    switch, steps = switch_step(sparse.history), sparse.history[-1]["step"]
    if switch is None:
        gaps = [f"{100 * row['gap']:+.2f} % at step {row['step']}" for row in sparse.history if "gap" in row]
        allowed = f"{100 * sparse.trainer.config.gap:.1f} %"
        detail = f"sparse attention's loss never came within {allowed} of dense: {', '.join(gaps) or 'never measured'}"
        return [Check("stage 2 begins", False, detail)]
    _, dense, random = runs
    ratio, medians = times_faster(runs), [statistics.median(run.seconds) for run in (dense, sparse)]
    gap, control = sparse.validation / dense.validation - 1, random.validation / dense.validation - 1
    shape, computed = sparse.trainer.config.model, sparse.trainer.policy.computed["sparse"]
    layers = shape.depth - len(sparse.trainer.config.dense_layers)
    tokens = shape.grid(*sparse.trainer.validation[0].clips.shape[2:]).tokens
    return [
        Check(
            "stage 2 is the larger part",
            steps - switch >= max(STAGE_2_STEPS, steps / 2) and computed >= (steps - switch) * layers,
            f"{steps - switch} of {steps} steps, {tokens:,} tokens; {layers} of {shape.depth} layers, {computed} calls",
        ),
        Check(
            f"sparse steps are ≥ {SPEEDUP}× faster",
            ratio >= SPEEDUP,
            f"{ratio:.2f}×: {medians[0]:.2f} s dense, {medians[1]:.2f} s sparse, in turns (medians)",
        ),
        Check(
            "the loss is kept within 1 %",
            gap <= TOLERANCE,
            f"{100 * gap:+.2f} %: validation loss {sparse.validation:.5f}, dense twin {dense.validation:.5f}",
        ),
        Check(
            "random tiles fail that check",
            control > TOLERANCE,
            f"{100 * control:+.2f} %: validation loss {random.validation:.5f} at the same budget",
        ),
    ]


@dataclass(frozen=True)
class Generated:
    """A clip (C, F, Y, X) in -1 ... 1, and the seconds it took."""

    video: Tensor
    seconds: float


def generate_clips(runs: list[Run], steps: int, seed: int = 0) -> dict[str, Generated]:
    """From the same noise: the sparse run's model with sparse and with dense attention, and the dense twin."""
    sparse, dense = runs[0].trainer, runs[1].trainer
    noise = torch.randn(sparse.validation[0].clips.shape, generator=stream(seed, 7))
    jobs = {"sparse": (sparse, "sparse"), "exact": (sparse, "dense"), "dense twin": (dense, "dense")}
    clips = {}
    for name, (trainer, mode) in jobs.items():
        began = time.perf_counter()
        with trainer.policy.using(mode):
            video = generate(trainer.model, noise, steps=steps)
        clips[name] = Generated(video[0], time.perf_counter() - began)
    return clips
