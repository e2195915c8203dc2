"""A tiny saved Wan pipeline with its own text encoder and tokenizer, and clips to fine-tune it on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foveate.data import write_mp4


def tokenizer() -> Any:
    """Letters as tokens."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "</s>", "<unk>", *map(chr, range(97, 123))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )


def wan(folder: Path) -> Path:
    """Saves a WanPipeline of some thousand weights."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(vocab_size=32, **shape))
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.1] * 4, latents_std=[0.9] * 4
    )
    model = tiny_wan()
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = diffusers.WanPipeline(
        tokenizer=tokenizer(), text_encoder=encoder, vae=vae, scheduler=scheduler, transformer=model
    )
    pipe.save_pretrained(folder)
    return folder


def tiny_wan() -> Any:
    """A tiny Wan transformer of which no layer is silent."""
    import diffusers

    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, num_layers=2, text_dim=16,
        freq_dim=16, ffn_dim=64, rope_max_seq_len=32,
    )  # fmt: skip
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def clips(folder: Path, count: int = 6) -> Path:
    """Moving stripes, landscape and portrait in turns, with captions; one file that is no film."""
    folder.mkdir()
    rows = []
    for i in range(count):
        height, width = ((64, 96), (96, 64))[i % 2]
        t, y, x = np.meshgrid(range(12), range(height), range(width), indexing="ij")
        video = (127 + 120 * np.sin(0.2 * (i + 1) * (x + y) / 3 + t)).astype(np.uint8)
        write_mp4(folder / f"{i}.mp4", np.stack([video, video, 255 - video], -1), 12)
        rows.append({"file": f"{i}.mp4", "caption": "stripes that move " + "very " * i + "fast"})
    (folder / "broken.mp4").write_bytes(b"no film")
    rows.append({"file": "broken.mp4", "caption": "nothing"})
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def transformer(folder: Path) -> Path:
    """A pipeline's folder with what training reads of it: a transformer and a scheduler."""
    import diffusers

    torch.manual_seed(0)
    tiny_wan().save_pretrained(folder / "transformer")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    return folder


def encoded(folder: Path, count: int = 12) -> Path:
    """As `foveate encode` leaves it: latents of two sizes, 144 and 240 tokens, with a pattern in them."""
    from safetensors.torch import save_file

    from foveate.finetune.encode import ABOUT, EMPTY, INDEX, shard_file

    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(1)
    tensors, rows = {}, []
    for i in range(count):
        shape = 4, (3, 5)[i % 2], 16, 12
        wave = torch.sin(torch.arange(shape[1] * 192).view(1, *shape[1:]) / (3 + i))
        tensors |= {f"latents.{i}": wave + 0.1 * torch.randn(shape, generator=draw)}
        tensors |= {f"text.{i}": torch.randn(5, 16, generator=draw), f"mask.{i}": torch.ones(5, dtype=torch.bool)}
        rows.append({
            "shard": 0, "place": i, "clip": f"{i}.mp4", "start": 0, "caption": "c", "fps": 24.0, "shape": list(shape),
            "tokens": 48 * shape[1], "text": i, "text_tokens": 5, "more": [],
        })  # fmt: skip
    save_file(tensors, shard_file(folder, 0))
    save_file({"text": torch.zeros(1, 16), "mask": torch.ones(1, dtype=torch.bool)}, folder / EMPTY)
    (folder / INDEX).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / ABOUT).write_text(json.dumps({"pipeline": "WanPipeline", "shards": 1}))
    return folder
