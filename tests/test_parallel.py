"""`parallelize` on real gloo ranks against one process: outputs and every parameter's gradient (CASES 16 to 26, 30)."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from worlds import Worlds

import foveate as fv
from foveate import Selection, SparsityConfig, VideoGrid, sparsify
from foveate.models import adapters
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.parallel import ParallelConfig, mean_over_ranks, parallelize
from foveate.parallel.policy import Fixed, Parallel
from foveate.sparsity.policy import Sparse

TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def worlds():
    made = Worlds()
    yield made
    made.stop()


def awake(model: nn.Module) -> nn.Module:
    """Zero-initialised parameters made random: otherwise outputs and gradients are 0."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def dit(heads: int = 4, depth: int = 2) -> tuple[nn.Module, tuple, VideoGrid]:
    torch.manual_seed(0)
    model = awake(VideoDiT(DiTConfig(width=32 * heads, depth=depth, heads=heads, patch=(1, 2, 2), mlp_ratio=2)))
    inputs = (torch.randn(2, 3, 5, 22, 20), torch.rand(2))
    return model, inputs, VideoGrid(5, 11, 10)  # 550 tokens: 9 tiles, the last one short


def tiny(name: str) -> tuple[nn.Module, dict, VideoGrid]:
    """A model of tests/test_adapters.py with its inputs and grid: 315 video tokens, and 11 of text in CogVideoX."""
    from test_adapters import CASES, make

    model, inputs = make(name, (5, 7, 9))
    return model, inputs, VideoGrid(5, 7, 9, text=CASES[name].text)


def fixed(grid: VideoGrid, heads: int, periphery="drop") -> Fixed:
    """Layer 0 sparse by random tiles, 3 to 60 % by head, layer 1 dense."""
    draw = torch.Generator().manual_seed(2)
    shape = (2, heads, grid.tiles(), grid.tiles())
    mask = torch.rand(shape, generator=draw) < torch.linspace(0.03, 0.6, heads)[:, None, None]
    mask |= torch.eye(grid.tiles(), dtype=torch.bool) | grid.text_tiles() | grid.text_tiles()[:, None]
    return Fixed({0: Selection.from_dense(mask, grid)}, periphery, backend="torch")


def results(model: nn.Module, inputs: tuple | dict, finish: Callable = lambda: None) -> dict[str, Tensor]:
    """The output, and all parameters' gradients of a fixed random mixture of it."""
    model.zero_grad()
    out = model(*inputs) if isinstance(inputs, tuple) else model(**inputs, return_dict=False)[0]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    (out * weight).mean().backward()
    finish()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **grads}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Name by name, relative to each one's norm; what is zero but for rounding only has to be so in both."""
    missing = theirs.keys() - ours.keys()
    assert not missing, missing
    nothing = 1e-6 * max(x.norm() for x in theirs.values())
    for name, expected in theirs.items():
        if expected.norm() < nothing:
            assert ours[name].norm() < nothing, name
            continue
        error = float((ours[name] - expected).norm() / expected.norm())
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def make(kind: str):
    return dit(int(kind[3:] or 4)) if kind.startswith("dit") else tiny(kind)


def one_process(kind: str, periphery="drop") -> dict[str, Tensor]:
    model, inputs, grid = make(kind)
    with adapters.install(model, fixed(grid, adapters_heads(model), periphery)):
        return results(model, inputs)


def adapters_heads(model: nn.Module) -> int:
    with adapters.install(model, fv.Dense()) as installed:
        return installed.heads


def on_ranks(kind: str, head: int, sequence: int, periphery="drop") -> dict[str, Tensor]:
    model, inputs, grid = make(kind)
    installed = adapters.install(model, fixed(grid, adapters_heads(model), periphery))
    handle = parallelize(model, ParallelConfig(head=head, sequence=sequence))
    assert isinstance(installed.policy, Parallel)
    found = results(model, inputs, handle.reduce_gradients)
    handle.remove()
    installed.remove()
    return found


MODELS = [
    ("dit", 2, 1), ("dit", 1, 2), ("dit", 2, 2), ("dit7", 4, 1), ("dit", 1, 4), ("dit", 4, 2),
    ("wan", 2, 1), ("wan", 1, 4), ("wan22-per-token-time", 1, 2), ("wan22-per-token-time", 2, 2),
    ("cogvideox15-rope", 2, 1), ("cogvideox15-rope", 2, 2), ("ltx", 1, 2), ("skyreels", 1, 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "head", "sequence"), MODELS)
def test_outputs_and_all_gradients_equal_one_process(kind: str, head: int, sequence: int, worlds: Worlds) -> None:
    if not kind.startswith("dit"):
        pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")
    periphery = "pool" if sequence > 1 else "drop"
    truth = one_process(kind, periphery)
    found = worlds(head * sequence).run(on_ranks, kind, head, sequence, periphery)
    for ours in found:
        assert_same(ours, truth)
    assert all(torch.equal(x["output"], found[0]["output"]) for x in found), "ranks return different outputs"
