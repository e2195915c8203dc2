"""Every dial of a fine-tuning run, in one frozen dataclass."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from foveate.sparsity.config import SparsityConfig
from foveate.training.recipes import absolute, as_json, check_rates


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Every dial of training a diffusers model."""

    # What is trained, on what.
    model: Path
    """Folder of a diffusers pipeline."""
    data: Path
    """Folder that `foveate encode` wrote."""
    out: Path
    """Folder of this run: history, checkpoints, what is exported."""
    validation: Path | None = None
    """Folder by `foveate encode` that only judges the run; without one, clips of `data` are held out."""
    val_fraction: float = 0.02
    """Part of the clips that is held out, at least one; 0 trains on all and validates on none."""
    lora: int = 0
    """Rank of LoRA matrices; 0 trains all weights."""
    lora_alpha: float | None = None
    """Scale of LoRA, by default its rank."""
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """Ends of the names of the linear layers that LoRA changes."""
    expert: Literal["auto", "high", "low"] = "auto"
    """Of a pipeline with two transformers: the one for high or for low noise. auto: the only one."""

    # Optimisation.
    steps: int = 1000
    """Steps of the whole run."""
    batch: int = 1
    """Clips of a step, over all GPUs and accumulated forwards."""
    micro: int = 1
    """Clips of one forward, all of one size. Where that leaves several forwards a step, they are accumulated."""
    lr: float = 1e-4
    """Highest learning rate."""
    warmup: int = 50
    """Steps over which the learning rate rises."""
    decay_to: float = 1.0
    """Cosine decay of the learning rate to this fraction at the last step; 1 keeps it constant."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.99
    """Decay of the averaged weights, which are exported; (1 + n) / (10 + n) at step n while that is less. 0: no EMA."""
    drop_text: float = 0.1
    """Part of the samples that lose their caption, for classifier-free guidance."""
    density: Literal["logit-normal", "uniform"] = "logit-normal"
    """How noise levels of a flow matching model are drawn, before the scheduler's shift."""
    seed: int = 0
    """Seed of data order, noise and LoRA's start."""

    # Memory and machines.
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What is computed in. auto: bfloat16 on GPUs. Trained weights, gradients' sums, EMA and moments stay float32."""
    checkpointing: Literal["none", "blocks", "selective"] = "none"
    """Recompute blocks in the backward: all of them, or selective: all but attention, whose outputs are kept."""
    head: int = 1
    """Context parallelism: GPUs that share the heads of one sequence."""
    sequence: int = 1
    """Context parallelism: parts that a sequence is cut into. head x sequence GPUs are one replica."""
    shard: Literal["all", "host"] = "all"
    """Weights are sharded (FSDP2) over all GPUs, or over those of a host and repeated on each host."""
    device: str = "auto"
    """Device to train on: auto, cpu, cuda or cuda:N."""
    workers: int = 0
    """Processes that prepare batches ahead, on each GPU."""

    # Sparse attention.
    sparse: bool = True
    """Let sparsify decide what attention leaves out. Without it training is dense."""
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    """How sparsify decides."""

    # Looking and keeping.
    validate_every: int = 200
    """Steps between validation losses."""
    validation_clips: int = 4
    """Samples that validation is measured on, each at four noise levels."""
    sample_every: int = 0
    """Steps between validation videos, out/samples/step-*.mp4; 0 makes none."""
    sample_clips: int = 1
    """Held-out captions that videos are made for."""
    sample_steps: int = 30
    """Denoising steps of a validation video."""
    sample_guidance: float | None = None
    """Guidance of validation videos, by default what the pipeline takes; 1 is none, in half the time."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints that are kept, the newest."""
    tensorboard: bool = False
    """Write TensorBoard events into out/events."""
    wandb: str | None = None
    """Project of Weights & Biases that the run is logged to; WANDB_MODE=offline keeps it on this machine."""
    peak_tflops: float | None = None
    """What one GPU can do, for MFU: by default what is known of the card in bfloat16."""

    MAY_CHANGE: ClassVar[set[str]] = {"head", "sequence", "shard", "checkpointing", "data", "model", "validation",
                                  "peak_tflops", "sample_clips", "sample_steps", "sample_guidance"}  # fmt: skip

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "micro", "head", "sequence", "validate_every", "checkpoint_every", "keep")
        for name in (*counts, "validation_clips", "sample_clips", "sample_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("lora", "warmup", "workers", "weight_decay", "sample_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(self, name)}")
        if self.batch % self.micro:
            raise ValueError(
                f"--batch {self.batch} is not a multiple of --micro {self.micro}, the clips of one forward"
            )
        if not (0 <= self.val_fraction < 1 and 0 <= self.drop_text <= 1):
            raise ValueError("--val-fraction must lie in 0 ... 1 (1 excluded), --drop-text in 0 ... 1")
        check_rates(self.lr, self.clip, self.ema, self.decay_to)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise ValueError(f"--peak-tflops must be above 0, got {self.peak_tflops}")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            raise ValueError(
                f"--lora-alpha must be above 0 and finite, got {self.lora_alpha}; without it it is the rank"
            )
        if self.lora_alpha is not None and not self.lora:
            raise ValueError("--lora-alpha is for --lora RANK; without it all weights are trained")
        if self.lora and not self.lora_targets:
            raise ValueError("--lora-targets names no layer")

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Paths are absolute: a run may be resumed from another folder."""
        return as_json(asdict(self, dict_factory=lambda pairs: {k: absolute(v) for k, v in pairs}))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "FinetuneConfig":
        """Undoes `to_dict`. ValueError for a dial that this version does not know."""
        unknown = sorted(set(values) - {item.name for item in fields(cls)})
        if unknown:
            raise ValueError(f"this version of foveate knows no {', '.join(unknown)}; train anew, or with the version")
        found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        for name in ("model", "data", "out", "validation"):
            if found.get(name) is not None:
                found[name] = Path(found[name])
        dials: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in found.get("sparsity", {}).items()
        }
        found["sparsity"] = SparsityConfig(**dials)
        return cls(**found)


CHOICES = {
    "expert": ("auto", "high", "low"), "density": ("logit-normal", "uniform"), "shard": ("all", "host"),
    "dtype": ("auto", "bfloat16", "float32"), "checkpointing": ("none", "blocks", "selective"),
}  # fmt: skip
