"""Compiles the selection kernel for cards that are not here; exits with 1 where it spills or wants too much memory."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foveate.kernels import triton_select

SPILL = 64  # bytes a thread, outside of every inner loop
SHARED = {80: 163, 90: 227, 100: 227, 120: 99}  # KB of shared memory a block may use


def resources(kernel, architecture: int, constants: dict, types: dict, aligned: set, **options) -> tuple[str, int, int]:
    """Compiled code's PTX, bytes of registers spilled to the stack, bytes of shared memory."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return compiled.asm["ptx"], int(re.search(r"STACK:(\d+)", usage.stdout)[1]), compiled.metadata.shared


def select_kernel(architecture: int, tiles: int, by_mass: bool) -> tuple[str, int, int]:
    plan = triton_select.plan(tiles, 16, 64, 64, architecture)
    constants = {
        "BY_MASS": by_mass, "M": triton_select.QUERIES, "C": triton_select.KEYS, "OT": 8, "QO": 8, "R2": 16,
        "Z": plan.together, "J": plan.blocks, "PLACES": plan.places, "STAGES": triton_select.STAGES, "INTERPRET": False,
    }  # fmt: skip
    types = {"q": "*fp16", "k": "*fp16", "want": "*fp32", "words": "*i16", "strips": "*bf16"}
    types["norms"] = "*fp32"
    aligned = {*types, "q_octants", "k_octants", "blocks", "width"} - {"want"}
    return resources(
        triton_select._select, architecture, constants, types, aligned,
        num_warps=triton_select.WARPS, maxnreg=512 // plan.resident,
    )  # fmt: skip


def main() -> int:
    failures = 0
    for architecture, limit in SHARED.items():
        sizes = ((512, False), (2048, True), (8192, False)) if architecture == 90 else ((2048, False),)
        for tiles, by_mass in sizes:
            ptx, spilled, shared = select_kernel(architecture, tiles, by_mass)
            tensor_cores = ("wgmma" in ptx) if architecture == 90 else ("mma" in ptx)
            good = spilled <= SPILL and shared <= limit * 1024 and tensor_cores
            print(
                f"sm_{architecture} {tiles} tiles: spilled {spilled} B, shared {shared} B, {'ok' if good else 'FAIL'}"
            )
            failures += not good
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
