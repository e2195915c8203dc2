"""Weights on the device by --offload, for two models' shapes: the picture of docs/generate.md. Nothing is downloaded.

    python benchmarks/generation_memory.py [--out docs/images/generate_memory.png]

Sizes are counted on the meta device from the published configurations of Wan 2.1: bfloat16, the decoder in float32.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from foveate.generation.memory import GIB, needed

SHAPES = {"Wan 2.1 1.3B": (30, 12, 8960), "Wan 2.1 14B": (40, 40, 13824)}  # layers, heads, feed-forward

COLORS = {"text encoder": "#7a9cc6", "transformer": "#d98c5f", "decoder": "#8fb573"}


def bytes_of(module: Any, each: int) -> int:
    return each * sum(x.numel() for x in module.parameters())


def parts(layers: int, heads: int, ffn: int) -> dict[str, int]:
    """Bytes of each part."""
    with torch.device("meta"):
        transformer: Any = WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=128, ffn_dim=ffn, num_layers=layers
        )
        text = UMT5EncoderModel(
            UMT5Config(vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
                feed_forward_proj="gated-gelu")
        )  # fmt: skip
        vae = AutoencoderKLWan()
    return {"text encoder": bytes_of(text, 2), "transformer": bytes_of(transformer, 2), "decoder": bytes_of(vae, 4)}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/generate_memory.png"))
    options = parser.parse_args()
    found = {name: parts(*shape) for name, shape in SHAPES.items()}
    figure, axis = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    rows = [(name, offload) for name in found for offload in ("none", "model")]
    for place, (name, offload) in enumerate(rows):
        left, sizes = 0.0, found[name]
        shown = sizes if offload == "none" else {max(sizes, key=lambda part: sizes[part]): needed(sizes, "model")}
        for part, color in zip(
            ("text encoder", "transformer", "decoder"), ("#7a9cc6", "#d98c5f", "#8fb573"), strict=True
        ):
            axis.barh(place, shown.get(part, 0) / GIB, left=left, color=color, label=part if not place else None)
            left += shown.get(part, 0) / GIB
        axis.text(left + 0.4, place, f"{left:.1f}", va="center")
    axis.set_yticks(range(len(rows)), [f"{name}, --offload {offload}" for name, offload in rows])
    axis.invert_yaxis()
    axis.set_xlabel("GiB of weights on the GPU at once")
    axis.set_xlim(0, 47)
    axis.legend(loc="lower right", frameon=False)
    figure.savefig(options.out, dpi=130)
    print(json.dumps({name: {part: round(size / GIB, 2) for part, size in one.items()} for name, one in found.items()}))


if __name__ == "__main__":
    main()
