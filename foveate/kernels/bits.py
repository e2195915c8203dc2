"""Bit-packed tile masks: 32 key/value tiles to an int32 word, lowest bit first.

Shapes: B batch, H heads, R query tiles, N key/value tiles, W = ceil(N / 32) words.
"""

import torch
from torch import Tensor

WORD = 32


def pack(mask: Tensor) -> Tensor:
    """Pack a bool mask (..., N) into int32 words (..., ceil(N / 32)); unused high bits are 0."""
    spare = -mask.shape[-1] % WORD
    padded = torch.nn.functional.pad(mask, (0, spare)).unflatten(-1, (-1, WORD))
    weights = torch.ones((), dtype=torch.int64, device=mask.device) << torch.arange(WORD, device=mask.device)
    unsigned = (padded * weights).sum(-1)
    # int64 -> int32 wraps modulo 2^32, which is what a word with bit 31 set needs.
    return unsigned.to(torch.int32)


def unpack(words: Tensor, count: int) -> Tensor:
    """The bool mask (..., count) behind int32 `words` (..., W)."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)[..., :count]


def lists(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Kept columns of each row of a bool `mask` (..., N): ascending int32 indices (..., N) and int32 counts (...).

    The list is as wide as the mask, whatever is kept, so its size never depends on data. Entries past the count
    are the columns that are not kept, also ascending: a valid index, to be masked by the reader.
    """
    order = torch.argsort(mask.to(torch.uint8), dim=-1, descending=True, stable=True)
    return order.to(torch.int32), mask.sum(-1, dtype=torch.int32)
