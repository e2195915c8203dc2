"""The examples run as they stand, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=EXAMPLES, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def test_own_loop() -> None:
    said = run("own_loop.py", "--steps", "40")
    assert "step 30: loss" in said
    assert "sparse" in said


def test_lora_fine_tune_of_a_diffusers_model(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    run("finetune_lora.py", "--tiny", "--steps", "6", "--out", str(tmp_path / "lora"))
    assert list((tmp_path / "lora").rglob("*.safetensors"))


def test_context_parallel_training_under_torchrun() -> None:
    said = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "context_parallel.py", "--steps", "3"
    )
    assert "step 0: loss" in said
    assert "head 1 x sequence 2: 2 layers" in said


def test_reuse_in_a_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    said = run("reuse.py", "--out", str(tmp_path / "schedule.json"))
    rows = {line[:17].strip(): line.split() for line in said.splitlines() if "of the calls" in line}
    assert rows["exact"][-1] == "0.0e+00"
    assert rows["schedule"][1] == "40%"
    assert 0 < float(rows["schedule"][-1]) < 0.05
    assert 0 < float(rows["every third step"][-1]) < 0.05


def test_a_servers_loop_of_changing_requests_with_cancellations() -> None:
    """Finished clips are a fresh pipeline's bit by bit, and tensors that are alive do not grow (exit code 0)."""
    pytest.importorskip("diffusers")
    said = run("server_loop.py", "--requests", "15", "--check")
    finished, cancelled = (int(re.search(rf"(\d+) {word}", said)[1]) for word in ("finished", "cancelled"))
    assert finished + cancelled == 15
    assert cancelled >= 2
    assert "0 differ" in said
    assert int(re.search(r"(\d+)% of the calls held", said)[1]) > 10
