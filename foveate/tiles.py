"""The latent token grid, its tile order, and which tiles of keys each tile of queries attends to.

Shapes: B batch, H heads, S tokens, R query tiles, N key/value tiles (64 tokens each, only the last one shorter).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from foveate.kernels import bits

TILE = 64
OCTANT = 8
CUBE: tuple[int, int, int] = (4, 4, 4)


@dataclass(frozen=True)
class VideoGrid:
    """A grid of latent tokens, frames x height x width, followed by `text` tokens.

    *Tile order* sorts video tokens by 3-D cube and in Morton order inside the cube, so that 8 consecutive tokens are a
    2 x 2 x 2 octant, then cuts the row into runs of 64. Nothing is padded: at odd edges cubes are smaller and a run
    may span two neighbours; only the last run is short. Text tokens follow the video, in their own order.

    cube: frames, height and width of a tile, such as 16 x 1 x 4, whose octants are its eight equal parts. Where the
    grid is shorter than an edge (an image, for a model trained on clips) it halves and the shortest other doubles.
    """

    frames: int
    height: int
    width: int
    text: int = 0
    cube: tuple[int, int, int] = CUBE

    def __post_init__(self) -> None:
        if min(self.frames, self.height, self.width) < 1 or self.text < 0:
            raise ValueError(f"a grid needs frames, height and width of at least 1 and text of at least 0, got {self}")
        if len(self.cube) != 3 or min(self.cube) < 1:
            raise ValueError(f"cube must be three positive sizes (frames, height, width), got {self.cube}")

    @property
    def video(self) -> int:
        """Number of video tokens."""
        return self.frames * self.height * self.width

    @property
    def tokens(self) -> int:
        """Number of tokens, text included."""
        return self.video + self.text

    @property
    def edges(self) -> tuple[int, ...]:
        """Frames, height and width of a tile on this grid: `cube`, unless the grid is shorter."""
        return _fitted(self.cube, (self.frames, self.height, self.width))

    def tiles(self, size: int = TILE) -> int:
        """Number of tiles of `size` tokens, the short last one included."""
        return -(-self.tokens // size)

    def order(self) -> Tensor:
        """int64 (tokens,): the raster index of the token at each place of the tile order. `x[:, grid.order()]`."""
        return _order(self)

    def inverse(self) -> Tensor:
        """int64 (tokens,): the place in tile order of each raster token. Undoes `order`."""
        return torch.argsort(self.order())

    def text_tiles(self, size: int = TILE) -> Tensor:
        """bool (tiles(size),): tiles that hold at least one text token."""
        ends = torch.arange(1, self.tiles(size) + 1) * size
        return (ends > self.video) & torch.full_like(ends, self.text > 0, dtype=torch.bool)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a table made while generating must serve training later
def _order(grid: VideoGrid) -> Tensor:
    sizes = (grid.frames, grid.height, grid.width)
    axes = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
    edges = grid.edges
    cubes = [axis // edge for axis, edge in zip(axes, edges, strict=True)]
    inside = [axis % edge for axis, edge in zip(axes, edges, strict=True)]
    key = torch.zeros(sizes, dtype=torch.int64)
    for cube, size, edge in zip(cubes, sizes, edges, strict=True):
        key = key * -(-size // edge) + cube
    levels = (max(edges) - 1).bit_length()
    for level in reversed(range(levels)):
        for place in inside:
            key = key * 2 + (place >> level & 1)
    video = torch.argsort(key.flatten(), stable=True)
    return torch.cat([video, torch.arange(grid.video, grid.tokens)])


def _fitted(cube: tuple[int, int, int], sizes: tuple[int, int, int]) -> tuple[int, ...]:
    """A tile's edges on a grid that may be shorter than they are: as many tokens, if the grid has them."""
    edges = list(cube)
    for axis in range(3):
        while edges[axis] % 2 == 0 and edges[axis] >= 2 * sizes[axis]:
            room = [other for other in range(3) if edges[other] < sizes[other]]
            if not room:
                break
            edges[axis] //= 2
            edges[min(room, key=lambda other: edges[other])] *= 2
    return tuple(edges)


