"""Awkward folders and captions: every file is a clip or listed with the reason; validation by whole clips."""

import json
import os
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foveate.data import Clips, write_mp4
from foveate.models.dit import DiTConfig
from foveate.training.flow import fixed_batches
from foveate.training.loop import open_clips
from foveate.training.recipes import TrainConfig

SHAPE = {"frames": 4, "height": 16, "width": 16, "zoom": (1.0,), "split": "all"}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "a.mp4"
    write_mp4(path, np.random.default_rng(0).integers(0, 255, (24, 16, 16, 3), np.uint8), 24)
    return path


@pytest.fixture
def put(source, tmp_path):
    """Copies of one small film under the names given."""

    def make(*names: str, root: Path = tmp_path) -> Path:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / name)
        return root

    return make


def names(clips: Clips) -> list[str]:
    return [clip.name for clip in clips.clips]


def write_captions(root: Path, rows: list[tuple[str, str]], encoding: str = "utf-8", end: str = "\n") -> None:
    lines = [json.dumps({"file": name, "caption": caption}, ensure_ascii=False) for name, caption in rows]
    (root / "captions.jsonl").write_bytes(end.join(lines).encode(encoding))


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\ufeff", "\t"])
def test_no_character_inside_a_caption_cuts_its_line(put, mark):
    root = put("a.mp4", "b.mp4")
    text = f'{{"file": "a.mp4", "caption": "one{mark}two"}}\n{{"file": "b.mp4", "caption": "b"}}\n'
    (root / "captions.jsonl").write_bytes(text.encode())
    clips = Clips(root, **SHAPE)
    assert [(clip.name, clip.caption) for clip in clips.clips] == [("a.mp4", f"one{mark}two"), ("b.mp4", "b")]
    assert clips.skipped == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\n\n \n"])
def test_encodings_and_line_ends(put, encoding, end):
    root = put("a.mp4", "é.mp4")
    write_captions(root, [("a.mp4", "Füße, 猫"), ("é.mp4", "😀")], encoding, end)
    assert [clip.caption for clip in Clips(root, **SHAPE).clips] == ["Füße, 猫", "😀"]


def test_bad_lines_are_listed_by_number_and_the_rest_is_used(put):
    root = put("a.mp4", "b.mp4", "c.mp4", "d.mp4")
    lines = [
        b'\xef\xbb\xbf{"file": "a.mp4", "caption": "a"}',
        b'{"file": "b.mp4", "caption": "caf\xe9"}',  # Latin-1
        b'\xef\xbb\xbf{"file": "c.mp4", "caption": "c"}\r',  # two files joined
        b'{"file": "d.mp4", "caption": ["one", "two"]}',
        b'{"file": "d.mp4", "caption": 7}',
        b'{"file": null, "caption": "d"}',
        b'{"file": "", "caption": "d"}',
        b'{"file": "d.mp4", "caption": "\\ud83d"}',
        b'{"file": "d\\u0000.mp4", "caption": "d"}',
        b'{"file": "d\\ud83d.mp4", "caption": "d"}',
        b'"d.mp4"',
        b"[" * 100_000,
        b'{"file": "' + b"d" * 300 + b'.mp4", "caption": "d"}',
        b'{"file": ".", "caption": "d"}',
    ]
    (root / "captions.jsonl").write_bytes(b"\n".join(lines))
    clips = Clips(root, **SHAPE)
    assert [(clip.name, clip.caption) for clip in clips.clips] == [("a.mp4", "a"), ("c.mp4", "c")]
    told = " ".join(f"{name} {reason}." for name, reason in clips.skipped).replace(")", ".")
    for number in (2, *range(4, 15)):
        assert f"captions.jsonl line {number}" + "." in told or f"captions.jsonl line {number} " in told, number
    found = dict(clips.skipped)
    assert found["captions.jsonl line 2"].startswith("not UTF-8")
    assert found["captions.jsonl line 12"].startswith("not JSON")
    assert ("d.mp4", 'needs {"file": "...", "caption": "..."}, both text (captions.jsonl line 4)') in clips.skipped
    assert ("d.mp4", "the caption holds half a surrogate pair (captions.jsonl line 8)") in clips.skipped
    assert ("d.mp4", "video without a caption in captions.jsonl") in clips.skipped


def test_names_in_captions_mean_what_the_file_system_means(put, tmp_path):
    outside = put("far.mp4", "deep/x.mp4", root=tmp_path / "outside")
    root = put(
        "a.mp4", "sub/b.mp4", "with space ü.mp4", "UPPER.MP4", ".hidden.mp4", "c.mp4", "win/w.mp4", root=tmp_path / "in"
    )
    (root / "linked").symlink_to(outside)
    (root / "file-link.mp4").symlink_to(outside / "far.mp4")
    nfd = unicodedata.normalize("NFD", "né/é.mp4")
    put(nfd, root=root)
    rows = ["./a.mp4", "linked/../outside/deep/x.mp4", str(root / "c.mp4"), "linked/far.mp4", "file-link.mp4"]
    rows += ["sub/../sub/b.mp4", "with space ü.mp4", "UPPER.MP4", ".hidden.mp4", "né/é.mp4", "win\\w.mp4"]
    write_captions(root, [(name, f"of {name}") for name in rows])
    clips = Clips(root, **SHAPE)
    assert sorted(clip.caption for clip in clips.clips) == sorted(f"of {name}" for name in rows)
    assert {reason for name, reason in clips.skipped if not name.startswith(("*", "."))} == set()


