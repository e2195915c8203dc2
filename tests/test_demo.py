"""The demo's verdicts, and the whole of it at toy size."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from foveate.attention import Layer, attend
from foveate.data import write_mp4
from foveate.tiles import VideoGrid
from foveate.training import demo, demo_runs, folder, recipes


def run(name: str, validation: float, *, kept: float = 0.2, switch: int | None = 20) -> demo_runs.Run:
    """A finished run of 60 steps as `checks` sees it."""
    rows = [
        {"step": step, "kept": 1.0 if switch is None or step <= switch else kept, "gap": 0.02} for step in range(1, 61)
    ]
    if switch is not None:
        rows[switch - 1]["switched"] = True
    trainer = SimpleNamespace(config=recipes.demo(Path(), Path()))
    return demo_runs.Run(name, trainer, rows, validation)  # type: ignore[arg-type]


def verdicts(shortest: float = 2.0, **change: demo_runs.Run) -> list[bool]:
    """shortest: seconds of the shortest sparse step on the longest clip; the dense one takes 4.5."""
    runs = {"sparse": run("sparse", 1.005), "dense": run("dense", 1.0), "random": run("random", 1.5), **change}
    timings = [demo_runs.Timing(5120, (1.0,), (1.0,)), demo_runs.Timing(20480, (9.0, shortest), (4.5, 30.0))]
    return [check.passed for check in demo_runs.checks(list(runs.values()), timings)]


def test_a_good_demo_passes_every_check() -> None:
    assert verdicts() == [True] * 4


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"sparse": run("sparse", 1.005, switch=40)}, 0),
        ({"sparse": run("sparse", 1.005, kept=0.5)}, 0),
        ({"sparse": run("sparse", 1.02)}, 2),
        ({"random": run("random", 1.009)}, 3),
    ],
)
def test_each_check_can_fail(change: dict, failed: int) -> None:
    assert [index for index, passed in enumerate(verdicts(**change)) if not passed] == [failed]


def test_only_the_shortest_times_on_the_longest_clip_decide_on_speed() -> None:
    assert verdicts(shortest=2.4) == [True] * 4
    assert verdicts(shortest=2.6) == [True, False, True, True]


def test_a_run_that_never_turned_sparse_fails_and_says_why() -> None:
    (check,) = demo_runs.checks([run("sparse", 1.0, switch=None)], [])
    assert not check.passed
    assert "never met its tolerance" in check.detail
    assert "+2.00 %" in check.detail


def test_a_plan_is_computed_head_by_head_and_randomly_where_that_is_asked() -> None:
    grid, seen = VideoGrid(4, 16, 16), []
    q, k, v = torch.randn(3, 1, grid.tokens, 2, 16, generator=torch.Generator().manual_seed(0))
    plans = [
        {"step": 2, "active": False, "kept": [[0.25, 0.25], [0.25, 0.25]], "constants": [[0.0, 0.0]] * 2},
        {"step": 5, "active": True, "kept": [[0.25, 0.5], [1.0, 1.0]], "constants": [[-1.0, None], [0.0, 0.0]]},
    ]
    trainer = SimpleNamespace(step=0, config=SimpleNamespace(seed=0))

    def choose(*given):
        seen.append(demo_runs.random_tiles(*given))
        return seen[-1]

    policy = demo_runs.Planned(trainer, plans, choose)  # type: ignore[arg-type]
    first, second = Layer(0, "a", grid), Layer(1, "b", grid)
    for step in (0, 4):  # before there is a plan in force
        trainer.step = step
        assert torch.equal(policy(first, q, k, v), attend(q, k, v).out)
    trainer.step = 5
    assert torch.equal(policy(second, q, k, v), attend(q, k, v).out)
    assert not seen
    out = policy(first, q, k, v)
    assert torch.allclose(out, attend(q, k, v, seen[0], periphery=[-1.0, "drop"]).out)
    assert seen[0].to_dense().sum(-1).unique(dim=-1).flatten().tolist() == [4, 8]  # of 16 tiles
    trainer.step = 6
    policy(first, q, k, v)
    assert not torch.equal(seen[0].words, seen[1].words)


def test_the_whole_demo_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t, y, x = np.meshgrid(np.arange(60), np.arange(64), np.arange(80), indexing="ij")
    stripes = np.stack([np.sin((k * t + 2 * y + 5 * x) / 9.0) * 100 + 128 for k in (1, 3, 5)], -1)
    (tmp_path / "clips").mkdir()
    write_mp4(tmp_path / "clips" / "stripes.mp4", stripes.astype(np.uint8), 25)
    full = recipes.demo
    monkeypatch.setattr(recipes, "demo", lambda data, out: replace(recipes.smoke(full(data, out)), exclude=()))
    monkeypatch.setattr(demo_runs, "SIZES", ((32, 32), (64, 64)))
    monkeypatch.setattr(demo_runs, "TURNS", (2, 1))
    monkeypatch.setattr(demo_runs, "MORE_TURNS", 1)
    code = demo.run_demo(tmp_path / "out", tmp_path / "clips", 2, Console(quiet=True))
    assert code == 1  # a toy of 12 steps keeps few of the demo's promises, and says so
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<video") == 6
    histories = [folder.rows(tmp_path / "out" / name / "history.jsonl") for name in ("sparse", "dense", "random")]
    switch = demo_runs.switch_step(histories[0])
    assert [len(rows) for rows in histories] == [12, 12 - switch, 12 - switch]  # twins continue from there
    assert all(row["kept"] == 1 for rows in histories[1:] for row in rows), "nothing decides in the twins"
    assert len({rows[-1]["loss"] for rows in histories}) == 3, "each computed its own attention"
