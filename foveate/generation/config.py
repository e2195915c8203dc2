"""Every flag of `foveate generate`, checked when made. Which ones a model takes depends on what it is: see `kind`."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from foveate.held.config import ReuseConfig
from foveate.training.recipes import CHECKPOINT

WEIGHTS = {".safetensors", ".pt", ".pth", ".ckpt", ".bin"}
# What only one kind of model takes; all other flags are for both.
OURS = ("attention", "label", "text_encoder", "unconditional", "solver")
PIPELINES = (
    "prompts", "negative", "image", "frames", "height", "width", "fps", "sparse", "cfg_parallel", "ranks_per_video",
    "offload", "tiled", "dtype", "pipeline", "embeds", "call",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Every dial of a generated clip."""

    model: str = str(CHECKPOINT)
    """Folder or hub name of a diffusers pipeline, or a weights file that `foveate train` wrote; the demo's by
    default."""
    prompt: str | None = None
    """What the clip shows, for a pipeline or a model that was trained on captions."""
    prompts: Path | None = None
    """JSON lines for many clips, one object each: prompt, and what differs from the flags (negative, image, seed,
    steps, guidance, frames, height, width, embeds, call, name)."""
    negative: str | None = None
    """What the clip should not show."""
    image: Path | None = None
    """Picture to begin with, for a pipeline that takes one."""
    steps: int | None = None
    """Denoising steps; by default the pipeline's own number, or 30."""
    guidance: float | None = None
    """Classifier-free guidance, by default the pipeline's own; 1 is off."""
    frames: int | None = None
    """Frames of the clip."""
    height: int | None = None
    """Pixels from top to bottom."""
    width: int | None = None
    """Pixels from side to side."""
    fps: float | None = None
    """Frames a second that the file is played at, by default what models of this kind are trained for."""
    seed: int = 0
    """Seed of the noise that the clip is made from. Line i of --prompts, counted from 0, has seed + i."""
    quality: Annotated[float | None, tyro.conf.arg(aliases=["--reuse"])] = None
    """Quality in (0, 1] of reusing what earlier denoising steps computed, for example 0.9; 1, or none, is exact."""
    schedule: Path | None = None
    """File by `foveate calibrate` that says which steps are computed, in place of --quality."""
    sparse: str | None = None
    """Share of the key tiles that attention keeps, for example 0.15, chosen by what the first steps show; or the folder
    that sparse training saved."""
    cfg_parallel: bool = False
    """Under torchrun: half of a clip's ranks for each of the two branches of guidance."""
    ranks_per_video: int | None = None
    """Under torchrun: ranks that share a clip; 1 gives each rank clips of its own. By default 1 where --prompts has a
    clip for every rank, all ranks otherwise."""
    offload: Literal["none", "model", "sequential"] = "none"
    """Keep in the memory of the GPU only the model that runs, or only the layer that runs (slow)."""
    tiled: bool = False
    """Decode the video in tiles, which takes less memory and more time."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Numbers to compute in; auto: bfloat16 on a GPU, float32 on a CPU."""
    pipeline: str | None = None
    """Class of diffusers to load the folder as, where it is not the one it was saved as: LTXImageToVideoPipeline."""
    embeds: Path | None = None
    """Safetensors of prompt_embeds and whatever else the pipeline is to be given, in place of --prompt."""
    call: str | None = None
    """JSON object of further arguments of the pipeline's call, for example '{"guidance_scale_2": 3.0}'."""
    attention: Literal["dense", "sparse"] = "dense"
    """Of a model by `foveate train`: all of the attention, or what the folder `sparse` beside the model says."""
    label: int | None = None
    """Class of the clip, counted from 0, for a model that was trained on class folders."""
    text_encoder: str | None = None
    """Folder or hub name of the encoder that a model by `foveate train` was trained with, for --prompt."""
    unconditional: bool = False
    """Let a model that takes a label or a prompt make a clip without one."""
    solver: Literal["heun", "euler"] = "heun"
    """Of a model by `foveate train`: second order with two model calls a step, or one call a step, which loses less
    where steps are reused."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", str(self.model))
        for name, known in (("attention", ("dense", "sparse")), ("solver", ("heun", "euler"))):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps: generation needs at least 1 step, got {self.steps}")
        if self.guidance is not None and not 0 <= self.guidance < float("inf"):
            raise ValueError(f"--guidance must be a number of at least 0, got {self.guidance}")
        if self.quality is not None:
            ReuseConfig(quality=self.quality)
        if self.schedule is not None and self.quality is not None:
            raise ValueError("--schedule takes the place of --quality (or --reuse): give one of them")
        foreign = OURS if self.kind == "pipeline" else PIPELINES
        plain = {field.name: field.default for field in fields(self)}
        given = [f"--{name.replace('_', '-')}" for name in foreign if getattr(self, name) != plain[name]]
        if given:
            what = "weights files by `foveate train`" if self.kind == "pipeline" else "diffusers pipelines"
            raise ValueError(f"{', '.join(given)}: for {what} only; --model {self.model} is {self.described}")
        self._check_pipeline() if self.kind == "pipeline" else self._check_ours()

    @property
    def kind(self) -> Literal["ours", "pipeline"]:
        """What `model` is: a weights file, or a diffusers pipeline's folder or hub name."""
        path = Path(self.model)
        return "ours" if path.is_file() or path.suffix in WEIGHTS else "pipeline"

    @property
    def described(self) -> str:
        return "a weights file" if self.kind == "ours" else "the name or folder of a pipeline"

    def _check_ours(self) -> None:
        if self.schedule is not None and self.solver != "euler":
            raise ValueError("--schedule wants --solver euler, as it was calibrated")
        if self.unconditional and (self.label is not None or self.prompt is not None):
            raise ValueError("--unconditional wants a clip without a condition: leave --label and --prompt out")
        if (self.prompt is None) != (self.text_encoder is None):
            raise ValueError("--prompt and --text-encoder go together: a caption, and what turns it into numbers")
        if self.guidance not in (None, 1) and self.label is None and self.prompt is None:
            raise ValueError("--guidance strengthens a condition: give --label or --prompt, or leave it out")

    def _check_pipeline(self) -> None:
        check_place(self.model)
        for name in ("frames", "height", "width", "fps", "ranks_per_video"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if sum(x is not None for x in (self.prompt, self.prompts, self.embeds)) != 1:
            raise ValueError("give one of --prompt, --prompts (a file of many) and --embeds (text already encoded)")
        _ = self.budget, self.arguments  # say what is wrong with them now

    @property
    def budget(self) -> float | Path | None:
        """--sparse: a share of the tiles, or the folder that says which."""
        if self.sparse is None:
            return None
        try:
            share = float(self.sparse)
        except ValueError:
            if not Path(self.sparse).is_dir():
                raise ValueError(
                    f"--sparse {self.sparse}: give a share of the tiles such as 0.15, or the folder that "
                    "handle.save(folder) or `foveate train` wrote"
                ) from None
            return Path(self.sparse)
        if not 0 < share <= 1:
            raise ValueError(f"--sparse is a share of the tiles in (0, 1], got {self.sparse}")
        return share

    @property
    def arguments(self) -> dict[str, Any]:
        """--call, as a mapping."""
        try:
            found = json.loads(self.call or "{}")
        except ValueError as error:
            raise ValueError(f"--call is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("--call must be a JSON object of arguments, such as '{\"guidance_scale_2\": 3.0}'")
        return found


def check_place(model: str) -> None:
    """ValueError for a folder that holds no pipeline, and for what is neither a folder nor a name of the hub."""
    folder = Path(model)
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        if (folder / "model.safetensors").is_file():
            raise ValueError(f"{model} is a run's folder: give --model {folder / 'model.safetensors'}")
        if (folder / "config.json").is_file():
            raise ValueError(f"{model} is one part of a pipeline: give the folder above it, with model_index.json")
        raise ValueError(f"{model}: no such checkpoint file, and no pipeline: the folder has no model_index.json")
    looks_local = folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1
    if not folder.exists() and looks_local:
        raise ValueError(f"{model}: no such folder, nor a name of the hub such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
