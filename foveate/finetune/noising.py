"""How a model's own scheduler says that it was trained: what noise does to a clip, what the model predicts, and which
noise levels are drawn. Everything is a function of numbers in 0 ... 1 that the caller draws.

Flow matching (FlowMatchEuler, and solvers with flow sigmas): noisy = (1 - s) x + s noise, predicted is noise - x, with
levels shifted as generation shifts them (arXiv 2403.03206, section 5.3.2). Diffusion: the scheduler's alphas, predicted
is the noise, the clip or the velocity (arXiv 2202.00512).

Shapes: B batch; x, noise (B, C, F, Y, X); levels (B,).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foveate.finetune.families import diffusers


class Noising(Protocol):
    """What training needs of a scheduler."""

    def levels(self, u: Tensor, tokens: int) -> Tensor:
        """u (B,) uniform in 0 ... 1 -> noise levels, as `apply` takes them. tokens: of the clip, video only."""
        ...

    def apply(self, x: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy clips, the transformer's timestep (B,), and what it should predict."""
        ...


@dataclass(frozen=True, kw_only=True)
class Flow:
    """shift: one number, or None: by the number of tokens, from `base` and `most` ((tokens, shift) each).
    bounds: part of the levels that is trained, for a model that is one of two."""

    shift: float | None
    base: tuple[float, float] = (256, 0.5)
    most: tuple[float, float] = (4096, 1.15)
    bounds: tuple[float, float] = (0.0, 1.0)
    density: str = "logit-normal"
    steps: int = 1000

    def levels(self, u: Tensor, tokens: int) -> Tensor:
        low, high = (self._unshift(bound, tokens) for bound in self.bounds)
        if self.density == "logit-normal":  # the part of the density between the bounds
            low, high = (float(torch.special.ndtr(torch.logit(torch.tensor(x).double(), 1e-9))) for x in (low, high))
            drawn = torch.special.ndtri((low + (high - low) * u.double()).clamp(1e-6, 1 - 1e-6)).sigmoid()
        else:
            drawn = low + (high - low) * u.double()
        factor = self.factor(tokens)
        return (factor * drawn / (1 + (factor - 1) * drawn)).float()

    def factor(self, tokens: int) -> float:
        """Of the shift, at this length."""
        if self.shift is not None:
            return self.shift
        (few, low), (many, high) = self.base, self.most
        return math.exp(low + (high - low) * (tokens - few) / (many - few))

    def _unshift(self, level: float, tokens: int) -> float:
        factor = self.factor(tokens)
        return level / (factor - (factor - 1) * level)

    def apply(self, x: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = level.view(-1, 1, 1, 1, 1)
        return (1 - s) * x + s * noise, self.steps * level, noise - x


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """alphas: cumulative, (steps,) float32. predicts: epsilon, sample or v_prediction."""

    alphas: Tensor
    predicts: str

    def levels(self, u: Tensor, tokens: int) -> Tensor:
        return (u * len(self.alphas)).long().clamp(max=len(self.alphas) - 1)

    def apply(self, x: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alpha = self.alphas.to(x.device)[level.long()].view(-1, 1, 1, 1, 1)
        a, b = alpha.sqrt(), (1 - alpha).sqrt()
        target = {"epsilon": noise, "sample": x, "v_prediction": a * noise - b * x}[self.predicts]
        return a * x + b * noise, level, target


def noising(config: Mapping[str, Any], folder: Path, *, density: str, bounds: tuple[float, float]) -> Noising:
    """By a scheduler's configuration. ValueError for one whose training is not known here."""
    kind, predicts = config.get("_class_name", ""), config.get("prediction_type", "epsilon")
    flow = kind.startswith("FlowMatch") or config.get("use_flow_sigmas") or predicts == "flow_prediction"
    if flow:
        odd = [name for name in ("invert_sigmas", "stochastic_sampling") if config.get(name)]
        if odd:
            raise ValueError(f"the scheduler is a {kind} with {odd[0]}, which training here does not know")
        shift = config.get("shift", 1.0) if kind.startswith("FlowMatch") else config.get("flow_shift", 1.0)
        base = config.get("base_image_seq_len", 256), config.get("base_shift", 0.5)
        most = config.get("max_image_seq_len", 4096), config.get("max_shift", 1.15)
        return Flow(
            shift=None if config.get("use_dynamic_shifting") else float(shift or 1.0), base=base, most=most,
            bounds=bounds, density=density, steps=config.get("num_train_timesteps", 1000),
        )  # fmt: skip
    if predicts not in ("epsilon", "sample", "v_prediction"):
        raise ValueError(f"the scheduler's prediction_type is {predicts!r}, which training here does not know")
    scheduler = getattr(diffusers(), kind).from_pretrained(folder / "scheduler")
    if not hasattr(scheduler, "alphas_cumprod"):
        raise ValueError(f"the scheduler is a {kind}, whose training is not known here; give the folder the one of it")
    if bounds != (0.0, 1.0):
        raise ValueError("--expert is for flow matching models")
    return Diffusion(alphas=scheduler.alphas_cumprod.float(), predicts=predicts)
