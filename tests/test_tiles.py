"""Grids, tile order and selections."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate.kernels import bits
from foveate.tiles import Selection, VideoGrid

FIELD_GRIDS = [(60, 104, 32), (21, 45, 80), (5, 32, 32), (33, 90, 160), (1, 1, 1), (5, 7, 9)]


@pytest.mark.parametrize("sizes", FIELD_GRIDS)
def test_order_is_a_permutation_and_inverse_undoes_it(sizes: tuple[int, int, int]) -> None:
    grid = VideoGrid(*sizes, text=7)
    order, inverse = grid.order(), grid.inverse()
    assert len(order) == grid.tokens == sizes[0] * sizes[1] * sizes[2] + 7
    assert torch.equal(order.sort().values, torch.arange(grid.tokens))
    assert torch.equal(order[inverse], torch.arange(grid.tokens))
    assert torch.equal(order[grid.video :], torch.arange(grid.video, grid.tokens))
    assert grid.tiles() == -(-grid.tokens // 64)


def test_tiles_are_cubes_and_octants_are_eight_neighbours() -> None:
    grid = VideoGrid(8, 12, 8)
    order = grid.order()
    places = torch.stack([order // 96, order // 8 % 12, order % 8], dim=-1)
    for run, edge in ((64, 4), (8, 2)):
        corners = places.unflatten(0, (-1, run))
        assert torch.equal(corners.amax(1) - corners.amin(1), torch.full((96 * 8 // run, 3), edge - 1))


@pytest.mark.parametrize(
    ("sizes", "cube", "tile"),
    [
        ((16, 12, 8), (16, 1, 4), (16, 1, 4)),
        ((16, 12, 8), (2, 4, 8), (2, 4, 8)),
        ((4, 12, 8), (16, 1, 4), (4, 4, 4)),  # the clip is short: its tiles grow in the shortest other edge
        ((1, 16, 16), (4, 4, 4), (1, 8, 8)),  # an image
        ((1, 1, 128), (4, 4, 4), (1, 1, 64)),
    ],
)
def test_tiles_of_any_shape_fit_the_grid(sizes: tuple, cube: tuple, tile: tuple) -> None:
    grid = VideoGrid(*sizes, cube=cube)
    places = torch.stack(torch.unravel_index(grid.order(), sizes), dim=-1).unflatten(0, (-1, 64))
    assert torch.equal(places.amax(1) - places.amin(1) + 1, torch.tensor(tile).expand(len(places), 3))
    octants = places.unflatten(1, (8, 8))
    assert ((octants.amax(2) - octants.amin(2) + 1).prod(-1) == 8).all(), "an octant is a box of eight tokens"


def test_odd_edges_shrink_cubes_instead_of_padding() -> None:
    grid = VideoGrid(5, 5, 5)
    places = grid.order()
    first = torch.stack([places[:64] // 25, places[:64] // 5 % 5, places[:64] % 5], dim=-1)
    assert int(first.max()) == 3  # the whole first 4x4x4 cube comes first
    assert grid.tiles() == 2


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_empty_grids_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        VideoGrid(*bad)


@pytest.mark.parametrize(("text", "expected"), [(0, []), (1, [2]), (64, [2, 3]), (70, [2, 3])])
def test_text_tiles_hold_any_text_token(text: int, expected: list[int]) -> None:
    grid = VideoGrid(3, 7, 7, text=text)  # 147 video tokens: the third tile is shared
    assert torch.nonzero(grid.text_tiles()).flatten().tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**31))
def test_packing_round_trips(columns: int, seed: int) -> None:
    mask = torch.rand(2, 3, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    words = bits.pack(mask)
    assert words.dtype == torch.int32
    assert words.shape == (2, 3, -(-columns // 32))
    assert torch.equal(bits.unpack(words, columns), mask)


def test_both_orientations_list_the_same_pairs() -> None:
    grid = VideoGrid(5, 9, 13, text=9)
    mask = torch.rand(2, 3, grid.tiles(128), grid.tiles(), generator=torch.Generator().manual_seed(0)) < 0.4
    selection = Selection.from_dense(mask, grid, query_tile=128)
    assert torch.equal(selection.to_dense(), mask)
    assert torch.allclose(selection.density(), mask.float().mean((-1, -2)))
    for (index, counts), truth in ((selection.query_lists(), mask), (selection.key_lists(), mask.transpose(-1, -2))):
        for place in torch.cartesian_prod(*(torch.arange(size) for size in truth.shape[:3])).tolist():
            row, kept = tuple(place), int(counts[tuple(place)])
            assert index[row][:kept].tolist() == torch.nonzero(truth[row]).flatten().tolist()


def test_bitmap_is_an_eighth_of_a_byte_a_pair() -> None:
    grid = VideoGrid(32, 64, 64)  # 131,072 tokens, 2,048 tiles
    words = torch.zeros(1, 1, 2048, 64, dtype=torch.int32)
    assert Selection(words, grid).words.nbytes == 2048**2 // 8


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[[[0, -1]] * 2]], "0 ... 1"),
        ([[[[0, 2]] * 2]], "0 ... 1"),
        ([[[[1, 1]] * 2]], "twice"),
        ([[[0, 1]]], "integers"),
    ],
)
def test_bad_index_rows_are_refused(lists: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Selection.from_lists(lists, VideoGrid(1, 1, 100))


def test_lists_become_the_selection_they_say() -> None:
    selection = Selection.from_lists([[[[1], [0]]]], VideoGrid(1, 1, 100))
    assert selection.to_dense().tolist() == [[[[False, True], [True, False]]]]


@pytest.mark.parametrize(
    "make",
    [
        lambda grid: Selection.from_dense(torch.ones(1, 1, 3, 2, dtype=torch.bool), grid),
        lambda grid: Selection.from_dense(torch.ones(1, 1, 2, 2), grid),
        lambda grid: Selection.from_dense(torch.ones(2, 2, dtype=torch.bool), grid),
        lambda grid: Selection(torch.zeros(1, 1, 2, 2, dtype=torch.int32), grid),
        lambda grid: Selection.from_dense(torch.ones(1, 1, 2, 2, dtype=torch.bool), grid, query_tile=32),
    ],
)
def test_selections_of_the_wrong_shape_are_refused(make) -> None:
    with pytest.raises(ValueError, match="must be"):
        make(VideoGrid(1, 1, 100))
