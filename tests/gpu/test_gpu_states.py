"""Held states moved by one kernel on a card: against the definition in float64."""

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_triton_states import TOLERANCE, check, check_merge


@pytest.mark.parametrize("dim", [32, 96, 128])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("result", TOLERANCE)
def test_the_definition(dim: int, dtype: torch.dtype, result: torch.dtype) -> None:
    check("cuda", 105, 3, dim, dtype, result)


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_merging(count: int, dtype: torch.dtype) -> None:
    check_merge("cuda", count, 105, 128, dtype)
