"""What fine-tuning has to know of each diffusers pipeline: how its clips and captions become tensors, and what its
transformer is given and gives back.

Everything goes by the pipeline's own code where that can be called. Clips are kept as latents (C, F, Y, X), normalised
as the transformer sees them; a caption as its text sequence (T, W), cut behind its last token where what lies behind
can be made again: zeros (Wan), or anything under a mask (LTX). CogVideoX attends to its padding, so that is kept.

Not covered: HunyuanVideo, Mochi, LTX-2, VACE; posterior samples (the mean is taken, as most trainers do).

Shapes: B batch, C channels, F frames, Y height, X width of latents; T text tokens, W text width; S video tokens.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

EXTRA = "fine-tuning diffusers models needs {}: pip install 'foveate[diffusers]'"


@dataclass(frozen=True)
class Sample:
    """A batch of encoded clips: latents (B, C, F, Y, X), text (B, T, W), mask (B, T) bool, frames a second (B,); `more`
    by the family: image latents to be joined to the noisy ones, image embeddings."""

    latents: Tensor
    text: Tensor
    mask: Tensor
    fps: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> "Sample":
        moved = {name: x.to(device, non_blocking=True) for name, x in self.more.items()}
        latents, text, mask, fps = (
            x.to(device, non_blocking=True) for x in (self.latents, self.text, self.mask, self.fps)
        )
        return Sample(latents, text, mask, fps, moved)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the table.

    text: what lies behind a caption's last token: `zeros`, nothing of use under a `mask`, or the `whole` is kept.
    latents(vae, z): normalised; pixels(vae, latents): video (B, 3, T, H, W) in -1 ... 1. image(pipe, video, z): what an
    image-to-video model is given beside the noisy latents. inputs(about, model, noisy, timestep (B,), sample): the
    transformer's arguments. output(noisy, y): (B, C, F, Y, X).
    first_clean: the first latent frame is the image: no noise, time 0, no loss.
    """

    pipelines: tuple[str, ...]
    text: Literal["zeros", "mask", "whole"]
    latents: Callable[[Any, Tensor], Tensor]
    pixels: Callable[[Any, Tensor], Tensor]
    inputs: Callable[["About", Any, Tensor, Tensor, Sample], dict[str, Any]]
    output: Callable[["About", Tensor, Tensor], Tensor] = lambda about, noisy, y: y
    image: Callable[[Any, Tensor], dict[str, Tensor]] | None = None
    first_clean: bool = False


