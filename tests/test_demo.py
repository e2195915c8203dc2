"""The demo's verdicts, and the whole of it at toy size."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from foveate.data import write_mp4
from foveate.training import demo, demo_runs, recipes
from foveate.training.demo_report import at_budget, needed


def run(name: str, validation: float, *, seconds: tuple[float, float], switch: int | None = 20) -> demo_runs.Run:
    """A finished run of 90 steps as `checks` sees it."""
    rows = [
        {"step": step, "stage": 1 if switch is None or step <= switch else 2, "seconds": seconds[0], "gap": 0.02}
        for step in range(1, 91)
    ]
    for row in rows:
        if name == "dense":
            row["stage"] = 1
        row["seconds"] = seconds[row["stage"] - 1]
    if switch is not None:
        rows[switch - 1]["switched"] = True
    config = recipes.demo(Path(), Path())
    trainer = SimpleNamespace(
        config=config,
        policy=SimpleNamespace(computed={"sparse": 70 * config.model.depth}),
        validation=[SimpleNamespace(clips=np.zeros((1, 3, config.frames, config.height, config.width)))],
    )
    turns = (seconds[0 if name == "dense" else 1],) * 3
    return demo_runs.Run(name, trainer, rows, validation, turns)  # type: ignore[arg-type]


def verdicts(**change: demo_runs.Run) -> list[bool]:
    runs = {
        "sparse": run("sparse", 1.005, seconds=(3.0, 1.5)),
        "dense": run("dense", 1.0, seconds=(3.0, 3.0)),
        "random": run("random", 1.5, seconds=(3.0, 1.5)),
        **change,
    }
    return [check.passed for check in demo_runs.checks(list(runs.values()))]


def test_a_good_demo_passes_every_check() -> None:
    assert verdicts() == [True] * 4


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"sparse": run("sparse", 1.02, seconds=(3.0, 1.5))}, 2),
        ({"sparse": run("sparse", 1.005, seconds=(3.0, 2.5))}, 1),
        ({"sparse": run("sparse", 1.005, seconds=(3.0, 1.5), switch=40)}, 0),
        ({"random": run("random", 1.009, seconds=(3.0, 1.5))}, 3),
    ],
)
def test_each_check_can_fail(change: dict, failed: int) -> None:
    assert [index for index, passed in enumerate(verdicts(**change)) if not passed] == [failed]


def test_a_switch_that_never_came_fails_and_says_why() -> None:
    (check,) = demo_runs.checks([run("sparse", 1.0, seconds=(3.0, 1.5), switch=None)])
    assert not check.passed
    assert "never came within" in check.detail
    assert "+2.00 %" in check.detail


def test_the_whole_demo_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t, y, x = np.meshgrid(np.arange(60), np.arange(64), np.arange(80), indexing="ij")
    stripes = np.stack([np.sin((k * t + 2 * y + 5 * x) / 9.0) * 100 + 128 for k in (1, 3, 5)], -1)
    write_mp4(tmp_path / "clips.mp4", stripes.astype(np.uint8), 25)
    full = recipes.demo
    monkeypatch.setattr(recipes, "demo", lambda data, out: replace(recipes.smoke(full(data, out)), exclude=()))
    code = demo.run_demo(tmp_path / "out", tmp_path, 2, Console(quiet=True))
    assert code == 1  # a toy of 12 steps keeps none of the demo's promises, and says so
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<video") == 4
    assert "in turns (medians)" in page
    for name in ("sparse", "dense", "random"):
        assert len((tmp_path / "out" / name / "history.jsonl").read_text().splitlines()) == 12
    shared = [
        (tmp_path / "out" / name / "history.jsonl").read_text().splitlines()[:4]
        for name in ("sparse", "dense", "random")
    ]
    assert shared[0] == shared[1] == shared[2]


def test_profiles_are_read_at_other_budgets() -> None:
    recall = np.array([[[0.2, 0.4, 0.6, 0.8, 0.95]]])
    assert at_budget(recall, 0.15) == pytest.approx(0.5)
    assert needed(recall, 0.9) == pytest.approx(0.3 + 0.2 * 2 / 3)
    assert needed(np.array([[[0.1] * 5]]), 0.9)[0, 0] > 0.5
