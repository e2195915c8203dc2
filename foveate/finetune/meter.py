"""How well a run uses its GPUs: model operations a second over what the card can do (MFU, arXiv 2204.02311, B)."""

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from foveate import costs
from foveate.finetune import estimate
from foveate.finetune.config import FinetuneConfig
from foveate.finetune.encoded import Encoded
from foveate.finetune.families import About

log = logging.getLogger("foveate")

_counted: dict[str, estimate.Work] = {}


class Meter:
    """Of one run. Recomputed blocks and the choice of tiles are no work of the model's; skipped attention is none."""

    def __init__(
        self, about: About, part: str, config: FinetuneConfig, data: Encoded, text: int, dtype: torch.dtype,
        device: torch.device, ranks: int,
    ):  # fmt: skip
        self.about, self.part, self.config, self.data, self.text, self.dtype = about, part, config, data, text, dtype
        self.device, self.ranks = device, ranks

    @cached_property
    def peak(self) -> float | None:
        """Operations a second of all GPUs together; None, said once, where that is not known."""
        own = self.config.peak_tflops
        name = costs.name_of(self.device)
        found = own * 1e12 if own else costs.peak(name) if self.dtype == torch.bfloat16 else None
        if found is None and self.device.type == "cuda":
            log.info("no MFU: the peak of %s in %s is not known here; --peak-tflops gives it", name, self.dtype)
        return found and found * self.ranks

    def measure(self, groups: Sequence[Sequence[int]], kept: float, seconds: float, tokens: float) -> dict[str, float]:
        """For the row of a step that took these clips: `mfu`, and where attention is sparse
        `dense_tokens_per_second`, what dense attention would reach at the same operations a second."""
        if self.peak is None and kept == 1:
            return {}
        works = [(len(group), self._work(group[0])) for group in groups]
        done, dense = (sum(n * work.operations(share) for n, work in works) for share in (kept, 1.0))
        found = {} if self.peak is None else {"mfu": done / seconds / self.peak}
        return found | ({"dense_tokens_per_second": tokens * done / dense} if kept < 1 else {})

    def _work(self, place: int) -> estimate.Work:
        """Of a clip, counted once for every size."""
        config, row = self.config, self.data.rows[place]
        said: list[Any] = [dict(self.about.transformers[self.part]), row["shape"], self.text, str(self.dtype)]
        key = json.dumps([*said, config.lora, config.lora_targets], default=str)
        if key not in _counted:
            sample = self.data.batch([place], self.text)
            _counted[key] = estimate.work(self.about, self.part, config, sample, self.dtype)
        return _counted[key]