@dataclass(frozen=True)
class About:
    """A pipeline folder: its class, its own configuration, its transformers' (by name) and its scheduler's."""

    folder: Path
    pipeline: str
    config: Mapping[str, Any]
    transformers: Mapping[str, Mapping[str, Any]]
    scheduler: Mapping[str, Any]
    family: Family

    @property
    def first_clean(self) -> bool:
        expanded = bool(self.config.get("expand_timesteps")) and self.family.image is not None
        return self.family.first_clean or expanded

    @property
    def patch(self) -> tuple[int, int, int]:
        """Latent frames, height and width of one token."""
        config = next(iter(self.transformers.values()))
        size = config.get("patch_size", 1)
        return tuple(size) if isinstance(size, list | tuple) else (config.get("patch_size_t") or 1, size, size)

    def tokens(self, shape: tuple[int, ...]) -> int:
        """Video tokens of latents (..., F, Y, X)."""
        return int(torch.tensor([-(-n // p) for n, p in zip(shape[-3:], self.patch, strict=True)]).prod())


def examine(folder: Path) -> About:
    """What a pipeline folder holds, read from its JSON files only. ValueError where it is none that can be trained."""
    if not (folder / "model_index.json").is_file():
        raise ValueError(
            f"{folder} is no diffusers pipeline: there is no model_index.json in it. --model takes a folder that "
            "save_pretrained wrote or `hf download` fetched (for the built-in model leave --model out, see --help)"
        )
    index = _json(folder / "model_index.json")
    name = index.get("_class_name", "")
    family = next((row for row in TABLE if name in row.pipelines), None)
    if family is None:
        known = ", ".join(name for row in TABLE for name in row.pipelines)
        raise ValueError(f"{folder} is a {name}, which cannot be fine-tuned here yet; supported are {known}")
    parts = [part for part in ("transformer", "transformer_2") if (folder / part / "config.json").is_file()]
    if not parts or not (folder / "scheduler" / "scheduler_config.json").is_file():
        raise ValueError(f"{folder} lacks its transformer or its scheduler; download the whole pipeline")
    transformers = {part: _json(folder / part / "config.json") for part in parts}
    scheduler = _json(folder / "scheduler" / "scheduler_config.json")
    return About(folder, name, index, transformers, scheduler, family)


def vae_of(folder: Path) -> dict[str, str] | None:
    """Which VAE a pipeline has: digests of its configuration and of its files; None where it has none."""
    files = sorted((folder / "vae").glob("*.safetensors"))
    if not (folder / "vae" / "config.json").is_file():
        return None
    config = {k: v for k, v in _json(folder / "vae" / "config.json").items() if not k.startswith("_")}
    weights = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as handle:
            weights.update(hashlib.file_digest(handle, "blake2b").digest())
    plain = json.dumps(config, sort_keys=True).encode()
    return {"config": hashlib.blake2b(plain, digest_size=16).hexdigest(), "files": weights.hexdigest()}


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from None


def diffusers() -> Any:
    """The package; ImportError that names the extra."""
    for name in ("diffusers", "transformers"):
        try:
            __import__(name)
        except ImportError:
            raise ImportError(EXTRA.format(name)) from None
    import diffusers

    return diffusers


def check_encoders(about: About) -> None:
    """ValueError where the folder lacks what encodes."""
    for part in ("vae", "text_encoder", "tokenizer"):
        if not (about.config.get(part) or [None])[0] or not (about.folder / part).is_dir():
            raise ValueError(f"{about.folder} has no {part}, which encoding needs; download the whole pipeline")


def load_encoders(about: About, device: str, dtype: torch.dtype) -> Any:
    """The pipeline without its transformers, on a device: encoders in `dtype`, the VAE in float32."""
    package = diffusers()
    absent: dict[str, Any] = dict.fromkeys(about.transformers)
    try:
        pipe = getattr(package, about.pipeline).from_pretrained(
            about.folder, dtype={"default": dtype, "vae": torch.float32}, **absent
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{about.folder} cannot be loaded: {error}; download it again") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def load_vae(about: About) -> Any:
    """The pipeline's, float32, on the CPU."""
    package, (_, name) = diffusers(), about.config["vae"]
    return getattr(package, name).from_pretrained(about.folder, subfolder="vae", dtype=torch.float32).eval()


def load_transformer(about: About, name: str, dtype: torch.dtype) -> Any:
    """One transformer of the pipeline, on the CPU."""
    package = diffusers()
    cls = getattr(package, about.transformers[name]["_class_name"])
    try:
        return cls.from_pretrained(about.folder, subfolder=name, dtype=dtype)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{about.folder / name} cannot be loaded: {error}; download it again") from error


@torch.no_grad()
def encode_captions(about: About, pipe: Any, captions: list[str]) -> list[dict[str, Tensor]]:
    """Each caption as `text` (T, W) and `mask` (T,), cut where the family allows, on the CPU."""
    length = inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default
    found = []
    for caption in captions:
        out = pipe.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=length)
        text = out[0][0].float().cpu()
        if about.family.text == "mask":
            mask = out[1][0].bool().cpu()
        elif about.family.text == "zeros":
            mask = text.ne(0).any(-1)
        else:
            mask = torch.ones(len(text), dtype=torch.bool)
        stop = int(mask.nonzero().max()) + 1 if mask.any() else 1
        found.append({"text": text[:stop].contiguous(), "mask": mask[:stop].contiguous()})
    return found


def text_length(about: About) -> int:
    """Text tokens that the pipeline's call gives its transformer."""
    cls = getattr(diffusers(), about.pipeline)
    return inspect.signature(cls.__call__).parameters["max_sequence_length"].default


@torch.no_grad()
def encode_clip(about: About, pipe: Any, video: Tensor) -> dict[str, Tensor]:
    """One clip (3, T, H, W) in -1 ... 1 as `latents` (C, F, Y, X) and what image models are given, on the CPU."""
    device = next(pipe.vae.parameters()).device
    video = video[None].to(device, torch.float32)
    z = pipe.vae.encode(video).latent_dist.mode().float()
    found = {"latents": about.family.latents(pipe.vae, z)}
    if about.family.image is not None and not about.first_clean:
        found |= about.family.image(SimpleNamespace(about=about, pipe=pipe), video)
    return {name: x[0].cpu().contiguous() for name, x in found.items()}


def _wan_latents(vae: Any, z: Tensor) -> Tensor:
    mean, std = (torch.tensor(vae.config[name]).to(z).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return (z - mean) / std


def _wan_pixels(vae: Any, x: Tensor) -> Tensor:
    mean, std = (torch.tensor(vae.config[name]).to(x).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return vae.decode(x * std + mean, return_dict=False)[0]


def _wan_image(to: Any, video: Tensor) -> dict[str, Tensor]:
    """The first frame as the pipeline conditions on it: mask and latents, and CLIP's view where the model asks."""
    pipe, (_, _, frames, height, width) = to.pipe, video.shape
    z = pipe.vae.config.z_dim
    found = pipe.prepare_latents(video[:, :, 0], 1, z, height, width, frames, torch.float32, video.device)
    more = {"image": found[1]}
    if next(iter(to.about.transformers.values())).get("image_dim") is not None:
        from PIL import Image

        picture = (video[0, :, 0].movedim(0, -1) * 127.5 + 127.5).round().byte().cpu().numpy()
        more["image_embeds"] = pipe.encode_image(Image.fromarray(picture), video.device).float()
    return more


def _wan_inputs(about: About, model: Any, noisy: Tensor, timestep: Tensor, sample: Sample) -> dict[str, Any]:
    if about.config.get("expand_timesteps"):
        timestep = _by_token(about, noisy, timestep, about.first_clean)
    if "image" in sample.more:
        noisy = torch.cat([noisy, sample.more["image"].to(noisy)], 1)
    given = {"hidden_states": noisy, "timestep": timestep, "encoder_hidden_states": sample.text.to(noisy)}
    if "image_embeds" in sample.more:
        given["encoder_hidden_states_image"] = sample.more["image_embeds"].to(noisy)
    return given


def _by_token(about: About, noisy: Tensor, timestep: Tensor, clean: bool) -> Tensor:
    """timestep (B,) -> (B, S): 0 for the tokens of a first frame that is clean."""
    tokens, frame = about.tokens(noisy.shape), about.tokens((1, *noisy.shape[-2:]))
    spread = timestep[:, None].repeat(1, tokens)
    if clean:
        spread[:, :frame] = 0
    return spread


def _ltx_latents(vae: Any, z: Tensor) -> Tensor:
    mean, std = (x.to(z).view(1, -1, 1, 1, 1) for x in (vae.latents_mean, vae.latents_std))
    return (z - mean) * vae.config.scaling_factor / std


def _ltx_pixels(vae: Any, x: Tensor) -> Tensor:
    mean, std = (y.to(x).view(1, -1, 1, 1, 1) for y in (vae.latents_mean, vae.latents_std))
    time = x.new_zeros(len(x)) if vae.config.timestep_conditioning else None  # as its pipeline decodes by default
    return vae.decode(x * std / vae.config.scaling_factor + mean, time, return_dict=False)[0]


def _ltx_inputs(about: About, model: Any, noisy: Tensor, timestep: Tensor, sample: Sample) -> dict[str, Any]:
    cls = getattr(diffusers(), "LTXPipeline")  # noqa: B009 (loaded when first asked for)
    time, space, _ = about.patch
    _, _, frames, height, width = noisy.shape
    if about.first_clean:
        timestep = _by_token(about, noisy, timestep, True)[..., None]
    return {
        "hidden_states": cls._pack_latents(noisy, space, time), "encoder_hidden_states": sample.text.to(noisy),
        "timestep": timestep, "encoder_attention_mask": sample.mask, "num_frames": frames, "height": height,
        "width": width, "rope_interpolation_scale": (8 / float(sample.fps[0]), 32, 32),
    }  # fmt: skip


def _ltx_output(about: About, noisy: Tensor, y: Tensor) -> Tensor:
    cls = getattr(diffusers(), "LTXPipeline")  # noqa: B009
    time, space, _ = about.patch
    return cls._unpack_latents(y, *noisy.shape[-3:], space, time)


def _cog_latents(vae: Any, z: Tensor) -> Tensor:
    return z * vae.config.scaling_factor


def _cog_pixels(vae: Any, x: Tensor) -> Tensor:
    return vae.decode(x / vae.config.scaling_factor, return_dict=False)[0]


def _cog_image(to: Any, video: Tensor) -> dict[str, Tensor]:
    """The first frame's latents, zeros behind it."""
    vae = to.pipe.vae
    z = vae.encode(video[:, :, :1]).latent_dist.mode().float()
    scale = vae.config.scaling_factor
    z = z / scale if vae.config.get("invert_scale_latents") else z * scale
    frames = (video.shape[2] - 1) // to.pipe.vae_scale_factor_temporal + 1
    return {"image": torch.cat([z, z.new_zeros(*z.shape[:2], frames - 1, *z.shape[3:])], 2)}


def _cog_inputs(about: About, model: Any, noisy: Tensor, timestep: Tensor, sample: Sample) -> dict[str, Any]:
    config = next(iter(about.transformers.values()))
    if "image" in sample.more:
        noisy = torch.cat([noisy, sample.more["image"].to(noisy)], 1)
    given = {
        "hidden_states": noisy.transpose(1, 2), "encoder_hidden_states": sample.text.to(noisy), "timestep": timestep,
    }  # fmt: skip
    if config.get("use_rotary_positional_embeddings"):
        cls = getattr(diffusers(), "CogVideoXPipeline")  # noqa: B009
        owner = SimpleNamespace(
            transformer=SimpleNamespace(config=SimpleNamespace(**config)), vae_scale_factor_spatial=8
        )
        frames, height, width = noisy.shape[-3:]
        table = cls._prepare_rotary_positional_embeddings
        given["image_rotary_emb"] = table(owner, 8 * height, 8 * width, frames, noisy.device)
    if config.get("ofs_embed_dim") is not None:
        given["ofs"] = noisy.new_full((1,), 2.0)
    return given


def _cog_output(about: About, noisy: Tensor, y: Tensor) -> Tensor:
    return y.transpose(1, 2)


TABLE = [
    Family(
        pipelines=("WanPipeline", "SkyReelsV2Pipeline"), text="zeros", latents=_wan_latents, pixels=_wan_pixels,
        inputs=_wan_inputs
    ),
    Family(
        pipelines=("WanImageToVideoPipeline",), text="zeros", latents=_wan_latents, pixels=_wan_pixels,
        inputs=_wan_inputs, image=_wan_image,
    ),
    Family(
        pipelines=("LTXPipeline",), text="mask", latents=_ltx_latents, pixels=_ltx_pixels,
        inputs=_ltx_inputs, output=_ltx_output
    ),
    Family(
        pipelines=("LTXImageToVideoPipeline",), text="mask", latents=_ltx_latents, pixels=_ltx_pixels,
        inputs=_ltx_inputs, output=_ltx_output, first_clean=True,
    ),
    Family(
        pipelines=("CogVideoXPipeline",), text="whole", latents=_cog_latents, pixels=_cog_pixels,
        inputs=_cog_inputs, output=_cog_output
    ),
    Family(
        pipelines=("CogVideoXImageToVideoPipeline",), text="whole", latents=_cog_latents, pixels=_cog_pixels,
        inputs=_cog_inputs, output=_cog_output, image=_cog_image,
    ),
]  # fmt: skip
