"""Rotary positions and tile order in one kernel: against the eager formula, in Triton's interpreter, and compiled."""

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from foveate.attention import Dense  # noqa: E402
from foveate.kernels import triton_rotary  # noqa: E402
from foveate.models import adapters, processor  # noqa: E402
from foveate.models.processor import rotate_pairs  # noqa: E402
from foveate.tiles import VideoGrid  # noqa: E402


def case(device: str, batch: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x (B, S, H, D) with strides of its own, a gradient, tables (S, D), the tile order and its inverse; S = 105."""
    grid = VideoGrid(3, 5, 7)
    torch.manual_seed(dim)
    x = torch.randn(batch, heads, grid.tokens, dim, device=device).transpose(1, 2).to(dtype)
    angles = 6 * torch.rand(grid.tokens, dim // 2, device=device)
    cos, sin = (f(angles).repeat_interleave(2, dim=1) for f in (torch.cos, torch.sin))
    orders = (grid.order().to(device), grid.inverse().to(device))
    return x, torch.randn(x.shape, device=device).to(dtype), cos, sin, *orders


def check(device: str, batch: int, heads: int, dim: int, dtype: torch.dtype, tolerance: float) -> None:
    x, dout, cos, sin, order, inverse = case(device, batch, heads, dim, dtype)
    leaf = x.detach().double().requires_grad_()
    expected = rotate_pairs(leaf, cos[:, None].double(), sin[:, None].double())[:, order]
    (gradient,) = torch.autograd.grad(expected, leaf, dout.double())
    got = triton_rotary.rotate(x, order, cos, sin)
    back = triton_rotary.rotate(dout, inverse, cos, sin, back=True)
    for ours, exact in ((got, expected), (back, gradient)):
        assert ours.dtype == dtype
        assert float((ours.double() - exact).detach().norm() / exact.detach().norm()) <= tolerance


@pytest.mark.interpreted
@pytest.mark.parametrize(("batch", "heads", "dim"), [(1, 2, 32), (2, 3, 96), (2, 1, 128)])
def test_rotation_and_its_gradient(batch: int, heads: int, dim: int) -> None:
    check("cpu", batch, heads, dim, torch.float32, 1e-6)
    check("cpu", batch, heads, dim, torch.float16, 4e-4)


@pytest.mark.interpreted
def test_wan_by_the_fused_kernel_is_wan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and all gradients of a small model, as where a card takes the kernel."""
    diffusers = pytest.importorskip("diffusers")
    shape = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(**shape, text_dim=16, freq_dim=16, ffn_dim=64, rope_max_seq_len=32)
    inputs = (torch.randn(2, 4, 3, 10, 14), torch.tensor([500, 20]), torch.randn(2, 8, 16))
    plain = results(model, inputs)
    calls = []
    monkeypatch.setattr(processor, "_fused", lambda *_: calls.append(1) is None)
    with adapters.install(model, Dense()):
        fused = results(model, inputs)
    assert len(calls) == 4  # queries and keys of two layers
    for ours, exact in zip(fused, plain, strict=True):
        assert float((ours - exact).norm() / exact.norm()) <= 1e-5


def results(model, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and the gradients of all parameters."""
    model.zero_grad()
    out = model(*inputs, return_dict=False)[0]
    out.square().mean().backward()
    return [out.detach(), *(w.grad for w in model.parameters() if w.grad is not None)]


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_it_compiles_without_spills(capability: int) -> None:
    constants = {"DIM": 128, "D": 128, "ROWS": triton_rotary.ROWS, "BACK": False}
    pointers = {"X": "*bf16", "OUT": "*bf16", "FROM": "*i64", "COS": "*fp32", "SIN": "*fp32"}
    names = triton_rotary._rotate.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = ASTSource(triton_rotary._rotate, signature, constants)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert ".local" not in done.asm["ptx"]
