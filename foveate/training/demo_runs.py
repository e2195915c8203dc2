"""The demo's runs: a small video DiT that sparsify turns sparse, and two twins that it is judged by.

Three runs from one seed. Before the first sparse step all are the same, so the twins continue from the sparse run's
checkpoint there: bit for bit what training them from the first step would give.

    sparse    sparsify decides what every head keeps, and learned predictors choose the tiles
    dense     the twin it is judged by
    random    as many tiles, head by head and step by step, chosen at random: it must fail the check on the loss

Shapes: B batch, S tokens, H heads, D head dim.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from foveate.attention import Dense, Layer, Policy, attend
from foveate.sparsity.select import select, select_random
from foveate.tiles import Selection
from foveate.training import folder
from foveate.training.flow import Batch, fixed_batches, loss, stream
from foveate.training.loop import Trainer, open_clips
from foveate.training.progress import watch
from foveate.training.recipes import TrainConfig
from foveate.training.record import denoised

TOLERANCE = 0.01  # of the dense twin's validation loss
SPEEDUP = 1.8  # at the longest clip, also beside other load
SPARSE_SHARE, KEPT = 0.5, 0.35  # of the steps, at least; of the tiles in them, at most
SIZES = ((64, 64), (96, 84), (128, 128))  # pixels of the clips that steps are timed on: 5, 10, 20 thousand tokens
TURNS = (4, 3, 2)  # at these sizes
MORE_TURNS = 3  # at most, at the longest, where other load may have hit the first ones

Choose = Callable[[Trainer, Layer, Tensor, Tensor, Tensor], Selection]


@dataclass(frozen=True)
class Run:
    """A finished run: its name, trainer, history from the first step on, and validation loss as it was trained."""

    name: str
    trainer: Trainer
    history: list[dict]
    validation: float = float("nan")


@dataclass(frozen=True)
class Timing:
    """Seconds of a training step with sparse and with dense attention, a number a turn, at so many tokens."""

    tokens: int
    sparse: tuple[float, ...]
    dense: tuple[float, ...]

    @property
    def faster(self) -> float:
        """By the shortest times, which other load does not decide."""
        return min(self.dense) / min(self.sparse)


@dataclass(frozen=True)
class Check:
    """A promise of the demo, whether this run kept it, and the numbers."""

    name: str
    passed: bool
    detail: str


class Planned:
    """A policy that keeps what a run's plans say, head by head and step by step, and lets `choose` say which tiles.

    plans: rows of plans.jsonl. The one in force is the last that was made before the trainer's step.
    """

    def __init__(self, trainer: Trainer, plans: Sequence[Mapping[str, Any]], choose: Choose):
        self.trainer, self.plans, self.choose = trainer, plans, choose

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = next((row for row in reversed(self.plans) if row["step"] <= self.trainer.step), None)
        if plan is None or not plan["active"] or min(plan["kept"][layer.index]) == 1:
            return attend(q, k, v).out
        budget = torch.tensor(plan["kept"][layer.index])
        constants = ["drop" if x is None else x for x in plan["constants"][layer.index]]
        with torch.no_grad():
            selection = self.choose(self.trainer, layer, q, k, budget)
        return attend(q, k, v, selection, periphery=constants).out


def random_tiles(trainer: Trainer, layer: Layer, q: Tensor, k: Tensor, budget: Tensor) -> Selection:
    """As many tiles, but any: other ones at every step."""
    draw = stream(trainer.config.seed, trainer.step, layer.index)
    return select_random(layer.grid, q.shape[0], q.shape[2], budget=budget, generator=draw, device=q.device)


def learned_tiles(trainer: Trainer, layer: Layer, q: Tensor, k: Tensor, budget: Tensor) -> Selection:
    """What the run's predictors choose, at any length."""
    assert trainer.handle is not None
    return select(q, k, layer.grid, predictor=trainer.handle.policy.predictor(layer.index), budget=budget)


def plans_of(trainer: Trainer) -> list[dict]:
    return folder.rows(trainer.config.out / folder.PLANS)


def train_three(config: TrainConfig, console: Console) -> list[Run]:
    """The sparse run, and, if it became sparse, its dense twin and its random control."""
    sparse = train(Trainer(replace(config, out=config.out / "sparse")), "sparse", console)
    switch = switch_step(sparse.history)
    if switch is None:
        return [sparse]
    runs = [sparse]
    for name in ("dense", "random"):
        twin = Trainer(replace(config, out=config.out / name, sparse=False))
        twin.load(sparse.trainer.config.out / folder.SWITCH, switch)
        if name == "random":
            twin.model.policy = Planned(twin, plans_of(sparse.trainer), random_tiles)
        run = train(twin, name, console)
        runs.append(replace(run, history=sparse.history[:switch] + run.history))
    return runs


def switch_step(history: list[dict]) -> int | None:
    """The step after which attention became sparse, None if it never did."""
    return next((row["step"] for row in history if row.get("switched")), None)


def train(trainer: Trainer, name: str, console: Console) -> Run:
    with watch(console, f"{name:6}", trainer.config.steps) as show:
        trainer.on_step = show
        history = trainer.fit(overwrite=True)
    if trainer.interrupted:
        raise KeyboardInterrupt
    return Run(name, trainer, history)


