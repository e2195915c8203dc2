"""The layouts of context parallelism on real gloo ranks against one process: outputs and gradients, bytes, errors."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from worlds import World, Worlds

from foveate import Predictor, Selection, VideoGrid, attend, select
from foveate.kernels.bits import pack, unpack
from foveate.kernels.select import octant_means, project, tile_mass
from foveate.parallel.buffers import Buffers
from foveate.parallel.comm import TRAFFIC, Group, Shards, partition
from foveate.parallel.fetch import Fetch, Place
from foveate.parallel.headwise import Heads, exchange_qkv, return_out
from foveate.parallel.lessons import ShardedSight
from foveate.parallel.ring import attend_ring
from foveate.parallel.sequence import Choice, Job, Kernel, attend_sequence, select_sequence
from foveate.sparsity.sight import Sight, true_mass

TOLERANCE = 1e-5
MADE: dict[tuple[int, int], tuple[Group, Group]] = {}


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


def whole(grid, shape, dtype, mask, periphery, query_tile=64, device="cpu", backend="torch") -> list[Tensor]:
    """out, dq, dk, dv of one process, on the CPU in the end."""
    q, k, v, dout = (x.to(device) for x in tensors(grid, *shape, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    selection = None if mask is None else Selection.from_dense(mask, grid, query_tile=query_tile).to(device)
    out = attend(*leaves, selection=selection, periphery=periphery, backend=backend).out
    return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))]


def sharded(
    grid, shape, dtype, mask, periphery, head, sequence, order=None, query_tile=64, device="cpu", backend="torch"
) -> list[Tensor]:
    """The same of this rank's shard, by the layout head x sequence. mask None: dense."""
    heads, groups = layout(head, sequence)
    q, k, v, dout = (x.to(device) for x in tensors(grid, *shape, dtype))
    shards = Shards.cut(grid.tokens, head * sequence, query_tile)
    first, stop = shards.bounds[dist.get_rank()], shards.bounds[dist.get_rank() + 1]
    leaves = [x[:, first:stop].clone().requires_grad_() for x in (q, k, v)]
    repeats = shape[1] // shape[2]
    assigned = Heads.contiguous(shape[2], head) if order is None else Heads(order)
    at = groups.rank * head
    run = Shards(tuple(b - shards.bounds[at] for b in shards.bounds[at : at + head + 1]))
    own = exchange_qkv(*leaves, assigned, run, heads, "layer")
    kernel = Kernel(scale=shape[3] ** -0.5, backend=backend, query_tile=query_tile)
    merged = shards.merged(head)
    if mask is None:
        out = attend_ring(*own, merged, groups, kernel, "layer").out
    else:
        mine = list(assigned.expanded(repeats).of[heads.rank])
        rows = slice(merged.bounds[groups.rank] // query_tile, -(-merged.bounds[groups.rank + 1] // query_tile))
        names = [periphery] * shape[1] if isinstance(periphery, str) else periphery
        pooled = torch.tensor([names[h] == "pool" for h in mine], device=device) if "pool" in names else None
        job = Job(groups, merged, kernel, pooled, "layer", Buffers())
        out = attend_sequence(*own, pack(mask[:, mine][:, :, rows]).to(device), job).out
    out = return_out(out, assigned, repeats, run, heads, "layer")
    return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout[:, first:stop]))]


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


def wide(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, video: int) -> list[Tensor]:
    """Tiles of 128 tokens chosen and attended to on this rank: words, out and gradients of its shard."""
    _, group = layout(1, 2)
    shards = Shards.cut(q.shape[1], 2, 128)
    first, stop = shards.bounds[group.rank], shards.bounds[group.rank + 1]
    leaves = [x[:, first:stop].clone().requires_grad_() for x in (q, k, v)]
    pooled = torch.tensor([0.0, -torch.inf])
    choice = Choice(None, None, torch.full((2,), 0.3), video, 128)
    words = select_sequence(leaves[0], leaves[1], choice, shards, group, "layer", 128)
    job = Job(group, shards, Kernel(32**-0.5, "torch", 128, 128), pooled, "layer", Buffers())
    out = attend_sequence(*leaves, words, job).out
    grads = torch.autograd.grad(out, leaves, dout[:, first:stop])
    return [words.transpose(1, 2), out.detach(), *grads]


