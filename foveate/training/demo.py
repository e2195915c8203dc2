"""The main job in minutes, from two-stage training to a report."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foveate.data import package_clips
from foveate.training import folder, recipes
from foveate.training.demo_findings import Findings, checks
from foveate.training.demo_report import write
from foveate.training.demo_runs import judge, restore, take_turns, train_three
from foveate.training.doctor import machine, packages
from foveate.version import described

JUDGED_CLIPS = 6


def run_demo(out: Path, data: Path | None, denoise_steps: int, console: Console, messages: Console) -> int:
    """Everything, with a report at `out`/report.html. Returns 1 where a check fails, after saying which.

    console: for what came out. messages: for what is worth knowing meanwhile.
    """
    spent: dict[str, float] = {}
    config = recipes.demo(package_clips() if data is None else data, out)
    with clocked(spent, "training"):
        runs = train_three(config, messages)
    levels, losses, timings, clips = [], {}, [], {}
    if len(runs) == 3:
        with clocked(spent, "judging"), messages.status("judging the runs on held-out clips"):
            levels, losses = judge(runs, JUDGED_CLIPS)
        with clocked(spent, "denoising"), messages.status("denoising a held-out clip"):
            clips = restore(runs, denoise_steps)
        with clocked(spent, "timing"), messages.status("timing steps on longer and longer clips, sparse and dense"):
            timings = take_turns(runs[0])
    found = Findings(
        made=datetime.now().astimezone().isoformat(timespec="seconds"),
        version=described(),
        command=" ".join(["foveate", *sys.argv[1:]]),
        machine=machine() | {"threads": str(torch.get_num_threads())},
        packages=packages(),
        spent=spent,
        levels=levels,
        losses=losses,
        timings=timings,
    )
    found.save(out, clips)
    page = write(out)
    verdicts = checks(found, folder.rows(out / "sparse" / folder.HISTORY))
    table = Table("check", "", "measured")
    for check in verdicts:
        table.add_row(check.name, Text("passed", "green") if check.passed else Text("failed", "red"), check.detail)
    console.print(table)
    parts = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in spent.items())
    console.print(f"{sum(spent.values()) / 60:.1f} minutes: {parts}")
    console.print(f"report: {page.resolve()}", soft_wrap=True)
    return 0 if all(check.passed for check in verdicts) else 1


@contextmanager
def clocked(spent: dict[str, float], part: str) -> Iterator[None]:
    """Seconds of a `with`, under its name."""
    began = time.perf_counter()
    yield
    spent[part] = time.perf_counter() - began