def test_one_file_by_two_names_has_one_caption(put):
    root = put("a.mp4", "sub/b.mp4")
    write_captions(
        root, [("a.mp4", "first"), ("./a.mp4", "second"), ("sub/../a.mp4", "third"), (str(root / "a.mp4"), "4")]
    )
    clips = Clips(root, **SHAPE)
    assert [(clip.name, clip.caption) for clip in clips.clips] == [("a.mp4", "first")]
    assert sum("second caption" in reason for _, reason in clips.skipped) == 3
    (root / "captions.jsonl").unlink()
    (root / "captions.jsonl").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"captions.jsonl cannot be read"):
        Clips(root, **SHAPE)


def test_links_folders_and_odd_entries(put, tmp_path):
    outside = put("x.mp4", root=tmp_path / "outside")
    root = put("a.mp4", "B.MP4", ".hidden.mp4", "._a.mp4", root=tmp_path / "in")
    (root / "link.mp4").symlink_to(outside / "x.mp4")
    (root / "broken.mp4").symlink_to("nowhere.mp4")
    (root / "loop.mp4").symlink_to("loop.mp4")
    (root / "dir.mp4").mkdir()
    (root / "empty.mkv").touch()
    os.mkfifo(root / "pipe.mp4")
    odd = root / os.fsdecode(b"\xff\xe9.mp4")
    shutil.copy(root / "a.mp4", odd)
    (root / "self").symlink_to(".")
    (root / "notes.txt").write_text("...")
    clips = Clips(root, **SHAPE)
    assert names(clips) == ["B.MP4", "a.mp4", "link.mp4", odd.name]
    assert dict(clips.skipped) == {
        "broken.mp4": "a broken symbolic link",
        "loop.mp4": "a symbolic link that leads back to itself",
        "dir.mp4": "folder without video files",
        "empty.mkv": "the file is empty",
        "pipe.mp4": "not a regular file",
        "self": "a link back to a folder that it lies in",
        "*.txt": "1 sidecar files, no video",
        ".*": "2 hidden files and folders",
    }
    assert names(Clips(root, **SHAPE)) == names(clips)  # from the index now


def test_class_folders_may_be_links_hold_folders_and_pictures_beside_them_are_no_class(put, tmp_path):
    outside = put("r.mp4", "more/s.mp4", root=tmp_path / "outside")
    root = put("walk/a.mp4", root=tmp_path / "in")
    (root / "run").symlink_to(outside)
    clips = Clips(root, **SHAPE)
    assert clips.classes == ("run", "walk")
    assert [(c.name, c.label) for c in clips.clips] == [("run/more/s.mp4", 0), ("run/r.mp4", 0), ("walk/a.mp4", 1)]
    flat = put("a.mp4", root=tmp_path / "flat")
    (flat / "thumbs").mkdir()
    (flat / "thumbs" / "a.jpg").write_bytes(b"\xff\xd8\xff\xe0 not much of a picture")
    clips = Clips(flat, **SHAPE)
    assert (names(clips), clips.classes) == (["a.mp4"], ())
    assert {name for name, _ in clips.skipped} == {"thumbs", "thumbs/a.jpg"}


def test_a_long_list_of_skipped_files_is_not_a_long_log(put, tmp_path, caplog):
    put("good.mp4")
    for number in range(50):
        (tmp_path / f"{number}.bin").touch()
    clips = Clips(tmp_path, **SHAPE)
    assert len(clips.skipped) == 50
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 21
    assert "skipped 30 more (30 times the file is empty)" in caplog.text


# What is held out for validation.


def split(root: Path, **given) -> tuple[list[str], list[str]]:
    return tuple(names(Clips(root, **{**SHAPE, "split": part, **given})) for part in ("train", "val"))


def test_whole_clips_are_held_out_where_there_are_enough(put):
    root = put(*(f"{n}.mp4" for n in range(10)))
    train, val = split(root)
    assert (len(train), len(val)) == (8, 2)
    assert sorted(train + val) == sorted(f"{n}.mp4" for n in range(10))
    assert split(root, frames=20) == (train, val)  # of 24: no tail would do
    assert split(root, frames=1, stride=2, height=8) == (train, val)
    clips = Clips(root, **{**SHAPE, "split": "val"})
    assert {s.start for s in map(clips.sample, range(99))} == set(range(21))  # all of the clip
    put(*(f"more-{n}.mp4" for n in range(10)))
    again = split(root)
    assert len(again[1]) == 4
    assert len(set(val) & set(again[1])) >= 1


