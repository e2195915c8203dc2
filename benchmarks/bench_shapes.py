"""Tile shapes and constants of the periphery, found as `sparsify` finds them, against cubes that are pooled.

    python benchmarks/bench_shapes.py --part layer --data FOLDER    # q, k, v of a trained layer: output errors
    python benchmarks/bench_shapes.py --part demo                   # foveate demo's checkpoint: paired losses
    python benchmarks/bench_shapes.py --part pans                   # the same after training on pans and zooms
    python benchmarks/bench_shapes.py --part wan                    # tests/assets/wan_tiny.safetensors; needs ale-py

CPU, minutes each; `--out DIR` writes shapes_<part>_cpu_<yyyymm>.json. Nothing is fitted on what it is scored on: shape
and constants come from one denoising step and are scored on the other (layer), or from training clips and scored on
held-out ones (models). Tiles are chosen by octant means at full rank everywhere, so that no predictor's training is
part of the comparison. Losses are paired: the same clips, noise and noise levels, dense and sparse, and a model that
was never trained with sparse attention. For `pans` it is first trained further, dense, on moving cameras over stills of
the training clips. Every run checks that with all tiles kept the loss is the dense one. The last line is JSON.

Shapes: B batch, S tokens, L layers, H heads, D head dim, P constants.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from foveate.attention import Layer, attend
from foveate.models import adapters
from foveate.sparsity.profile import CONSTANTS, POOL, measure
from foveate.sparsity.select import select
from foveate.sparsity.shapes import LOOKS, Look, Search, Shape, name
from foveate.sparsity.sight import Sight
from foveate.tiles import CUBE, VideoGrid

BUDGET = 0.1
TRAINED, RATE = 60, 1e-4  # steps on moving cameras
GRID = VideoGrid(16, 26, 20)  # of real_qkv.safetensors
Forward = Callable[[Any], tuple[float, Tensor]]  # of a batch: the loss and the output


class Seen:
    """A dense policy that shows q, k, v of every call to `look`."""

    def __init__(self, look: Callable[[Layer, Sight], None]):
        self.look = look

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.look(layer, Sight(q, k, v))
        return attend(q, k, v).out


@dataclass
class Kept:
    """A sparse policy of one budget: constants (L, H) of the periphery."""

    budget: float
    constants: Tensor

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = select(q, k, layer.grid, budget=self.budget)
        return attend(q, k, v, kept, periphery=self.constants[layer.index].float()).out


def search(installed: adapters.Installed, forward: Forward, batches: Sequence[Any]) -> Search:
    """The search that a training run makes in its first steps, on these batches."""
    found, layers, heads = Search(), len(installed.layers), installed.heads
    for step in range(LOOKS):
        look = Look(found.shapes, BUDGET, CONSTANTS, found.rows(layers))
        seen: dict[int, Tensor] = {}
        installed.policy = Seen(lambda layer, sight, look=look, seen=seen, step=step: seen.update({
            layer.index: look.at(sight, layer.grid, torch.Generator().manual_seed(100 * step + layer.index))
        }))  # fmt: skip
        forward(batches[step % len(batches)])
        found = found.take(
            torch.stack([seen[index] for index in range(layers)]), torch.ones(layers, heads), step + 1, 100
        )
    return found


def constants_of(installed: adapters.Installed, forward: Forward, batches: Sequence[Any], budget: float) -> Tensor:
    """(L, H): each head's best constant at a budget, on these batches, in tiles of the shape that is installed."""
    total: dict[int, Tensor] = {}

    def look(layer: Layer, sight: Sight) -> None:
        draw = torch.Generator().manual_seed(len(total) + layer.index)
        errors = measure(sight, layer.grid, None, budgets=(budget,), rows=4, generator=draw).error_predicted[..., 0]
        total[layer.index] = total.get(layer.index, 0) + errors

    installed.policy = Seen(look)
    for batch in batches:
        forward(batch)
    return torch.tensor(CONSTANTS)[torch.stack([total[index] for index in sorted(total)]).argmin(-1)]


