"""From a weights file to an MP4."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from foveate.data import to_uint8, write_mp4
from foveate.held.calibrate import calibrate
from foveate.held.config import ReuseConfig
from foveate.held.handle import reuse as reuse_states
from foveate.held.schedule import Schedule
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.sample import generate
from foveate.sparsity.artifact import load_sparse
from foveate.training import checkpoint
from foveate.training.flow import stream
from foveate.training.folder import SPARSE
from foveate.training.machine import pick_device
from foveate.training.recipes import CHECKPOINT


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Every dial of a generated clip."""

    model: Path = CHECKPOINT
    """Weights file that `foveate train` wrote; the demo's by default."""
    attention: Literal["dense", "sparse"] = "dense"
    """Compute all of the attention, or what the folder `sparse` beside the model says."""
    steps: int = 30
    """Denoising steps."""
    seed: int = 0
    """Seed of the noise that the clip is made from."""
    label: int | None = None
    """Class of the clip, counted from 0, for a model that was trained on class folders."""
    prompt: str | None = None
    """Caption of the clip, for a model that was trained on captions."""
    text_encoder: str | None = None
    """Folder or hub name of the encoder that the model was trained with, for --prompt."""
    unconditional: bool = False
    """Let a model that takes a label or a prompt make a clip without one."""
    guidance: float = 1.0
    """Classifier-free guidance; 1 is off and computes the model once a step."""
    reuse: float | None = None
    """Quality in (0, 1] of reusing what earlier denoising steps computed, for example 0.9; 1 is exact."""
    schedule: Path | None = None
    """File by `foveate calibrate` that says which steps are computed, in place of --reuse; wants --solver euler."""
    solver: Literal["heun", "euler"] = "heun"
    """Second order with two model calls a step, or one call a step, which loses less where steps are reused."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if self.attention not in ("dense", "sparse"):
            raise ValueError(f"--attention must be dense or sparse, got {self.attention!r}")
        if self.steps < 1:
            raise ValueError(f"--steps: generation needs at least 1 step, got {self.steps}")
        if not 0 <= self.guidance < float("inf"):
            raise ValueError(f"--guidance must be a number of at least 0, got {self.guidance}")
        if self.reuse is not None:
            ReuseConfig(quality=self.reuse)
        if self.solver not in ("heun", "euler"):
            raise ValueError(f"--solver must be heun or euler, got {self.solver!r}")
        if self.schedule is not None and (self.reuse is not None or self.solver != "euler"):
            raise ValueError("--schedule takes the place of --reuse, and wants --solver euler, as it was calibrated")
        if self.unconditional and (self.label is not None or self.prompt is not None):
            raise ValueError("--unconditional wants a clip without a condition: leave --label and --prompt out")
        if (self.prompt is None) != (self.text_encoder is None):
            raise ValueError("--prompt and --text-encoder go together: a caption, and what turns it into numbers")
        if self.guidance != 1 and self.label is None and self.prompt is None:
            raise ValueError("--guidance strengthens a condition: give --label or --prompt, or leave it out")


def load_model(path: Path, device: str = "cpu") -> tuple[VideoDiT, dict]:
    """The model of a weights file, ready to generate, and what the file says of itself. ValueError for other files."""
    weights, about = checkpoint.load_weights(path)
    try:
        model = VideoDiT(DiTConfig.from_dict(about["model"]))
        model.load_state_dict(weights)
        model.config.grid(*(about["clip"][name] for name in ("frames", "height", "width")))
    except (KeyError, TypeError, RuntimeError) as error:
        why = str(error).splitlines()[0] if isinstance(error, RuntimeError) else f"{error} is missing or odd"
        raise ValueError(f"{path} is no model that `foveate train` wrote: {why}") from None
    return model.eval().requires_grad_(False).to(device), about


def make_sparse(model: VideoDiT, folder: Path) -> None:
    """Attention as training left it. ValueError where it left no sparse one beside the model."""
    if not folder.is_dir():
        raise ValueError(f"sparse attention needs {folder}, which sparse training writes; use --attention dense")
    load_sparse(model, folder)


def condition(config: GenerateConfig, model: DiTConfig) -> Tensor | None:
    """What the model is told about the clip: a label (1,) or a text embedding (1, text_dim), on the CPU.

    ValueError for a condition that the model does not take, and for none where it takes one.
    """
    if config.label is not None and not model.classes:
        raise ValueError(f"--label {config.label}, but this model was trained without labels; leave it out")
    if config.prompt is not None and not model.text_dim:
        raise ValueError("--prompt, but this model was trained without captions; leave it out")
    if config.unconditional:
        return None
    if model.classes and config.label is None:
        raise ValueError(f"this model is told a class: give --label 0 ... {model.classes - 1}, or --unconditional")
    if model.text_dim and config.prompt is None:
        raise ValueError("this model is told a caption: give --prompt and --text-encoder, or --unconditional")
    if config.label is not None:
        if not 0 <= config.label < model.classes:
            raise ValueError(f"--label must lie in 0 ... {model.classes - 1} for this model, got {config.label}")
        return torch.tensor([config.label])
    if config.prompt is None or config.text_encoder is None:
        return None
    from foveate.training.text import embed_captions

    found = embed_captions([config.prompt], config.text_encoder)[config.prompt]
    if len(found) != model.text_dim:
        raise ValueError(f"--text-encoder gives {len(found)} numbers, this model was trained on {model.text_dim}")
    return found[None]


def check_target(out: Path, overwrite: bool, suffix: str = ".mp4") -> None:
    """ValueError where no such file can be written to `out`, or where one is already there."""
    if out.suffix != suffix:
        raise ValueError(f"{out} must end in {suffix}")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; give the name of a file")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} is there already; give another name, or --overwrite to replace it")
    home = next(folder for folder in out.absolute().parents if folder.exists())
    if not home.is_dir():
        raise ValueError(f"{home} is a file, so {out} cannot lie in it")
    if not os.access(home, os.W_OK | os.X_OK):
        raise ValueError(f"{home} cannot be written to (read-only, or not yours); give another place")


@contextmanager
def reusing(model: VideoDiT, config: GenerateConfig, console: Console) -> Iterator[None]:
    """What earlier steps computed, reused as the flags say, and what that saved; nothing where they say nothing."""
    if config.reuse is None and config.schedule is None:
        yield
        return
    by_error = None if config.reuse is None else ReuseConfig(quality=config.reuse)
    with reuse_states(model, by_error or ReuseConfig(schedule=config.schedule)) as handle:
        yield
        report = handle.report()
    console.print(f"reuse: {report.computed:.0%} of the attention computed")


def open_model(config: GenerateConfig, device: str) -> tuple[VideoDiT, dict, Tensor | None]:
    """The model, what its file says, and the condition of the clip. ValueError where they do not go together."""
    model, about = load_model(config.model, device)
    given = condition(config, model.config)
    if config.attention == "sparse":
        make_sparse(model, config.model.parent / SPARSE)
    return model, about, None if given is None else given.to(device)


def make_clip(
    model: VideoDiT, size: dict, config: GenerateConfig, given: Tensor | None, seed: int, status: Any
) -> Tensor:
    """One clip (1, C, F, Y, X) of the size that the model was trained on."""
    shape = (1, model.config.channels, size["frames"], size["height"], size["width"])
    noise = torch.randn(shape, generator=stream(seed)).to(next(model.parameters()).device)
    return generate(
        model, noise, steps=config.steps, condition=given, guidance=config.guidance, solver=config.solver,
        progress=lambda done, total: status.update(f"generating: step {done} of {total}"),
    )  # fmt: skip


def calibrate_file(
    out: Path, config: GenerateConfig, calls: float, clips: int, console: Console, *, overwrite: bool = False
) -> Schedule:
    """Write the schedule of these flags' clips, made from clips of as many seeds. ValueError as `generate_file`."""
    if not 0 < calls <= 1:
        raise ValueError(f"--calls is the share of the steps that compute, in (0, 1], got {calls}")
    if config.reuse is not None or config.schedule is not None:
        raise ValueError("a calibration computes everything: leave --reuse and --schedule out")
    check_target(out, overwrite, ".json")
    config = replace(config, solver="euler")
    model, about, given = open_model(config, pick_device(config.device))
    with console.status("calibrating") as status:
        plan = calibrate(
            model, lambda i: make_clip(model, about["clip"], config, given, config.seed + i, status), clips=clips
        )
    found = replace(plan.schedule(calls), guidance=config.guidance)
    out.parent.mkdir(parents=True, exist_ok=True)
    found.write(out)
    return found


def generate_file(out: Path, config: GenerateConfig, console: Console, *, overwrite: bool = False) -> None:
    """Generate one clip of the size the model was trained on and write it. ValueError for what cannot be done.

    console: for what is worth knowing meanwhile. A file is written whole or not at all.
    """
    check_target(out, overwrite)
    model, about, given = open_model(config, pick_device(config.device))
    size = about["clip"]
    with console.status("generating") as status, reusing(model, config, console):
        video = make_clip(model, size, config, given, config.seed, status)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.stem}.partial.mp4")
    try:
        write_mp4(partial, to_uint8(video)[0], fps=size.get("fps", 25))
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
