"""What plain diffusers loads: LoRA as `pipe.load_lora_weights(OUT/lora)`, all weights as a transformer's folder."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from foveate.finetune.families import About, diffusers

LORA, TRANSFORMER = "lora", "transformer"


def write_lora(out: Path, about: About, part: str, weights: Mapping[str, Tensor], alpha: float, rank: int) -> Path:
    """LoRA weights, by the transformer's parameter names, as diffusers' own file. Returns its folder."""
    package = diffusers()
    cls = getattr(package, about.pipeline)
    layers = {name.replace(".default.weight", ".weight"): x.float().contiguous() for name, x in weights.items()}
    folder = out / LORA
    fresh = _fresh(folder)
    given = {f"{part}_lora_layers": layers}
    if alpha != rank:  # diffusers takes the scale from the file's header
        metadata = {"r": rank, "lora_alpha": alpha, "target_modules": sorted(_targets(layers))}
        given[f"{part}_lora_adapter_metadata"] = metadata
    cls.save_lora_weights(str(fresh), **given)
    return _renamed(fresh, folder)


def _targets(layers: Mapping[str, Tensor]) -> set[str]:
    return {name.rpartition(".lora_")[0] for name in layers}


def write_transformer(out: Path, about: About, part: str, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Path:
    """A transformer's weights as `save_pretrained` writes them, to put in the place of the pipeline's own."""
    cls = getattr(diffusers(), about.transformers[part]["_class_name"])
    with torch.device("meta"):
        model = cls.from_config(dict(about.transformers[part]))
    keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    cast = {
        name: x if any(key in name.split(".") for key in keep) else x.to(dtype) for name, x in weights.items()
    }  # fmt: skip
    model.load_state_dict(cast, strict=False, assign=True)
    folder = out / part
    fresh = _fresh(folder)
    model.save_pretrained(fresh)
    return _renamed(fresh, folder)


def _fresh(folder: Path) -> Path:
    fresh = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    return fresh


def _renamed(fresh: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)
    return folder
