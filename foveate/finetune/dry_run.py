"""`foveate train --model ... --dry-run`: the whole configuration as YAML; what a rank needs in memory, as comments."""

from dataclasses import asdict

import torch
import yaml

from foveate.finetune import estimate, families
from foveate.finetune.config import FinetuneConfig
from foveate.finetune.encoded import Encoded, Order, deal
from foveate.finetune.families import About
from foveate.finetune.model import choose_expert, open_data
from foveate.parallel import fsdp

HOST = 8  # GPUs of a host, for --shard host


def describe(config: FinetuneConfig, gpus: int) -> str:
    """For `gpus` ranks; a recipe for --config. Reads no weights. ValueError for what could not be trained."""
    about = families.examine(config.model)
    part, _ = choose_expert(config, about)
    data = open_data(config, about)
    context = config.head * config.sequence
    if gpus < 1 or gpus % context:
        raise ValueError(f"--gpus {gpus} is no multiple of --head x --sequence, {context}")
    train, _ = data.held_out(config.val_fraction if config.validation is None else 0.0)
    order = Order(
        train, data.bucket[train], data.tokens[train], batch=config.batch, micro=config.micro, seed=config.seed
    )
    deal([0] * order.forwards, gpus // context)
    need, said = needs(config, about, part, data, gpus)
    parts = {name.replace("_", " "): size for name, size in asdict(need).items()} | {"in all": need.total}
    head = [f"# One of {gpus} ranks needs, estimated:"]
    head += [f"# {name:12} {size / 2**30:9.3f} GiB" for name, size in parts.items()]
    head += [f"# for {line}" for line in said]
    return "\n".join(head) + "\n" + yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def needs(
    config: FinetuneConfig, about: About, part: str, data: Encoded, gpus: int
) -> tuple[estimate.Memory, list[str]]:
    """Of the rank that holds most, with the longest clips of the data; and what was assumed, in words."""
    low = config.dtype == "bfloat16" or (config.dtype == "auto" and not config.device.startswith("cpu"))
    dtype = torch.bfloat16 if low else torch.float32
    text = families.text_length(about) if about.family.text != "whole" else 0
    longest = int(data.tokens.argmax())
    sample = data.batch([longest] * config.micro, text)
    model = estimate.empty(about, part, config, dtype)
    blocks = [list(block.parameters()) for block in fsdp.blocks(model)]
    inside = {id(p) for block in blocks for p in block}
    groups = [*blocks, [p for p in model.parameters() if id(p) not in inside]]
    context = config.head * config.sequence
    need = estimate.memory(
        dict(model.named_parameters()), groups, ranks=min(gpus, HOST) if config.shard == "host" else gpus,
        held=estimate.held(about, part, config, sample, dtype, gpus > 1), context=context, element=dtype.itemsize,
    )  # fmt: skip
    tokens = data.rows[longest]["tokens"]
    said = [f"{config.micro} x {tokens:,} tokens a forward, the longest; {str(dtype).removeprefix('torch.')}"]
    said += ["dense attention; without what the allocator, the driver and validation videos take besides"]
    said += [f"activations shared evenly by {context} ranks"] if context > 1 else []
    said += [f"hosts of {HOST} GPUs"] if config.shard == "host" else []
    return need, said
