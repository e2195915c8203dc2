"""From a weights file that `foveate train` wrote to an MP4."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from foveate.data import to_uint8, write_mp4
from foveate.generation.config import GenerateConfig
from foveate.generation.film import about as about_clip
from foveate.generation.film import check_target, given_flags, whole
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

STEPS = 30


def strength(config: GenerateConfig) -> float:
    """Of guidance, off where it was not asked for."""
    return 1.0 if config.guidance is None else config.guidance


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


@contextmanager
def reusing(model: VideoDiT, config: GenerateConfig, console: Console) -> Iterator[None]:
    """What earlier steps computed, reused as the flags say, and what that saved; nothing where they say nothing."""
    if config.quality is None and config.schedule is None:
        yield
        return
    by_error = None if config.quality is None else ReuseConfig(quality=config.quality)
    with reuse_states(model, by_error or ReuseConfig(schedule=config.schedule)) as handle:
        yield
        report = handle.report()
    console.print(f"reuse: {report.computed:.0%} of the attention computed")


def open_model(config: GenerateConfig, device: str) -> tuple[VideoDiT, dict, Tensor | None]:
    """The model, what its file says, and the condition of the clip. ValueError where they do not go together."""
    model, about = load_model(Path(config.model), device)
    given = condition(config, model.config)
    if config.attention == "sparse":
        make_sparse(model, Path(config.model).parent / SPARSE)
    return model, about, None if given is None else given.to(device)


def make_clip(
    model: VideoDiT, size: dict, config: GenerateConfig, given: Tensor | None, seed: int, status: Any
) -> Tensor:
    """One clip (1, C, F, Y, X) of the size that the model was trained on."""
    shape = (1, model.config.channels, size["frames"], size["height"], size["width"])
    noise = torch.randn(shape, generator=stream(seed)).to(next(model.parameters()).device)
    return generate(
        model, noise, steps=config.steps or STEPS, condition=given, guidance=strength(config), solver=config.solver,
        progress=lambda done, total: status.update(f"generating: step {done} of {total}"),
    )  # fmt: skip


def calibrate_file(
    out: Path, config: GenerateConfig, calls: float, clips: int, console: Console, *, overwrite: bool = False
) -> Schedule:
    """Write the schedule of these flags' clips, made from clips of as many seeds. ValueError as `generate_file`."""
    if not 0 < calls <= 1:
        raise ValueError(f"--calls is the share of the steps that compute, in (0, 1], got {calls}")
    if config.quality is not None or config.schedule is not None:
        raise ValueError("a calibration computes everything: leave --quality (or --reuse) and --schedule out")
    check_target(out, overwrite, ".json")
    config = replace(config, solver="euler")
    model, about, given = open_model(config, pick_device(config.device))
    with console.status("calibrating") as status:
        plan = calibrate(
            model, lambda i: make_clip(model, about["clip"], config, given, config.seed + i, status), clips=clips
        )
    found = replace(plan.schedule(calls), guidance=strength(config))
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
    with whole(out) as partial:
        write_mp4(partial, to_uint8(video)[0], fps=size.get("fps", 25), about=about_clip(given_flags(config)))
