"""Do budgets head by head earn their place? Against one budget for all heads, found by the same loop on trained models.

    python benchmarks/bench_budgets.py [--models demo wan] [--seeds 3]      # the Wan's footage needs ale-py; CPU

Frozen models: the demo's checkpoint on the clips that its packages bring, and the small Wan on Atari games. For each
seed three clips with noise of their own give profiles and gradients, as in training; then each rule has one level,
searched by bisection until the gap of the loss (`pairs.gap`, dense against sparse) on four other clips is the
tolerance:

    uniform        every head of every layer keeps the same share
    one error      every head the smallest budget within one level of output error
    weighed error  the same, errors weighed by what the gradient says of the head: what `sparsify` does

Octant means at full rank choose the tiles, so that no predictor's learning is in the way; the constants of the
periphery are every head's best for all three rules. What counts is the mean share kept at the same gap, and the gap on
two clips that no search has seen.

Shapes: L layers, H heads.
"""

import argparse
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
from foveate.sparsity import controller
from foveate.sparsity.pairs import Pair, gap
from foveate.sparsity.policy import Sparse
from foveate.sparsity.profile import SparsityProfile

TOLERANCE, ROUNDS = 0.005, 6
FITTED, SEARCHED, FRESH = 3, 4, 2  # clips
Rule = Callable[[float], tuple[Tensor, Tensor]]


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
    def gap(self, samples: list[Sample], budgets: Tensor, constants: Tensor) -> float:
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
        return gap(pairs)


def search(frozen: Frozen, samples: list[Sample], rule: Rule, low: float, high: float) -> tuple[Tensor, Tensor, float]:
    """Budgets and constants at the level whose gap comes closest to the tolerance, and that gap.

    low, high: levels; the gap is taken to be monotone between them.
    """
    best: tuple[Tensor, Tensor, float] | None = None
    for _ in range(ROUNDS):
        level = math.sqrt(low * high)
        budgets, constants = rule(level)
        found = frozen.gap(samples, budgets, constants)
        if best is None or abs(found - TOLERANCE) < abs(best[2] - TOLERANCE):
            best = budgets, constants, found
        keeps_more = rule(high)[0].mean() > rule(low)[0].mean()
        if (found > TOLERANCE) == bool(keeps_more):
            low = level
        else:
            high = level
    assert best is not None
    return best


def compare(model: nn.Module, samples: Iterator[Sample], name: str, seed: int) -> list[dict[str, Any]]:
    frozen = Frozen(model)
    fitted, searched, fresh = ([next(samples) for _ in range(count)] for count in (FITTED, SEARCHED, FRESH))
    profile, influence = frozen.fit(fitted)
    rules: dict[str, tuple[Rule, float, float]] = {
        "uniform": (lambda level: controller.at_budget(profile, level, "auto"), 0.01, 0.8),
        "one error": (lambda level: controller.by_error(profile, level, "auto"), 0.005, 1.0),
        "weighed error": (lambda level: controller.by_error(profile, level, "auto", influence), 0.005, 1.0),
    }
    rows = []
    for rule, (make, low, high) in rules.items():
        began = time.time()
        budgets, constants, found = search(frozen, searched, make, low, high)
        row = {"model": name, "seed": seed, "rule": rule, "kept": float(budgets.mean()), "gap": found}
        row |= {"fresh_gap": frozen.gap(fresh, budgets, constants), "seconds": time.time() - began}
        rows.append(row)
        print(json.dumps(row), flush=True)
    frozen.installed.remove()
    return rows


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
        for seed in range(options.seeds):
            rows += compare(model, samples(seed), name, seed)
        for rule in dict.fromkeys(row["rule"] for row in rows):
            mine = [row for row in rows if (row["model"], row["rule"]) == (name, rule)]
            mean = {key: sum(row[key] for row in mine) / len(mine) for key in ("kept", "gap", "fresh_gap")}
            print(json.dumps({"model": name, "rule": rule, "mean": mean}), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"month": time.strftime("%Y-%m"), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
