"""A live line for an encoding: samples and their rate."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from foveate.finetune.encode import Say
from foveate.training.progress import live


@contextmanager
def watch_encoding(console: Console) -> Iterator[Say]:
    """Is told the samples done, and of how many; those that were there before count for no rate."""
    with live(console, "encode", "sample") as (show, _):
        began, first = time.monotonic(), None

        def say(done: int, total: int) -> None:
            nonlocal began, first
            if first is None:
                first, began = done, time.monotonic()
            speed = (done - first) / max(1e-9, time.monotonic() - began)
            show(done, total, f"{speed:.2f} clips/s, {_words((total - done) / speed)} left" if speed else "")

        yield say


def _words(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
