"""Which shape of tile suits a model: measured on its own queries and keys, for footage differs.

A tile of 64 tokens may be a 4 x 4 x 4 cube, or a strip of 16 frames, one row and 4 columns: what stands still is the
same through time. A good shape puts alike keys into one tile, whose mean then stands for them well.

One shape serves the whole model, so that tokens are put in order once. It is looked for at the first steps of a
training run, and again, ever more rarely, while nothing is sparse yet: a model that begins with random weights shows
nothing at first.

Shapes: B batch, S tokens in tile order, L layers, H heads, G key/value heads, D head dim, C candidates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foveate.sparsity.profile import CONSTANTS, measure
from foveate.sparsity.sight import Sight
from foveate.tiles import CUBE, TILE, VideoGrid

Shape = tuple[int, int, int]

LONGEST = 16  # edge of a tile: longer strips have never been best (docs/log.md)
EDGES = tuple(2**n for n in range(LONGEST.bit_length()))
SHAPES: tuple[Shape, ...] = tuple(
    (frames, height, TILE // (frames * height))
    for frames in EDGES
    for height in EDGES
    if frames * height <= TILE and TILE // (frames * height) in EDGES
)
LEAST = 16  # tiles that a sequence must have: of fewer, a tenth is kept by chance
LOOKS = 4  # training steps that one search lasts
FINALISTS = 6  # shapes that are measured again after the first of them
ROWS = 12  # query tiles of all layers together that a shape is measured on in a step; half of that in the first
ROOM = 1 << 26  # numbers of whole queries, keys and values that a layer may hold at once for this
LATER = 8  # times as many steps until the next search
MARGIN = 0.03  # by which another shape must be better, in both halves of the looks


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
    """float32 (C, H): the output error of q (B, S, H, D), k, v (B, S, G, D) by tile shape, at one budget.

    q, k, v are in the tile order of `grid`. Tiles are chosen by octant means, so that no predictor is needed, whose
    moments would be of one shape; the others are pooled with each head's best of `constants`. `rows` query tiles are
    sampled for each shape.
    """
    raster = grid.inverse().to(q.device)
    found: dict[tuple[int, ...], Tensor] = {}
    errors = []
    for shape in shapes:
        other = replace(grid, cube=shape)
        if other.edges not in found:  # on short grids several shapes come down to one
            places = raster[other.order().to(q.device)]
            options = {"budgets": (budget,), "constants": constants, "rows": rows, "scale": scale}
            sight = Sight(q[:, places], k[:, places], v[:, places])
            measured = measure(sight, other, None, generator=generator, **options)
            found[other.edges] = measured.error_predicted[:, :, 0].amin(1)
        errors.append(found[other.edges])
    return torch.stack(errors)


@dataclass(frozen=True)
class Look:
    """What a layer is asked in a training step: errors of `shapes`, at a budget, on so many query tiles."""

    shapes: tuple[Shape, ...]
    budget: float
    constants: tuple[float, ...]
    rows: int

    def nothing(self, heads: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(len(self.shapes) + 1, heads, device=device)

    @torch.no_grad()
    def at(self, sight: Sight, grid: VideoGrid, generator: torch.Generator) -> Tensor:
        """float32 (C + 1, H): errors of one clip, times their weight, and the weight, the work of a sequence's
        attention. Where a layer has too many numbers some heads alone are looked at, others have weight 0."""
        heads, tokens = sight.heads, grid.tokens
        found = self.nothing(heads, sight.q.device)
        if grid.tiles() < LEAST:
            return found
        repeats = heads // sight.k.shape[2]
        groups = min(sight.k.shape[2], max(1, ROOM // (3 * tokens * repeats * sight.q.shape[-1])))
        draw = {"generator": generator, "device": generator.device}
        clip = int(torch.randint(sight.q.shape[0], (1,), **draw))
        first = int(torch.randint(sight.k.shape[2] - groups + 1, (1,), **draw))
        part = sight.part(clip, slice(first, first + groups))
        assert part.v is not None
        options = {"shapes": self.shapes, "budget": self.budget, "constants": self.constants, "rows": self.rows}
        errors = shape_errors(part.q, part.k, part.v, grid, generator=generator, **options)
        weight = (tokens / TILE) ** 2
        fine = errors.isfinite().all()
        seen = slice(first * repeats, (first + groups) * repeats)
        found[:, seen] = torch.cat([torch.where(fine, errors, 0.0), fine.expand(1, errors.shape[1])]) * weight
        return found


@dataclass(frozen=True, eq=False)
class Search:
    """The shape in use, and how far the search for a better one is. A value; `sums` float32 (2, C + 1, L, H): of every
    other step, so that what is chosen by one half is judged by the other. `next`: step that the next search begins at.
    """

    shape: Shape = CUBE
    fixed: bool = False
    next: int = 1
    looks: int = 0
    shapes: tuple[Shape, ...] = SHAPES
    sums: Tensor | None = None
    said: str = ""

    def rows(self, layers: int) -> int:
        """Query tiles of a layer that a shape is measured on in the next step."""
        return -(-ROWS // (layers if self.looks else 2 * layers))

    def wanted(self, step: int) -> bool:
        """Whether the training forwards of this step are to be looked at."""
        return not self.fixed and step >= self.next

    def look(self, budget: float | Sequence[float] | None, constants: tuple[float, ...], layers: int) -> Look:
        """What the next training forwards are asked: budget, one or a head's, is their mean, a tenth where None."""
        listed = [0.1] if budget is None else [budget] if isinstance(budget, int | float) else list(budget)
        return Look(self.shapes, sum(listed) / len(listed), constants, self.rows(layers))

    def take(self, found: Tensor, influence: Tensor, step: int, warmup: int) -> "Search":
        """After the look of a step: found (L, C + 1, H), influence of the heads (L, H), both of all ranks."""
        found = found.transpose(0, 1).cpu()
        over = {"looks": 0, "shapes": SHAPES, "sums": None, "next": max(LATER * step, warmup // 2, step + 1)}
        if not found[-1].any():
            return replace(self, **over, said=f"tiles stay {name(self.shape)}: sequences have fewer than {LEAST} tiles")
        sums = found.new_zeros(2, *found.shape) if self.sums is None else self.sums.clone()
        sums[self.looks % 2] += found
        weight = influence.cpu()
        if self.looks == 0:
            order = _score(found, weight).argsort().tolist()
            chosen = sorted({*order[:FINALISTS], self.shapes.index(self.shape)})
            shapes = tuple(self.shapes[place] for place in chosen)
            return replace(self, looks=1, shapes=shapes, sums=sums[:, [*chosen, -1]])
        if self.looks + 1 < LOOKS:
            return replace(self, looks=self.looks + 1, sums=sums)
        shape, said = _decide(sums, weight, self.shapes, self.shape)
        return replace(self, shape=shape, said=said, **over)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {**vars(self), "sums": None if self.sums is None else self.sums.tolist()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Search":
        sums = None if saved["sums"] is None else torch.tensor(saved["sums"])
        shapes = tuple((a, b, c) for a, b, c in saved["shapes"])
        return cls(**{**saved, "shape": tuple(saved["shape"]), "shapes": shapes, "sums": sums})


def _errors(sums: Tensor) -> Tensor:
    """(C, L, H) of sums (C + 1, L, H); NaN where nothing was looked at."""
    return sums[:-1] / sums[-1]


def _score(sums: Tensor, weight: Tensor) -> Tensor:
    """(C,): what moves the loss: the root of the mean square error, heads (L, H) weighed by their influence."""
    weight = weight * (sums[-1] > 0)
    return ((_errors(sums).square().nan_to_num() * weight).sum((1, 2)) / weight.sum()).sqrt()


def _decide(sums: Tensor, weight: Tensor, shapes: Sequence[Shape], now: Shape) -> tuple[Shape, str]:
    """The shape to use from now on, and what to say of it."""
    score, halves = _score(sums.sum(0), weight), [_score(half, weight) for half in sums]
    stays, winner = list(shapes).index(now), int(score.argmin())
    if any(half[winner] > (1 - MARGIN) * half[stays] for half in halves):
        others = [place for place in range(len(shapes)) if place != stays]
        second = min(others, key=lambda place: float(score[place]), default=stays)
        found = f"tiles stay {name(now)}: output error {score[stays]:.3f}, {name(shapes[second])} {score[second]:.3f}"
        winner = stays
    else:
        found = f"tiles are {name(shapes[winner])}: output error {score[winner]:.3f}, {name(now)} {score[stays]:.3f}"
    return shapes[winner], f"{found} (frames x height x width; {_more(sums, weight, winner)})"


def _more(sums: Tensor, weight: Tensor, chosen: int) -> str:
    """What a shape for each layer, or each head, would add: picked by one half of the looks, judged by the other."""
    ratios = []
    for by_head in (False, True):
        squares = []
        for picks, judges in (sums, sums.flip(0)):
            pick, judge = (_errors(half).square().nan_to_num() * weight for half in (picks, judges))
            places = (pick if by_head else pick.sum(-1, keepdim=True)).argmin(0, keepdim=True)
            squares.append((judge.gather(0, places.expand(1, *judge.shape[1:])).sum(), judge[chosen].sum()))
        own, one = (sum(float(x) for x in column) for column in zip(*squares, strict=True))
        ratios.append(100 * (math.sqrt(own / max(one, 1e-30)) - 1))
    return f"one for each layer instead: {ratios[0]:+.0f} %, for each head {ratios[1]:+.0f} %"


def name(shape: Shape) -> str:
    return " x ".join(map(str, shape))