def paired(model: nn.Module, forward: Forward, fit: Sequence[Any], scored: Sequence[Any]) -> dict[str, Any]:
    """Gaps of today's cubes and of the shape and constants that are found, at equal budget and at half of it."""
    with adapters.install(model, Seen(lambda *_: None)) as installed, torch.no_grad():
        found = search(installed, forward, fit)
        print(found.said, flush=True)
        settings: dict[str, tuple[Shape, float, Tensor]] = {}
        pooled = torch.full((len(installed.layers), installed.heads), POOL)
        for shape in dict.fromkeys((CUBE, found.shape)):
            installed.tile_shape = shape
            for budget in (BUDGET, BUDGET / 2):
                settings[f"{name(shape)}, pooled, {budget:.0%}"] = shape, budget, pooled
                fitted = constants_of(installed, forward, fit, budget)
                settings[f"{name(shape)}, constants, {budget:.0%}"] = shape, budget, fitted
        installed.policy = Seen(lambda *_: None)
        dense = [forward(batch) for batch in scored]
        rows = []
        for what, (shape, budget, constants) in settings.items():
            installed.tile_shape, installed.policy = shape, Kept(budget, constants)
            sparse = [forward(batch) for batch in scored]
            row = {"what": what, **gaps(dense, sparse)}
            rows.append(row)
            print(f"{what}: loss {row['loss']:+.3%}, shift {row['shift']:.3%}", flush=True)
        installed.policy = Kept(1.0, pooled)
        exact = abs(forward(scored[0])[0] / dense[0][0] - 1)
        if exact > 1e-4:
            raise RuntimeError(f"with all tiles kept the loss differs by {exact:.1e}")
    return {"search": found.said, "shape": found.shape, "batches": len(scored), "rows": rows, "all_kept": exact}


def gaps(dense: Sequence[tuple[float, Tensor]], sparse: Sequence[tuple[float, Tensor]]) -> dict[str, float]:
    """Relative increase of the mean loss, and the mean square of the outputs' difference over the loss (`Pair`)."""
    base = sum(loss for loss, _ in dense)
    shift = sum(float((a - b).square().mean()) for (_, a), (_, b) in zip(dense, sparse, strict=True))
    return {"loss": sum(loss for loss, _ in sparse) / base - 1, "shift": shift / base}


def layer(folder: Path) -> dict[str, Any]:
    """Output errors of the trained layer's heads: shape and constants of one denoising step, scored on the other."""
    data = load_file(folder / "real_qkv.safetensors")
    steps = {step: [data[f"{step}.{part}"] for part in "qkv"] for step in ("step0", "step1")}
    rows = []
    for fitted, scored in (("step0", "step1"), ("step1", "step0")):
        q, k, v = (x[:, GRID.order()] for x in steps[fitted])
        found = Search()
        for step in range(LOOKS):
            look = Look(found.shapes, BUDGET, CONSTANTS, found.rows(1))
            seen = look.at(Sight(q, k, v), GRID, torch.Generator().manual_seed(step))
            found = found.take(seen.unsqueeze(0), torch.ones(1, q.shape[2]), step + 1, 100)
        print(f"{fitted}: {found.said}", flush=True)
        constants = errors(steps[fitted], found.shape, BUDGET, seed=1).argmin(-1, keepdim=True)
        for shape, budget in ((CUBE, BUDGET), (found.shape, BUDGET), (found.shape, BUDGET / 2)):
            table = errors(steps[scored], shape, budget, seed=2)
            row = {
                "scored": scored,
                "shape": shape,
                "budget": budget,
                "pooled": table[:, CONSTANTS.index(POOL)].tolist(),
            }
            rows.append(row | {"constants": table.gather(1, constants).squeeze(1).tolist()})
            print(row | {"constants": rows[-1]["constants"]}, flush=True)
    mean = {key: sum(sum(row[part]) for row in rows if row["shape"] == shape and row["budget"] == BUDGET)
            for key, part, shape in (("before", "pooled", CUBE), ("after", "constants", rows[1]["shape"]))}  # fmt: skip
    return {"rows": rows, "ratio": mean["after"] / mean["before"]}


def errors(qkv: Sequence[Tensor], shape: Shape, budget: float, seed: int) -> Tensor:
    """float32 (H, P): output errors of the layer, half of all query tiles that a profile may draw."""
    grid = replace(GRID, cube=shape)
    q, k, v = (x[:, grid.order()] for x in qkv)
    draws = [torch.Generator().manual_seed(10 * seed + part) for part in range(4)]
    tables = [measure(Sight(q, k, v), grid, None, budgets=(budget,), rows=8, generator=draw) for draw in draws]
    return torch.stack([table.error_predicted[..., 0].square() for table in tables]).mean(0).sqrt()


def demo() -> dict[str, Any]:
    from foveate.training.flow import fixed_batches

    model, forward, training, held_out = demo_model()
    fit = fixed_batches(training, 4)
    return paired(model, forward, [fit[place] for place in (1, 6, 11, 12)], fixed_batches(held_out, 3))


