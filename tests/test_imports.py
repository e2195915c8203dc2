"""Imports run one way: a module may import its own room and the rooms before it, never a later one."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "foveate"
ORDER = [
    "kernels",
    "tiles",
    "attention",
    "models",
    "sparsity",
    "parallel",
    "held",
    "training",
    "generation",
    "finetune",
    "compare",
    "cli",
]
LEAVES = {
    "costs",
    "data",
    "quality",
    "report",
    "version",
    "video",
}  # import nothing of foveate, may be imported by anyone
LATE = {
    "sample": "models",
    "flags": "cli",
    "run_report": "cli",
    "__init__": "cli",
    "__main__": "cli",
}  # modules that live at the height of a room
HEAVY = ("triton", "diffusers", "matplotlib", "av", "scipy", "tyro", "rich", "yaml", "jinja2", "torch._dynamo")


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
    """Neither optional packages, nor much time beside torch's: 150 ms, of which some 30 are used."""
    code = f"""
import sys, time, torch
heavy = {HEAVY!r}
before = set(sys.modules)
began = time.process_time()
import foveate
took = time.process_time() - began
import foveate.sparsity.handle, foveate.parallel.handle
print(took, [name for name in heavy if name in sys.modules and name not in before])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took, _, found = done.stdout.strip().partition(" ")
    assert found == "[]"
    assert float(took) < 0.15


def test_every_public_name_is_there() -> None:
    """Names that are loaded when first asked for stand twice: for type checkers, and for Python."""
    import foveate

    for name in foveate.__all__:
        assert getattr(foveate, name).__module__.startswith("foveate.")
    assert set(foveate.__all__) <= set(dir(foveate))
    with pytest.raises(AttributeError, match="no attribute 'sparsity_'"):
        _ = foveate.sparsity_
    later = [name for names in foveate._LATER.values() for name in names]
    checked = next(node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.If))
    assert sorted(later) == sorted(alias.name for node in checked.body for alias in node.names)


COLLECTIVES = re.compile(r"(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|barrier|batch_isend|new_group)")


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_collectives_stand_in_one_folder(file: Path) -> None:
    """`torch.distributed`'s collectives are called in parallel/ only: there they have names, groups and a timeout."""
    if file.relative_to(ROOT).parts[0] == "parallel":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            assert not any(COLLECTIVES.match(alias.name) for alias in node.names), file
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("dist", "c10d"):
            assert not COLLECTIVES.match(node.attr), f"{file}:{node.lineno} dist.{node.attr}"
