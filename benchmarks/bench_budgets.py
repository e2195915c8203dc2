"""Do budgets head by head earn their place? Against one budget for all heads, at equal totals, on trained models.

    python benchmarks/bench_budgets.py [--models demo wan] [--seeds 3] [--out FILE]   # the Wan's footage needs ale-py

CPU, 10 minutes of one thread. Frozen models: the demo's checkpoint on the clips that its packages bring, and the small
Wan on Atari games. For each seed four clips with noise of their own, one a noise level, give profiles and gradients, as
in training; from them each rule makes the budgets of a given mean:

    uniform        every head of every layer keeps the same share
    one error      every head the smallest budget within one level of output error
    weighed error  the same, errors weighed by what the gradient says of the head (sparsity/influence.py)

Then the gap of the loss (`pairs.gap`, dense against sparse) is taken on four other clips, the same clips and noise for
all rules: nothing is searched on what it is scored on. Octant means at full rank choose the tiles, so that no
predictor's learning is in the way; the constants of the periphery are every head's best for all three rules. `at
tolerance`: the mean budget at which a rule's gap is the tolerance, between two that were measured. With all tiles kept
the loss must be dense's.

Shapes: L layers, H heads.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foveate.data import Clips, package_clips
from foveate.models import adapters
from foveate.sparsity.budgets import at_budget, by_error
from foveate.sparsity.influence import Influence
from foveate.sparsity.pairs import Pair, gap
from foveate.sparsity.policy import Sparse
from foveate.sparsity.profile import SparsityProfile

KEPT = (0.1, 0.2, 0.4)  # mean budgets
TOLERANCE = {"demo": 0.02, "wan": 0.4}  # gaps that lie between those of these budgets
CLIPS = 4  # to measure on, and as many to score on
LOWEST, HIGHEST = 1e-5, 10.0  # error levels
Rule = Callable[[float], tuple[Tensor, Tensor]]  # of a level: budgets and constants (L, H)


@dataclass(frozen=True)
class Sample:
    """A call of the model, and what it should return."""

    arguments: tuple[Tensor, ...]
    target: Tensor


class Frozen:
    """A trained model under a sparse policy."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.dense: dict[int, Tensor] = {}  # outputs of dense attention, by sample
        self.installed = adapters.install(model, None)  # type: ignore[arg-type]
        layers = len(self.installed.layers)
        self.policy = Sparse(layers, self.installed.heads, self.installed.dim, budget=1.0)
        self.installed.policy = self.policy

    def output(self, sample: Sample) -> Tensor:
        found = self.model(*sample.arguments)
        return found if isinstance(found, Tensor) else found[0]

    def forget(self) -> None:
        """Nothing of one seed's clips serves the next."""
        self.dense, self.policy.influence = {}, Influence(len(self.policy.learners), self.policy.heads)

    def fit(self, samples: list[Sample]) -> tuple[SparsityProfile, Tensor]:
        """Profile, and influence (L, H)."""
        profile = SparsityProfile.empty(len(self.policy.learners))
        self.policy.mode, self.policy.weighs = "dense", True
        for step, sample in enumerate(samples):
            self.policy.step = step
            with self.policy.profiling() as found:
                loss = (self.output(sample) - sample.target).square().mean()
            loss.backward()
            self.policy.influence.take()
            for index, heads in found.items():
                profile = profile.updated(index, heads, step, decay=1 - 1 / (step + 1))
        self.policy.weighs = False
        self.model.zero_grad()
        assert self.policy.influence.mean is not None
        return profile, self.policy.influence.mean

    @torch.no_grad()
    def gap(self, samples: list[Sample], budgets: Tensor, constants: Tensor) -> tuple[float, float]:
        """The gap, and the relative increase of the loss alone."""
        for index, row in enumerate(zip(budgets.tolist(), constants.tolist(), strict=True)):
            self.policy.assign(index, *row, sparse=True)
        pairs = []
        for sample in samples:
            outputs = []
            for mode in ("dense", "sparse"):
                if mode == "dense" and id(sample) in self.dense:
                    outputs.append(self.dense[id(sample)])
                    continue
                with self.policy.using(mode):
                    outputs.append(self.output(sample))
                if mode == "dense":
                    self.dense[id(sample)] = outputs[-1]
            dense, sparse = outputs
            losses = [float((out - sample.target).square().mean()) for out in outputs]
            pairs.append(Pair(losses[0], losses[1], float((sparse - dense).square().mean())))
        return gap(pairs), gap(pairs, weight=0.0)


def of_mean(rule: Rule, kept: float) -> tuple[Tensor, Tensor]:
    """Budgets and constants at the error level whose budgets have this mean."""
    low, high = LOWEST, HIGHEST
    for _ in range(40):
        level = math.sqrt(low * high)
        low, high = (level, high) if rule(level)[0].mean() > kept else (low, level)
    return rule(high)


