"""The generation benchmark and the recipe of its model, at toy size, by the code that runs on a card."""

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

ROOT = Path(__file__).parent.parent
SMALL = {"num_layers": 2, "num_attention_heads": 2, "ffn_dim": 64}


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    folders = [str(ROOT / "benchmarks")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def bench(path: None) -> ModuleType:
    return importlib.import_module("bench_generate")


@pytest.fixture(scope="module")
def trained(path: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the recipe on footage made here, in the file's own form."""
    recipe, folder = importlib.import_module("pretrain_wan"), tmp_path_factory.mktemp("wan")
    draw = np.random.default_rng(0)
    shape = (40, recipe.HEIGHT, recipe.WIDTH, 3)
    frames = {game: draw.integers(0, 256, shape, dtype=np.uint8) for game in recipe.GAMES}
    changes = {game: np.diff(x, axis=0, prepend=np.zeros_like(x[:1])) for game, x in frames.items()}
    np.savez_compressed(folder / "atari.npz", **changes)
    assert np.array_equal(recipe.footage(folder / "atari.npz", 0)[3], frames[recipe.GAMES[3]])
    arguments = ["--footage", folder / "atari.npz", "--steps", 2, "--batch", 1, "--frames", 1, "--every", 1]
    arguments += ["--model", json.dumps(SMALL), "--sampling-steps", 1]
    sys.argv, before = ["pretrain_wan.py", str(folder), *map(str, arguments)], sys.argv
    try:
        recipe.main()
    finally:
        sys.argv = before
    history = json.loads((folder / "history.json").read_text())
    assert [row["step"] for row in history] == [1, 2, 2]
    assert 0.5 < history[-1]["validation"] < 4  # noise - clip has a variance of 1 and the clip's
    assert (folder / "samples_guidance3.png").stat().st_size > 1000
    return folder / "wan_tiny.safetensors"


def test_recipe_writes_what_loads(trained: Path) -> None:
    import tiny_wan

    model = tiny_wan.load(trained)
    assert len(model.blocks) == SMALL["num_layers"]
    assert not any(parameter.requires_grad for parameter in model.parameters())
    clips = torch.randint(0, 256, (2, 3, 8, 12, 3), dtype=torch.uint8)
    assert torch.equal(tiny_wan.to_clips(tiny_wan.to_latents(clips)), clips)
    with pytest.raises(ValueError, match="at most 4 words"):
        tiny_wan.prompt_embeds(["one two three four five"])


def test_checkpoint_is_trained() -> None:
    """The file that comes with foveate predicts a flat picture's velocity far better than chance."""
    import tiny_wan

    model = tiny_wan.load()
    pong = torch.tensor([144, 72, 17], dtype=torch.uint8).expand(1, 1, tiny_wan.HEIGHT, tiny_wan.WIDTH, 3)
    clip, noise = tiny_wan.to_latents(pong), tiny_wan.noise([0], (1, tiny_wan.HEIGHT, tiny_wan.WIDTH))
    with torch.no_grad():
        said = model(0.5 * clip + 0.5 * noise, torch.tensor([500.0]), tiny_wan.prompt_embeds(["pong"])).sample
    error = (said - (noise - clip))[..., 10:40, 10:30].square().mean()  # the field, without walls and score
    assert error < 0.15


def test_benchmark(bench: ModuleType, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--quick", "--checkpoint", trained, "--frames", 1, "--steps", 8, "--prompts", 1, "--out", tmp_path]
    assert bench.main([str(x) for x in arguments]) == 0
    (file,) = tmp_path.glob("generate_cpu_*.json")
    said = json.loads(file.read_text())
    assert file.with_suffix(".png").stat().st_size > 1000
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["green"]
    held = {(x["family"], x["setting"]): x for x in said["chosen on"]}
    ours = ("plain hold", "states, undamped", "foveate states", "foveate")
    for family in ours:
        assert held[family, "every 2"]["attention"] == pytest.approx(6 / 8)  # steps 5 and 7 are held
    assert held["TaylorSeer", "every 2, order 1"]["attention"] < 1
    assert 0 < held["SeaCache", "threshold 0.3, at most 2 in a row"]["attention"] <= 1
    assert 0 < held["MagCache", "threshold 0.06, at most 3 in a row"]["attention"] <= 1
    reported = {(x["family"], x["setting"]): x for x in said["results"]}
    assert reported["foveate schedule", "55% of the calls"]["attention"] == pytest.approx(4 / 8)
    assert held["PAB", "every 2 in 100-900"]["attention"] < 1
    assert len({tuple(held[family, "every 2"]["psnr"]) for family in ours}) > 2
    found = bench.every_candidate(8, True, bench.Prepared())
    settled, rest = bench.divided(found, file)
    assert {one.family for one in settled} <= {one.family for one in found}
    assert not {one.family for one in rest} & {family for family, _ in reported}


def test_gate_sees_a_wrong_exact_mode(bench: ModuleType, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_wan

    with bench.counting() as counter:
        one = bench.Bench(tiny_wan.load(trained), 4, (1, tiny_wan.HEIGHT, tiny_wan.WIDTH), counter)
        assert bench.gate(one, ["pong"], [1], 60.0)["green"]
        lossy = bench.methods.exact()
        lossy[1] = bench.Method("exact", "foveate", bench.methods.reuse(interval=2, order=0))
        monkeypatch.setattr(bench.methods, "exact", lambda: lossy)
        monkeypatch.setattr(bench.methods, "WARMUP", 1)
        assert not bench.gate(one, ["pong"], [1], 60.0)["green"]


def test_frontier_and_comparison(bench: ModuleType) -> None:
    summary = importlib.import_module("generation_summary")

    def outcome(family: str, attention: float, db: float) -> SimpleNamespace:
        return SimpleNamespace(family=family, setting=f"{attention}", attention=attention, db=db)

    ours = [outcome("foveate", 0.2, 30.0), outcome("foveate", 0.3, 29.0), outcome("foveate", 0.4, 40.0)]
    cost = lambda x: x.attention  # noqa: E731
    assert [x.attention for x in summary.frontier(ours, cost)] == [0.2, 0.4]
    peers = [outcome("PAB", 0.3, 34.0), outcome("PAB", 0.3, 36.0), outcome("PAB", 0.1, 31.0), outcome("PAB", 1.0, 99.0)]
    found = summary.compare(ours + peers, cost)
    assert [(x["cost"], x["ours"], x["above"]) for x in found] == [
        (0.1, None, False), (0.3, pytest.approx(35.0), True), (0.3, pytest.approx(35.0), False),
    ]  # fmt: skip


def test_ditangos_rule_holds_what_it_says(bench: ModuleType, trained: Path) -> None:
    """Everything an anchor is the plain video; else the step after an anchor holds all of the other ranks' states."""
    import tiny_wan

    rule, steps = importlib.import_module("generation_ditango"), 16
    shape = 1, tiny_wan.HEIGHT, tiny_wan.WIDTH

    def made(ratio: float | None, anchors: Iterable[int] = (5,)) -> tuple[torch.Tensor, Any]:
        pipe = tiny_wan.pipeline(tiny_wan.load(trained))
        if ratio is None:
            return tiny_wan.generate(pipe, ["pong"], [1], steps=steps, shape=shape), None
        policy, installed = rule.install(pipe, ratio, steps)
        policy.anchors = set(anchors)
        with installed:
            return tiny_wan.generate(pipe, ["pong"], [1], steps=steps, shape=shape), policy

    plain = made(None)[0]
    exact, policy = made(0.5, range(steps))
    torch.testing.assert_close(exact, plain, rtol=0, atol=1e-4)
    assert set(policy.trace) == {1.0}
    held, policy = made(0.5)
    assert not torch.equal(held, plain)
    by_step = [sum(policy.trace[4 * step : 4 * step + 4]) / 4 for step in range(steps)]  # 2 layers, 2 branches
    assert by_step[:6] == [1.0] * 6
    assert by_step[-5:] == [1.0] * 5
    assert by_step[6] == 0.0
    if 7 not in policy.anchors:
        assert by_step[7] == pytest.approx(0.5, abs=0.1), "a half of the errors is at least their median"


def test_figures_are_drawn_from_a_run(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, row = (
        importlib.import_module("generation_figures"),
        {"psnr": [40.0, "inf"], "ssim": [1.0, 1.0], "dB": 70.0},
    )
    settings = [
        ("parts of foveate", "every 3, held as they are"), ("parts of foveate", "every 3, mended"),
        ("parts of foveate", "scheduled"), ("foveate", "every 3"), ("foveate schedule", "40% of the calls"),
        ("PAB", "every 2"),
    ]  # fmt: skip
    shared = {"attention": 0.4, "seconds": 0.5, "bytes": None}
    results = [{"family": family, "setting": setting, **row, **shared} for family, setting in settings]
    record = {"results": results, "schedules": {"sigmas": [1.0, 0.5], "anchors": {"0.4": [0, 1]}}}
    (file := tmp_path / "run.json").write_text(json.dumps(record))
    for what in ("frontier", "schedules", "parts"):
        arguments = ["generation_figures.py", what, "--file", file, "--out", tmp_path]
        monkeypatch.setattr(sys, "argv", [str(x) for x in arguments])
        assert figures.main() == 0
        assert (tmp_path / f"reuse_{what}.png").stat().st_size > 1000
