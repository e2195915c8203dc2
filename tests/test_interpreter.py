"""Runs the tests marked `interpreted` in a process of their own: Triton chooses its interpreter when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [["test_triton_sparse.py"], ["test_kernels_select.py", "test_triton_rotary.py", "test_fa4.py"]]


@pytest.mark.parametrize("names", FILES, ids=["attention", "others"])
def test_in_tritons_interpreter(names: list[str]) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *(str(Path(__file__).parent / name) for name in names)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
