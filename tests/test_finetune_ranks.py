"""Fine-tuning on many ranks: FSDP2 times context parallelism, checkpoints for any number of ranks."""

from pathlib import Path
from typing import Any

import finetune_data
import pytest
import torch
from worlds import Worlds

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")

from foveate.finetune.config import FinetuneConfig
from foveate.finetune.loop import Finetuner
from foveate.sparsity.config import SparsityConfig

STEPS, SAVED = 30, 10
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
    """2 replicas x 2 context-parallel ranks at the same global batch; then 2 ranks and 1 from the checkpoint of 4."""
    dials = {"sparse": sparse, "sparsity": SPARSE}
    losses, validation = run(home, f"one-{sparse}", **dials)
    four = worlds(4).run(on_rank, home, f"four-{sparse}", False, {**dials, "sequence": 2})
    for ours, judged in four:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=0, atol=1e-5)
        assert abs(judged - validation) < 1e-5
    assert losses[-1] < losses[0]
    ours, _ = run(home, f"four-{sparse}", True, **dials)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=0, atol=1e-5)
    for two, _ in worlds(2).run(on_rank, home, f"four-{sparse}", True, dials):
        torch.testing.assert_close(torch.tensor(two[-20:]), torch.tensor(losses[-20:]), rtol=0, atol=1e-5)


def on_rank(root: Path, name: str, resume: bool, dials: dict[str, Any]) -> tuple[list[float], float]:
    return run(root, name, resume, **dials)
