"""Shared by all tests: where real attention is kept, empty buffers that are poisoned, gloo ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
REAL = Path(os.environ.get("FOVEATE_SHARED", ROOT.parent / "shared")) / "data"
WHERE = (
    f"q, k, v of trained models are not in this repository and not under {REAL}: the tests above that name this folder "
    "did not run. Set FOVEATE_SHARED to the folder that has data/real_qkv.safetensors, views_fit and views_test."
)


@pytest.fixture(autouse=True)
def poisoned_buffers():
    """torch.empty returns NaN, so that a test fails where something reads or returns what nobody wrote."""
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before[0]
    torch.use_deterministic_algorithms(before[1])


@pytest.fixture(scope="session")
def worlds():
    """Real gloo ranks, `worlds(size).run(task, *args)`, started when first asked for (worlds.py)."""
    from worlds import Worlds

    made = Worlds()
    yield made
    made.stop()


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """Path of a file with q, k, v of a trained model; the test skips, and says so, where there is none."""

    def find(name: str) -> Path:
        if not (REAL / name).exists():
            pytest.skip(f"needs {REAL / name}")
        return REAL / name

    return find


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What a clone without those files has not tested, and how to test it."""
    skipped = terminalreporter.stats.get("skipped", [])
    if any(f"needs {REAL}" in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(WHERE, yellow=True)


def pytest_configure() -> None:
    """Triton's interpreter patches its language anew at every call of a device function: once a module is enough."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpretedFunction

    patched, plain = set(), InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(self.fn.__module__)
        return plain(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `interpreted` run where TRITON_INTERPRET=1 (test_interpreter.py starts that), others elsewhere."""
    wanted = os.environ.get("TRITON_INTERPRET") == "1"
    left_out = [item for item in items if (item.get_closest_marker("interpreted") is not None) != wanted]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