def pans(steps: int = TRAINED) -> dict[str, Any]:
    """Cameras that move over stills: windows that slide and grow over single pictures of the same clips, on which the
    demo's model is trained further before anything is measured."""
    from foveate.training.flow import Batches, fixed_batches

    model, forward, training, held_out = demo_model()
    fit = moved(fixed_batches(training, 4))
    scored = moved(fixed_batches(held_out, 2))
    with torch.no_grad():
        before = sum(forward(batch)[0] for batch in scored) / len(scored)
    train(model, Batches(training, size=1, seed=5), steps)
    with torch.no_grad():
        after = sum(forward(batch)[0] for batch in scored) / len(scored)
    print(f"{steps} steps on moving cameras: held-out loss {before:.4f} -> {after:.4f}", flush=True)
    if after >= before:
        raise RuntimeError("training on moving cameras has taught nothing")
    found = paired(model, forward, [fit[place] for place in (1, 6, 11, 12)], scored)
    return {"trained": {"steps": steps, "before": before, "after": after}, **found}


def moved(batches: Sequence[Any], first: int = 0) -> list[Any]:
    return [replace(batch, clips=camera(batch.clips, first + place)) for place, batch in enumerate(batches)]


def train(model: nn.Module, batches: Any, steps: int) -> None:
    """Dense, one clip a step under a camera of its own."""
    from foveate.training.flow import loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 10, (steps - step) / (steps / 2))
        value = loss(model, moved([batches[step]], step)[0])
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: {value.item():.4f}", flush=True)


def camera(clips: Tensor, kind: int) -> Tensor:
    """(B, C, F, Y, X): the middle picture of clips, seen by a camera that pans over two fifths of its width or height,
    or zooms, one way or back."""
    frames = clips.shape[2]
    still, seen = clips[:, :, frames // 2], []
    for frame in range(frames):
        way = frame / (frames - 1) if kind % 2 else 1 - frame / (frames - 1)
        size = 1 - 0.4 * way if kind % 3 == 0 else 0.6
        right, down = ((0.8 * way - 0.4) * (kind % 3 == axis) for axis in (1, 2))
        theta = torch.tensor([[size, 0.0, right], [0.0, size, down]])
        grid = nn.functional.affine_grid(theta.expand(len(clips), -1, -1), list(still.shape), align_corners=False)
        seen.append(nn.functional.grid_sample(still, grid, padding_mode="reflection", align_corners=False))
    return torch.stack(seen, 2)


def demo_model() -> tuple[nn.Module, Forward, Any, Any]:
    """foveate demo's model as it begins, its loss, and the clips that it learns from and is judged by."""
    from foveate.data import package_clips
    from foveate.models.dit import VideoDiT
    from foveate.training import checkpoint, recipes
    from foveate.training.loop import open_clips

    config = recipes.demo(package_clips(), Path(tempfile.gettempdir()) / "bench_shapes")
    weights, _ = checkpoint.load_weights(recipes.CHECKPOINT)
    model = VideoDiT(config.model)
    model.load_state_dict(weights)

    def forward(batch: Any) -> tuple[float, Tensor]:
        level = batch.sigma.view(-1, 1, 1, 1, 1)
        out = model((1 - level) * batch.clips + level * batch.noise, batch.sigma, batch.condition)
        return (out - (batch.noise - batch.clips)).square().mean().item(), out

    return model.eval(), forward, open_clips(config, "train"), open_clips(config, "val")


def wan() -> dict[str, Any]:
    """Eight games, played with other seeds than the model was trained on."""
    import pretrain_wan
    import tiny_wan

    model = tiny_wan.load()

    def batches(seed: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        found = []
        for place, game in enumerate(tiny_wan.GAMES):
            played = torch.from_numpy(pretrain_wan.play(game, 120, seed + place))[-tiny_wan.FRAMES :]
            latents = tiny_wan.to_latents(played.unsqueeze(0))
            noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed + place))
            found.append((latents, noise, torch.tensor([(place % 4 + 0.5) / 4]), tiny_wan.prompt_embeds([game])))
        return found

    def forward(batch: Any) -> tuple[float, Tensor]:
        latents, noise, sigma, text = batch
        level = sigma.view(-1, 1, 1, 1, 1)
        out = model((1 - level) * latents + level * noise, 1000 * sigma, text, return_dict=False)[0]
        return (out - (noise - latents)).square().mean().item(), out

    return paired(model, forward, batches(1000)[::2], batches(2000))


def main() -> None:
    parser = argparse.ArgumentParser(description="Tile shapes and constants against pooled cubes.")
    parser.add_argument("--part", choices=["layer", "demo", "pans", "wan"], required=True)
    parser.add_argument("--data", type=Path, help="folder with real_qkv.safetensors, for layer")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.part == "layer" and asked.data is None:
        parser.error("--part layer needs --data")
    began = time.perf_counter()
    report: dict[str, Any] = {"part": asked.part, "torch": torch.__version__, "budget": BUDGET}
    report |= layer(asked.data) if asked.part == "layer" else {"demo": demo, "pans": pans, "wan": wan}[asked.part]()
    report["seconds"] = round(time.perf_counter() - began)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        file = asked.out / f"shapes_{asked.part}_cpu_{time.strftime('%Y%m')}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
