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
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from foveate.attention import Dense, Layer, Policy, attend
from foveate.sparsity.select import select, select_random
from foveate.tiles import Selection
from foveate.training import folder
from foveate.training.demo_findings import SPEEDUP, Timing, switch_step
from foveate.training.flow import Batch, fixed_batches, loss, stream
from foveate.training.loop import Trainer, open_clips
from foveate.training.progress import watch
from foveate.training.recipes import TrainConfig
from foveate.training.record import denoised

SIZES = ((64, 64), (96, 84), (128, 128))  # pixels of the clips that steps are timed on: 5, 10, 20 thousand tokens
TURNS = (4, 3, 1)  # at these sizes
MORE_TURNS = 3  # at most, at the longest, where other load may have hit the first ones

Choose = Callable[[Trainer, Layer, Tensor, Tensor, Tensor], Selection]


@dataclass(frozen=True)
class Run:
    """A finished run: its name, and its trainer after the last step."""

    name: str
    trainer: Trainer


class Planned:
    """A policy that keeps what a run's plans say, head by head and step by step, and lets `choose` say which tiles.

    plans: rows of plans.jsonl. The one in force is the last that was made before the trainer's step.
    """

    def __init__(self, trainer: Trainer, plans: Sequence[Mapping[str, Any]], choose: Choose):
        self.trainer, self.plans, self.choose = trainer, plans, choose

    def plan(self, step: int) -> Mapping[str, Any] | None:
        return next((row for row in reversed(self.plans) if row["step"] <= step), None)

    def kept(self, step: int) -> float:
        """Share of the attention that is computed in a step."""
        plan = self.plan(step)
        return 1.0 if plan is None or not plan["active"] else fmean(map(fmean, plan["kept"]))

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = self.plan(self.trainer.step)
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


def train_three(config: TrainConfig, messages: Console) -> list[Run]:
    """The sparse run, and, if it became sparse, its dense twin and its random control."""
    sparse = train("sparse", Trainer(replace(config, out=config.out / "sparse")), messages)
    home = sparse.trainer.config.out
    switch = switch_step(folder.rows(home / folder.HISTORY))
    runs = [sparse]
    for name in ("dense", "random") if switch is not None else ():
        twin = Trainer(replace(config, out=config.out / name, sparse=False))
        twin.load(home / folder.SWITCH, switch)
        if name == "random":
            twin.model.policy = Planned(twin, plans_of(sparse.trainer), random_tiles)
        runs.append(train(name, twin, messages))
    return runs


def train(name: str, trainer: Trainer, messages: Console) -> Run:
    with watch(messages, f"{name:6}", trainer.config.steps) as show:
        policy = trainer.model.policy  # the random control's own handle is idle, and would call its steps dense
        control = policy if isinstance(policy, Planned) else None
        trainer.on_step = show if control is None else lambda row: show(row | {"kept": control.kept(row["step"] - 1)})
        trainer.fit(overwrite=True)
    if trainer.interrupted:
        raise KeyboardInterrupt
    return Run(name, trainer)


def judge(runs: Sequence[Run], clips: int) -> tuple[list[float], dict[str, list[float]]]:
    """Losses after training of held-out pairs of clip and noise, the same for all runs: their noise levels, and losses
    by run. `clips` held-out windows, four noise levels each."""
    pairs = fixed_batches(open_clips(runs[0].trainer.config, "val"), clips)
    losses = {run.name: [run.trainer.validate([pair]) for pair in pairs] for run in runs}
    return [pair.sigma.item() for pair in pairs], losses


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


def restore(runs: Sequence[Run], steps: int) -> dict[str, Tensor]:
    """A held-out clip (C, F, Y, X) in -1 ... 1 as "clip", with noise as "noisy", and what each run's model makes of it,
    with the attention that it was trained with."""
    batch = runs[0].trainer.validation[0]
    found = {"clip": batch.clips[0]}
    for run in runs:
        noisy, restored = denoised(run.trainer.model, batch.clips, batch.condition, steps=steps)
        found |= {"noisy": noisy[0], run.name: restored[0]}
    return found
