"""The command line as a person meets it: help, errors with exit code 2, files that appear."""

import subprocess
import sys
from pathlib import Path

import av
import pytest
import torch

from foveate.training.checkpoint import load_weights, save_weights
from foveate.training.recipes import CHECKPOINT


def foveate(*arguments: str | Path) -> subprocess.CompletedProcess:
    code = "import sys; from foveate.cli import main; sys.argv[0] = 'foveate'; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("command", ["demo", "train", "generate", "doctor"])
def test_every_command_has_help(command: str) -> None:
    done = foveate(command, "--help")
    assert done.returncode == 0
    assert "usage: foveate " + command in done.stdout


def test_doctor_names_the_backend_and_why() -> None:
    done = foveate("doctor")
    assert done.returncode == 0
    assert torch.__version__ in done.stdout
    assert "auto takes" in done.stdout


def test_errors_have_exit_code_2_and_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04")
    train = ("train", "--out", tmp_path / "run", "--data")
    cases = [
        ((*train, tmp_path / "nowhere"), "nowhere"),
        ((*train, tmp_path / "empty"), "empty"),
        ((*train, tmp_path, "--budget", "0"), "budget"),
        ((*train, tmp_path / "empty", "--sizes", "3"), "--sizes"),
        (("generate", tmp_path / "a.mp4", "--model", tmp_path / "none.safetensors"), "no such checkpoint file"),
        (("generate", tmp_path / "a.mp4", "--model", tmp_path / "pickle.pt"), "not a safetensors file"),
        (("generate", tmp_path / "a.mp4", "--attention", "sparse"), "predictor.safetensors"),
        (("generate", tmp_path / "a.gif"), "must end in .mp4"),
        (("generate", tmp_path / "a.mp4", "--label", "1"), "label"),
        (("generate", tmp_path / "a.mp4", "--steps", "0"), "at least 1 step"),
    ]
    for arguments, message in cases:
        done = foveate(*arguments)
        said = " ".join((done.stderr + done.stdout).split())
        assert done.returncode == 2, (arguments, said)
        assert message in said, (arguments, said)
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_generate_writes_a_clip_that_plays(tmp_path: Path) -> None:
    weights, about = load_weights(CHECKPOINT)
    small = tmp_path / "small.safetensors"
    save_weights(small, weights, {**about, "clip": {"frames": 4, "height": 32, "width": 32, "fps": 25}})
    done = foveate("generate", tmp_path / "new" / "clip.mp4", "--model", small, "--steps", "2")
    assert done.returncode == 0, done.stderr
    with av.open(str(tmp_path / "new" / "clip.mp4")) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 4
    assert (frames[0].height, frames[0].width) == (32, 32)


def test_the_demos_checkpoint_says_where_it_comes_from() -> None:
    about = load_weights(CHECKPOINT)[1]
    assert CHECKPOINT.stat().st_size <= 16 * 2**20
    assert {"recipe", "data", "hardware", "month", "step"} <= about.keys()
