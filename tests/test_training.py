"""Two-stage training: the switch, resume after kill -9, twins, checkpoints (CASES 27 in one process, 28)."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foveate.data import write_mp4
from foveate.models.dit import DiTConfig
from foveate.training import checkpoint, recipes
from foveate.training.generate import load_model, load_predictor
from foveate.training.loop import Trainer, learning_rate
from foveate.training.recipes import TrainConfig, smoke

STEPS = 12


@pytest.fixture(scope="module")
def footage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips of moving stripes, and a file that is no video."""
    folder = tmp_path_factory.mktemp("footage")
    t, y, x = np.meshgrid(np.arange(60), np.arange(64), np.arange(80), indexing="ij")
    for index, (dt, dy, dx) in enumerate([(3, 2, 5), (-4, 6, 1)]):
        wave = np.sin((dt * t + dy * y + dx * x) / 9.0)
        clip = np.stack([wave, np.roll(wave, 5, 2), -wave], -1) * 100 + 128
        write_mp4(folder / f"stripes-{index}.mp4", clip.astype(np.uint8), 25)
    (folder / "broken.mp4").write_bytes(b"not a video")
    return folder


@pytest.fixture
def config(footage: Path, tmp_path: Path) -> TrainConfig:
    return replace(smoke(recipes.demo(footage, tmp_path / "run")), exclude=())


@pytest.fixture(scope="module")
def finished(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """One uninterrupted run that others are compared with."""
    trainer = Trainer(replace(smoke(recipes.demo(footage, tmp_path_factory.mktemp("whole"))), exclude=()))
    trainer.fit()
    return trainer


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in history(folder)]


def test_a_length_at_which_sparse_is_slower_stays_dense_and_says_so(config: TrainConfig, caplog) -> None:
    trainer = Trainer(replace(config, force=False))
    with caplog.at_level("WARNING", "foveate"):
        trainer.fit()
    assert [row["stage"] for row in history(config.out)] == [1] * STEPS
    assert trainer.policy.ready
    assert history(config.out)[-1]["gap"] <= config.gap, "the loss did not keep it dense"
    assert sum("stays dense: at 512 tokens" in record.message for record in caplog.records) == 1


