"""Recipes: named functions that return a complete configuration. One dataclass holds every dial of a run."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from foveate.models.dit import DiTConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every dial of a training run."""

    # What it learns from, and at what size.
    data: Path
    """Folder of clips: plain, one folder a class, or with captions.jsonl."""
    validation: Path | None = None
    """Folder of clips that only judge the run; without one, a part of `data` is held out."""
    val_fraction: float = 0.2
    """Part of `data` that is held out for validation."""
    val_by: Literal["auto", "clips", "frames"] = "auto"
    """Hold out whole clips, or the last frames of each; auto: clips, where the fraction is at least one clip."""
    out: Path
    """Folder of this run: history, checkpoints."""
    frames: int = 20
    """Frames of a clip."""
    height: int = 64
    """Height of a clip in pixels."""
    width: int = 64
    """Width of a clip in pixels."""
    stride: int = 1
    """Take every n-th frame."""
    zoom: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0)
    """Sizes of the random crops, in multiples of height x width."""
    exclude: tuple[str, ...] = ()
    """File names to leave out."""
    model: DiTConfig = field(default_factory=DiTConfig)
    """Shape of the model."""
    start_from: Path | None = None
    """A weights file to continue from, instead of random weights."""

    # Optimisation.
    steps: int = 1000
    """Steps of the whole run."""
    batch: int = 1
    """Clips of a step."""
    lr: float = 3e-4
    """Highest learning rate."""
    warmup: int = 100
    """Steps over which the learning rate rises."""
    decay_to: float = 1.0
    """Cosine decay of the learning rate to this fraction at the last step; 1 keeps it constant."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.999
    """Decay of the averaged weights, which model.safetensors holds."""
    seed: int = 0
    """Seed of weights, batches and noise."""
    device: str = "auto"
    """Device to train on: auto, cpu, cuda or cuda:N."""
    workers: int = 0
    """Processes that prepare batches ahead."""

    # Sparsity: stage 1 is dense while predictors learn, stage 2 computes `budget` of the tiles.
    sparse: bool = True
    """Go sparse when that costs no more than --gap; without it training stays dense."""
    budget: float = 0.15
    """Share of the tiles that sparse attention computes."""
    periphery: Literal["drop", "pool"] = "pool"
    """What stands for the other tiles: pool (one mean each) or drop (nothing)."""
    dense_layers: tuple[int, ...] = ()
    """Layers that stay dense in stage 2, as DSV keeps some."""
    rank: int = 16
    """Rank of the predictors."""
    learn_from: int = 20
    """Steps whose queries and keys give the predictors their start; they are fine-tuned on all that follow."""
    learn_every: int = 1
    """In stage 2 predictors are fine-tuned at every n-th step only."""
    learn_rows: int = 1
    """Query tiles a head and step that fine-tune a predictor."""
    learn_lr: float = 5e-4
    """Learning rate of the predictors."""
    gap: float = 0.01
    """Stage 2 starts when sparse attention's paired validation loss is within this fraction of dense attention's."""
    stage1: int = 100
    """Steps before the first attempt to switch."""
    check_every: int = 50
    """Steps between attempts, and between profiles."""
    force: bool = False
    """Go sparse even where the cost table says that dense attention is faster."""
    control: bool = False
    """Choose tiles at random in stage 2: the control that must do worse."""

    # Keeping.
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    validation_clips: int = 4
    """Clips that validation is measured on."""

    def __post_init__(self) -> None:
        counts = ("frames", "height", "width", "stride", "steps", "batch", "rank", "check_every", "checkpoint_every")
        for name in (*counts, "validation_clips"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction is the part held out, between 0 and 1, got {self.val_fraction}")
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget is the kept fraction of tiles, above 0 and at most 1, got {self.budget}")
        if not set(self.dense_layers) <= set(range(self.model.depth)):
            raise ValueError(f"dense_layers must lie in 0 ... {self.model.depth - 1}, got {self.dense_layers}")
        if self.periphery not in ("drop", "pool"):
            raise ValueError(f"periphery must be drop or pool, got {self.periphery!r}")
        if min(self.lr, self.clip, self.gap) <= 0 or not 0 <= self.ema < 1 or not 0 <= self.decay_to <= 1:
            raise ValueError("lr, clip and gap must be above 0, ema in 0 ... 1 (1 excluded), decay_to in 0 ... 1")
        self.model.grid(self.frames, self.height, self.width)


def pretrain(data: Path, out: Path) -> TrainConfig:
    """The checkpoint that the demo continues from: dense, on a GPU, minutes. See examples/pretrain_demo.py."""
    return TrainConfig(
        data=data, out=out, exclude=DEMO_EXCLUDE, steps=4241, batch=16, lr=1e-3, warmup=500, decay_to=0.05, ema=0.999,
        weight_decay=0.01, sparse=False, workers=12, check_every=500, checkpoint_every=1000, validation_clips=6,
    )  # fmt: skip


def demo(data: Path, out: Path) -> TrainConfig:
    """Two-stage training on two CPU cores, minutes, from the pretrained checkpoint."""
    return TrainConfig(
        data=data, out=out, exclude=DEMO_EXCLUDE, steps=74, lr=1.5e-5, warmup=10, ema=0.99, start_from=CHECKPOINT,
        device="cpu",
        budget=0.16, dense_layers=(4,), rank=24, learn_from=8, learn_every=3, learn_rows=4, learn_lr=2e-3, stage1=12,
        check_every=12, checkpoint_every=30, validation_clips=2,
    )  # fmt: skip


def smoke(config: TrainConfig) -> TrainConfig:
    """Any recipe shrunk to seconds: for tests and a first look."""
    small = DiTConfig(width=64, depth=2, heads=2)
    return replace(
        config, frames=8, height=32, width=32, model=small, start_from=None, steps=12, batch=1, workers=0,
        dense_layers=(), stage1=4, learn_from=2, check_every=2, checkpoint_every=2, validation_clips=1, budget=0.5,
        gap=0.5, force=True,
    )  # fmt: skip


DEMO_EXCLUDE = ("carphone_distorted.mp4",)  # carphone_pristine once more, compressed to ruin
CHECKPOINT = Path(__file__).parent.parent / "assets" / "demo.safetensors"
