"""From a model and a configuration to the policy that is put into it; what can never run is refused before."""

import torch
from torch import nn

from foveate import costs as prices
from foveate.attention import DTYPES, unavailable
from foveate.models import adapters
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.policy import Sparse
from foveate.sparsity.profile import CONSTANTS


def check_model(model: nn.Module, config: SparsityConfig) -> torch.device:
    """The model's device. ValueError for what can never run, before anything is put into the model."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if parameter is None:
        adapters.find(model)  # says what is wrong
        raise ValueError(f"{type(model).__name__} has no parameters")
    if parameter.dtype not in DTYPES:
        raise ValueError(f"the model is in {parameter.dtype}, attention is computed in one of {DTYPES}: convert it")
    device = parameter.device
    if config.backend != "auto" and device.type != "meta" and (missing := unavailable(config.backend, device.type)):
        raise ValueError(f"backend {config.backend} {missing}")
    return torch.device("cpu") if device.type == "meta" else device  # the policy follows its queries later


def make_policy(installed: adapters.Installed, config: SparsityConfig, device: torch.device) -> Sparse:
    """For the layers of a model. ValueError for `dense_layers` that it does not have."""
    layers = len(installed.layers)
    if any(index >= layers for index in config.dense_layers):
        raise ValueError(f"dense_layers {tuple(config.dense_layers)} of a model of {layers} layers: count from 0")
    return Sparse(
        layers, installed.heads, installed.dim,
        budget=1.0 if config.budget is None else config.budget,
        periphery="drop" if config.rule == "dsv" else "pool" if config.periphery == "auto" else config.periphery,
        profiled=CONSTANTS if isinstance(config.periphery, str) else sorted({*CONSTANTS, config.periphery}),
        rank=config.rank,
        query_tile=config.query_tile or (128 if config.backend == "fa4" else prices.here(device).tile),
        seed=config.seed, backend=config.backend, device=device,
        start=max(1, config.training_free_steps // 2) if config.training_free_steps else config.learn_from,
    )  # fmt: skip
