"""A live line for a run: step, stage, loss, tokens a second, budget."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def watch(console: Console, title: str, total: int) -> Iterator[Callable[[dict], None]]:
    """A progress bar that takes rows of the history. Where output is not a terminal, a plain line now and then."""
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, note="")

        def show(row: dict) -> None:
            note = describe(row)
            progress.update(task, completed=row["step"], note=note)
            if "reason" in row:
                gap = f", its loss is {100 * row['gap']:+.2f} % of dense attention's" if "gap" in row else ""
                progress.console.print(f"{title}: step {row['step']}: sparse attention: {row['reason']}{gap}")
            if not console.is_terminal and (row["step"] % max(1, total // 8) == 0 or row["step"] == total):
                console.print(f"{title}: step {row['step']}/{total} {note}")

        yield show


def describe(row: dict) -> str:
    """One row of the history in words."""
    kept = "dense" if row["kept"] == 1 else f"{100 * row['kept']:.0f} % of the attention"
    found = f", validation {row['validation']:.4f}" if "validation" in row else ""
    dense = f" (dense {row['dense_tokens_per_second']:,.0f})" if "dense_tokens_per_second" in row else ""
    used = f", {100 * row['mfu']:.0f} % MFU" if "mfu" in row else ""
    return f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s{dense}{used}, {kept}{found}"