@dataclass(frozen=True, eq=False)
class Selection:
    """For every (batch, head, query tile) the kept key/value tiles, as a bitmap: N^2 / 8 bytes a head.

    `words` is int32 (B, H, R, ceil(N / 32)), lowest bit first. Query tiles are 64 or 128 tokens, key/value tiles 64
    (128 for backends that want it). No size depends on what is kept. A row may be empty.
    """

    words: Tensor
    grid: VideoGrid
    query_tile: int = TILE
    kv_tile: int = TILE

    def __post_init__(self) -> None:
        for name, size in (("query_tile", self.query_tile), ("kv_tile", self.kv_tile)):
            if size not in (64, 128):
                raise ValueError(f"{name} must be 64 or 128 tokens, got {size}")
        rows, width = self.grid.tiles(self.query_tile), -(-self.columns // bits.WORD)
        if self.words.dtype != torch.int32 or self.words.dim() != 4 or self.words.shape[2:] != (rows, width):
            raise ValueError(
                f"words must be int32 (B, H, {rows}, {width}) for {self.grid} and query tiles of {self.query_tile}, "
                f"got {self.words.dtype} {tuple(self.words.shape)}; build selections with Selection.from_dense"
            )

    @classmethod
    def from_dense(cls, mask: Tensor, grid: VideoGrid, *, query_tile: int = TILE, kv_tile: int = TILE) -> "Selection":
        """From a bool mask (B, H, R, N), True where a tile is kept."""
        expected = (grid.tiles(query_tile), grid.tiles(kv_tile))
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2:] != expected:
            raise ValueError(
                f"mask must be bool (B, H, {expected[0]}, {expected[1]}) for {grid}, query tiles of {query_tile} and "
                f"key tiles of {kv_tile}, got {mask.dtype} {tuple(mask.shape)}"
            )
        return cls(bits.pack(mask), grid, query_tile, kv_tile)

    @classmethod
    def from_lists(cls, lists: Sequence | Tensor, grid: VideoGrid, *, query_tile: int = TILE, kv_tile: int = TILE):
        """From kept tile numbers, integer (B, H, R, K) of any order. Checked, so it waits for the device.

        Raises ValueError for numbers outside 0 ... N - 1 (padding such as -1 included) and for duplicates in a row.
        """
        index = torch.as_tensor(lists)
        columns = grid.tiles(kv_tile)
        if index.dim() != 4 or index.dtype.is_floating_point:
            raise ValueError(f"lists must be integers (B, H, R, K), got {index.dtype} {tuple(index.shape)}")
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < columns:
            raise ValueError(
                f"tile numbers must lie in 0 ... {columns - 1}, got {int(index.min())} ... {int(index.max())}; "
                "rows of different length are made with Selection.from_dense"
            )
        index = index.long()
        counts = torch.zeros(*index.shape[:3], columns, dtype=torch.int32, device=index.device)
        counts.scatter_add_(-1, index, torch.ones_like(index, dtype=torch.int32))
        if int(counts.max()) > 1:
            raise ValueError("a row lists the same tile twice; each kept tile is listed once")
        return cls.from_dense(counts.bool(), grid, query_tile=query_tile, kv_tile=kv_tile)

    @property
    def columns(self) -> int:
        """Number of key/value tiles, N."""
        return self.grid.tiles(self.kv_tile)

    @property
    def heads(self) -> int:
        return self.words.shape[1]

    def to_dense(self) -> Tensor:
        """bool (B, H, R, N)."""
        return bits.unpack(self.words, self.columns)

    def density(self) -> Tensor:
        """Kept fraction of key/value tiles by batch and head, float32 (B, H). Stays on the device."""
        return self.to_dense().float().mean((-2, -1))

    def query_lists(self) -> tuple[Tensor, Tensor]:
        """Query-major: for each query tile the kept key tiles, ascending int32 (B, H, R, N), and counts (B, H, R)."""
        return bits.lists(self.to_dense())

    def key_lists(self) -> tuple[Tensor, Tensor]:
        """Key-major (for dK and dV): the query tiles that keep each key tile, (B, H, N, R), and counts (B, H, N)."""
        return bits.lists(self.to_dense().transpose(-1, -2))

    def to(self, device: torch.device | str) -> "Selection":
        return Selection(self.words.to(device), self.grid, self.query_tile, self.kv_tile)
