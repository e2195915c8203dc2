"""The index beside the data: made once, never trusted blindly, shared by processes, kept elsewhere where it must be."""

import json
import multiprocessing
import os
import runpy
import shutil
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from foveate.data import Clips, index, write_mp4
from foveate.video import probe

SHAPE = {"frames": 4, "height": 16, "width": 16, "zoom": (1.0,), "split": "all", "memory_gib": 0}


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Three films, one of them damaged beyond use; the user's cache is a folder of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "films"
    folder.mkdir()
    for number, name in enumerate("ab"):
        write_mp4(folder / f"{name}.mp4", np.full((8 + number, 16, 16, 3), 100, np.uint8), 24)
    (folder / "bad.mp4").write_bytes(b"no film")
    return folder


@pytest.fixture
def probed(monkeypatch) -> list[str]:
    """Names of the files that are read, in order."""
    seen: list[str] = []

    def watch(source):
        seen.append(source.name)
        return probe(source)

    monkeypatch.setattr(index, "probe", watch)
    monkeypatch.setattr(index, "WORKERS", 1)
    return seen


def facts(root: Path) -> tuple:
    clips = Clips(root, **SHAPE)
    return clips.clips, clips.skipped


def test_files_are_read_once_and_again_only_when_they_change(root, probed):
    first = facts(root)
    assert probed == ["a.mp4", "b.mp4", "bad.mp4"]
    assert facts(root) == first  # the other split, the next run
    assert probed[3:] == []
    shutil.copy(root / "b.mp4", root / "c.mp4")
    assert [clip.name for clip in facts(root)[0]] == ["a.mp4", "b.mp4", "c.mp4"]
    assert probed[3:] == ["c.mp4"]
    times = (root / "a.mp4").stat()
    shutil.copy(root / "b.mp4", root / "a.mp4")  # another size
    os.utime(root / "a.mp4", ns=(times.st_atime_ns, times.st_mtime_ns))
    os.utime(root / "b.mp4", ns=(1, 1))
    clips, _ = facts(root)
    assert probed[4:] == ["a.mp4", "b.mp4"]
    assert [clip.frames for clip in clips] == [9, 9, 9]
    (root / "c.mp4").unlink()
    Clips(root, **SHAPE, exclude=["b.mp4"])
    assert probed[6:] == []
    write_mp4(root / "bad.mp4", np.full((8, 16, 16, 3), 100, np.uint8), 24)
    assert [clip.name for clip in facts(root)[0]] == ["a.mp4", "b.mp4", "bad.mp4"]
    assert probed[6:] == ["bad.mp4"]
    places = [json.loads(line)[0] for line in (root / index.NAME).read_text().splitlines()[1:]]
    assert sorted(places) == ["a.mp4", "b.mp4", "bad.mp4"]  # what is gone is forgotten
    moved = root.rename(root.parent / "moved")
    assert len(facts(moved)[0]) == 3
    assert probed[7:] == []


def whole(rows: list) -> bytes:
    body = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    return json.dumps({"format": index.FORMAT, "rows": len(rows), "checksum": zlib.crc32(body)}).encode() + b"\n" + body


def forged(data: bytes) -> bytes:
    rows = [json.loads(line) for line in data.splitlines()[1:]]
    return whole([[*row[:3], "many", *row[4:]] if len(row) == 9 else row for row in rows])