def test_tiles_of_128_tokens(worlds: Worlds) -> None:
    grid = VideoGrid(5, 9, 15, text=9)
    q, k, v, dout = tensors(grid, 1, 2, 2, 32, torch.float32)
    kept = select(q, k, grid, budget=0.3, query_tile=128, kv_tile=128)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, selection=kept, periphery=["pool", "drop"], backend="torch").out
    words, *ours = joined(worlds(2).run(wide, q, k, v, dout, grid.video))
    assert torch.equal(words.transpose(1, 2), kept.words)
    for mine, truth in zip(ours, (out, *torch.autograd.grad(out, leaves, dout)), strict=True):
        assert error(mine, truth) <= TOLERANCE


@pytest.mark.parametrize(("head", "sequence"), [(1, 8), (2, 4), (8, 1)])
def test_bfloat16_errors_do_not_grow_with_the_ranks(head: int, sequence: int, worlds: Worlds) -> None:
    """Against float32: at most 1.2 times the error of one process, for outputs and gradients."""
    grid, shape = VideoGrid(5, 15, 15), (1, 8, 8, 32)
    mask = random_mask(grid, 1, 8)
    for kept in (mask, None):
        args = (grid, shape, torch.bfloat16, kept, "pool", head, sequence)
        q, k, v, dout = tensors(grid, *shape, torch.bfloat16)
        leaves = [x.float().requires_grad_() for x in (q, k, v)]
        selection = None if kept is None else Selection.from_dense(kept, grid)
        out = attend(*leaves, selection=selection, periphery="pool", backend="torch").out
        truth = [out.detach(), *torch.autograd.grad(out, leaves, dout.float())]
        alone = whole(grid, shape, torch.bfloat16, kept, "pool")
        ours = joined(worlds(8).run(sharded, *args))
        for name, exact, one, many in zip(("out", "dq", "dk", "dv"), truth, alone, ours, strict=True):
            assert error(many, exact) <= 1.2 * error(one, exact), (name, kept is None)


def repeated(*args) -> bool:
    first, second = sharded(*args), sharded(*args)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_repeats_are_bit_equal(worlds: Worlds) -> None:
    grid, shape = VideoGrid(5, 15, 15, text=40), (1, 4, 4, 32)
    for mask in (random_mask(grid, 1, 4), None):
        assert all(worlds(4).run(repeated, grid, shape, torch.float32, mask, "pool", 2, 2))


def seen_by_a_lesson(grid: VideoGrid, shape: tuple, rows: Tensor) -> list[Tensor]:
    shards, group = Shards.cut(grid.tokens, dist.get_world_size()), layout(1, dist.get_world_size())[1]
    mine = slice(*shards.bounds[group.rank : group.rank + 2])
    q, k = (x[:, mine] for x in tensors(grid, *shape, torch.float32)[:2])
    sight = ShardedSight(q, k, shards, group, "layer")
    return [*sight.octants(), sight.mass(torch.tensor([1]), rows, 0.5)]


def test_lessons_on_ranks_see_what_one_process_sees(worlds: Worlds) -> None:
    grid, shape = VideoGrid(5, 15, 15, text=40), (2, 4, 2, 32)  # the last tile and the last octant are short
    rows = torch.tensor([[0, 18], [3, 4], [18, 9], [11, 5]])
    q, k = tensors(grid, *shape, torch.float32)[:2]
    sight = Sight(q, k)
    truth = [*sight.octants(), sight.mass(torch.tensor([1]), rows, 0.5)]
    for found in worlds(4).run(seen_by_a_lesson, grid, shape, rows):
        assert all(error(ours, theirs) < TOLERANCE for ours, theirs in zip(found, truth, strict=True))


REAL = VideoGrid(16, 26, 20)
BUDGET = 0.1


