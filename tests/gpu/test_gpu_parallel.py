"""Context parallelism on one card: two processes that share it, gloo staged through the host, against one process.

FOVEATE_PARALLEL_DEVICE=cpu runs the same on the CPU, to try the file itself without a card.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

if os.environ.get("FOVEATE_PARALLEL_DEVICE", "cuda") == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_parallel import assert_same, on_ranks, one_process
from test_parallel_layouts import error, joined, random_mask, sharded, tensors, whole

from foveate import Selection, VideoGrid, attend

DEVICE = os.environ.get("FOVEATE_PARALLEL_DEVICE", "cuda")
BACKENDS = ["torch", "triton"] if DEVICE == "cuda" else ["torch"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("periphery", ["drop", "mixed", "dense"])
@pytest.mark.parametrize(("head", "sequence"), [(2, 1), (1, 2)])
def test_layouts_equal_one_process(head: int, sequence: int, periphery: str, backend: str, worlds) -> None:
    grid, shape = VideoGrid(5, 15, 15, text=40), (2, 7, 7, 64)
    mask = None if periphery == "dense" else random_mask(grid, shape[0], shape[1])
    kinds = ["pool" if h % 3 else "drop" for h in range(shape[1])] if periphery == "mixed" else "drop"
    where = (DEVICE, backend)
    truth = whole(grid, shape, torch.float32, mask, kinds, 64, *where)
    ours = joined(worlds(2).run(sharded, grid, shape, torch.float32, mask, kinds, head, sequence, None, 64, *where))
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, truth, strict=True):
        assert error(a, b) <= 1e-5, f"{name}: {error(a, b):.1e}"


@pytest.mark.parametrize(("head", "sequence"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("sparse", [True, False])
def test_bfloat16_errors_do_not_grow(head: int, sequence: int, sparse: bool, worlds) -> None:
    """1.2 times one process's error at most, against float32; the kernels of the card, of which `auto` is one.

    A dense kernel rounds its results, so those of a ring's parts are rounded twice: 1.27 times (see sequence.Kernel).
    """
    most = 1.3 if sequence > 1 and not sparse else 1.2
    grid, shape = VideoGrid(8, 24, 24), (1, 4, 4, 64)
    mask = random_mask(grid, 1, 4) if sparse else None
    q, k, v, dout = (x.to(DEVICE) for x in tensors(grid, *shape, torch.bfloat16))
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    selection = Selection.from_dense(mask, grid).to(DEVICE) if mask is not None else None
    out = attend(*leaves, selection=selection, periphery="pool", backend="torch").out
    truth = [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout.float()))]
    where = (DEVICE, "auto")
    alone = whole(grid, shape, torch.bfloat16, mask, "pool", 64, *where)
    ours = joined(worlds(2).run(sharded, grid, shape, torch.bfloat16, mask, "pool", head, sequence, None, 64, *where))
    for name, exact, one, many in zip(("out", "dq", "dk", "dv"), truth, alone, ours, strict=True):
        print(f"{name}: one process {error(one, exact):.2e}, two {error(many, exact):.2e}")
    for name, exact, one, many in zip(("out", "dq", "dk", "dv"), truth, alone, ours, strict=True):
        assert error(many, exact) <= most * error(one, exact), name


@pytest.mark.parametrize(("head", "sequence"), [(2, 1), (1, 2)])
def test_a_model_and_all_its_gradients_equal_one_process(head: int, sequence: int, worlds) -> None:
    truth = one_process("dit", "pool", DEVICE)
    for ours in worlds(2).run(on_ranks, "dit", head, sequence, "pool", DEVICE):
        assert_same(ours, truth)
