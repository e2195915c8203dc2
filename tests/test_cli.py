"""The command line as a person meets it: help, errors with exit code 2, files that appear."""

import errno
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import av
import pytest
import torch
import tyro

import foveate as package
from foveate import __main__, cli
from foveate.generation import builtin
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.training import machine
from foveate.training.checkpoint import load_weights, save_weights
from foveate.training.recipes import CHECKPOINT, TrainConfig

SIZE = {"frames": 4, "height": 32, "width": 32, "fps": 25}
Run = Callable[..., SimpleNamespace]


@pytest.fixture
def foveate(capsys: pytest.CaptureFixture) -> Run:
    """`foveate ...` in this process: its exit code, and what it said where."""

    def run(*arguments: str | Path, main: Callable = cli.main) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            main([str(item) for item in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, out=out, err=err)

    handlers = logging.getLogger("foveate").handlers
    yield run
    logging.getLogger("foveate").handlers = handlers


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, told to make clips of 4 frames of 32 x 32."""
    weights, about = load_weights(CHECKPOINT)
    file = tmp_path_factory.mktemp("model") / "small.safetensors"
    save_weights(file, weights, {**about, "clip": SIZE})
    return file


def untrained(file: Path, **dials: int) -> Path:
    model = VideoDiT(DiTConfig(width=32, depth=1, heads=1, **dials))
    save_weights(file, model.state_dict(), {"model": model.config.to_dict(), "clip": SIZE})
    return file


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_flag_has_a_sentence_of_its_own(command: str, foveate: Run) -> None:
    done = foveate(command, "-h")
    assert (done.code, done.err) == (0, "")
    assert f"usage: foveate {command}" in done.out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(cli.COMMANDS[command])
    texts = {}
    for action in parser._actions:
        if action.dest != "help":
            text = re.sub(r"\x1b\[[\d;]*m", "", action.help or "").partition("(default")[0].partition("(required")[0]
            texts[action.dest] = text.strip()
    for flag, text in texts.items():
        assert text.endswith("."), (flag, text)
        assert len(text.split()) >= 2, (flag, text)
    assert len(set(texts.values())) == len(texts)  # not the heading of their group


def test_version_and_no_command(foveate: Run) -> None:
    assert foveate("--version").out == f"foveate {package.__version__}\n"
    assert foveate().code == 2
    assert foveate("paint").code == 2


@pytest.mark.parametrize("module", ["foveate", "foveate.cli"])
def test_python_m_runs_it_and_a_reader_may_leave(module: str) -> None:
    command = f"{sys.executable} -m {module} doctor --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")


def test_broken_pipes_and_ctrl_c_are_no_errors(foveate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(words: list[str]) -> int:
        raise KeyboardInterrupt if words else BrokenPipeError

    monkeypatch.setattr(cli, "run", broken)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    assert foveate().code == 141
    assert foveate("train").code == 130


def test_without_its_packages_it_says_what_to_install(foveate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "foveate.cli")
    monkeypatch.setitem(sys.modules, "tyro", None)
    done = foveate(main=lambda _: __main__.main())
    assert (done.code, done.err) == (2, "foveate: the command line needs tyro: pip install 'foveate[cli]'\n")
    monkeypatch.setitem(sys.modules, "av", None)
    assert cli.sentence(ModuleNotFoundError("No module named 'av'", name="av")).endswith("pip install 'foveate[cli]'")


def test_doctor_names_the_backend_and_why(foveate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    assert machine.cores() == os.cpu_count()
    monkeypatch.setattr("foveate.training.doctor.unavailable", lambda name, device: "needs 'foveate[fa4]'")
    done = foveate("doctor")
    assert done.code == 0
    assert "needs 'foveate[fa4]'" in done.out
    found = json.loads(foveate("doctor", "--json").out)
    assert found["foveate"] == package.__version__
    assert found["torch"] == torch.__version__
    assert found["auto takes"].startswith("torch: ")
    assert all(f"{name} " in done.out for name in found)


def test_bad_input_ends_with_code_2_and_says_what_to_do(foveate: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04")
    save_weights(tmp_path / "foreign.safetensors", {"x": torch.zeros(1)}, {"rank": 3})
    (tmp_path / "there.mp4").write_text("mine")
    plain, classes = untrained(tmp_path / "plain.safetensors"), untrained(tmp_path / "c.safetensors", classes=3)
    text = untrained(tmp_path / "t.safetensors", text_dim=4)
    train = ("train", "--out", tmp_path / "run", "--data")
    clip = ("generate", tmp_path / "a.mp4", "--model")
    cases = [
        ((*train, tmp_path / "nowhere"), "nowhere"),
        ((*train, tmp_path / "empty"), "empty"),
        ((*train, tmp_path / "empty", "--steps", "0"), "steps must be at least 1"),
        ((*train, tmp_path / "empty", "--steps", "many"), "--steps"),
        ((*train, tmp_path / "empty", "--sizes", "3"), "--sizes"),
        ((*train, tmp_path / "empty", "--device", "gpu"), "there is no device 'gpu'"),
        ((*train, tmp_path / "empty", "--model.heads", "3"), "model.heads 3"),
        ((*train, tmp_path / "empty", "--height", "62"), "multiples of model.patch"),
        ((*clip, tmp_path / "none.safetensors"), "no such checkpoint file"),
        ((*clip, tmp_path), "no such checkpoint file"),
        ((*clip, tmp_path / "pickle.pt"), "not a safetensors file"),
        ((*clip, tmp_path / "foreign.safetensors"), "no model that `foveate train` wrote"),
        ((*clip, plain, "--attention", "sparse"), "which sparse training writes"),
        ((*clip, plain, "--attention", "blurred"), "dense"),
        ((*clip, plain, "--steps", "0"), "at least 1 step"),
        ((*clip, plain, "--label", "1"), "trained without labels"),
        ((*clip, plain, "--prompt", "a cat", "--text-encoder", "x"), "trained without captions"),
        ((*clip, plain, "--prompt", "a cat"), "go together"),
        ((*clip, plain, "--guidance", "4"), "--guidance strengthens a condition"),
        ((*clip, classes, "--label", "3"), "0 ... 2"),
        ((*clip, classes), "give --label 0 ... 2, or --unconditional"),
        ((*clip, classes, "--label", "1", "--unconditional"), "leave --label"),
        ((*clip, text), "give --prompt"),
        ((*clip, plain, "--reuse", "2"), "quality"),
        ((*clip, plain, "--device", "gpu"), "there is no device 'gpu'"),
        ((*clip, plain, "--device", "meta"), "does not work here"),
        (("generate", tmp_path / "a.gif"), "must end in .mp4"),
        (("generate", tmp_path / "there.mp4"), "--overwrite"),
        (("generate", tmp_path / "pickle.pt" / "a.mp4"), "is a file"),
        (("demo", "--denoise-steps", "0", "--out", tmp_path / "run"), "--denoise-steps must be at least 1"),
        (("report", tmp_path / "empty"), "holds no run"),
        (("report", tmp_path / "empty", "--denoise-steps", "-1"), "at least 0"),
        (("demo", "--data", tmp_path / "nowhere", "--out", tmp_path / "run"), "nowhere"),
    ]
    for arguments, message in cases:
        done = foveate(*arguments)
        assert (done.code, done.out) == (2, ""), (arguments, done)
        assert message in " ".join(done.err.replace("│", " ").split()), (arguments, done.err)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "a.mp4").exists()
    assert (tmp_path / "there.mp4").read_text() == "mine"


@pytest.mark.parametrize("name", machine.RANKS)
def test_many_processes_are_refused(name: str, foveate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    for command in (("train", "--data", tmp_path, "--out", tmp_path / "run"), ("generate",), ("demo",)):
        done = foveate(*command)
        assert done.code == 2
        assert f"`foveate {command[0]}` is one process, and {name} is 2" in done.err
    monkeypatch.setenv(name, "1")
    machine.refuse_many_processes("train")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees no GPU"):
        machine.pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine.pick_device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match="has 2 GPUs"):
        machine.pick_device("cuda:9")


def test_generate_writes_a_clip_that_plays(small: Path, foveate: Run, tmp_path: Path) -> None:
    folder = tmp_path / "[red]a folder with a name of more than eighty characters, so that a line would be broken[bold]"
    out = folder / "clip.mp4"
    done = foveate("generate", out, "--model", small, "--steps", "2")
    assert (done.code, done.out) == (0, f"wrote {out}\n"), done.err
    with av.open(str(out)) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 4
    assert (frames[0].height, frames[0].width) == (32, 32)
    assert foveate("generate", out, "--model", small).code == 2
    assert foveate("generate", out, "--model", small, "--steps", "1", "--overwrite").code == 0
    assert os.listdir(folder) == ["clip.mp4"]


def test_a_calibrated_schedule_is_followed(small: Path, foveate: Run, tmp_path: Path) -> None:
    file, flags = tmp_path / "plan.json", ("--model", small, "--steps", "6")
    done = foveate("calibrate", file, *flags, "--calls", "0.5", "--clips", "1")
    assert (done.code, done.out) == (0, f"wrote {file}: computes 3 of 6 steps\n"), done.err
    follow = ("--schedule", file, "--solver", "euler")
    assert "50% of the attention" in foveate("generate", tmp_path / "a.mp4", *flags, *follow).err
    assert foveate("calibrate", file, *flags).code == 2  # there already
    assert "--solver euler" in foveate("generate", tmp_path / "b.mp4", *flags, "--schedule", file).err
    done = foveate("generate", tmp_path / "b.mp4", "--model", small, "--steps", "4", *follow)
    assert done.code == 2
    assert "for 6 steps, this run has 4" in done.err


def test_a_full_disk_is_a_sentence_and_leaves_nothing(small, foveate: Run, tmp_path: Path, monkeypatch) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(builtin, "write_mp4", full)
    arguments = ("generate", tmp_path / "clip.mp4", "--model", small, "--steps", "1")
    done = foveate(*arguments)
    assert done.code == 1
    assert "No space left on device; make room" in done.err
    assert "Traceback" not in done.err
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="No space"):
        cli.main([*map(str, arguments), "--debug"])
    monkeypatch.setattr(os, "access", lambda *_: False)
    done = foveate(*arguments)
    assert (done.code, "cannot be written to" in done.err) == (2, True)


def test_flags_come_from_a_file_and_win_over_it(foveate: Run, tmp_path: Path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "train": recorded(seen)})
    yaml, js = tmp_path / "run.yaml", tmp_path / "run.json"
    yaml.write_text(
        "data: clips\nout: runs/a\nsteps: 7\nlr: 3e-4\nsparse: false\nzoom: [1.0, 2.0]\n"
        "model: {width: 64, heads: 2, patch: [1, 2, 2]}\nvalidation_clips: 3\nstart_from: null\n"
    )
    assert foveate("train", "--config", yaml, "--steps", "9", "--sparse").code == 0
    (config,) = seen
    assert (str(config.data), config.steps, config.lr, config.sparse) == ("clips", 9, 3e-4, True)
    assert (config.zoom, config.model.patch, config.validation_clips) == ((1.0, 2.0), (1, 2, 2), 3)
    assert config.start_from is None
    js.write_text(json.dumps({"data": "clips", "out": "x", "model.width": 96}))
    assert foveate("train", f"--config={js}").code == 0
    assert seen[1].model.width == 96
    for text, message in (
        ("data: clips\nout: x\nstepz: 3\n", "stepz"),
        ("data: clips\nout: x\nmodel: {widht: 3}\n", "widht"),
        ("- 3\n", "must hold flags"),
        ("a: [\n", "not YAML"),
        ("config: other.yaml\n", "one file"),
    ):
        yaml.write_text(text)
        done = foveate("train", "--config", yaml)
        assert (done.code, message in done.err) == (2, True), (text, done.err)
    js.write_text("{")
    assert "not JSON" in foveate("train", "--config", js).err
    assert foveate("train", "--config", tmp_path / "none.yaml").code == 2
    assert len(seen) == 2


def recorded(seen: list) -> Callable:
    """`train`, of which only its configuration is kept."""

    def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")], file: cli.File = None) -> int:
        seen.append(config)
        return 0

    return train


def test_messages_are_on_stderr_as_they_are(foveate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def speak() -> int:
        log = logging.getLogger("foveate")
        log.info("pip install 'foveate[fa4]'")
        log.warning("x" * 200)
        raise ValueError("[bold]a/[red]b[/]")

    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "doctor": speak})
    done = foveate("doctor")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"pip install 'foveate[fa4]'\nwarning: {'x' * 200}\nfoveate: [bold]a/[red]b[/]\n"


def test_the_demos_checkpoint_says_where_it_comes_from() -> None:
    about = load_weights(CHECKPOINT)[1]
    assert CHECKPOINT.stat().st_size <= 16 * 2**20
    assert {"recipe", "data", "hardware", "month", "step"} <= about.keys()