def real_tensors(path: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v (1, 8320, 3, 64) of a real clip in tile order."""
    found = load_file(path)
    return [found[f"step0.{name}"].to(dtype)[:, REAL.order()] for name in "qkv"]


def chosen(path: str, a: Tensor | None, b: Tensor | None, cap: float | None) -> tuple[Tensor, int, int]:
    """Words of this rank's query tiles, bytes it sent to choose and fetch them, and bytes of its dense exchange."""
    _, group = layout(1, dist.get_world_size())
    shards = Shards.cut(REAL.tokens, group.size)
    q, k, v = (x[:, shards.bounds[group.rank] : shards.bounds[group.rank + 1]] for x in real_tensors(path))
    TRAFFIC.reset()
    choice = Choice(a, b, torch.full((3,), BUDGET), REAL.video, fetch_cap=cap)
    words = select_sequence(q, k, choice, shards, group, "layer")
    place = Place(shards, group.rank, 64)
    fetch = Fetch(unpack(words, place.tiles), 3, place, group, "layer")
    tiles = fetch.start(k, v).wait()
    assert tiles.shape[0] == sum(fetch.counts[1])
    return words, TRAFFIC.total, (group.size - 1) * k.numel() * 2 * k.element_size()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_selection_of_ranks_is_that_of_one_process_and_moves_few_bytes(size: int, worlds: Worlds, shared) -> None:
    path = str(shared("real_qkv.safetensors"))
    q, k, _ = real_tensors(path)
    predictor = Predictor.fit(q, k)
    found = worlds(size).run(chosen, path, predictor.a, predictor.b, None)
    ours = unpack(torch.cat([words for words, _, _ in found], 2), REAL.tiles())
    theirs = select(q, k, REAL, predictor=predictor, budget=BUDGET).to_dense()
    octants = (project(octant_means(x), m, 3) for x, m in ((q, predictor.a), (k, predictor.b)))
    mass = tile_mass(*octants, tokens=REAL.tokens, scale=64**-0.5, query_tile=64)
    for b, h, row in (ours != theirs).any(-1).nonzero():  # a tie: what was taken weighs what was left
        given, taken = (mass[b, h, row][(x & ~y)[b, h, row]] for x, y in ((theirs, ours), (ours, theirs)))
        assert torch.allclose(given.sort().values, taken.sort().values, rtol=1e-5, atol=0)
    allowed = {2: 0.55, 4: 0.52, 8: 0.35}[size]
    share = sum(sent for _, sent, _ in found) / sum(dense for _, _, dense in found)
    assert share <= allowed, f"{share:.3f} of the dense exchange"


def test_a_fetch_cap_bounds_bytes_and_keeps_most_of_the_recall(worlds: Worlds, shared) -> None:
    path, cap = str(shared("real_qkv.safetensors")), 0.3
    q, k, _ = real_tensors(path)
    predictor = Predictor.fit(q, k)
    found = worlds(4).run(chosen, path, predictor.a, predictor.b, cap)
    share = sum(sent for _, sent, _ in found) / sum(dense for _, _, dense in found)
    assert share <= cap + 0.04  # octant keys, and what is wanted
    capped = unpack(torch.cat([words for words, _, _ in found], 2), REAL.tiles())
    free = select(q, k, REAL, predictor=predictor, budget=BUDGET).to_dense()
    mass = true_mass(q, k, torch.arange(REAL.tiles()).expand(3, -1), 64**-0.5)
    recall = [float((mass * kept[0]).sum() / mass.sum()) for kept in (capped, free)]
    assert recall[0] >= 0.89 * recall[1], f"{recall[0] / recall[1]:.3f} of the recall"


def test_shards_are_whole_tiles_and_as_even_as_can_be() -> None:
    for tokens, ranks in ((57_826, 8), (60 * 104 * 32, 4), (21 * 45 * 80, 8), (5 * 32 * 32, 4), (33 * 90 * 160, 8)):
        shards = Shards.cut(tokens, ranks)
        assert shards.bounds[0] == 0
        assert shards.bounds[-1] == tokens
        assert all(bound % 64 == 0 for bound in shards.bounds[:-1])
        assert max(shards.sizes) - min(shards.sizes) < 128
    with pytest.raises(ValueError, match="too few for 4"):
        Shards.cut(150, 4)
    with pytest.raises(ValueError, match="cannot be spread over 4"):
        Heads.contiguous(3, 4)
    with pytest.raises(ValueError, match="every head one rank"):
        Heads(((0, 1), (1, 2)))
