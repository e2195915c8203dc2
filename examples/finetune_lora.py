"""LoRA fine-tune of diffusers' Wan with sparse attention: two lines more than without, marked.

    python examples/finetune_lora.py --tiny                                  a random tiny model, seconds on a CPU
    python examples/finetune_lora.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --clips clips.safetensors

clips.safetensors holds, for each clip i, `latents.i` (C, F, Y, X), normalised as the pipeline's, and `text.i` (T, W).
"""

import argparse
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file

import foveate as fv

TINY: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "num_layers": 2,
    "text_dim": 16, "freq_dim": 16, "ffn_dim": 128, "rope_max_seq_len": 32,
}  # fmt: skip


def tiny_clips() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.randn(1, 4, 5, 24, 16), torch.randn(1, 8, 16)


def clips_of(file: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    tensors = load_file(file)
    for index in itertools.cycle(range(len(tensors) // 2)):
        yield tensors[f"latents.{index}"][None], tensors[f"text.{index}"][None]


def main(args: argparse.Namespace) -> fv.Handle:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" and not args.tiny else torch.float32
    model: Any
    if args.tiny:
        model, clips = WanTransformer3DModel(**TINY), tiny_clips()
        # Defaults suit long runs of long videos. Here all comes at once, and sparse though dense would be faster.
        config = fv.SparsityConfig(budget=0.3, warmup=4, learn_from=2, often=2, force=True)
    else:
        model = WanTransformer3DModel.from_pretrained(args.model, subfolder="transformer", torch_dtype=dtype)
        clips, config = clips_of(args.clips), fv.SparsityConfig(tolerance=0.005)
    model.requires_grad_(False).to(device)
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    model.enable_gradient_checkpointing()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    handle = fv.sparsify(model, config)  # 1: before or after LoRA, checkpointing and compiled blocks
    for step, (clip, text) in enumerate(itertools.islice(clips, args.steps)):
        clip, text = clip.to(device, dtype), text.to(device, dtype)
        noise, sigma = torch.randn_like(clip), torch.rand(1, device=device)
        noisy = ((1 - sigma) * clip + sigma * noise).to(dtype)
        loss = (model(noisy, 1000 * sigma, text).sample - (noise - clip)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.step()  # 2: after the optimiser's step
        print(f"step {step}: loss {loss.item():.3f}")
    print(handle)
    model.save_lora_adapter(args.out)  # plain diffusers loads it, and runs dense
    handle.save(args.out / "sparse")  # to generate: fv.load_sparse(model, args.out / "sparse")
    return handle


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="random model and data, runs anywhere")
    parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    parser.add_argument("--clips", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    args = parser.parse_args()
    if not args.tiny and args.clips is None:
        parser.error("give --clips, or --tiny for a trial on random data")
    main(args)
