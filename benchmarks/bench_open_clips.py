"""How long it takes to open a folder of many clips that are in its index.

    python benchmarks/bench_open_clips.py FOLDER [--clips 100000]

Makes FOLDER/clips with as many small files in class folders, four of them real films, and their index. Then opens the
training and the validation clips as a run does, and checks: no file is read but the four, none is lost, the two parts
are apart, and the real films are decoded. Prints the slower of the two as JSON.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from foveate.data import Clips, index, write_mp4
from foveate.data.files import walk
from foveate.video import pack

CLASSES = 50


def make(root: Path, count: int) -> None:
    """Files of a few bytes, known to the index as films with the uneven times of WebM; and four films."""
    for number in range(CLASSES):
        (root / f"class-{number:02}").mkdir(parents=True)
    for number in range(count - 4):
        (root / f"class-{number % CLASSES:02}" / f"{number:06}.webm").write_bytes(b"x" * (1 + number % 7))
    times = pack([round(number * 1000 / 24) for number in range(240)])
    rows = [
        [file.real.removeprefix(f"{os.path.realpath(root)}/"), file.size, file.mtime, 240, 24.0, 360, 640, 0, times]
        for file in walk(root).files
    ]
    index._save(root, rows)
    for number in range(4):
        write_mp4(root / f"class-{number:02}" / f"real-{number}.mp4", np.full((80, 64, 64, 3), 99, np.uint8), 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=100_000)
    options = parser.parse_args()
    root = options.folder / "clips"
    make(root, options.clips)
    shape = {"frames": 16, "height": 64, "width": 64, "zoom": (1.0,), "memory_gib": 0.001}
    began = time.perf_counter()
    Clips(root, **shape, split="all")  # the four films come into the index
    first = time.perf_counter() - began
    real, index.probe = index.probe, None  # from here on nothing may be read
    opened, seconds, cpu = {}, 0.0, 0.0
    for split in ("train", "val"):
        began, busy = time.perf_counter(), time.process_time()
        opened[split] = Clips(root, **shape, split=split)
        seconds, cpu = max(seconds, time.perf_counter() - began), max(cpu, time.process_time() - busy)
    index.probe = real
    names = [{clip.name for clip in clips.clips} for clips in opened.values()]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == options.clips
    assert len(names[1]) == options.clips // 5
    assert not any(clips.skipped for clips in opened.values())
    for clips in opened.values():
        films = [number for number, clip in enumerate(clips.clips) if "real" in clip.name]
        assert all(abs(int(clips._segment(number, 0)[0].mean()) - 99) < 4 for number in films)
    found = {"clips": options.clips, "seconds": seconds, "cpu_seconds": cpu, "with_four_new_files": first}
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
