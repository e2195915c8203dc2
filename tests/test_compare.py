"""`foveate compare`: what it pairs, what it measures, how sure it is, and what it says of what it cannot measure."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import linalg, stats

from foveate import cli, quality, video
from foveate.compare import frechet, intervals, metrics, pairs, runs
from foveate.compare.config import CompareConfig
from foveate.compare.features import FRAMES, SIZE, WEIGHTS, trained
from foveate.compare.folders import compare
from foveate.compare.frechet import View
from foveate.compare.treatments import TREATMENTS
from foveate.video import Clip, write_mp4

NAMES = [f"clip{number}" for number in range(8)]


def moving(number: int, noise: float = 0.0) -> np.ndarray:
    """uint8 (10, 56, 64, 3): stripes that move."""
    draw = np.random.default_rng(number)
    t, y, x, c = np.ogrid[:10, :56, :64, :3]
    levels = 128 + 90 * np.sin((x + number * y + 3 * t) / (4 + c)) * np.cos(y / (3 + number))
    return (levels + noise * draw.normal(0, 1, levels.shape)).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """exact, close (light noise) and far (more of it); a clip that only one has, one that is none, a table."""
    root = tmp_path_factory.mktemp("videos")
    for name, noise in (("exact", 0.0), ("close", 2.0), ("far", 12.0)):
        (root / name).mkdir()
        for number, clip in enumerate(NAMES):
            write_mp4(root / name / f"{clip}.mp4", moving(number, noise), 12)
        (root / name / "broken.mp4").write_bytes(b"no film" * 99)
    write_mp4(root / "close" / "extra.mp4", moving(9), 12)
    return [root / name for name in ("exact", "close", "far")]


@pytest.fixture(scope="module")
def result(folders: list[Path]) -> dict:
    return compare(folders, CompareConfig(windows=512))


def frames(path: Path) -> np.ndarray:
    clip = video.probe(Clip(path.name, path))
    return video.decode(clip, 0, clip.frames)[0]


def test_every_number_is_the_metric_of_the_decoded_clips(folders: list[Path], result: dict) -> None:
    assert [pair["name"] for pair in result["pairs"]] == NAMES
    for pair in result["pairs"]:
        a, b = (frames(folder / f"{pair['name']}.mp4") for folder in folders[:2])
        found = pair["scores"]["close"]
        assert found["psnr"] == pytest.approx(quality.psnr(b, a), abs=1e-9)
        assert found["ssim"] == pytest.approx(quality.ssim(b, a), abs=1e-12)
        assert found["flicker"] == pytest.approx(np.abs(np.diff(b.astype(float), axis=0)).mean(), abs=1e-9)
        assert found["flicker_change"] == pytest.approx(quality.flicker(b) - quality.flicker(a), abs=1e-9)
    values = [pair["scores"]["far"]["ssim"] for pair in result["pairs"]]
    mean = result["metrics"]["ssim"]["far"]
    assert mean["mean"] == pytest.approx(np.mean(values))
    wanted = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(1)).confidence_interval
    assert (mean["low"], mean["high"]) == pytest.approx(
        (wanted.low, wanted.high), abs=0.15 * (wanted.high - wanted.low)
    )


def test_what_is_not_compared_is_listed_with_the_reason(result: dict) -> None:
    left_out = dict(map(tuple, result["left_out"]))
    assert any("extra.mp4" in name and "no video of this name in exact, far" in why for name, why in left_out.items())
    assert "Invalid data" in left_out["broken"]
    missing = result["not_measured"]
    assert {"ms_ssim", "lpips", "fvd", "vbench"} <= set(missing)
    assert "needs 161 pixels a side; a clip is 64 x 56" in missing["ms_ssim"]


def test_a_frechet_distance_of_512_windows_tells_a_damaged_control_from_a_close_folder(result: dict) -> None:
    found = result["distances"]["frechet"]
    assert (found["windows"], found["videos"], found["drawn_anew"]) == (512, 8, "videos")
    close, far, control = found["to"]["close"], found["to"]["far"], found["control"]
    for one in (close, far, control):
        assert one["low"] < one["high"]
    assert close["value"] < far["value"]
    assert close["high"] < control["value"]
    assert close["control_outside"]


def test_frechet_is_the_formula_and_nothing_between_equal_sets() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(600, 6)), 0.3 + draw.normal(size=(600, 6)) @ draw.normal(size=(6, 6))
    ca, cb = np.cov(a.T), np.cov(b.T)
    cross = np.trace(linalg.sqrtm(ca @ cb).real)
    wanted = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(ca) + np.trace(cb) - 2 * cross
    video_of = np.repeat(np.arange(12), 50)
    found = frechet.distance(a, b, video_of)
    assert found.value == pytest.approx(wanted, rel=1e-9)
    assert found.low < wanted < found.high
    same = frechet.distance(a, a, video_of)
    assert max(same.value, same.high) < 1e-9
    assert 0 < frechet.halves(a, video_of) < wanted


def test_windows_are_cut_at_the_same_places_of_both(folders: list[Path]) -> None:
    found, _ = pairs.find([folders[0], folders[0].parent / "close"])
    one = pairs.Pair("a", (found[0].clips[0],) * 2, found[0].frames)
    a, b = frechet.windows(one, 20, View(FRAMES, SIZE), seed=3)
    assert a.shape == (20, 3, FRAMES, SIZE, SIZE)
    assert torch.equal(a, b)
    assert len({x.sum().item() for x in a}) > 15
    assert not torch.equal(a, frechet.windows(one, 20, View(FRAMES, SIZE), seed=4)[0])


def test_the_feature_net_is_small_and_tells_damage_apart() -> None:
    assert WEIGHTS.stat().st_size < 2**20
    draw = torch.Generator().manual_seed(0)
    clean = [torch.from_numpy(moving(k)[:FRAMES, 4:52, 4:52]).permute(3, 0, 1, 2) / 127.5 - 1 for k in range(8)]
    names = [treatment.__name__ for treatment in TREATMENTS]
    treated = [names.index(name) for name in ("noisy", "flickering", "pixelated", "stuttering") for _ in clean]
    windows = torch.stack([TREATMENTS[k](x, 0.7, draw).clamp(-1, 1) for k, x in zip(treated, clean * 4, strict=True)])
    right = (trained()(windows).argmax(1) == torch.tensor(treated)).float().mean()
    assert right > 0.5, "of twelve"


def test_a_long_clip_is_measured_in_chunks(folders: list[Path], monkeypatch: pytest.MonkeyPatch, result: dict) -> None:
    monkeypatch.setattr(pairs, "ROOM", 4 * 56 * 64 * 3)
    found = compare([folders[0] / "clip3.mp4", folders[2] / "clip3.mp4"], CompareConfig(windows=0))
    scores = found["pairs"][0]["scores"]
    whole = result["pairs"][3]["scores"]
    for metric in ("psnr", "ssim", "flicker_change"):
        assert scores["far/clip3.mp4"][metric] == pytest.approx(whole["far"][metric], abs=1e-9)
    assert found["metrics"]["psnr"]["far/clip3.mp4"]["low"] is None, "one pair has no interval"


def test_equal_clips_count_as_100_db_and_are_counted(folders: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "clip0.mp4").write_bytes((folders[0] / "clip0.mp4").read_bytes())
    (copy / "clip1.mp4").write_bytes((folders[1] / "clip1.mp4").read_bytes())
    found = compare([folders[0], copy], CompareConfig(windows=0))
    assert found["pairs"][0]["scores"]["copy"]["psnr"] == "inf"
    one = found["metrics"]["psnr"]["copy"]
    assert (one["equal"], one["n"]) == (1, 2)
    assert one["mean"] == pytest.approx((100 + found["pairs"][1]["scores"]["copy"]["psnr"]) / 2)


def test_supplied_networks_are_used(folders: list[Path], tmp_path: Path) -> None:
    class Apart(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a - b).abs().mean((1, 2, 3))

    torch.jit.script(Apart()).save(str(tmp_path / "lpips.pt"))
    places = [folders[0] / "clip1.mp4", folders[2] / "clip1.mp4"]
    found = compare(places, CompareConfig(windows=0, lpips=tmp_path / "lpips.pt"))
    a, b = (frames(place).astype(float) for place in places)
    assert found["pairs"][0]["scores"]["far/clip1.mp4"]["lpips"] == pytest.approx(
        np.abs(a - b).mean() / 127.5, rel=1e-5
    )
    (tmp_path / "no.pt").write_text("none")
    with pytest.raises(ValueError, match=r"no\.pt is no TorchScript file"):
        compare(places, CompareConfig(lpips=tmp_path / "no.pt"))


def test_bad_input_is_a_sentence_and_code_2(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "small").mkdir()
    write_mp4(tmp_path / "small" / "clip0.mp4", moving(0)[:6, :40], 12)
    (tmp_path / "there.json").write_text("mine")
    exact = folders[0]
    for arguments, message in [
        ([exact], "two or more folders"),
        ([exact, exact], "given twice"),
        ([exact, tmp_path / "nowhere"], "nowhere is not there"),
        ([exact, exact / "clip0.mp4"], "folders only, or files only"),
        ([exact, tmp_path / "empty"], "empty holds no file"),
        ([exact, tmp_path / "small"], "clip0: 64 x 56 x 10 frames in exact, 64 x 40 x 6 frames in small"),
        ([exact, folders[1], "--windows", "100"], "at least 512"),
        ([exact, folders[1], "--json", tmp_path / "there.json"], "is there already"),
    ]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["compare", *map(str, arguments)])
        assert (ended.value.code, message in capsys.readouterr().err) == (2, True), message
    assert (tmp_path / "there.json").read_text() == "mine"
    fitted = compare([exact, tmp_path / "small"], CompareConfig(windows=0, fit=True))
    assert [fitted["pairs"][0][key] for key in ("frames", "height", "width")] == [6, 56, 64]


def run_folder(root: Path, gap: float, pace: float, steps: int = 40) -> Path:
    """A history whose loss falls as 1 / sqrt(step), `gap` above; `pace` seconds a step, validated every fifth."""
    root.mkdir()
    rows = [
        {"step": k, "loss": 1.0, "seconds": pace} | ({"validation": (1 + gap) / math.sqrt(k)} if k % 5 == 0 else {})
        for k in range(1, steps + 1)
    ]
    (root / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "config.json").write_text("{}")
    return root


def test_runs_are_compared_at_equal_steps_and_equal_time(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    dense, sparse = run_folder(tmp_path / "dense", 0, 2.0), run_folder(tmp_path / "sparse", 0.01, 1.0, 60)
    found = runs.compare([dense, sparse])["gaps"]
    assert found["steps"]["sparse"]["mean"] == pytest.approx(0.01)
    assert (found["steps"]["sparse"]["from"], found["steps"]["sparse"]["to"]) == (25, 40)
    # At 60 s, the sparse run's end, it is at step 60 and the dense run at step 30.
    assert found["seconds"]["sparse"]["to"] == 60
    assert found["seconds"]["sparse"]["last"] == pytest.approx(1.01 * math.sqrt(30 / 60) - 1)
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(dense), str(sparse), "--json", str(tmp_path / "found.json")])
    assert ended.value.code == 0
    assert "+1.00 % [+1.00, +1.00] (steps 25 to 40, 4 validations)" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["gaps"] == found
    (tmp_path / "dense" / "history.jsonl").write_text('{"step": 1, "loss": 1.0, "seconds": 1}\n')
    with pytest.raises(ValueError, match="no validation loss yet"):
        runs.compare([dense, sparse])


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (7, 12), (12, 12)])
def test_a_share_has_its_exact_interval(hits: int, trials: int) -> None:
    wanted = stats.binomtest(hits, trials).proportion_ci(0.95, "exact")
    assert intervals.of_share(hits, trials) == pytest.approx((wanted.low, wanted.high), abs=1e-9)
    assert intervals.at_least(hits, trials) == pytest.approx(stats.binom.sf(hits - 1, trials, 0.5))


def test_vmaf_is_of_the_first_ffmpeg_that_has_it_or_the_line_says_how_to_get_one(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_close() -> tuple[float | None, str]:
        metrics.ffmpeg.cache_clear()
        found = compare([folder / "clip0.mp4" for folder in folders[:2]], CompareConfig(windows=0))
        return found["pairs"][0]["scores"]["close/clip0.mp4"].get("vmaf"), found["not_measured"].get("vmaf", "")

    def install(name: str, script: str) -> Path:
        file = tmp_path / name / "ffmpeg"
        file.parent.mkdir()
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert of_close() == (None, metrics.HOW["vmaf"].format("there is no ffmpeg on the PATH"))
    plain = install("plain", "echo scale")
    monkeypatch.setenv("PATH", str(plain.parent))
    assert of_close() == (None, metrics.HOW["vmaf"].format(f"{plain} has none"))
    log = '{"pooled_metrics": {"vmaf": {"mean": 91.5}}}'
    able = install("able", f"case $* in *-filters*) echo libvmaf;; *libvmaf=*) echo '{log}' > vmaf.json;; esac")
    monkeypatch.setenv("PATH", f"{plain.parent}:{able.parent}")
    assert of_close() == (91.5, "")
    metrics.ffmpeg.cache_clear()
