"""The small trained Wan of tests and benchmarks: diffusers' model and pipeline, real footage, no other weights.

`tests/assets/wan_tiny.safetensors` is a `WanTransformer3DModel` of 2.6 M parameters, trained by pretrain_wan.py on
eight Atari games. Its pixels are its latents: 2 x 2 pixels of 3 colours are one latent of 12 channels (space to depth),
so no VAE is needed, and its text encoder is a table: a word is a fixed random vector. It exists to judge generation by
the finished video where no large model fits.

Shapes: B batch, F frames, Y height, X width; latents (B, 12, F, Y / 2, X / 2), clips uint8 (B, F, Y, X, 3).
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

CHECKPOINT = Path(__file__).parent.parent / "tests" / "assets" / "wan_tiny.safetensors"
GAMES = ("pong", "breakout", "space invaders", "ms pacman", "freeway", "seaquest", "boxing", "enduro")
FRAMES, HEIGHT, WIDTH = 12, 96, 80  # pixels; 12 x 24 x 20 = 5,760 tokens
WORDS, TEXT_DIM = 4, 32  # a prompt is at most so many words, each a vector of so many numbers
CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 5, "attention_head_dim": 32, "in_channels": 12, "out_channels": 12,
    "text_dim": TEXT_DIM, "freq_dim": 128, "ffn_dim": 256, "num_layers": 8, "rope_max_seq_len": 64,
}  # fmt: skip


def prompt_embeds(prompts: Sequence[str]) -> Tensor:
    """float32 (B, WORDS, TEXT_DIM): one fixed Gaussian vector a word, zeros after the last; "" is all zeros.

    Raises ValueError for a prompt of more than `WORDS` words.
    """
    table = torch.zeros(len(prompts), WORDS, TEXT_DIM)
    for row, prompt in zip(table, prompts, strict=True):
        words = prompt.split()
        if len(words) > WORDS:
            raise ValueError(f"a prompt has at most {WORDS} words here, got {prompt!r}; trained on {', '.join(GAMES)}")
        for place, word in enumerate(words):
            seed = int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:6], "little")
            row[place] = torch.randn(TEXT_DIM, generator=torch.Generator().manual_seed(seed))
    return table


def to_latents(clips: Tensor) -> Tensor:
    """uint8 (B, F, Y, X, 3) -> float32 (B, 12, F, Y / 2, X / 2) in -1 ... 1."""
    pictures = clips.permute(0, 1, 4, 2, 3).float() / 127.5 - 1
    return nn.functional.pixel_unshuffle(pictures, 2).transpose(1, 2)


def to_clips(latents: Tensor) -> Tensor:
    """The way back, rounded and clamped."""
    pictures = nn.functional.pixel_shuffle(latents.float().transpose(1, 2), 2)
    return ((pictures + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2)


def noise(seeds: Sequence[int], shape: tuple[int, int, int] = (FRAMES, HEIGHT, WIDTH)) -> Tensor:
    """Starting latents float32 (B, 12, F, Y / 2, X / 2), one seed a sample; the same on every device."""
    frames, height, width = shape
    size = (CONFIG["in_channels"], frames, height // 2, width // 2)
    return torch.stack([torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def load(file: Path = CHECKPOINT, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The `WanTransformer3DModel` of a file that benchmarks/pretrain_wan.py wrote, in evaluation mode.

    Modules that diffusers keeps in float32 stay so. Raises ValueError for a file without its header.
    """
    from diffusers import WanTransformer3DModel

    with safe_open(file, "pt") as opened:
        header = opened.metadata() or {}
        if "config" not in header:
            raise ValueError(f"{file} has no model configuration in its header; make one by benchmarks/pretrain_wan.py")
        weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    model: Any = WanTransformer3DModel(**json.loads(header["config"]))
    model.load_state_dict(weights)  # copies into the parameters' own float32
    kept = tuple(WanTransformer3DModel._keep_in_fp32_modules or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(part in kept for part in name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return model.requires_grad_(False).eval().to(device)


def pipeline(transformer: nn.Module, *, shift: float = 3.0) -> Any:
    """diffusers' own `WanPipeline` around the model: Euler's flow-matching scheduler, no text encoder, no VAE."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    missing: Any = None  # components that only raw prompts and decoded output need
    pipe = WanPipeline(
        tokenizer=missing, text_encoder=missing, vae=missing, scheduler=scheduler, transformer=transformer  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(
    pipe: Any,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int = 50,
    guidance: float = 3.0,
    shape: tuple[int, int, int] = (FRAMES, HEIGHT, WIDTH),
) -> Tensor:
    """Latents float32 (B, 12, F, Y / 2, X / 2) on the CPU, one prompt and seed a sample. The batch runs as one."""
    text = prompt_embeds(prompts).to(pipe.device)
    done = pipe(
        prompt_embeds=text, negative_prompt_embeds=torch.zeros_like(text), latents=noise(seeds, shape).to(pipe.device),
        num_inference_steps=steps, guidance_scale=guidance, output_type="latent", height=16 * (shape[1] // 4),
        width=16 * (shape[2] // 4),
    )  # fmt: skip
    return done.frames.float().cpu()
