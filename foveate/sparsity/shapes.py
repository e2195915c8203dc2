"""Which shape of tile suits a model: measured on its own queries and keys, for footage differs.

A tile of 64 tokens may be a 4 x 4 x 4 cube, or a strip of 16 frames, one row and 4 columns: what stands still is the
same through time. A good shape puts alike keys into one tile, whose mean then stands for them well.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foveate.sparsity.profile import CONSTANTS, profile
from foveate.tiles import CUBE, TILE, VideoGrid

Shape = tuple[int, int, int]


def tile_shapes(grid: VideoGrid, longest: int = 16) -> list[Shape]:
    """Shapes of 64 tokens with edges in powers of two, none longer than the grid or `longest`; the cube is always one.

    Longer strips than 16 have never been best (docs/log.md).
    """
    edges = [2**n for n in range(longest.bit_length())]
    found = [
        (frames, height, TILE // (frames * height))
        for frames in edges
        for height in edges
        if frames * height <= TILE and TILE // (frames * height) in edges
    ]
    sizes = (grid.frames, grid.height, grid.width)
    return [one for one in found if one == CUBE or all(edge <= size for edge, size in zip(one, sizes, strict=True))]


def shape_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: VideoGrid,
    *,
    budget: float,
    shapes: Sequence[Shape],
    constants: Sequence[float] = CONSTANTS,
    generator: torch.Generator,
    rows: int = 8,
    scale: float | None = None,
) -> Tensor:
    """float32 (len(shapes), H): the output error of q (B, S, H, D), k, v (B, S, G, D) by tile shape, at one budget.

    q, k, v are in the tile order of `grid`. Tiles are chosen by octant means, so that no predictor is needed, whose
    moments would be of one shape; the others are pooled with each head's best of `constants`. `rows` query tiles are
    sampled for each shape.
    """
    raster = grid.inverse().to(q.device)
    errors = []
    for shape in shapes:
        other = VideoGrid(grid.frames, grid.height, grid.width, grid.text, cube=shape)
        places = raster[other.order().to(q.device)]
        found = profile(
            q[:, places], k[:, places], v[:, places], other, constants=constants,
            predictor=None, budgets=(budget,), rows=rows, generator=generator, scale=scale,
        )  # fmt: skip
        errors.append(found.error_predicted[:, :, 0].amin(1))
    return torch.stack(errors)


def best(errors: Tensor, shapes: Sequence[Shape], margin: float = 0.02) -> Shape:
    """The shape of least mean error, errors (len(shapes), ...); the cube where nothing is better by `margin`."""
    mean = errors.flatten(1).mean(1)
    winner = shapes[int(mean.argmin())]
    if CUBE in shapes and float(mean.min()) > (1 - margin) * float(mean[list(shapes).index(CUBE)]):
        return CUBE
    return winner
