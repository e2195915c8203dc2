"""The main job in minutes, from two-stage training to a report."""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from foveate.data import package_clips
from foveate.training import recipes
from foveate.training.demo_report import write
from foveate.training.demo_runs import checks, judge, restore, take_turns, train_three

JUDGED_CLIPS = 6


def run_demo(out: Path, data: Path | None, denoise_steps: int, console: Console) -> int:
    """Everything, with a report at `out`/report.html. Returns 1 where a check fails, after saying which."""
    began = time.perf_counter()
    config = recipes.demo(package_clips() if data is None else data, out)
    runs = train_three(config, console)
    timings, restored = [], None
    if len(runs) == 3:
        with console.status("judging the runs on held-out clips"):
            runs = judge(runs, JUDGED_CLIPS)
            restored = restore(runs, denoise_steps)
        with console.status("timing steps on longer and longer clips, sparse and dense in turns"):
            timings = take_turns(runs[0])
    verdicts = checks(runs, timings)
    page = write(out / "report.html", runs, timings, restored, verdicts, time.perf_counter() - began)
    table = Table("check", "", "measured")
    for check in verdicts:
        table.add_row(check.name, Text("passed", "green") if check.passed else Text("failed", "red"), check.detail)
    console.print(table)
    console.print(f"report: {page.resolve()}", soft_wrap=True)
    return 0 if all(check.passed for check in verdicts) else 1