def judge(runs: list[Run], clips: int) -> list[Run]:
    """Validation losses after training: `clips` held-out windows, four noise levels each, noise paired over runs."""
    batches = fixed_batches(open_clips(runs[0].trainer.config, "val"), clips)
    return [replace(run, validation=run.trainer.validate(batches)) for run in runs]


def take_turns(run: Run) -> list[Timing]:
    """Time sparse and dense steps of one model in turns, on clips of growing size.

    The plan is the one that training ended with. Both see the same batch, and the rate is 0, so the weights stay.
    """
    trainer = run.trainer
    policies = Planned(trainer, plans_of(trainer), learned_tiles), Dense()
    found = []
    for (height, width), count in zip(SIZES, TURNS, strict=True):
        batch = timed_batch(trainer.config, height, width).to(trainer.device)
        tokens = trainer.config.model.grid(*batch.clips.shape[2:]).tokens
        took = []
        longest = (height, width) == SIZES[-1]
        while len(took) < count or (longest and slow(took) and len(took) < count + MORE_TURNS):
            took.append([step_seconds(trainer, policy, batch) for policy in policies])
        found.append(Timing(tokens, *(tuple(times) for times in zip(*took, strict=True))))
    return found


def slow(took: list[list[float]]) -> bool:
    sparse, dense = (min(times) for times in zip(*took, strict=True))
    return dense < SPEEDUP * sparse


def timed_batch(config: TrainConfig, height: int, width: int) -> Batch:
    """A training clip of this size; a smaller one enlarged where the data has none."""
    try:
        clips = open_clips(replace(config, height=height, width=width, zoom=(1.0,)), "train").fixed(1)[0].video
    except ValueError:
        small = open_clips(config, "train").fixed(1)[0].video.transpose(0, 1)
        clips = torch.nn.functional.interpolate(small, size=(height, width), mode="bilinear").transpose(0, 1)
    noise = torch.randn(clips.shape, generator=stream(height, width))
    return Batch(clips[None], noise[None], torch.tensor([0.5]))


def step_seconds(trainer: Trainer, policy: Policy, batch: Batch) -> float:
    """Seconds of a training step at rate 0 with attention by `policy`."""
    before, trainer.model.policy = trainer.model.policy, policy
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    began = time.perf_counter()
    loss(trainer.model, batch).backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.config.clip)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - began
    trainer.model.policy = before
    return seconds


def checks(runs: list[Run], timings: Sequence[Timing]) -> list[Check]:
    """Every promise, measured. The last one is the control: without it the loss check would prove nothing."""
    sparse = runs[0]
    goal = sparse.trainer.config.sparsity.goal
    if switch_step(sparse.history) is None:
        gaps = [f"{100 * row['gap']:+.2f} % at step {row['step']}" for row in sparse.history if "gap" in row]
        detail = f"sparsify never met its tolerance of {100 * (goal or 0):g} %: {', '.join(gaps) or 'nothing measured'}"
        return [Check("training becomes sparse", False, detail)]
    _, dense, random = runs
    kept = [row["kept"] for row in sparse.history if row["kept"] < 1]
    mean, share = sum(kept) / max(1, len(kept)), len(kept) / len(sparse.history)
    gap, control = sparse.validation / dense.validation - 1, random.validation / dense.validation - 1
    longest = timings[-1]
    return [
        Check(
            "training is sparse for most of its steps",
            share >= SPARSE_SHARE and mean <= KEPT,
            f"{len(kept)} of {len(sparse.history)} steps, {100 * mean:.0f} % of the attention computed in them",
        ),
        Check(
            f"a step on {longest.tokens:,} tokens is ≥ {SPEEDUP}× faster",
            longest.faster >= SPEEDUP,
            f"{longest.faster:.2f}×: {min(longest.dense):.2f} s dense, {min(longest.sparse):.2f} s sparse, the "
            f"shortest of {len(longest.dense)} turns",
        ),
        Check(
            "the loss is kept within 1 %",
            gap <= TOLERANCE,
            f"{100 * gap:+.2f} %: {sparse.validation:.5f} on held-out clips, trained dense {dense.validation:.5f}",
        ),
        Check(
            "tiles chosen at random fail that check",
            control > TOLERANCE,
            f"{100 * control:+.2f} %: {random.validation:.5f} with as many tiles",
        ),
    ]


@dataclass(frozen=True)
class Restored:
    """A held-out clip (C, F, Y, X) in -1 ... 1, with noise, and as each run's model restores it; the noise share."""

    clip: Tensor
    noisy: Tensor
    by: dict[str, Tensor]


def restore(runs: list[Run], steps: int, clip: int = 0) -> Restored:
    """What each run's model, with the attention it was trained with, makes of a noisy held-out clip."""
    batches = runs[0].trainer.validation
    batch = batches[clip * 4 % len(batches)]
    by = {}
    for run in runs:
        noisy, by[run.name] = (x[0] for x in denoised(run.trainer.model, batch.clips, batch.condition, steps=steps))
    return Restored(batch.clips[0], noisy, by)
