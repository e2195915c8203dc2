"""Imports run one way: a module may import its own room and the rooms before it, never a later one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "foveate"
ORDER = ["kernels", "tiles", "attention", "models", "sparsity", "parallel", "held", "training", "cli"]
LEAVES = {
    "charts",
    "costs",
    "data",
    "quality",
    "report",
    "video",
}  # import nothing of foveate, may be imported by anyone
LATE = {"sample": "models", "__init__": "cli", "__main__": "cli"}  # modules that live at the height of a room
HEAVY = ("triton", "diffusers", "matplotlib", "av", "scipy", "tyro")


def room(module: str) -> str:
    name = module.split(".")[1] if "." in module else "__init__"
    return LATE.get(name, name)


def imports(file: Path) -> set[str]:
    """Every foveate module a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "foveate":
            whole = node.module == "foveate"
            found |= {f"foveate.{alias.name}" for alias in node.names} if whole else {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "foveate"}
    return found


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    here = file.relative_to(ROOT).parts[0].removesuffix(".py")
    here = LATE.get(here, here)
    assert here in ORDER or here in LEAVES, (
        f"{here} has no place in the import order: give it one here and in docs/design.md"
    )
    for module in imports(file):
        there = room(module)
        if there in LEAVES or there == here:
            continue
        assert here not in LEAVES, f"{file} is a leaf, it may not import {module}"
        assert ORDER.index(there) < ORDER.index(here), f"{file} imports {module}, which comes later"


def test_importing_foveate_is_light() -> None:
    code = f"import sys, foveate; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