def compare(frozen: Frozen, samples: Iterator[Sample], name: str, seed: int) -> list[dict[str, Any]]:
    fitted, scored = ([next(samples) for _ in range(CLIPS)] for _ in range(2))
    profile, influence = frozen.fit(fitted)
    whole = torch.ones_like(influence)
    if (exact := abs(frozen.gap(scored[:1], whole, torch.zeros_like(whole))[0])) > 1e-5:
        raise RuntimeError(f"with all tiles kept the gap is {exact:.1e}")
    rules: dict[str, Callable[[float], tuple[Tensor, Tensor]]] = {
        "uniform": lambda kept: at_budget(profile, kept, "auto"),
        "one error": lambda kept: of_mean(lambda level: by_error(profile, level, "auto"), kept),
        "weighed error": lambda kept: of_mean(lambda level: by_error(profile, level, "auto", influence), kept),
    }
    rows = []
    for kept in KEPT:
        for rule, make in rules.items():
            budgets, constants = make(kept)
            found, loss = frozen.gap(scored, budgets, constants)
            row = {"model": name, "seed": seed, "rule": rule, "kept": round(float(budgets.mean()), 4)}
            rows.append({**row, "asked": kept, "gap": found, "loss": loss})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def at_tolerance(rows: list[dict[str, Any]], tolerance: float) -> float:
    """The mean budget at which one rule's gap on one seed is the tolerance; gaps fall as powers of the budget."""
    curve = sorted((row["kept"], row["gap"]) for row in rows)
    for (less, above), (more, below) in itertools.pairwise(curve):
        if above > tolerance >= below:
            way = math.log(above / tolerance) / math.log(above / below)
            return less * (more / less) ** way
    return math.nan


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model and rule: gaps over uniform's at equal budgets, and budgets at equal gaps; mean and every seed."""
    found = []
    for name, rule in dict.fromkeys((row["model"], row["rule"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["rule"]) == (name, rule)]
        seeds = sorted({row["seed"] for row in mine})
        base = {
            (row["seed"], row["asked"]): row["gap"] for row in rows if (row["model"], row["rule"]) == (name, "uniform")
        }
        ratios = {kept: [row["gap"] / base[row["seed"], kept] for row in mine if row["asked"] == kept] for kept in KEPT}
        budgets = [at_tolerance([row for row in mine if row["seed"] == seed], TOLERANCE[name]) for seed in seeds]
        found.append({"model": name, "rule": rule, "gap_over_uniform": ratios, "kept_at_tolerance": budgets})
    return found


def demo_samples(seed: int) -> Iterator[Sample]:
    config = recipe()
    clips = Clips(
        config.data, frames=config.frames, height=config.height, width=config.width, split="train",
        val_fraction=config.val_fraction, exclude=config.exclude, stride=config.stride, zoom=config.zoom,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    for step in range(100):
        video = clips.batch(step, 1, 1000 + seed).video
        noise = torch.randn(video.shape, generator=draw)
        sigma = torch.full((1,), ((step % 4) + 0.5) / 4)
        yield Sample(((1 - sigma) * video + sigma * noise, sigma), noise - video)


def recipe() -> Any:
    from foveate.training import recipes

    return recipes.demo(package_clips(), Path("unused"))


def demo() -> tuple[nn.Module, Callable[[int], Iterator[Sample]]]:
    from foveate.models.dit import DiTConfig, VideoDiT
    from foveate.training import checkpoint

    weights, about = checkpoint.load_weights(recipe().start_from)
    model = VideoDiT(DiTConfig.from_dict(about["model"]))
    model.load_state_dict(weights)
    return model, demo_samples


def wan() -> tuple[nn.Module, Callable[[int], Iterator[Sample]]]:
    import pretrain_wan
    import tiny_wan

    model = tiny_wan.load().requires_grad_(True)
    frames = torch.stack([torch.from_numpy(pretrain_wan.play(game, 120, 99)) for game in tiny_wan.GAMES])

    def samples(seed: int) -> Iterator[Sample]:
        draw = torch.Generator().manual_seed(seed)
        for step in range(100):
            game = torch.randint(len(tiny_wan.GAMES), (1,), generator=draw)
            start = torch.randint(frames.shape[1] - tiny_wan.FRAMES, (1,), generator=draw)
            video = tiny_wan.to_latents(pretrain_wan.clips(frames, game, start, tiny_wan.FRAMES))
            noise = torch.randn(video.shape, generator=draw)
            sigma = torch.full((1,), ((step % 4) + 0.5) / 4)
            text = tiny_wan.prompt_embeds([tiny_wan.GAMES[int(game)]])
            yield Sample(((1 - sigma) * video + sigma * noise, 1000 * sigma, text), noise - video)

    return model, samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("demo", "wan"), default=["demo", "wan"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        model, samples = {"demo": demo, "wan": wan}[name]()
        frozen = Frozen(model)
        for seed in range(options.seeds):
            rows += compare(frozen, samples(seed), name, seed)
            frozen.forget()
    report = {"month": time.strftime("%Y-%m"), "tolerance": TOLERANCE, "summary": summary(rows), "rows": rows}
    print(json.dumps(report["summary"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
