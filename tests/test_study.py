"""The study of training at toy size, by the code that runs on a card; its gates must be able to fail."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import foveate as fv
from foveate.models.dit import DiTConfig, VideoDiT

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("study_training")
    sys.path.remove(str(FOLDER))


def test_rehearsal(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, draw = tmp_path / "footage.npz", np.random.default_rng(0)
    pictures = {name: draw.integers(0, 255, (10, 40, 44, 3), dtype=np.uint8) for name in ("bikes", "map05", "alien")}
    importlib.import_module("study_footage").pack(((name, list(x)) for name, x in pictures.items()), file)
    kept = importlib.import_module("study_footage").load(file, "cpu")
    assert kept["held out"].names == ("map05",)
    assert torch.equal(kept["train"].clips[1], torch.from_numpy(pictures["alien"]))  # games are lossless
    given = [str(file), "--out", str(tmp_path), "--size", "tiny", "--device", "cpu"]
    given += ["--checkpoint", str(tmp_path / "dense.pt")]
    arms = ["dense", "10 %, weighed pool", "5 %, coarse, distilled", "10 %, window"]
    assert study.main([*given, "--steps", "5", "--arms", *arms]) == 0
    rows = {row["arm"]: row for row in study.study_results.read(tmp_path / "runs.jsonl")}
    assert list(rows) == arms
    for name in arms[1:]:
        assert rows[name]["kept"] == [0.125, 0.125]  # one tile of eight
    pool, dense = rows["10 %, weighed pool"], rows["dense"]
    assert pool["calls"]["sparse"] > 0
    over = study.study_results.compared(pool, [dense, pool])
    assert over["over dense"] == pytest.approx(pool["loss"] / dense["loss"] - 1, abs=1e-5)
    assert over["time"] == pytest.approx(pool["seconds"] / dense["seconds"])
    text = (tmp_path / "runs.jsonl").read_text()
    peers, attend = study.study_peers, study.study_peers.attend
    monkeypatch.setattr(peers, "attend", lambda q, k, v, *rest, **more: attend(q, k, 1.1 * v, *rest, **more))
    assert study.main([*given, "--arms", "dense"]) == 1  # from the same checkpoint: the window's gradients are wrong
    assert (tmp_path / "runs.jsonl").read_text() == text


def test_branches(study: ModuleType) -> None:
    peers, draw = study.study_peers, torch.Generator().manual_seed(0)
    model = VideoDiT(DiTConfig(width=64, depth=1, heads=2))
    grid = fv.VideoGrid(4, 8, 8)
    x, (q, k, v) = torch.randn(1, 256, 64, generator=draw), torch.randn(3, 1, 256, 2, 32, generator=draw)
    selection = fv.select(q, k, grid, budget=0.5)
    for kind in (peers.Coarse, peers.Linear):
        assert not kind(model)(0, selection, x, q, k, v).any()  # training begins as with tiles that are dropped
    linear = peers.Linear(model)
    torch.nn.init.eye_(linear.project[0].weight)
    rest = ~selection.to_dense().repeat_interleave(64, 2).repeat_interleave(64, 3)
    weights = rest * (q.softmax(-1).transpose(1, 2) @ k.softmax(-1).permute(0, 2, 3, 1))
    expected = (weights / weights.sum(-1, keepdim=True)) @ v.transpose(1, 2)
    torch.testing.assert_close(linear(0, selection, x, q, k, v).transpose(1, 2), expected)
    coarse = peers.Coarse(model)
    torch.nn.init.ones_(coarse.gates[0].bias)
    means = [y.transpose(1, 2).unflatten(2, (4, 64)).mean(3) for y in (q, k, v)]
    expected = ((means[0] @ means[1].mT * 32**-0.5).softmax(-1) @ means[2]).repeat_interleave(64, 2)
    torch.testing.assert_close(coarse(0, selection, x, q, k, v).transpose(1, 2), expected)


def test_window_keeps_the_nearest_tiles(study: ModuleType) -> None:
    grid = fv.VideoGrid(8, 16, 16)  # 2 x 4 x 4 cubes
    policy = study.study_peers.Given(8 / 32, 64, study.study_peers.window)
    q = torch.zeros(1, 2048, 1, 8)
    kept = study.study_peers.window(policy, fv.Layer(0, "", grid), q).to_dense()[0, 0]
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 4, 5, 16, 17, 20, 21]  # 2 x 2 x 2 cubes in a corner
    assert kept.sum(-1).tolist() == [8] * 32
