"""What is trained: which transformer of a pipeline, with LoRA or whole, and what its backward computes again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from foveate.finetune.config import FinetuneConfig
from foveate.finetune.encoded import Encoded
from foveate.finetune.families import EXTRA, About
from foveate.sparsity import select as _select  # noqa: F401 (its operator)


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
    return data


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