def test_every_class_and_every_link_to_a_file_stays_together(put):
    root = put(*(f"{c}/{n}.mp4" for c in ("run", "walk") for n in range(5)), "rare/one.mp4")
    train, val = split(root)
    assert sorted(name.split("/")[0] for name in val) == ["run", "walk"]
    assert "rare/one.mp4" in train
    for name in val + train[:2]:
        (root / name.split("/")[0] / f"again-{Path(name).name}").symlink_to(root / name)
    train, val = split(root)
    real = [{os.path.realpath(root / name) for name in part} for part in (train, val)]
    assert not real[0] & real[1]


def test_few_clips_lose_their_last_frames_and_errors_name_the_dials(put):
    root = put("a.mp4", "b.mp4")
    assert split(root) == (["a.mp4", "b.mp4"],) * 2
    with pytest.raises(
        ValueError, match=r"24, of which 5 for val; needs 6.*val_fraction=0.2.*--val-fraction.*--validation"
    ):
        Clips(root, **{**SHAPE, "split": "val", "frames": 6})
    assert split(root, frames=6, val_fraction=0.25)[1] == ["a.mp4", "b.mp4"]
    assert [len(part) for part in split(root, frames=6, val_by="clips", val_fraction=0.5)] == [1, 1]
    put(*(f"{n}.mp4" for n in range(8)))
    assert split(root, val_by="frames")[0] == split(root, val_by="frames")[1]


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    model = DiTConfig(width=64, depth=1, heads=1)
    return TrainConfig(data=tmp_path, out=tmp_path / "run", frames=8, height=16, width=16, zoom=(1.0,), model=model)


def test_a_validation_folder_is_never_trained_on(put, tmp_path, config):
    put(*(f"{n}.mp4" for n in range(6)), "held/v.mp4")
    (tmp_path / "held" / "same.mp4").hardlink_to(tmp_path / "0.mp4")
    config = replace(config, validation=tmp_path / "held")
    train, val = open_clips(config, "train"), open_clips(config, "val")
    assert names(train) == [f"{n}.mp4" for n in range(1, 6)]
    assert all(clip.frames == 24 for clip in train.clips)
    assert {s.start for s in map(train.sample, range(99))} == set(range(17))  # nothing is held out twice
    assert sorted(names(val)) == ["same.mp4", "v.mp4"]
    assert not val.flip
    assert train.classes == ()
    with pytest.raises(ValueError, match="not to be trained on"):
        open_clips(replace(config, validation=tmp_path), "train")
    with pytest.raises(ValueError, match="not a folder"):
        open_clips(replace(config, validation=tmp_path / "gone"), "val")


def test_validation_takes_the_classes_of_training(put, tmp_path, config):
    put("in/jump/a.mp4", "in/run/b.mp4", "val/run/c.mp4", "val/swim/d.mp4", "plain/e.mp4")
    config = replace(config, data=tmp_path / "in", validation=tmp_path / "val")
    val = open_clips(config, "val")
    assert [(clip.name, clip.label) for clip in val.clips] == [("run/c.mp4", 1)]
    assert val.classes == ("jump", "run")
    assert ("swim/d.mp4", "training has no class swim") in val.skipped
    with pytest.raises(ValueError, match="class folders of training: jump, run"):
        open_clips(replace(config, validation=tmp_path / "plain"), "val")


def test_text_must_cover_the_captions_of_held_out_clips(put, config):
    root = put(*(f"{n}.mp4" for n in range(5)))
    write_captions(root, [(f"{n}.mp4", f"caption {n}") for n in range(5)])
    train, val = open_clips(config, "train"), open_clips(config, "val")
    text = {clip.caption or "": torch.ones(3) for clip in train.clips}
    with pytest.raises(ValueError, match=f"no embedding for the caption '{val.clips[0].caption}'"):
        fixed_batches(val, 1, conditions=text)
    text |= {clip.caption or "": torch.zeros(3) for clip in val.clips}
    assert [batch.condition.tolist() for batch in fixed_batches(val, 1, levels=1, conditions=text)] == [[[0.0] * 3]]


def test_a_runs_own_films_are_not_its_clips(put, tmp_path, config):
    put("a.mp4", "run/step-10.mp4")
    clips = open_clips(config, "train")
    assert (names(clips), clips.classes) == (["a.mp4"], ())
    with pytest.raises(ValueError, match="lies in"):
        open_clips(replace(config, out=tmp_path), "train")
    assert names(open_clips(replace(config, data=tmp_path / "run", out=tmp_path), "train")) == ["step-10.mp4"]
    with pytest.raises(ValueError, match="val_fraction"):
        replace(config, val_fraction=0.0)
