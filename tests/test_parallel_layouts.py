"""The layouts of context parallelism on real gloo ranks against one process: outputs and gradients, bytes, errors
(CASES 16 to 18, 22, 23, 25, 26)."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from worlds import World, Worlds

from foveate import Selection, VideoGrid, attend
from foveate.kernels.bits import pack
from foveate.parallel.comm import Buffers, Group, Shards, partition
from foveate.parallel.headwise import Heads, exchange_qkv, return_out
from foveate.parallel.ring import attend_ring
from foveate.parallel.sequence import Job, Kernel, attend_sequence

TOLERANCE = 1e-5
MADE: dict[tuple[int, int], tuple[Group, Group]] = {}


@pytest.fixture(scope="session")
def worlds():
    made = Worlds()
    yield made
    made.stop()


def layout(head: int, sequence: int) -> tuple[Group, Group]:
    """Head and sequence groups of this rank, made once a process: ranks r * head + u."""
    if (head, sequence) not in MADE:
        runs = [[r * head + u for u in range(head)] for r in range(sequence)]
        strides = [[r * head + u for r in range(sequence)] for u in range(head)]
        MADE[head, sequence] = partition(runs, "head"), partition(strides, "sequence")
    return MADE[head, sequence]


def tensors(grid: VideoGrid, batch: int, heads: int, groups: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(batch, grid.tokens, n, dim) for n in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def random_mask(grid: VideoGrid, batch: int, heads: int, query_tile: int = 64) -> Tensor:
    """Per-head budgets from 2 to 100 %; own tiles are not sure of their place, text is."""
    draw = torch.Generator().manual_seed(1)
    shape = batch, heads, grid.tiles(query_tile), grid.tiles()
    budgets = torch.logspace(-1.7, 0, heads)[:, None, None]
    mask = torch.rand(shape, generator=draw) < budgets
    return mask | grid.text_tiles() | grid.text_tiles(query_tile)[:, None]


def whole(grid, shape, dtype, mask, periphery, query_tile=64) -> list[Tensor]:
    """out, dq, dk, dv of one process."""
    q, k, v, dout = tensors(grid, *shape, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    selection = None if mask is None else Selection.from_dense(mask, grid, query_tile=query_tile)
    out = attend(*leaves, selection=selection, periphery=periphery, backend="torch").out
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sharded(grid, shape, dtype, mask, periphery, head, sequence, order=None, query_tile=64) -> list[Tensor]:
    """The same of this rank's shard, by the layout head x sequence. mask None: dense."""
    heads, groups = layout(head, sequence)
    q, k, v, dout = tensors(grid, *shape, dtype)
    shards = Shards.cut(grid.tokens, head * sequence, query_tile)
    first, stop = shards.bounds[dist.get_rank()], shards.bounds[dist.get_rank() + 1]
    leaves = [x[:, first:stop].clone().requires_grad_() for x in (q, k, v)]
    repeats = shape[1] // shape[2]
    assigned = Heads.contiguous(shape[2], head) if order is None else Heads(order)
    at = groups.rank * head
    run = Shards(tuple(b - shards.bounds[at] for b in shards.bounds[at : at + head + 1]))
    own = exchange_qkv(*leaves, assigned, run, heads, "layer")
    kernel = Kernel(scale=shape[3] ** -0.5, backend="torch", query_tile=query_tile)
    merged = shards.merged(head)
    if mask is None:
        out = attend_ring(*own, merged, groups, kernel, "layer")
    else:
        mine = list(assigned.expanded(repeats).of[heads.rank])
        rows = slice(merged.bounds[groups.rank] // query_tile, -(-merged.bounds[groups.rank + 1] // query_tile))
        names = [periphery] * shape[1] if isinstance(periphery, str) else periphery
        pooled = torch.tensor([names[h] == "pool" for h in mine]) if "pool" in names else None
        job = Job(groups, merged, kernel, pooled, "layer", Buffers())
        out = attend_sequence(*own, pack(mask[:, mine][:, :, rows]), job)
    out = return_out(out, assigned, repeats, run, heads, "layer")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout[:, first:stop])]


def joined(parts: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(shards, 1) for shards in zip(*parts, strict=True)]


def error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def assert_equal_shards(world: World, *args, tolerance: float = TOLERANCE) -> None:
    grid, shape, dtype, mask, periphery, *rest = args
    truth = whole(grid, shape, dtype, mask, periphery, rest[3] if len(rest) > 3 else 64)
    for name, ours, theirs in zip(["out", "dq", "dk", "dv"], joined(world.run(sharded, *args)), truth, strict=True):
        assert ours.shape == theirs.shape
        assert torch.isfinite(ours).all()
        assert error(ours, theirs) <= tolerance, f"{name}: {error(ours, theirs):.1e}"


LAYOUTS = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (8, 1), (1, 8), (4, 2), (2, 4)]


@pytest.mark.parametrize(("head", "sequence"), LAYOUTS)
@pytest.mark.parametrize("periphery", ["drop", "mixed", "dense"])
def test_every_layout_equals_one_process(head: int, sequence: int, periphery: str, worlds: Worlds) -> None:
    # 18 tiles and a short one: no number of ranks divides them; 40 text tokens share tiles with video.
    grid = VideoGrid(5, 15, 15, text=40)
    heads = {1: 3, 2: 3, 4: 7, 8: 12}[head]
    shape = (1 if sequence == 8 else 2, heads, heads, 32)
    mask = None if periphery == "dense" else random_mask(grid, shape[0], heads)
    kinds = ["pool" if h % 3 else "drop" for h in range(heads)] if periphery == "mixed" else "drop"
    assert_equal_shards(worlds(head * sequence), grid, shape, torch.float32, mask, kinds, head, sequence)


def test_thirty_heads_on_four_ranks_in_any_order(worlds: Worlds) -> None:
    grid, shape = VideoGrid(4, 8, 16), (1, 30, 30, 32)
    order = (tuple(range(0, 30, 3)), tuple(range(1, 30, 3)), (2, 29), tuple(range(5, 29, 3)))
    args = (grid, shape, torch.float32, random_mask(grid, 1, 30), "drop", 4, 1, order)
    assert_equal_shards(worlds(4), *args)


@pytest.mark.parametrize(("head", "sequence"), [(1, 2), (2, 1)])
def test_grouped_heads_and_long_query_tiles(head: int, sequence: int, worlds: Worlds) -> None:
    grid, shape = VideoGrid(5, 7, 20, text=9), (2, 6, 2, 32)
    mask = random_mask(grid, 2, 6, query_tile=128)
    args = (grid, shape, torch.float32, mask, ["pool", "drop"] * 3, head, sequence, None, 128)
    assert_equal_shards(worlds(2), *args)
