"""Shared by all tests: where ../shared/data is, empty buffers that are poisoned, gloo ranks."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


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
    """Path of a file of ../shared/data; the test skips, and says so, where there is none."""

    def find(name: str) -> Path:
        path = Path(os.environ.get("FOVEATE_SHARED", ROOT.parent / "shared")) / "data" / name
        if not path.exists():
            pytest.skip(f"needs {path}")
        return path

    return find


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `interpreted` run where TRITON_INTERPRET=1 (test_interpreter.py starts that), others elsewhere."""
    wanted = os.environ.get("TRITON_INTERPRET") == "1"
    left_out = [item for item in items if (item.get_closest_marker("interpreted") is not None) != wanted]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
