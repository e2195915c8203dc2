"""Tiny diffusers pipelines as folders, with tokenizers, text encoders and VAEs: what `foveate generate` is given.

`saved(folder, name)` -> the flags that its clip wants. Weights are random but fixed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from tiny_models import cogvideox, ltx, rand, wan
from tiny_pipelines import flow, hunyuan, mochi, text, unipc
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

WORDS = ["<pad>", "</s>", "<unk>", "a", "cat", "dog", "runs", "red", "bad"]


def words() -> Any:
    table = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    table.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=table, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def t5(kind: str = "") -> Any:
    config, model = (UMT5Config, UMT5EncoderModel) if kind == "umt5" else (T5Config, T5EncoderModel)
    return model(config(vocab_size=len(WORDS), d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)).eval()


def vae_wan() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=3, z_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.0] * 3, latents_std=[1.0] * 3)  # fmt: skip


def with_text(cls: str, transformer: nn.Module, scheduler: Any, vae: Any, kind: str = "", **more: Any) -> Any:
    return getattr(diffusers, cls)(
        tokenizer=words(), text_encoder=t5(kind), transformer=transformer, scheduler=scheduler, vae=vae, **more
    )


def vae_ltx() -> Any:
    return diffusers.AutoencoderKLLTXVideo(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(4, 4, 4, 4),
        decoder_block_out_channels=(4, 4, 4, 4), layers_per_block=(1, 1, 1, 1, 1), patch_size=1,
        decoder_layers_per_block=(1, 1, 1, 1, 1), spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, timestep_conditioning=False,
    )  # fmt: skip


def vae_cog() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        in_channels=3, out_channels=3, latent_channels=3, block_out_channels=(4, 4, 4, 4), layers_per_block=1,
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4, norm_num_groups=2,
        temporal_compression_ratio=4,
    )  # fmt: skip


def vae_hunyuan() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1,
        norm_num_groups=2, down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4, spatial_compression_ratio=8, temporal_compression_ratio=4,
        mid_block_add_attention=True,
    )  # fmt: skip


def vae_mochi() -> Any:
    return diffusers.AutoencoderKLMochi(
        latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
    )  # fmt: skip


def made_wan() -> Any:
    return with_text("WanPipeline", wan(), unipc(), vae_wan(), "umt5"), 5, 64


def made_skyreels() -> Any:
    model = wan(cls="SkyReelsV2Transformer3DModel")
    return with_text("SkyReelsV2Pipeline", model, unipc(), vae_wan(), "umt5"), 5, 64


def made_ltx() -> Any:
    return with_text("LTXPipeline", ltx(), flow(use_dynamic_shifting=True), vae_ltx()), 9, 64


def made_cog() -> Any:
    scheduler = diffusers.CogVideoXDDIMScheduler()
    return with_text("CogVideoXPipeline", cogvideox(True), scheduler, vae_cog()), 9, 64


def made_mochi() -> Any:
    pipe = with_text("MochiPipeline", mochi()[0].transformer, flow(invert_sigmas=True), vae_mochi())
    return pipe, 7, 32


def made_hunyuan() -> Any:
    pipe, _ = hunyuan()
    pipe.register_modules(vae=vae_hunyuan())
    return pipe, 5, 32


def made_image() -> Any:
    """Wan 2.2's kind of image to video: two transformers that see the picture as latents only."""
    shape = {"in_channels": 10}
    model = [
        diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, out_channels=3, text_dim=8, patch_size=(1, 2, 2), freq_dim=8,
            ffn_dim=32, num_layers=2, rope_max_seq_len=16, **shape,
        ) for _ in range(2)
    ]  # fmt: skip
    pipe = with_text("WanImageToVideoPipeline", model[0], unipc(), vae_wan(), "umt5",
        transformer_2=model[1], boundary_ratio=0.7)  # fmt: skip
    return pipe, 5, 64


MAKERS: dict[str, Callable[[], Any]] = {
    "wan": made_wan, "ltx": made_ltx, "cogvideox": made_cog, "skyreels": made_skyreels, "mochi": made_mochi,
    "hunyuan": made_hunyuan, "wan i2v": made_image,
}  # fmt: skip


def saved(folder: Path, name: str) -> list[str]:
    """Write the folder; the flags that a clip of it wants, `--model` first."""
    torch.manual_seed(0)
    pipe, frames, edge = MAKERS[name]()
    for part in pipe.components.values():
        for parameter in part.parameters() if isinstance(part, nn.Module) else ():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
    pipe.save_pretrained(folder)
    flags = ["--model", str(folder), "--frames", str(frames), "--height", str(edge), "--width", str(edge)]
    if name == "hunyuan":  # its text encoders are a language model with a template of its own: encoded before
        given = text(masks=True) | {"pooled_prompt_embeds": rand(1, 8), "negative_pooled_prompt_embeds": rand(1, 8)}
        save_file({key: value.clone() for key, value in given.items()}, folder / "embeds.safetensors")
        return [*flags, "--embeds", str(folder / "embeds.safetensors"), "--call", '{"true_cfg_scale": 3.0}']
    flags += ["--prompt", "a cat runs"]
    if name == "wan i2v":
        from PIL import Image

        noise = (torch.rand(50, 60, 3) * 255).byte().numpy()
        Image.fromarray(noise).save(folder / "first.png")
        flags += ["--image", str(folder / "first.png")]
    return flags
