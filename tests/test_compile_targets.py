"""Every kernel and configuration is compiled for every kind of card, on a machine without one.

Gates: Hopper's matrix instruction is used where it exists, no register spills in the measured configurations, and
shared memory fits the card.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from foveate.kernels import triton_lists as lists  # noqa: E402
from foveate.kernels import triton_periphery as periphery  # noqa: E402
from foveate.kernels import triton_sparse as sparse  # noqa: E402

pytestmark = pytest.mark.skipif(sparse.INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler")

# compute capability -> bytes of shared memory a block may have
CARDS = {(8, 0): 166_912, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}
KERNELS = {
    "forward": sparse._forward,
    "queries": sparse._grad_queries,
    "keys": sparse._grad_keys,
    "means": sparse._grad_means,
}
# On top of flash-attn-4's part; 128-token tiles. Kernel -> the role whose configuration it takes.
PERIPHERY = {
    "merge": periphery._merge,
    "add_queries": periphery._add_grad_queries,
    "add_means": periphery._add_grad_means,
}
ROLES = {"means": "keys", "merge": "forward", "add_queries": "queries", "add_means": "keys"}
BY_QUERIES, BY_KEYS = ("Q", "DOUT", "DQ", "OUT"), ("K", "V", "MEAN_K", "MEAN_V", "DK", "DV")
POINTERS = {
    "LSE": "*fp32", "LSE2": "*fp32", "DELTA": "*fp32", "FAR_K": "*fp32", "FAR_V": "*fp32", "LISTS": "*i16",
    "COUNTS": "*i32", "WORDS": "*i32", "ORDER": "*i32", "POOLED": "*fp32", "scale": "fp32", "scale2": "fp32",
}  # fmt: skip


def compiled(kernel: str, capability: tuple[int, int], dim: int, *, query_tile=64, kv_tile=64, dtype="bf16", even=True,
             pool=False, results=None):  # fmt: skip
    """The compiled kernel in the configuration that a card of this capability would get. results: their dtype."""
    role = ROLES.get(kernel, kernel)
    rows = 64 if kernel == "merge" else query_tile
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    config = sparse._config(role, torch_dtype, dim, rows, capability, CARDS[capability])
    block, tma = triton.next_power_of_2(dim), sparse._has_tma(capability)
    constants = {
        "DIM": dim, "D": block, "BM": config.m, "BN": config.n, "QUERY_TILE": query_tile, "TILE": kv_tile, "EVEN": even,
        "POOL": pool, "TMA": tma, "UPCAST": False, **({"REP": 1} if role == "keys" else {}),
    }  # fmt: skip
    function = (KERNELS | PERIPHERY)[kernel]
    signature = {}
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in BY_QUERIES + BY_KEYS:
            rows = config.m if name in BY_QUERIES else config.n
            kind = results or dtype if name in ("OUT", "DQ", "DK", "DV") else dtype
            pointer = (f"*{kind}", "i64", "i64", "i64", "i32")
            signature[name] = f"tensordesc<{kind}[1, 1, {rows}, {block}]>" if tma else pointer
        else:
            signature[name] = POINTERS.get(name, "i32")
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(signature.values()) if x[0] == "*"}
    if not tma:
        tensors = [i for i, x in enumerate(signature.values()) if isinstance(x, tuple)]
        attributes |= {(i, part): [["tt.divisibility", 16]] for i in tensors for part in range(4)}
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return triton.compile(ASTSource(function, signature, constants, attributes), target=target, options=options)


def spilled(kernel, folder: Path) -> int:
    """Bytes of stack a thread uses, which is where spilled registers go."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    return int(report.split("STACK:")[1].split()[0])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("query_tile", [64, 128])
def test_hopper_uses_its_matrix_units_and_does_not_spill(kernel, dim, query_tile, tmp_path):
    built = compiled(kernel, (9, 0), dim, query_tile=query_tile)
    assert "wgmma.mma_async" in built.asm["ptx"]
    assert "cp.async.bulk.tensor" in built.asm["ptx"]
    assert built.metadata.shared <= CARDS[9, 0]
    assert spilled(built, tmp_path) == 0


@pytest.mark.parametrize("kernel", [*PERIPHERY, "means", "keys"])
@pytest.mark.parametrize(("dim", "results"), [(64, "bf16"), (128, "fp32")])
def test_the_periphery_on_hopper_at_128_token_tiles(kernel, dim, results, tmp_path):
    built = compiled(kernel, (9, 0), dim, query_tile=128, kv_tile=128, even=False, pool=True, results=results)
    assert ("wgmma.mma_async" in built.asm["ptx"]) == (kernel != "add_means")
    assert built.metadata.shared <= CARDS[9, 0]
    assert spilled(built, tmp_path) == 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("capability", CARDS)
def test_fits_the_card(kernel, dim, capability):
    """With all options at once: short last tile, pooled periphery."""
    built = compiled(kernel, capability, dim, even=False, pool=True)
    assert built.metadata.shared <= CARDS[capability]


@pytest.mark.parametrize("kernel", ["forward", "queries", "keys"])
@pytest.mark.parametrize("query_tile", [64, 128])
@pytest.mark.parametrize("capability", CARDS)
def test_parts_of_a_larger_attention_leave_in_float32(kernel, query_tile, capability, tmp_path):
    built = compiled(kernel, capability, 128, query_tile=query_tile, results="fp32")
    assert built.metadata.shared <= CARDS[capability]
    if capability == (9, 0):
        assert spilled(built, tmp_path) == 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_compile(kernel, dtype):
    built = compiled(kernel, (9, 0), 64, dtype=dtype)
    assert ("wgmma" in built.asm["ptx"]) == (dtype == "fp16")
    assert "tf32" not in built.asm["ptx"]


LIST_KERNELS = [
    (lists._query_lists, {"CHUNK": 64}, {"LISTS": "*i16"}),
    (lists._key_lists, {"ROWS": 128}, {"LISTS": "*i16"}),
    (lists._hot_first, {"BLOCK": 2048}, {"ORDER": "*i32"}),
    (lists._row_stats, {"HAS_DLSE": True, "DIM": 96, "D": 128, "ROWS": 32}, {"DOUT": "*bf16", "OUT": "*bf16"}),
    (lists._tile_means, {"DIM": 96, "D": 128, "TILE": 64}, {"X": "*bf16", "MEAN": "*bf16"}),
]


@pytest.mark.parametrize("case", LIST_KERNELS, ids=lambda case: case[0].__name__)
@pytest.mark.parametrize("capability", CARDS)
def test_list_kernels_compile(case, capability, tmp_path):
    function, constants, pointers = case
    pointers = {"WORDS": "*i32", "COUNTS": "*i32", "DLSE": "*fp32"} | POINTERS | pointers
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in function.arg_names}
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    built = triton.compile(ASTSource(function, signature, constants), target=target)
    assert built.metadata.shared <= 48 * 1024
    if capability == (9, 0):
        assert spilled(built, tmp_path) == 0


def test_a_card_too_small_is_refused_before_launch(monkeypatch):
    monkeypatch.setitem(sparse.CONSUMER, "keys", {64: sparse.CONSUMER["keys"][64]})
    with pytest.raises(ValueError, match="does not fit"):
        sparse._config.__wrapped__("keys", torch.bfloat16, 256, 64, (12, 0), CARDS[12, 0])


def test_triton_needs_no_gpu_to_be_imported():
    assert os.environ.get("TRITON_INTERPRET") != "1"
