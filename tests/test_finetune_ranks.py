"""Fine-tuning on many ranks: FSDP2 times context parallelism, checkpoints for any number of ranks."""

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import Any

import finetune_data
import pytest
import torch
from worlds import PRELOAD, Worlds

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")

from foveate import cli
from foveate.finetune import videos
from foveate.finetune.config import FinetuneConfig
from foveate.finetune.loop import Finetuner
from foveate.sparsity.config import SparsityConfig
from foveate.training import folder
from foveate.training.checkpoint import read_state, steps

STEPS, SAVED = 15, 5
KILLS = int(os.environ.get("FOVEATE_KILLS", "1"))
SPARSE = SparsityConfig(budget=0.6, periphery="pool", warmup=4, learn_from=2, teach_every=1000, force=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    finetune_data.transformer(root / "wan")
    finetune_data.encoded(root / "encoded")
    return root


def run(root: Path, name: str, resume: bool = False, steps: int = STEPS, **more: Any) -> tuple[list[float], float]:
    """Losses of a run of this process or this rank, and its validation loss at the end."""
    given = {"lr": 3e-3, "warmup": 2, "batch": 4, "checkpoint_every": SAVED, "validate_every": STEPS, "keep": 9}
    config = FinetuneConfig(
        model=root / "wan", data=root / "encoded", out=root / name, steps=steps, val_fraction=0.2, validation_clips=3,
        **given | more,
    )  # fmt: skip
    tuner = Finetuner(config)
    if resume:
        tuner.resume(SAVED)
    rows = tuner.fit()
    assert (rows[-1]["kept"] < 0.7) == config.sparse
    return [row["loss"] for row in rows], rows[-1].get("validation", 0.0)


@pytest.mark.parametrize("sparse", [False, True])
def test_four_ranks_train_as_one_process_and_any_number_goes_on(sparse: bool, home: Path, worlds: Worlds) -> None:
    """2 replicas x 2 context-parallel ranks at the same global batch; then 2 ranks, or 1, from the checkpoint of 4.
    The four make videos meanwhile, which changes no loss.

    benchmarks/resume_ranks.py tries all pairs.
    """
    dials = {"sparse": sparse, "sparsity": SPARSE}
    losses, validation = run(home, f"one-{sparse}", **dials)
    shown = {"sample_every": 4, "sample_steps": 2}
    four = worlds(4).run(on_rank, home, f"four-{sparse}", False, {**dials, **shown, "sequence": 2})
    made = [row["samples"] for row in folder.rows(home / f"four-{sparse}" / "history.jsonl") if "samples" in row]
    assert made == [[f"{step} of (4, 3, 16, 12)"] for step in (4, 8, 12)]
    for ours, judged in four:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=0, atol=1e-5)
        assert abs(judged - validation) < 1e-5
    assert losses[-1] < losses[0]
    again = (home, f"four-{sparse}", True, dials)
    for ours, _ in worlds(2).run(on_rank, *again) if sparse else [on_rank(*again)]:
        torch.testing.assert_close(torch.tensor(ours[-10:]), torch.tensor(losses[-10:]), rtol=0, atol=1e-5)


def on_rank(root: Path, name: str, resume: bool, dials: dict[str, Any]) -> tuple[list[float], float]:
    """`run`, whose videos are not decoded: the pipeline has no VAE."""

    def decoded(tuner: Finetuner, made: Any) -> list[str]:
        return [f"{tuner.step} of {tuple(latents[0].shape)}" for _, latents in made if latents.isfinite().all()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(videos, "check", lambda about: None)
        patch.setattr(videos, "decoded", decoded)
        return run(root, name, resume, **dials)


def test_a_signal_to_one_rank_ends_all_with_code_0(home: Path, worlds: Worlds, tmp_path: Path) -> None:
    """LoRA on two ranks: all agree on the step after which they save and leave."""
    words = [*words_of(home, tmp_path / "run"), "--lora", "2", "--batch", "2"]
    assert worlds(2).run(stopped, words) == [0, 0]
    rows = folder.rows(tmp_path / "run" / "history.jsonl")
    assert steps(tmp_path / "run" / "checkpoints")[-1] == len(rows) < 8
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()


def stopped(words: list[str]) -> int:
    """`foveate train`, in whose third forward on rank 1 SIGTERM comes."""
    forwards, real = [], Finetuner.loss

    def loss(self: Finetuner, forward: Any) -> torch.Tensor:
        forwards.append(forward)
        if len(forwards) == 3 and self.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return real(self, forward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Finetuner, "loss", loss)
        return cli.run(words)


def words_of(root: Path, out: Path, *more: str) -> list[str]:
    words = ["train", "--model", str(root / "wan"), "--data", str(root / "encoded"), "--out", str(out), "--no-sparse"]
    return [
        *words,
        "--checkpoint-every",
        "1",
        "--val-fraction",
        "0",
        "--steps",
        str(8 + 4 * KILLS),
        "--lr",
        "1e-3",
        *more,
    ]


def test_kills_during_saves_lose_nothing_and_sigterm_leaves_with_0(home: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of a save, again and again where FOVEATE_KILLS=20, then SIGTERM, then to the end."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    out, begun, last = tmp_path / "run", 0, 0
    checkpoints = out / "checkpoints"
    for kill in range(KILLS):
        process = context.Process(target=cli.main, args=(words_of(home, out, *["--resume"] * bool(begun)),))
        process.start()
        until, seen = time.monotonic() + 60, last
        while time.monotonic() < until and process.is_alive():
            partial = list(checkpoints.glob(".step-*.partial"))
            seen = max([seen, *(int(path.name[6:12]) for path in partial)])
            if partial and seen > last + 1:
                time.sleep(0.002 * (kill % 5))
                break
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        known = steps(checkpoints)
        assert known, list(checkpoints.iterdir())
        assert known[-1] >= last
        assert known[-1] >= seen - 1
        for step in known:
            state = read_state(checkpoints, step)[1]
            assert state["step"] == step
        last, begun = known[-1], begun + 1
    process = context.Process(target=cli.main, args=(words_of(home, out, "--resume"),))
    process.start()
    while process.is_alive() and (steps(checkpoints) or [0])[-1] < last + 2:
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join()
    assert process.exitcode == 0
    rows = folder.rows(out / "history.jsonl")
    assert steps(checkpoints)[-1] == rows[-1]["step"] < 8 + 4 * KILLS
    assert cli.run(words_of(home, out, "--resume")) == 0
    assert cli.run(words_of(home, tmp_path / "whole")) == 0
    rows, whole = (folder.rows(path / "history.jsonl") for path in (out, tmp_path / "whole"))
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
