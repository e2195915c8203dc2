"""The rotary kernel on a card: against the eager formula in float64."""

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_triton_rotary import check


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)])
def test_rotation_and_its_gradient(dim: int, dtype: torch.dtype, tolerance: float) -> None:
    check("cuda", 2, 3, dim, dtype, tolerance)
