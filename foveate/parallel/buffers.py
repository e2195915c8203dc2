"""Memory of exchanges: scratch tensors that are used again, and numbers on their way to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Buffers:
    """Scratch tensors by name that grow to the largest size asked for. What is in them is anyone's guess."""

    def __init__(self) -> None:
        self._kept: dict[tuple, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised view of `shape` with the dtype and device of `like`, until the same name is taken again."""
        key = (name, like.dtype, like.device)
        count = 1
        for size in shape:
            count *= size
        kept = self._kept.get(key)
        if kept is None or kept.numel() < count:
            with torch.inference_mode(False):
                self._kept[key] = kept = torch.zeros(count, dtype=like.dtype, device=like.device)
        return kept[:count].view(*shape)


class HostNumbers:
    """Integers on their way from the device to the host: `get` waits for them alone, not for work given out later."""

    def __init__(self, numbers: Tensor):
        self.event, self._numbers = None, numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def get(self) -> list:
        if self.event is not None:
            self.event.synchronize()
        return self._numbers.tolist()