HARM = {
    "cut": lambda data: data[: len(data) * 2 // 3],
    "cut at a line": lambda data: b"".join(data.splitlines(keepends=True)[:-1]),
    "a digit flipped": lambda data: data.replace(b",16,16,", b",61,16,", 1),
    "empty": lambda data: b"",
    "no header": lambda data: data.partition(b"\n")[2],
    "another format": lambda data: data.replace(b'"format": 1', b'"format": 0', 1),
    "no index": lambda data: np.random.default_rng(0).bytes(300),
    "a list": lambda data: b"[1, 2]\n[]\n",
    "deep": lambda data: b"[" * 100_000,
    "rows of another kind": forged,
    "rows that are no lists": lambda data: whole([7, {"a": 1}, [], None]),
    "of other files": lambda data: whole(
        [["a.mp4", 1, 1, 99, 24.0, 9, 9, 0, None], ["z", 1, 1, 9, 24.0, 9, 9, 0, None]]
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_an_index_that_is_not_sound_is_made_anew(root, probed, harm):
    first, place = facts(root), root / index.NAME
    good = place.read_bytes()
    bad = HARM[harm](good)
    assert bad != good
    place.write_bytes(bad)
    assert facts(root) == first
    assert sorted(probed[3:]) == ["a.mp4", "b.mp4", "bad.mp4"]
    assert place.read_bytes() == good
    assert facts(root) == first
    assert probed[6:] == []


def test_a_failure_that_says_nothing_about_the_file_is_not_kept(root, probed, monkeypatch):
    def fails(source):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(index, "probe", fails)
        with pytest.raises(ValueError, match=r"a.mp4: cannot be read: Permission denied"):
            Clips(root, **SHAPE)
    assert len(facts(root)[0]) == 2
    monkeypatch.setattr(index, "DECODER", "av 99")  # may read what this one could not
    assert probed[3:] == []
    facts(root)
    assert probed[3:] == ["bad.mp4"]


def test_what_was_read_before_an_interruption_is_kept(root, probed, monkeypatch):
    def stops(source):
        if source.name == "bad.mp4":
            raise KeyboardInterrupt
        return probe(source)

    with monkeypatch.context() as patch:
        patch.setattr(index, "probe", stops)
        with pytest.raises(KeyboardInterrupt):
            Clips(root, **SHAPE)
    assert len(facts(root)[0]) == 2
    assert probed == ["bad.mp4"]


def test_a_folder_that_cannot_be_written_has_its_index_in_the_cache(root, probed, caplog):
    (root / index.NAME).mkdir()  # nobody can write there, root neither
    with caplog.at_level("INFO"):
        first = facts(root)
    kept = list((root.parent / "cache" / "foveate").iterdir())
    assert len(kept) == 1
    assert f"is kept as {kept[0]}, because the folder cannot be written: Is a directory" in caplog.text
    assert facts(root) == first
    assert probed[3:] == []
    kept[0].unlink()
    kept[0].mkdir()
    caplog.clear()
    assert facts(root) == first
    assert "cannot be kept (Is a directory): its files are read again at every start" in caplog.text
    assert not list(root.glob(f"{index.NAME}.*"))  # nothing is left over


def open_slowly(root: Path, together, answers) -> None:
    seen = []

    def slowly(source):
        seen.append(source.name)
        time.sleep(0.02)
        return probe(source)

    index.probe = slowly
    together.wait(60)
    answers.put((len(facts(root)[0]), len(seen)))


def test_of_two_processes_that_start_at_once_one_reads_the_files(root):
    for number in range(20):
        shutil.copy(root / "a.mp4", root / f"{number}.mp4")
    fork = multiprocessing.get_context("fork")
    together, answers = fork.Barrier(2), fork.Queue()
    runs = [fork.Process(target=open_slowly, args=(root, together, answers)) for _ in range(2)]
    for run in runs:
        run.start()
    found = [answers.get(timeout=60) for _ in runs]
    for run in runs:
        run.join(60)
    assert [clips for clips, _ in found] == [22, 22]
    assert sorted(read for _, read in found) == [0, 23]
    assert not list(root.glob(f"{index.NAME}.*"))


def test_without_a_lock_each_reads_and_the_index_is_whole(root, monkeypatch, probed):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    first = facts(root)
    assert facts(root) == first
    assert len(probed) == 3


def test_opening_many_indexed_clips_is_quick(tmp_path, monkeypatch, capsys):
    """The benchmark at a fiftieth of its size, with room for a busy machine; it checks what it opens."""
    script = Path(__file__).parent.parent / "benchmarks" / "bench_open_clips.py"
    monkeypatch.setattr(sys, "argv", [script.name, str(tmp_path), "--clips", "2000"])
    runpy.run_path(str(script))["main"]()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cpu_seconds"] < 1
