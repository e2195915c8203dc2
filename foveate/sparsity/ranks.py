"""How a handle hears of other ranks: foveate.parallel, which alone may speak to them, leaves its mean here."""

import importlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]

_finders: list[Callable[[], Reduce | None]] = []


def offer(find: Callable[[], Reduce | None]) -> None:
    """find: gives the mean of a float32 tensor over all ranks, None where this process is alone."""
    _finders[:] = [find]


def found() -> Reduce | None:
    """The mean over all ranks, None where this process is alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    importlib.import_module("foveate.parallel.handle")  # a later room: it offers, nothing here depends on it
    return _finders[0]() if _finders else None


def mean(parts: Sequence[Tensor], reduce: Reduce | None, device: torch.device) -> list[Tensor]:
    """float32 tensors' means over ranks, of all in one go; on `device`."""
    flat = torch.cat([x.to(device).flatten() for x in parts])
    flat = flat if reduce is None else reduce(flat)
    return [found.view(x.shape) for found, x in zip(flat.split([x.numel() for x in parts]), parts, strict=True)]
