"""Recipes: named functions that return a complete configuration. One dataclass holds every dial of a run."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from foveate.models.dit import DiTConfig
from foveate.sparsity.config import SparsityConfig


def check_rates(lr: float, clip: float, ema: float, decay_to: float) -> None:
    """Raises ValueError for dials of an optimiser, of any trainer, that cannot be."""
    if not (0 < lr < math.inf and clip > 0 and 0 <= ema < 1 and 0 <= decay_to <= 1):
        raise ValueError(
            "--lr (finite) and --clip must be above 0, --ema in 0 ... 1 (1 excluded), --decay-to in 0 ... 1; "
            f"got {lr}, {clip}, {ema}, {decay_to}"
        )


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
    text_encoder: str | None = None
    """Folder or hub name of the encoder for captions.jsonl, for a model with text_dim."""
    unconditional: bool = False
    """Leave classes or captions of the data unused; otherwise a model without a condition refuses such data."""

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
    """Decay of the averaged weights, which model.safetensors holds; (1 + n) / (10 + n) at step n while that is less."""
    seed: int = 0
    """Seed of weights, batches and noise."""
    device: str = "auto"
    """Device to train on: auto, cpu, cuda or cuda:N."""
    workers: int = 0
    """Processes that prepare batches ahead."""
    compile: bool | None = None
    """Compile what the model's blocks compute around attention: faster steps, but the first ones take a minute longer.
    By default on GPUs where Triton is installed."""
    capture: bool = False
    """Replay forward and backward as one CUDA graph wherever a step has nothing else to do: the host then launches one
    graph instead of a thousand kernels, for more memory. Needs a GPU (docs/training.md)."""

    # Sparse attention.
    sparse: bool = True
    """Let sparsify decide what attention leaves out. Without it training is dense."""
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    """How sparsify decides."""

    # Looking and keeping.
    validate_every: int | None = None
    """Steps between validation losses; by default at least 200, and so many that they take 1 % of the time at most, and
    one after the last step."""
    validation_clips: int = 4
    """Clips that validation is measured on."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints that are kept, the newest."""
    sample_every: int = 0
    """Steps between MP4s of a held-out clip, generated and denoised; 0 writes none."""
    tensorboard: bool = False
    """Write TensorBoard events into out/events."""

    def __post_init__(self) -> None:
        counts = ("frames", "height", "width", "stride", "steps", "batch", "validate_every", "checkpoint_every", "keep")
        for name in (*counts, "validation_clips"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction is the part held out, between 0 and 1, got {self.val_fraction}")
        for name in ("warmup", "workers", "sample_every", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        check_rates(self.lr, self.clip, self.ema, self.decay_to)
        if any(index >= self.model.depth for index in self.sparsity.dense_layers):
            raise ValueError(f"dense_layers must lie in 0 ... {self.model.depth - 1}, got {self.sparsity.dense_layers}")
        if self.unconditional and (self.model.classes or self.model.text_dim):
            raise ValueError("unconditional, but the model has classes or text_dim: give one or the other")
        self.model.grid(self.frames, self.height, self.width)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Paths are absolute: a run may be resumed from another folder."""
        return as_json(asdict(self, dict_factory=lambda pairs: {k: absolute(v) for k, v in pairs}))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Undoes `to_dict`. ValueError for a dial that this version does not know."""
        unknown = sorted(set(values) - {item.name for item in fields(cls)})
        if unknown:
            raise ValueError(f"this version of foveate knows no {', '.join(unknown)}; train anew, or with the version")
        found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        for name in ("data", "out", "validation", "start_from"):
            if found.get(name) is not None:
                found[name] = Path(found[name])
        if "model" in found:
            found["model"] = DiTConfig.from_dict(found["model"])
        if "sparsity" in found:
            dials: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found["sparsity"].items()}
            found["sparsity"] = SparsityConfig(**dials)
        return cls(**found)


def as_json(values: dict) -> dict:
    """As JSON gives it back: tuples as lists."""
    return json.loads(json.dumps(values))


def absolute(value: Any) -> Any:
    return os.path.abspath(value) if isinstance(value, Path) else value


def pretrain(data: Path, out: Path) -> TrainConfig:
    """The checkpoint that the demo continues from: dense, on a GPU, minutes. See examples/pretrain_demo.py."""
    return TrainConfig(
        data=data, out=out, exclude=DEMO_EXCLUDE, steps=4241, batch=16, lr=1e-3, warmup=500, decay_to=0.05, ema=0.999,
        weight_decay=0.01, sparse=False, workers=12, validate_every=500, checkpoint_every=1000, validation_clips=6,
    )  # fmt: skip


def demo(data: Path, out: Path) -> TrainConfig:
    """Two-stage training on two CPU cores, minutes, from the pretrained checkpoint."""
    return TrainConfig(
        data=data, out=out, exclude=DEMO_EXCLUDE, steps=48, lr=1.5e-5, warmup=10, ema=0.99, start_from=CHECKPOINT,
        device="cpu", validate_every=1000, checkpoint_every=1000, validation_clips=2,
        # A fixed budget: gaps of single clips scatter by more than a per cent, so within so few steps a tolerance would
        # turn sparse by luck. A rank of the whole head dim, and everything sooner than in a run of many thousand steps.
        sparsity=SparsityConfig(
            budget=0.22, rank=32, warmup=12, learn_from=8, often=8, rare=24, teach_every=4
        ),
    )  # fmt: skip


def smoke(config: TrainConfig) -> TrainConfig:
    """Any recipe shrunk to seconds: for tests and a first look."""
    small = DiTConfig(width=64, depth=2, heads=2)
    soon = SparsityConfig(tolerance=0.5, warmup=3, learn_from=2, often=1, rare=4, pairs=1, force=True)
    return replace(
        config, frames=8, height=32, width=32, model=small, start_from=None, steps=12, batch=1, lr=1e-3, workers=0,
        sparsity=soon, validate_every=4, checkpoint_every=2, validation_clips=1,
    )  # fmt: skip


DEMO_EXCLUDE = ("carphone_distorted.mp4",)  # carphone_pristine once more, compressed to ruin
CHECKPOINT = Path(__file__).parent.parent / "assets" / "demo.safetensors"
