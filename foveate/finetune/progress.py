"""A live line for an encoding: samples, rate, time left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from foveate.finetune.encode import Say

EVERY = 20.0  # seconds between plain lines, where output is no terminal


@contextmanager
def watch_encoding(console: Console) -> Iterator[Say]:
    """A progress bar that is told the samples done, and of how many. A plain line now and then elsewhere."""
    columns = TextColumn("[bold]encode"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("encode", total=None, note="")
        began, first, said = time.monotonic(), None, 0.0

        def say(done: int, total: int) -> None:
            nonlocal first, said, began
            if first is None:
                first, began = done, time.monotonic()
            note, now = rate(began, first, done, total), time.monotonic()
            progress.update(task, completed=done, total=total, note=note)
            if not console.is_terminal and (now - said > EVERY or done == total):
                said = now
                console.print(f"encode: {done}/{total} {note}")

        yield say


def rate(began: float, first: int, done: int, total: int) -> str:
    """Samples a second and time left, in words."""
    speed = (done - first) / max(1e-9, time.monotonic() - began)
    if speed <= 0:
        return ""
    left = (total - done) / speed
    return f"{speed:.2f} clips/s, " + (f"{left / 60:.0f} min left" if left > 90 else f"{left:.0f} s left")
