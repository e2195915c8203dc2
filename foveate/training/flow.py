"""Flow matching: what a model is trained on at each step, as a pure function of (seed, step, rank).

Nothing is drawn from a global generator, so a resumed run, and a sparse and a dense twin, see the same clips, noise
and noise levels. Shapes: B batch, C channels, F frames, Y height, X width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from foveate.data import Batch as ClipBatch
from foveate.data import Clips, stack

Conditions = str | Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Clips (B, C, F, Y, X) in -1 ... 1, noise of that shape, noise levels sigma (B,), and the model's condition."""

    clips: Tensor
    noise: Tensor
    sigma: Tensor
    condition: Tensor | None = None

    def to(self, device: torch.device | str) -> "Batch":
        moved = {name: None if x is None else x.to(device, non_blocking=True) for name, x in vars(self).items()}
        return replace(self, **moved)


def stream(*numbers: int) -> torch.Generator:
    """An own random stream for every tuple of numbers (seed, step, rank, ...)."""
    return torch.Generator().manual_seed(hash(numbers) & 0x7FFF_FFFF_FFFF_FFFF)


class Batches(Dataset):
    """Training batches by step number. Noise levels are logit-normal (arXiv 2403.03206, section 3.1).

    conditions: "none", "label" (the clip's class), or a table from caption to text embedding. `drop` of the samples
    lose their condition, for classifier-free guidance.
    """

    def __init__(
        self,
        clips: Clips,
        *,
        size: int,
        seed: int,
        rank: int = 0,
        conditions: Conditions = "none",
        drop: float = 0.1,
    ):
        self.clips, self.size, self.seed, self.rank = clips, size, seed, rank
        self.conditions, self.drop = conditions, drop

    def __getitem__(self, step: int) -> Batch:
        found = self.clips.batch(step, self.size, self.seed, self.rank)
        draw = stream(self.seed, step, self.rank)
        noise = torch.randn(found.video.shape, generator=draw)
        sigma = torch.randn(self.size, generator=draw).sigmoid()
        dropped = torch.rand(self.size, generator=draw) < self.drop
        return Batch(found.video, noise, sigma, condition(found, self.conditions, len(self.clips.classes), dropped))

    def loader(self, steps: Sequence[int], workers: int) -> DataLoader:
        """The batches of these steps in their order, made ahead by `workers` processes (0: here, when asked for)."""
        return DataLoader(self, batch_size=None, sampler=steps, num_workers=workers, pin_memory=workers > 0)


def condition(found: ClipBatch, conditions: Conditions, classes: int, dropped: Tensor) -> Tensor | None:
    """What a `VideoDiT` takes: labels, or text embeddings; where `dropped` (B,) the value that means none."""
    if conditions == "none":
        return None
    if conditions == "label":
        return found.labels.masked_fill(dropped, classes)
    assert not isinstance(conditions, str)
    if unknown := [caption for caption in found.captions if (caption or "") not in conditions]:
        raise ValueError(f"text has no embedding for the caption {unknown[0]!r}; clips held out need theirs, too")
    return torch.stack([conditions[caption or ""] for caption in found.captions]).masked_fill(dropped[:, None], 0.0)


def fixed_batches(clips: Clips, count: int, *, levels: int = 4, conditions: Conditions = "none") -> list[Batch]:
    """Validation: `count` fixed windows, each at `levels` noise levels spread evenly over 0 ... 1, with fixed noise.

    One clip and level a batch, so the mean loss does not depend on any batch size.
    """
    batches = []
    for index, sample in enumerate(clips.fixed(count)):
        one = stack([sample])
        given = condition(one, conditions, len(clips.classes), torch.zeros(1, dtype=torch.bool))
        for level in range(levels):
            noise = torch.randn(one.video.shape, generator=stream(index, level))
            batches.append(Batch(one.video, noise, torch.tensor([(level + 0.5) / levels]), given))
    return batches


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the predicted velocity, noise - clip."""
    level = batch.sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * batch.clips + level * batch.noise
    return (model(noisy, batch.sigma, batch.condition).float() - (batch.noise - batch.clips)).square().mean()
