"""Checkpoints of a fine-tuning run by torch.distributed.checkpoint, as safetensors: one format for 1 ... N ranks.

A checkpoint is a folder `step-000120` with every rank's shards and `state.json`. It is written beside its final name,
while training goes on, and renamed when every rank's part is on the disk: a kill at any moment leaves a complete
checkpoint or none of that name. Nothing is ever unpickled.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from foveate.parallel import fsdp
from foveate.training.checkpoint import PREFIX, flush, last, steps

log = logging.getLogger("foveate")


class Saver:
    """Writes checkpoints under `root`, the newest `keep` stay. On all ranks alike, one at a time."""

    def __init__(self, root: Path, keep: int):
        self.root, self.keep = root, keep
        self._rank, size = fsdp.rank_and_size()
        self._group = fsdp.saving_group()
        self._beside = size > 1
        self._writing: tuple[int, Any] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], *, wait: bool = False) -> None:
        """Begin checkpoint `step`; with `wait` it is complete on return. OSError where the one before failed."""
        self.finish()
        partial = self._partial(step)
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / "state.json").write_text(json.dumps(state, indent=1))
        fsdp.wait_for_all(self._group)
        staged = {name: x.detach().clone() for name, x in tensors.items()}
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        try:
            if self._beside:
                found = dcp.async_save(staged, storage_writer=writer, process_group=self._group)
                self._writing = step, found
            else:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
                    dcp.save(staged, storage_writer=writer, no_dist=True)
                self._writing = step, None
        except (OSError, dcp.api.CheckpointException) as error:
            self._writing = None
            raise self._failed(step, error) from error
        if wait or not self._beside:
            self.finish()

    def poll(self) -> None:
        """Give the checkpoint under way its name, if it is complete."""
        if self._writing is not None and self._writing[1] is not None and self._writing[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way and give it its name."""
        if self._writing is None:
            return
        (step, writing), self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
            if self._rank == 0:
                flush(self._partial(step))
                final = self.root / f"{PREFIX}{step:06d}"
                shutil.rmtree(final, ignore_errors=True)
                os.replace(self._partial(step), final)
        except (OSError, dcp.api.CheckpointException) as error:
            shutil.rmtree(self._partial(step), ignore_errors=True)
            raise self._failed(step, error) from error
        if self._rank == 0:
            for old in [number for number in steps(self.root) if number <= step][: -self.keep]:
                shutil.rmtree(self.root / f"{PREFIX}{old:06d}")

    def _failed(self, step: int, error: BaseException) -> OSError:
        return OSError(f"step {step} could not be saved: {error}; {last(self.root)}")

    def _partial(self, step: int) -> Path:
        return self.root / f".{PREFIX}{step:06d}.partial"


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read a checkpoint's tensors into these, in place, whatever ranks wrote it. On all ranks alike."""
    _, size = fsdp.rank_and_size()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=size == 1)
