"""The demo's verdicts, and the whole of it at toy size."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from foveate import run_report
from foveate.attention import Layer, attend
from foveate.data import write_mp4
from foveate.tiles import VideoGrid
from foveate.training import demo, demo_runs, folder, recipes
from foveate.training.demo_findings import Findings, Timing, checks, switch_step


def history(*, kept: float = 0.2, switch: int | None = 20) -> list[dict]:
    """Of a sparse run of 60 steps."""
    rows = [
        {"step": step, "kept": 1.0 if switch is None or step <= switch else kept, "gap": 0.02} for step in range(1, 61)
    ]
    if switch is not None:
        rows[switch - 1]["switched"] = True
    return rows


def findings(shortest: float = 2.0, **losses: float) -> Findings:
    """shortest: seconds of the shortest sparse step on the longest clip; the dense one takes 4.5."""
    found = {"sparse": 1.005, "dense": 1.0, "random": 1.5} | losses
    timings = [Timing(5120, (1.0,), (1.0,)), Timing(20480, (9.0, shortest), (4.5, 30.0))]
    return Findings(
        made="2026-12-03T12:00:00+00:00", version="1", command="foveate demo", machine={}, packages={},
        spent={"training": 60.0}, levels=[0.25, 0.75],
        losses={name: (loss - 0.1, loss + 0.1) for name, loss in found.items()}, timings=timings,
    )  # fmt: skip


def verdicts(found: Findings | None = None, **change) -> list[bool]:
    return [check.passed for check in checks(found or findings(), history(**change))]


def test_a_good_demo_passes_every_check() -> None:
    assert verdicts() == [True] * 4


@pytest.mark.parametrize(
    ("found", "change", "failed"),
    [
        (findings(), {"switch": 40}, 0),
        (findings(), {"kept": 0.5}, 0),
        (findings(sparse=1.02), {}, 2),
        (findings(random=1.009), {}, 3),
    ],
)
def test_each_check_can_fail(found: Findings, change: dict, failed: int) -> None:
    assert [index for index, passed in enumerate(verdicts(found, **change)) if not passed] == [failed]


def test_only_the_shortest_times_on_the_longest_clip_decide_on_speed() -> None:
    assert verdicts(findings(2.9)) == [True] * 4
    assert verdicts(findings(3.1)) == [True, False, True, True]


def test_a_run_that_never_turned_sparse_fails_and_says_why() -> None:
    (check,) = checks(
        replace(findings(), losses={}, timings=[]),
        [{**row, "reason": "the gap is above the tolerance"} for row in history(switch=None)],
    )
    assert not check.passed
    assert "it never did: the gap is above the tolerance" in check.detail
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
    assert policy.kept(4) == 1
    assert policy.kept(5) == 0.6875


def test_the_whole_demo_at_toy_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    t, y, x = np.meshgrid(np.arange(60), np.arange(64), np.arange(80), indexing="ij")
    stripes = np.stack([np.sin((k * t + 2 * y + 5 * x) / 9.0) * 100 + 128 for k in (1, 3, 5)], -1)
    (tmp_path / "clips").mkdir()
    write_mp4(tmp_path / "clips" / "stripes.mp4", stripes.astype(np.uint8), 25)
    full = recipes.demo
    monkeypatch.setattr(recipes, "demo", lambda data, out: replace(recipes.smoke(full(data, out)), exclude=()))
    monkeypatch.setattr(demo_runs, "SIZES", ((32, 32), (64, 64)))
    monkeypatch.setattr(demo_runs, "TURNS", (2, 1))
    monkeypatch.setattr(demo_runs, "MORE_TURNS", 1)
    out, said, aside = tmp_path / "out", Console(file=io.StringIO(), width=200), Console(file=io.StringIO())
    assert demo.run_demo(out, tmp_path / "clips", 2, said, aside) == 1  # a toy keeps few of the promises, and says so
    results, progress = said.file.getvalue(), aside.file.getvalue()
    assert "failed" in results
    assert f"report: {out.resolve() / 'report.html'}" in results
    last = next(line for line in progress.splitlines() if "random: step 12/12" in line)
    assert "% of the attention" in last
    assert "dense" not in last.split("tokens/s")[-1]
    assert "step 12/12" not in results, "what came out, and nothing else"
    page = (out / "report.html").read_text()
    assert page.count('class="film"') == 6
    assert page.count('class="chart"') == 6
    (out / "report.html").unlink()
    assert run_report.report(out, 2, "cpu") == out / "report.html"
    assert (out / "report.html").read_text() == page, "all of it is in the folder's files"
    histories = [folder.rows(out / name / "history.jsonl") for name in ("sparse", "dense", "random")]
    switch = switch_step(histories[0])
    assert [len(rows) for rows in histories] == [12, 12 - switch, 12 - switch]  # twins continue from there
    assert all(row["kept"] == 1 for rows in histories[1:] for row in rows), "nothing decides in the twins"
    assert len({rows[-1]["loss"] for rows in histories}) == 3, "each computed its own attention"
    check_report_of_a_run(out / "sparse", caplog)


def check_report_of_a_run(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any run has one: with clips while its data is there, without them, and a word why, when it has gone."""
    text = run_report.report(run, 2, "cpu").read_text()
    assert "Training run sparse" in text
    assert "12 of 12 steps" in text
    assert re.findall(r'alt="([^"]*)"', text) == [
        "The clip", "With noise", "Denoised dense", "Denoised sparse", "Sparse minus dense, × 8"
    ]  # fmt: skip
    active = {row["step"] for row in folder.rows(run / folder.PLANS) if row["active"]}
    shown = {int(step) for step in re.findall(r"<figcaption>step (\d+)", text)}
    assert shown, "what every head computed, once sparse"
    assert shown <= active
    (run.parent.parent / "clips").rename(run.parent.parent / "gone")
    caplog.clear()
    assert 'class="film"' not in run_report.report(run, 2, "cpu").read_text()
    assert "without a denoised clip" in caplog.text
    assert "clips" in caplog.text
    video = np.repeat(np.uint8([10, 120, 240]), 32)[None, None, :, None].repeat(4, 0).repeat(32, 1).repeat(3, 3)
    (run / "samples").mkdir()
    write_mp4(run / "samples" / "step-000012.mp4", video, 12)
    text = run_report.report(run, 0, "cpu").read_text()
    assert re.findall(r'alt="([^"]*)" data-columns="\d" data-count="4"', text) == [
        "Held out", "Restored from noise", "Generated"
    ]  # fmt: skip
    config = run / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({"model": "wan/", "steps": 12, "lora": 16, "sparsity": {"tolerance": 0.01}}))
    text = run_report.report(run, 2, "cpu").read_text()  # of a pipeline of diffusers
    assert "12 of 12 steps" in text
    assert "<th>lora</th><td>16</td>" in text
    config.write_text(before)
    for broken, message in ((run.parent.parent / "gone", "holds no run"), (run / "samples", "holds no run")):
        with pytest.raises(ValueError, match=message):
            run_report.report(broken, 0, "cpu")
    (run / "history.jsonl").write_text("")
    with pytest.raises(ValueError, match="no steps yet"):
        run_report.report(run, 0, "cpu")
