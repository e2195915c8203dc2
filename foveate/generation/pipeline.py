"""A diffusers pipeline from a folder or the hub: its class, its weights where they are wanted, and one call of it.

Shapes: F frames, H height, W width; pictures uint8 (F, H, W, 3).
"""

import inspect
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foveate.generation import memory
from foveate.generation.config import GenerateConfig
from foveate.generation.jobs import Job, open_picture

log = logging.getLogger("foveate")

WIDE_VAES = ("AutoencoderKLWan",)  # decode in float32 whatever the transformer computes in, as their authors do


def find_class(config: GenerateConfig) -> tuple[type, dict[str, Any]]:
    """The class of the pipeline that a name or folder holds, and its index of parts, without any weights.

    ValueError where there is none, where it is another kind of thing, and for pipelines that make no video.
    """
    try:
        import diffusers
    except ImportError:
        raise ImportError("diffusers pipelines need diffusers: pip install 'foveate[diffusers]'") from None
    index = _index(config.model, diffusers)
    name = config.pipeline or index.get("_class_name")
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    if found is None or not isinstance(found, type):
        raise ValueError(
            f"diffusers {diffusers.__version__} has no pipeline {name}: a newer one may (pip install -U diffusers); "
            "pipelines with code of their own are not run"
        )
    takes = parameters(found)
    if "transformer" not in inspect.signature(found.__init__).parameters or not {"num_frames", "video"} & set(takes):
        raise ValueError(f"{name} makes no video with a diffusion transformer, which is what `foveate generate` is for")
    return found, index


def _index(model: str, diffusers: Any) -> dict[str, Any]:
    try:
        return dict(diffusers.DiffusionPipeline.load_config(model))
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{model} is no folder here, and could not be had from the hub ({why}). Without a network, fetch it "
            f"elsewhere by `hf download {model} --local-dir FOLDER`, and give the folder"
        ) from None


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """What a pipeline's call takes, but for what it is always given here."""
    found = dict(inspect.signature(cls.__call__).parameters)
    return {name: one for name, one in found.items() if name != "self" and one.kind != one.VAR_KEYWORD}


def load(
    cls: Any, index: dict[str, Any], config: GenerateConfig, device: torch.device, *, encoded: bool = False
) -> Any:
    """The pipeline with its weights in main memory. ValueError where they are missing or are pickles.

    encoded: text encoders are left out, all text is given encoded.
    """
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, auto if config.dtype == "auto" else config.dtype)
    wide = (index.get("vae") or [None, None])[1] in WIDE_VAES
    kinds: dict[str, Any] = {"default": dtype} | ({"vae": torch.float32} if wide else {})
    names = inspect.signature(cls.__init__).parameters
    left_out = {name: None for name in names if encoded and name.startswith(("text_encoder", "tokenizer"))}
    try:
        pipe = cls.from_pretrained(config.model, dtype=kinds, use_safetensors=True, **left_out)
    except (OSError, ValueError, AttributeError) as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{config.model} cannot be loaded as {cls.__name__}: {why} (weights are read from safetensors only)"
        ) from error
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            module.eval().requires_grad_(False)
    return pipe


def place(pipe: Any, config: GenerateConfig, device: torch.device) -> None:
    """Put the weights where they are to be. ValueError, with numbers, where they do not fit."""
    if config.tiled:
        if not hasattr(pipe.vae, "enable_tiling"):
            raise ValueError(f"--tiled: {type(pipe.vae).__name__} cannot decode in tiles; leave it out")
        pipe.vae.enable_tiling()
    if config.offload != "none" and device.type == "cpu":
        log.warning("--offload %s has no effect on a CPU: everything is in main memory anyway", config.offload)
    memory.check(memory.sizes(pipe), config.offload, memory.free_bytes(device))
    if config.offload == "none" or device.type == "cpu":
        pipe.to(device)
    elif config.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.enable_sequential_cpu_offload(device=device)


def check_call(pipe: Any, job: Job) -> None:
    """What the pipeline itself says to the arguments, before it begins. Raises its ValueError."""
    check = getattr(pipe, "check_inputs", None)
    if check is None:
        return
    given, takes = arguments(pipe, job), parameters(type(pipe))
    values = {}
    for name, parameter in inspect.signature(check).parameters.items():
        if name in given:
            values[name] = given[name]
        elif name in takes and takes[name].default is not inspect.Parameter.empty:
            values[name] = takes[name].default
        elif parameter.default is inspect.Parameter.empty:
            values[name] = None
    if any(name in ("height", "width") and value is None for name, value in values.items()):
        return  # the pipeline finds them itself, later
    check(**values)


def arguments(pipe: Any, job: Job) -> dict[str, Any]:
    """The pipeline's call, but for noise and progress."""
    given = dict(job.given)
    if job.image is not None:
        given["image"] = _resized(open_picture(job.image), given)
    if job.embeds is not None:
        from safetensors.torch import load_file

        dtype, device = next(pipe.transformer.parameters()).dtype, pipe._execution_device
        for name, value in load_file(job.embeds).items():
            given[name] = value.to(device, dtype if value.is_floating_point() else value.dtype)
    return given


def _resized(picture: Any, given: dict[str, Any]) -> Any:
    """Of the clip's size, where that was given: scaled to cover it, and cut in the middle."""
    from PIL import ImageOps

    if "height" not in given or "width" not in given:
        return picture
    return ImageOps.fit(picture, (given["width"], given["height"]))


@torch.inference_mode()
def call(pipe: Any, job: Job) -> np.ndarray:
    """The clip as pictures. The noise is drawn on the CPU, so that a seed is the same clip on every device."""
    noise = torch.Generator("cpu").manual_seed(job.seed)
    done = pipe(**arguments(pipe, job), generator=noise, output_type="np")
    return to_pictures(done.frames)


def to_pictures(frames: Any) -> np.ndarray:
    """What a pipeline gives, (1, F, H, W, 3) or (1, F, 3, H, W) of numbers in 0 ... 1, or a list of one such."""
    first = frames[0]
    if isinstance(first, Tensor):
        first = first.float().cpu().numpy()
    first = np.asarray(first, dtype=np.float32)
    if first.ndim == 4 and first.shape[-1] != 3 and first.shape[1] == 3:
        first = first.transpose(0, 2, 3, 1)
    if first.ndim != 4 or first.shape[-1] != 3:
        raise ValueError(f"the pipeline gave {first.shape}, which is no video (frames, height, width, 3)")
    return (np.nan_to_num(first) * 255).round().clip(0, 255).astype(np.uint8)
