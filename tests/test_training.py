"""The trainer: sparsify inside it, resume after kill -9, signals, conditions, what it writes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from foveate.data import write_mp4
from foveate.generation.builtin import load_model, make_sparse
from foveate.models.dit import DiTConfig
from foveate.sparsity.config import SparsityConfig
from foveate.training import checkpoint, loop, recipes
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


def test_a_length_at_which_sparse_is_slower_stays_dense_and_says_so(config: TrainConfig) -> None:
    trainer = Trainer(replace(config, steps=4, sparsity=SparsityConfig(budget=0.9, warmup=3, learn_from=2)))
    rows = trainer.fit()
    assert [row["kept"] for row in rows] == [1.0] * 4
    assert any("does not pay" in row.get("reason", "") for row in rows)


def test_a_run_turns_sparse_and_learns(finished: Trainer) -> None:
    rows = history(finished.config.out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    switch = next(row for row in rows if row.get("switched"))
    assert switch["gap"] <= finished.config.sparsity.goal
    assert {row["kept"] for row in rows[: switch["step"]]} == {1.0}
    sparse = [row for row in rows[switch["step"] :] if row["kept"] < 1]
    assert sparse
    assert finished.handle.policy.computed["sparse"] >= len(sparse), "the sparse mode really computed"
    assert rows[-1]["validation"] < rows[3]["validation"]
    listed = json.loads((finished.config.out / "skipped.json").read_text())
    assert "broken.mp4" in [name for name, _ in listed], "every file that is not used, with the reason"


def test_every_decision_is_written_with_what_each_head_keeps(finished: Trainer) -> None:
    lines = [json.loads(line) for line in (finished.config.out / "plans.jsonl").read_text().splitlines()]
    plan = next(line for line in lines if line["active"])
    assert plan["step"] == next(row["step"] for row in history(finished.config.out) if row.get("switched"))
    assert np.shape(plan["kept"]) == np.shape(plan["constants"]) == (2, 2)
    following = history(finished.config.out)[plan["step"]]
    assert following["kept"] == pytest.approx(np.mean(plan["kept"]))


def test_a_fixed_budget_goes_through_sparsify_too(config: TrainConfig) -> None:
    soon = replace(config.sparsity, tolerance=None, budget=0.25)
    trainer = Trainer(replace(config, steps=5, sparsity=soon, capture=True))  # on the CPU steps are launched
    decide = trainer._sparsify
    trainer._sparsify = lambda value: {**decide(value), "switched": True}  # as often as that may be
    rows = trainer.fit()
    assert [row["kept"] for row in rows] == [1.0, 1.0, 1.0, 0.25, 0.25]
    assert checkpoint.steps(config.out / "switch") == [1], "the first is what a dense twin starts from"
    assert torch.equal(trainer.handle.policy.default.budgets[0], torch.full((2,), 0.25))


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


@pytest.mark.parametrize(("stop", "sparse"), [(3, False), (9, True)])
def test_killed_and_resumed_equals_uninterrupted_bit_by_bit(
    footage: Path, tmp_path: Path, finished: Trainer, stop: int, sparse: bool
) -> None:
    out = tmp_path / "run"
    process = launch(footage, out, stop, "start")
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == stop:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (history(out)[-1]["kept"] < 1) == sparse
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["step", "validation", "save"])
def test_signals_save_and_stop(config: TrainConfig, monkeypatch, number: int, where: str) -> None:
    """Ctrl-C, or the SIGTERM of a scheduler, whatever the run is doing."""
    before, press = signal.getsignal(number), partial(os.kill, os.getpid(), number)
    trainer = Trainer(replace(config, steps=6, validation_clips=2))
    if where == "step":
        trainer.on_step = lambda row: press() if row["step"] == 4 else None
    elif where == "validation":
        monkeypatch.setattr(loop, "loss", pressing(loop.loss, press, 5))  # four steps, then the first validation
    else:
        monkeypatch.setattr(checkpoint, "flush", pressing(checkpoint.flush, press, 2))
    trainer.fit()
    assert trainer.interrupted == number
    assert checkpoint.steps(config.out / "checkpoints")[-1] == trainer.step == 4
    assert ("validation" in history(config.out)[-1]) == (where != "validation")
    assert signal.getsignal(number) is before


def pressing(function: Callable, press: Callable, call: int) -> Callable:
    """`function`, with a signal during its n-th call."""
    calls = count(1)

    def wrapped(*arguments):
        if next(calls) == call:
            press()
        return function(*arguments)

    return wrapped


def test_validation_comes_as_its_price_allows_and_once_at_the_end(config: TrainConfig, caplog, monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(loop.VideoDiT, "compile_repeated_blocks", lambda self, on: compiled.append(on))
    caplog.set_level("INFO")
    trainer = Trainer(replace(config, steps=3, validate_every=None, sparse=False, compile=True))
    trainer.fit()
    assert ["validation" in row for row in history(config.out)] == [False, False, True]
    assert "validation losses every 200 steps: about 0.7 % of the time" in caplog.text
    Trainer(config)
    assert compiled == [True, False]


def test_fit_runs_in_a_thread_and_is_stopped_from_outside(config: TrainConfig) -> None:
    trainer = Trainer(config)
    trainer.on_step = lambda row: trainer.stop() if row["step"] == 3 else None
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(trainer.fit).result()) == 3
    assert checkpoint.steps(config.out / "checkpoints")[-1] == 3


def test_weights_and_predictor_files_generate_what_the_run_would(finished: Trainer) -> None:
    model, about = load_model(finished.config.out / "model.safetensors")
    assert about["step"] == STEPS
    modes = {
        file.stat().st_mode for file in finished.config.out.rglob("*.*") if file.suffix in (".safetensors", ".json")
    }
    assert len(modes) == 1  # all are for whom the umask lets read
    make_sparse(model, finished.config.out / "sparse")
    batch = finished.validation[0]
    kept = {name: weight.clone() for name, weight in finished.model.named_parameters()}
    finished.model.load_state_dict(finished.ema)
    with torch.no_grad(), finished.handle.policy.using("sparse"):
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
        ({"height": 30}, "multiples"),
        ({"steps": 0}, "steps"),
        ({"keep": 0}, "keep"),
        ({"lr": -1.0}, "lr"),
        ({"sparsity": SparsityConfig(dense_layers=(2,))}, "dense_layers"),
        ({"unconditional": True, "model": DiTConfig(classes=2)}, "unconditional"),
    ],
)
def test_bad_dials_are_refused(config: TrainConfig, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **change)


def test_models_and_data_that_do_not_fit_are_refused_with_the_way_out(config: TrainConfig, tmp_path: Path) -> None:
    small = {"width": 64, "depth": 2, "heads": 2}
    labelled, captioned = (
        DiTConfig(classes=2, **small),
        DiTConfig(text_dim=3, **small),
    )
    classes, captions = tmp_path / "classes", tmp_path / "captions"
    for index, file in enumerate(sorted(config.data.glob("stripes*"))):
        (classes / "ab"[index]).mkdir(parents=True)
        captions.mkdir(exist_ok=True)
        shutil.copy(file, classes / "ab"[index])
        shutil.copy(file, captions)
    lines = [{"file": file.name, "caption": file.stem} for file in captions.iterdir()]
    (captions / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = {"": torch.zeros(3), "stripes-0": torch.ones(3), "stripes-1": torch.ones(3)}
    refused = [
        ({"model": labelled}, None, "2 classes.*0 class folders"),
        ({"model": captioned}, None, "no captions.jsonl"),
        ({"model": captioned, "data": captions}, None, "--text-encoder"),
        ({"model": captioned, "data": captions}, {"": torch.zeros(3)}, "no embedding of 'stripes-0'"),
        ({"model": captioned, "data": captions}, dict.fromkeys(text, torch.ones(5)), "5 wide"),
        ({"data": classes}, None, "--model.classes 2, or --unconditional"),
        ({"data": captions}, None, "--text-encoder NAME, or --unconditional"),
        ({"data": captions}, text, "takes no text"),
        ({"start_from": recipes.CHECKPOINT}, None, "another shape"),
    ]
    for change, given, message in refused:
        with pytest.raises(ValueError, match=message):
            Trainer(replace(config, **change), text=given)
    for change, given in (
        ({"data": classes, "unconditional": True}, None),
        ({"data": classes, "model": labelled}, None),
        ({"data": captions, "model": captioned}, text),
    ):
        Trainer(replace(config, **change), text=given)


def test_learning_rate_warms_up_and_decays(config: TrainConfig) -> None:
    dial = replace(config, lr=1.0, warmup=10, steps=110, decay_to=0.1)
    assert learning_rate(dial, 0) == pytest.approx(0.1)
    assert learning_rate(dial, 10) == pytest.approx(1.0)
    assert learning_rate(dial, 110) == pytest.approx(0.1)


def test_averaged_weights_of_a_short_run_are_near_the_last_ones(config: TrainConfig) -> None:
    """At a fixed 0.999 they would still be the first ones."""
    trainer = Trainer(replace(config, sparse=False, steps=8, ema=0.999))
    first = {name: weight.clone() for name, weight in trainer.ema.items()}
    trainer.fit()
    assert not any(weight.requires_grad for weight in trainer.ema.values()), "else it keeps a graph of every step"
    moved, left = (
        sum((trainer.ema[name] - other[name]).square().sum() for name in first).sqrt()
        for other in (first, dict(trainer.model.named_parameters()))
    )
    assert left < moved / 2


def test_a_loss_that_is_not_finite_stops_and_names_the_last_good_checkpoint(config: TrainConfig, monkeypatch) -> None:
    real, calls = loop.loss, count(1)
    monkeypatch.setattr(loop, "loss", lambda *given: real(*given) * (float("inf") if next(calls) == 4 else 1))
    trainer = Trainer(replace(config, sparse=False))
    with pytest.raises(FloatingPointError, match=r"step 4; .*step-000002.*--allow-change lr"):
        trainer.fit()
    assert checkpoint.steps(config.out / "checkpoints") == [2]


def test_samples_and_events_are_written_where_asked_for(config: TrainConfig) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Trainer(replace(config, steps=4, sample_every=4, tensorboard=True)).fit()
    with av.open(str(config.out / "samples" / "step-000004.mp4")) as clip:
        frames = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
    assert np.shape(frames) == (8, 32, 3 * 32, 3)  # held out, restored, generated
    events = EventAccumulator(str(config.out / "events"))
    events.Reload()
    seen = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert seen == [(row["step"], pytest.approx(row["loss"])) for row in history(config.out)]
