"""What is trained: which transformer of a pipeline, with LoRA or whole, and what its backward computes again."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from foveate.finetune.config import FinetuneConfig
from foveate.finetune.encoded import Encoded
from foveate.finetune.families import EXTRA, About, vae_of
from foveate.sparsity import select as _select  # noqa: F401 (its operator)

log = logging.getLogger("foveate")


def choose_expert(config: FinetuneConfig, about: About) -> tuple[str, tuple[float, float]]:
    """Which transformer is trained, and the noise levels it is for. ValueError where that must be said."""
    border = about.config.get("boundary_ratio")
    if len(about.transformers) == 1 or border is None:
        if config.expert != "auto":
            raise ValueError(f"--expert {config.expert}, but {config.model} has one transformer; leave it out")
        return next(iter(about.transformers)), (0.0, 1.0)
    if config.expert == "auto":
        raise ValueError(f"{config.model} has two transformers: say by --expert high or low which noise is trained")
    return ("transformer", (border, 1.0)) if config.expert == "high" else ("transformer_2", (0.0, border))


def open_data(config: FinetuneConfig, about: About, place: Any = None) -> Encoded:
    """The encoded clips. ValueError where they are not of this pipeline."""
    data = Encoded(place or config.data)
    if data.about["pipeline"] != about.pipeline:
        raise ValueError(
            f"{data.folder} was encoded for a {data.about['pipeline']}, {config.model} is a {about.pipeline}"
        )
    _fits(data, about)
    return data


def _fits(data: Encoded, about: About) -> None:
    """ValueError where latents and texts are not of this pipeline's sizes, or by another VAE."""
    given = next(iter(about.transformers.values()))
    text = next((given[name] for name in ("text_dim", "caption_channels", "text_embed_dim") if given.get(name)), None)
    pairs = {"latent channels": (data.shapes[0][0], given.get("out_channels") or given.get("in_channels"))}
    pairs |= {"text width": (data.text_width, text)}
    odd = [f"{name} {has}, the model takes {takes}" for name, (has, takes) in pairs.items() if takes not in (None, has)]
    own, kept = vae_of(about.folder), data.about.get("vae")
    if own and kept and own["config"] != kept["config"]:
        odd.append("another VAE's configuration")
    if odd:
        raise ValueError(
            f"{data.folder} was encoded for another model ({'; '.join(odd)}): encode it with {about.folder}"
        )
    if own and kept and own != kept:
        log.warning(
            "%s was encoded by a VAE whose files are not those of %s: is it the same one?", data.folder, about.folder
        )


def prepare(model: Any, config: FinetuneConfig) -> None:
    """A transformer as it was loaded becomes one that is trained: LoRA or all weights, blocks that are recomputed."""
    model.requires_grad_(not config.lora)
    if config.lora:
        add_lora(model, config)
    model.train()
    if config.checkpointing != "none":
        model.enable_gradient_checkpointing(recompute(config.checkpointing))


def stored_in(config: FinetuneConfig, dtype: torch.dtype) -> torch.dtype:
    """What the loaded weights are kept in, where `dtype` is computed in: float32 where they are trained."""
    return torch.bfloat16 if config.lora and dtype == torch.bfloat16 else torch.float32


def add_lora(model: Any, config: FinetuneConfig) -> None:
    """LoRA by peft, in float32, the same on all ranks. ValueError where no layer has such a name."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise ImportError(EXTRA.format("peft")) from None
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    odd = [t for t in config.lora_targets if not any(n == t or n.endswith(f".{t}") for n in names)]
    if odd:
        kinds = sorted({name.split(".", 2)[-1] for name in names if name.count(".") > 1})
        raise ValueError(f"--lora-targets {' '.join(odd)}: no linear layer is named so; there are {', '.join(kinds)}")
    changed = [
        layer for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and any(name == t or name.endswith(f".{t}") for t in config.lora_targets)
    ]  # fmt: skip
    most = max(min(layer.weight.shape) for layer in changed)
    if config.lora > most:
        raise ValueError(f"--lora {config.lora} is more than any of these layers has ranks, {most}; give a lower one")
    torch.manual_seed(config.seed)
    alpha: Any = config.lora_alpha or config.lora
    model.add_adapter(LoraConfig(r=config.lora, lora_alpha=alpha, target_modules=list(config.lora_targets)))
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()


def recompute(kind: str) -> Callable[..., Any]:
    """How diffusers runs a block that is recomputed in the backward; `selective` keeps attention's outputs."""
    from torch.utils.checkpoint import checkpoint as run
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    if kind == "blocks":
        return partial(run, use_reentrant=False)
    aten: Any = torch.ops.aten
    kept = [
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.foveate.attend.default, torch.ops.foveate.select.default,
    ]  # fmt: skip
    return partial(run, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, kept))
