"""One live line for whatever takes its time: a bar on a terminal, elsewhere a plain line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EIGHTH, SECONDS = 8, 20.0  # plain lines come after so much of the whole, or so long, whichever is first

Show = Callable[[int, int, str], None]  # done, of how many, what else to say


@contextmanager
def live(console: Console, title: str, what: str = "step") -> Iterator[tuple[Show, Callable[[str], None]]]:
    """What shows how far it is, and what prints a line of its own."""
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None, note="")
        last, said = 0, time.monotonic()

        def show(done: int, total: int, note: str) -> None:
            nonlocal last, said
            progress.update(task, completed=done, total=total, note=note)
            late, part = time.monotonic() - said > SECONDS, max(1, total // EIGHTH)
            if not console.is_terminal and done > last and (done // part > last // part or done == total or late):
                last, said = done, time.monotonic()
                console.print(f"{title}: {what} {done}/{total} {note}".rstrip())

        yield show, lambda line: progress.console.print(f"{title}: {line}")


@contextmanager
def watch(console: Console, title: str, total: int) -> Iterator[Callable[[dict], None]]:
    """For rows of the history of a run."""
    with live(console, title) as (show, say):

        def row(row: dict) -> None:
            show(row["step"], total, describe(row))
            if "reason" in row:
                gap = f", its loss is {100 * row['gap']:+.2f} % of dense attention's" if "gap" in row else ""
                say(f"step {row['step']}: sparse attention: {row['reason']}{gap}")

        yield row


def describe(row: dict) -> str:
    """One row of the history in words."""
    kept = "dense" if row["kept"] == 1 else f"{100 * row['kept']:.0f} % of the attention"
    found = f", validation {row['validation']:.4f}" if "validation" in row else ""
    dense = f" (dense {row['dense_tokens_per_second']:,.0f})" if "dense_tokens_per_second" in row else ""
    used = f", {100 * row['mfu']:.0f} % MFU" if "mfu" in row else ""
    return f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s{dense}{used}, {kept}{found}"
