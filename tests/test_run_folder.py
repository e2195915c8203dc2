"""The folder of a run: refused before any work, resumed only as what it is, never left without a good checkpoint."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from foveate import cli
from foveate.sparsity.config import SparsityConfig
from foveate.training import checkpoint, folder, recipes
from foveate.training.loop import Trainer
from foveate.training.recipes import TrainConfig, smoke
from foveate.video import write_mp4


@pytest.fixture(scope="module")
def footage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clips = tmp_path_factory.mktemp("footage")
    levels = np.add.outer(np.add.outer(5 * np.arange(40), 2 * np.arange(40)), 3 * np.arange(40)) % 256
    write_mp4(clips / "slope.mp4", np.repeat(levels[..., None], 3, -1).astype(np.uint8), 25)
    return clips


@pytest.fixture
def config(footage: Path, tmp_path: Path) -> TrainConfig:
    return replace(smoke(recipes.demo(footage, tmp_path / "run")), steps=4, sparse=False, exclude=())


def test_a_folder_with_a_run_is_refused_until_one_says_what_is_meant(config: TrainConfig) -> None:
    Trainer(config).fit()
    foreign = config.out / "checkpoints" / "step-000003"  # not ours: no state.json
    foreign.mkdir()
    (foreign / "weights.pt").write_bytes(b"precious")
    before = {path: path.stat().st_mtime_ns for path in config.out.rglob("*")}
    with pytest.raises(ValueError, match="--resume, replace it by --overwrite"):
        Trainer(replace(config, steps=2)).fit()
    assert {path: path.stat().st_mtime_ns for path in config.out.rglob("*")} == before
    Trainer(replace(config, steps=2)).fit(overwrite=True)
    assert checkpoint.steps(config.out / "checkpoints") == [2]
    assert (foreign / "weights.pt").read_bytes() == b"precious"


def test_two_processes_do_not_train_into_one_folder(config: TrainConfig) -> None:
    trainer, busy = Trainer(config), pytest.raises(ValueError, match=f"process {os.getpid()} trains into")
    with folder.claimed(config.out, overwrite=False), busy:
        trainer.fit()
    Trainer(config).fit()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_ranks_are_refused(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=f"{name} is 2: start it without torchrun"):
        Trainer(config)


def test_places_that_cannot_be_written_are_refused_before_work(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="is a file"):
            Trainer(replace(config, out=out))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(ValueError, match="read-only"):
            Trainer(config)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match="GiB free"):
        Trainer(config).fit()
    assert not config.out.exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("no space left")])
def test_a_failed_save_keeps_the_last_good_checkpoint_and_names_it(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save = checkpoint.save_tensors

    def full(path, tensors, *more):
        save(path, tensors, *more)
        if ".step-000004" in str(path) and "ema" in Path(path).name:
            raise error

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    trainer = Trainer(config)
    with pytest.raises(OSError, match=r"step 4 could not be saved.*good checkpoint is .*step-000002"):
        trainer.fit()
    assert [path.name for path in (config.out / "checkpoints").iterdir()] == ["step-000002"]
    assert checkpoint.load_weights(config.out / "model.safetensors")[1]["step"] == 2
    monkeypatch.undo()
    again = Trainer(config)
    again.resume()
    assert [row["step"] for row in again.fit()] == [1, 2, 3, 4]


def test_a_run_goes_on_as_what_it_is(config: TrainConfig, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(config).fit()
    refused = [
        ({"lr": 0.5}, r"--lr \(lr: 0.001 -> 0.5\)"),
        ({"batch": 2}, "--batch"),
        ({"seed": 3, "clip": 2.0}, "--clip .*--seed .*--allow-change clip seed"),
        ({"sparse": True, "sparsity": SparsityConfig(budget=0.1)}, "--sparse .*--sparsity.budget"),
        ({"model": replace(config.model, depth=3)}, "--model.depth"),
    ]
    for change, message in refused:
        with pytest.raises(ValueError, match=message):
            Trainer(replace(config, **change)).resume()
    with pytest.raises(ValueError, match="no dial rate"):
        Trainer(config).resume(allow=["rate"])
    relative = Path(os.path.relpath(config.data))  # the same folder by another name
    more = Trainer(replace(config, steps=6, checkpoint_every=3, data=relative))
    with caplog.at_level("INFO", "foveate"):
        more.resume()
    said = [record.message for record in caplog.records if "resumed with a change" in record.message]
    assert [line.partition(", ")[2] for line in said] == ["steps: 4 -> 6", "checkpoint_every: 2 -> 3"]
    assert len(more.fit()) == 6
    insisted = Trainer(replace(config, steps=7, lr=0.5))
    insisted.resume(allow=["lr"])
    assert insisted.fit()[-1]["lr"] > 0.1
    assert folder.load_config(config.out).lr == 0.5  # what the run is from now on


def test_a_run_that_goes_on_from_an_older_checkpoint_does_not_continue_the_newer_one(config: TrainConfig) -> None:
    Trainer(config).fit()
    older = Trainer(replace(config, steps=5, checkpoint_every=5))
    older.resume(2)
    assert [row["step"] for row in older.fit()] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (config.out / "checkpoints").iterdir()) == [
        "abandoned-step-000004", "step-000002", "step-000005",
    ]  # fmt: skip


def test_so_many_checkpoints_are_kept(config: TrainConfig) -> None:
    Trainer(replace(config, keep=3, checkpoint_every=1)).fit()
    assert checkpoint.steps(config.out / "checkpoints") == [2, 3, 4]


def test_a_configuration_survives_its_file(config: TrainConfig) -> None:
    rich = replace(
        config, sparsity=SparsityConfig(budget=(0.1, 0.2), dense_layers=(1,)), validation=Path("held"), exclude=("a",)
    )  # fmt: skip
    again = TrainConfig.from_dict(rich.to_dict())
    assert again == replace(rich, validation=Path("held").absolute())
    with pytest.raises(ValueError, match="knows no colour"):
        TrainConfig.from_dict({**rich.to_dict(), "colour": 1})


def test_resume_on_the_command_line_reads_the_runs_own_configuration(
    config: TrainConfig, capsys: pytest.CaptureFixture
) -> None:
    Trainer(config).fit()

    def foveate(*words: str | Path) -> int:
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        return int(end.value.code or 0)

    assert foveate("train", "--resume", "--out", config.out, "--steps", "5") == 0
    assert folder.load_config(config.out) == replace(config, steps=5)
    rows = folder.rows(config.out / folder.HISTORY)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert foveate("train", "--resume", "--out", config.out, "--lr", "1") == 2
    assert foveate("train", "--resume", f"--out={config.out / 'none'}") == 2
    assert foveate("train", "--data", config.data, "--out", config.out) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--allow-change lr" in said
    assert "no run to resume" in said
    assert "already holds a run" in said


def test_states_are_split_into_tensors_and_json_and_joined_again() -> None:
    state = {"a": {"0.w": torch.ones(2), "deep": {"n": [1.5, None]}}, "empty": {}, "x": 3}
    tensors, plain = checkpoint.split(state)
    assert set(tensors) == {"a/0.w"}
    again = checkpoint.join(tensors, plain)
    assert torch.equal(again["a"].pop("0.w"), torch.ones(2))
    assert again == {"a": {"deep": {"n": [1.5, None]}}, "empty": {}, "x": 3}
