"""Reuse in generation, on a pipeline of diffusers: the default, a fixed interval, and a schedule calibrated for it.

    python examples/reuse.py [--steps 20] [--out schedule.json]

The pipeline is diffusers' own WanPipeline with a tiny transformer of random weights, so that it runs in seconds on a
CPU and loads nothing. With a real one replace `pipeline()` by `WanPipeline.from_pretrained(...)` and `generate` by your
own call; everything else stays. Random weights change little from step to step: look at your own videos for fidelity.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor

import foveate as fv


def pipeline() -> WanPipeline:
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=8, patch_size=(1, 2, 2),
        freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    missing: Any = None  # no text encoder and no VAE: prompts are given as embeddings, latents are taken
    pipe = WanPipeline(
        tokenizer=missing, text_encoder=missing, vae=missing, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer.eval().requires_grad_(False),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: WanPipeline, seed: int, steps: int) -> Tensor:
    """Latents of one clip."""
    draw = torch.Generator().manual_seed(seed)
    prompt, negative = torch.randn(2, 1, 5, 8, generator=draw)
    done: Any = pipe(
        prompt_embeds=prompt, negative_prompt_embeds=negative, num_inference_steps=steps, guidance_scale=3.0,
        latents=torch.randn(1, 4, 3, 8, 12, generator=draw), height=64, width=96, num_frames=9, output_type="latent",
    )  # fmt: skip
    return done.frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("schedule.json"))
    options = parser.parse_args()
    pipe, steps = pipeline(), options.steps
    exact = generate(pipe, 0, steps)

    plan = fv.calibrate(pipe, lambda clip: generate(pipe, 100 + clip, steps), clips=2)  # clips that are not judged
    plan.schedule(calls=0.4).write(options.out)

    settings = {
        "by quality": fv.ReuseConfig(quality=0.3),  # random weights are hard to predict: 0.9 for a trained model
        "every third step": fv.ReuseConfig(interval=3),
        "schedule": fv.ReuseConfig(schedule=options.out),
        "exact": fv.ReuseConfig(quality=1),
    }
    for name, config in settings.items():
        with fv.reuse(pipe, config) as handle:
            made = generate(pipe, 0, steps)
            error = float((made - exact).norm() / exact.norm())
            print(f"{name:17} {handle.report().computed:4.0%} of the calls, relative error {error:.1e}")


if __name__ == "__main__":
    main()