def test_a_run_turns_sparse_and_learns(finished: Trainer) -> None:
    rows = history(finished.config.out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    switch = next(row for row in rows if row.get("switched"))
    assert switch["gap"] <= finished.config.gap
    assert [row["stage"] for row in rows] == [1] * switch["step"] + [2] * (STEPS - switch["step"])
    # Training steps and paired checks: the sparse mode really computed, on both layers.
    assert finished.policy.computed["sparse"] >= 2 * (STEPS - switch["step"])
    assert rows[-1]["dense_loss"] < rows[1]["dense_loss"]
    assert ("broken.mp4") in [name for name, _ in finished.clips.skipped]


def test_profiles_are_written_for_every_layer_and_head(finished: Trainer) -> None:
    lines = [json.loads(line) for line in (finished.config.out / "profiles.jsonl").read_text().splitlines()]
    assert lines
    assert all(len(line["layers"]) == 2 for line in lines)
    assert all(len(layer["recall_predicted"]) == 2 for line in lines for layer in line["layers"])


RUN = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from foveate.training import recipes
from foveate.training.loop import Trainer

footage, out, stop, resume = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resume"
def show(row):
    print(row["step"], flush=True)
    if row["step"] == stop:
        time.sleep(600)
trainer = Trainer(replace(recipes.smoke(recipes.demo(footage, out)), exclude=()), on_step=show)
if resume:
    trainer.resume()
trainer.fit()
"""


def launch(footage: Path, out: Path, stop: int, mode: str) -> subprocess.Popen:
    command = [sys.executable, "-c", RUN, str(footage), str(out), str(stop), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("stop", "stage"), [(3, 1), (9, 2)])
def test_killed_and_resumed_equals_uninterrupted_bit_by_bit(
    footage: Path, tmp_path: Path, finished: Trainer, stop: int, stage: int
) -> None:
    out = tmp_path / "run"
    process = launch(footage, out, stop, "start")
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == stop:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert history(out)[-1]["stage"] == stage
    assert checkpoint.steps(out / "checkpoints")[-1] < stop  # steps after the checkpoint were lost and are redone
    resumed = launch(footage, out, -1, "resume")
    assert resumed.wait(timeout=120) == 0
    assert losses(out) == losses(finished.config.out)
    whole, again = (checkpoint.load(folder / "checkpoints")[0] for folder in (finished.config.out, out))
    for part, tensors in whole.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again[part][name]), f"{part} {name}"


def test_predictors_do_not_touch_the_models_training(finished: Trainer, config: TrainConfig) -> None:
    """Stage 1 of a sparse run is the dense run, bit by bit: same weights, same randomness."""
    dense = Trainer(replace(config, sparse=False, steps=4))
    dense.fit()
    assert losses(config.out) == losses(finished.config.out)[:4]


def test_random_control_keeps_as_many_tiles(config: TrainConfig) -> None:
    first = Trainer(config)
    first.fit()
    control = Trainer(replace(config, control=True))
    control.resume()
    control.validate("random")
    assert control.policy.computed["random"] == 2 * len(control.validation)
    layer, q = recorded_layer(control)
    with control.policy.using("random"):
        random = control.policy.selection(layer, q, q)
    with control.policy.using("sparse"):
        chosen = control.policy.selection(layer, q, q)
    assert torch.equal(random.to_dense().sum(-1), chosen.to_dense().sum(-1))
    assert not torch.equal(random.words, chosen.words)


def recorded_layer(trainer: Trainer):
    """A layer and its queries, as the model hands them to the policy."""
    seen = []

    def spy(layer, q, k, v):
        seen.append((layer, q.detach()))
        return v

    trainer.model.policy, kept = spy, trainer.model.policy
    with torch.no_grad():
        trainer.model(trainer.validation[0].clips, trainer.validation[0].sigma)
    trainer.model.policy = kept
    return seen[0]


def test_ctrl_c_saves_and_stops(config: TrainConfig) -> None:
    def press(row: dict) -> None:
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    trainer = Trainer(config, on_step=press)
    trainer.fit()
    assert trainer.interrupted
    assert checkpoint.steps(config.out / "checkpoints")[-1] == trainer.step == 3


def test_weights_and_predictor_files_generate_what_the_run_would(finished: Trainer) -> None:
    model, about = load_model(finished.config.out / "model.safetensors")
    assert about["step"] == STEPS
    model.policy = load_predictor(finished.config.out / "predictor.safetensors", model.config)
    batch = finished.validation[0]
    kept = {name: weight.clone() for name, weight in finished.model.named_parameters()}
    finished.model.load_state_dict(finished.ema)
    with torch.no_grad(), finished.policy.using("sparse"):
        assert torch.equal(model(batch.clips, batch.sigma), finished.model(batch.clips, batch.sigma))
    finished.model.load_state_dict(kept)


def test_checkpoints_survive_a_torn_write_and_old_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"model": {"w": torch.full((2,), float(step))}}, {"step": step})
    (tmp_path / ".step-000004.partial").mkdir()
    (tmp_path / "step-000005").mkdir()  # a folder without state.json is not a checkpoint
    assert checkpoint.steps(tmp_path) == [2, 3]
    parts, state = checkpoint.load(tmp_path)
    assert state == {"step": 3}
    assert torch.equal(parts["model"]["w"], torch.full((2,), 3.0))
    with pytest.raises(ValueError, match="there are"):
        checkpoint.load(tmp_path, 1)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    for name, content, message in (("a", b"\x80\x04 pickle", "not a safetensors file"), ("b", None, "no such")):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            checkpoint.load_weights(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0.0}, "budget"),
        ({"periphery": "blur"}, "periphery"),
        ({"height": 30}, "multiples"),
        ({"steps": 0}, "steps"),
        ({"lr": -1.0}, "lr"),
    ],
)
def test_bad_dials_are_refused(config: TrainConfig, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **change)


def test_models_that_do_not_fit_the_data_are_refused(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match="class folders"):
        Trainer(replace(config, model=DiTConfig(width=64, depth=2, heads=2, classes=5)))
    with pytest.raises(ValueError, match="--text-encoder"):
        Trainer(replace(config, model=DiTConfig(width=64, depth=2, heads=2, text_dim=5)))
    with pytest.raises(ValueError, match="another shape"):
        Trainer(replace(config, start_from=recipes.CHECKPOINT))


def test_learning_rate_warms_up_and_decays(config: TrainConfig) -> None:
    dial = replace(config, lr=1.0, warmup=10, steps=110, decay_to=0.1)
    assert learning_rate(dial, 0) == pytest.approx(0.1)
    assert learning_rate(dial, 10) == pytest.approx(1.0)
    assert learning_rate(dial, 110) == pytest.approx(0.1)
