"""diffusers pipelines with tiny random transformers: what a user runs, in a tenth of a second.

`made(name)` -> (pipeline, what its call is given but for the steps). Text is given as embeddings, results are latents.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from tiny_models import cogvideox, ltx, rand, wan
from torch import Tensor, nn

SIZE = {"height": 32, "width": 32, "num_frames": 5}


def flow(**more: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**more)


def unipc() -> Any:
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def vae_wan() -> nn.Module:
    return diffusers.AutoencoderKLWan(base_dim=3, z_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.0] * 3, latents_std=[1.0] * 3)  # fmt: skip


def bare(cls: str, **parts: Any) -> Any:
    """A pipeline whose encoders are missing, which only raw prompts need."""
    names = ("tokenizer", "text_encoder", "vae", "tokenizer_2", "text_encoder_2")
    made = getattr(diffusers, cls)
    wanted = made.__init__.__code__.co_varnames
    return made(**{name: None for name in names if name in wanted}, **parts)


def text(batch: int = 1, tokens: int = 6, dim: int = 8, masks: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {f"{kind}prompt_embeds": rand(batch, tokens, dim) for kind in ("", "negative_")}
    if masks:
        found |= {f"{kind}prompt_attention_mask": torch.ones(batch, tokens).bool() for kind in ("", "negative_")}
    return found


def wan_t2v() -> Any:
    return bare("WanPipeline", transformer=wan(), scheduler=unipc()), text() | SIZE


def wan_two() -> Any:
    pipe = bare("WanPipeline", transformer=wan(), transformer_2=wan(), scheduler=unipc(), boundary_ratio=0.7)
    return pipe, text() | SIZE | {"guidance_scale": 4.0, "guidance_scale_2": 3.0}


def wan_i2v(two: bool = False) -> Any:
    def model() -> nn.Module:
        shape = {"in_channels": 10} | ({} if two else {"image_dim": 8, "added_kv_proj_dim": 64})
        return diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, out_channels=3, text_dim=8, patch_size=(1, 2, 2), freq_dim=8,
            ffn_dim=32, num_layers=2, rope_max_seq_len=16, **shape,
        )  # fmt: skip

    more = {"transformer_2": model(), "boundary_ratio": 0.7} if two else {}
    pipe = diffusers.WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae_wan(), scheduler=unipc(), transformer=model(), **more
    )
    seen = rand(1, 257, 8)
    pipe.encode_image = lambda image, device: seen
    return pipe, text(tokens=512) | SIZE | {"image": torch.rand(1, 3, 32, 32)}


def wan_v2v() -> Any:
    pipe = bare("WanVideoToVideoPipeline", transformer=wan(), scheduler=unipc())
    return pipe, text() | {"height": 32, "width": 32, "latents": rand(1, 3, 2, 4, 4), "video": None, "strength": 1.0}


def skyreels() -> Any:
    pipe = bare("SkyReelsV2Pipeline", transformer=wan(cls="SkyReelsV2Transformer3DModel"), scheduler=unipc())
    return pipe, text() | SIZE


def skyreels_frames() -> Any:
    """A time for each frame."""
    pipe = bare("SkyReelsV2DiffusionForcingPipeline", transformer=wan(cls="SkyReelsV2Transformer3DModel",
        inject_sample_info=True), scheduler=unipc())  # fmt: skip
    return pipe, text() | SIZE | {"fps": 24, "prompt": None}


def ltx_t2v() -> Any:
    pipe = bare("LTXPipeline", transformer=ltx(), scheduler=flow(use_dynamic_shifting=True))
    return pipe, text(masks=True) | {"height": 64, "width": 64, "num_frames": 9}


def ltx_i2v() -> Any:
    pipe = bare("LTXImageToVideoPipeline", transformer=ltx(), scheduler=flow(use_dynamic_shifting=True))
    clip = {"height": 64, "width": 64, "num_frames": 9, "image": None, "latents": rand(1, 8, 4)}
    return pipe, text(masks=True) | clip


def cog(scheduler: str, **more: Any) -> Any:
    pipe = bare("CogVideoXPipeline", transformer=cogvideox(True), scheduler=getattr(diffusers, scheduler)())
    return pipe, text(tokens=11) | {"height": 64, "width": 64, "num_frames": 9} | more


def hunyuan() -> Any:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True, text_embed_dim=8,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    given = text(masks=True) | SIZE | {"pooled_prompt_embeds": rand(1, 8), "negative_pooled_prompt_embeds": rand(1, 8)}
    return bare("HunyuanVideoPipeline", transformer=model, scheduler=flow(shift=7.0)), given | {"true_cfg_scale": 3.0}


def mochi() -> Any:
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=12, text_embed_dim=8, time_embed_dim=4, activation_fn="swiglu", max_sequence_length=16,
    )  # fmt: skip
    pipe = bare("MochiPipeline", transformer=model, scheduler=flow(invert_sigmas=True))
    return pipe, text(masks=True) | {"height": 32, "width": 32, "num_frames": 7}


PIPELINES: dict[str, Callable[[], Any]] = {
    "wan": wan_t2v, "wan 2.2": wan_two, "wan i2v 2.1": wan_i2v, "wan i2v 2.2": lambda: wan_i2v(True),
    "wan v2v": wan_v2v, "skyreels": skyreels, "skyreels frames": skyreels_frames, "ltx": ltx_t2v, "ltx i2v": ltx_i2v,
    "cogvideox ddim": lambda: cog("CogVideoXDDIMScheduler"),
    "cogvideox dpm": lambda: cog("CogVideoXDPMScheduler", use_dynamic_cfg=True), "hunyuan": hunyuan, "mochi": mochi,
}  # fmt: skip


def made(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    pipe, given = PIPELINES[name]()
    models = [pipe.transformer, getattr(pipe, "transformer_2", None)]
    for parameter in (p for model in models if model is not None for p in model.parameters()):
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    pipe.set_progress_bar_config(disable=True)
    return pipe, given


def call(pipe: Any, given: dict[str, Any], steps: int = 20, seed: int = 1, **more: Any) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    done = pipe(**given | more, num_inference_steps=steps, generator=drawn, output_type="latent", return_dict=False)[0]
    return done.clone()


# Transformers of other pipelines, alone, with their inputs.


def ltx2() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=1,
        caption_channels=8,
        rope_double_precision=False,
    )
    return model, {
        "hidden_states": rand(1, 8, 4),
        "audio_hidden_states": rand(1, 6, 4),
        "encoder_hidden_states": rand(1, 5, 8),
        "audio_encoder_hidden_states": rand(1, 5, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_attention_mask": torch.ones(1, 5).bool(),
        "num_frames": 2,
        "height": 2,
        "width": 2,
        "audio_num_frames": 6,
        "fps": 25.0,
    }


def vace() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=16,
        num_layers=2,
        vace_layers=[0],
        vace_in_channels=6,
        rope_max_seq_len=16,
    )
    return model, {
        "hidden_states": rand(1, 4, 2, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": rand(1, 5, 8),
        "control_hidden_states": rand(1, 6, 2, 4, 4),
        "control_hidden_states_scale": torch.ones(1),
    }


def flux() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=[4, 4, 8],
    )
    return model, {
        "hidden_states": rand(1, 16, 4),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": rand(1, 5, 8),
        "pooled_projections": rand(1, 8),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def sd3() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        out_channels=4,
    )
    return model, {
        "hidden_states": rand(1, 4, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": rand(1, 5, 8),
        "pooled_projections": rand(1, 8),
    }


def sana() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=8,
        patch_size=1,
    )
    return model, {
        "hidden_states": rand(1, 4, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": rand(1, 5, 8),
    }


def pixart() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=8,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        attention_bias=True,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
    )
    return model, {
        "hidden_states": rand(1, 4, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": rand(1, 5, 8),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _alone(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A pipeline's transformer, and what the pipeline gives it at its first step."""
    pipe, given = made(name)
    seen: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda _, args, kw: seen.append(kw), with_kwargs=True)
    call(pipe, given, steps=2)
    hook.remove()
    return pipe.transformer, seen[0] | {"return_dict": True}


TRANSFORMERS: dict[str, Callable[[], Any]] = {
    "LTX-2": ltx2, "Wan VACE": vace, "Flux": flux, "SD3": sd3, "Sana": sana, "PixArt": pixart,
    **{name: partial(_alone, name) for name in ("hunyuan", "mochi", "cogvideox ddim", "ltx", "skyreels", "wan")},
}  # fmt: skip
