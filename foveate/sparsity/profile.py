"""What sparsity costs, measured: recall and output error by budget, of the oracle's and the predictor's choice.

Recall is the attention mass that the kept tiles hold. The error is what counts: ||out_sparse - out|| / ||out|| against
exact attention in float32, with the periphery dropped or pooled. Measured on a few query tiles (DESIGN, Profiler).

Shapes: B batch, S tokens in tile order, H heads, G key/value heads (G divides H), D head dim, R query tiles,
N key tiles, L layers, K budgets, T tokens of one query tile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.kernels.bits import unpack
from foveate.kernels.reference import tile_means, tile_sizes
from foveate.kernels.select import forced_tiles, keep, octant_means, project, tile_mass
from foveate.sparsity.predictor import Predictor
from foveate.tiles import TILE, VideoGrid

BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5)
SHARE = 16  # one query tile in so many at most: a profile must stay cheap beside the layer it measures


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadProfile:
    """Measurements of one layer, float32 (H, K) each: by head and budget, averaged over batch and sampled queries.

    `recall_*`: mass kept, in 0 ... 1. `error_*`: relative output error; `_oracle` where the oracle chose the tiles,
    else for the predictor's choice.
    """

    recall_oracle: Tensor
    recall_predicted: Tensor
    error_drop: Tensor
    error_pool: Tensor
    error_drop_oracle: Tensor
    error_pool_oracle: Tensor

    def cpu(self) -> "HeadProfile":
        return _map(lambda x: x.cpu(), self)


@torch.no_grad()
def profile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: VideoGrid,
    *,
    predictor: Predictor | None,
    budgets: Sequence[float] = BUDGETS,
    rows: int = 4,
    generator: torch.Generator,
    scale: float | None = None,
) -> HeadProfile:
    """Profile one layer's q (B, S, H, D) and k, v (B, S, G, D), any float dtype, arithmetic in float32.

    `rows` query tiles (at most 1/16 of them, at least one) are drawn by `generator`. The oracle takes tiles by true
    mass; it and the predictor (None: octant means at full rank) keep own and text tiles, as `select` does. scale: of
    the logits, 1 / sqrt(D) by default. Raises ValueError for budgets outside (0, 1] or a grid of another length.
    """
    if q.shape[1] != grid.tokens or k.shape[1] != grid.tokens:
        raise ValueError(f"{grid} has {grid.tokens} tokens, q has {q.shape[1]}, k {k.shape[1]}")
    if not budgets or not all(0 < x <= 1 for x in budgets):
        raise ValueError(f"budgets must be greater than 0 and at most 1, got {tuple(budgets)}")
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    tiles = grid.tiles()
    drawn = torch.randperm(tiles, generator=generator, device=generator.device)[: min(rows, max(1, tiles // SHARE))]
    with torch.autocast(q.device.type, enabled=False):
        keys = _keys(k, v, q.shape[2], predictor)
        sums = [_row_sums(q, keys, grid, predictor, budgets, int(row), scale) for row in drawn.tolist()]
    return _averages([torch.stack(parts).sum(0) for parts in zip(*sums, strict=True)])


@dataclass(frozen=True, eq=False)
class SparsityProfile:
    """Running profiles of all layers of a model, a value: `layers` has a HeadProfile for each, None until measured.

    `steps`: the training step of each layer's last measurement, -1 before any.
    """

    budgets: tuple[float, ...]
    layers: tuple[HeadProfile | None, ...]
    steps: tuple[int, ...]

    @classmethod
    def empty(cls, layers: int, budgets: Sequence[float] = BUDGETS) -> "SparsityProfile":
        return cls(tuple(budgets), (None,) * layers, (-1,) * layers)

    def updated(self, layer: int, head_profile: HeadProfile, step: int, decay: float = 0.9) -> "SparsityProfile":
        """With a new measurement of one layer: old * decay + new * (1 - decay), on the CPU; the first counts whole."""
        new, old = head_profile.cpu(), self.layers[layer]
        if new.recall_oracle.shape[-1] != len(self.budgets):
            raise ValueError(f"the profile has {new.recall_oracle.shape[-1]} budgets, this one {self.budgets}")
        if old is not None:
            new = _map(lambda a, b: a * decay + b * (1 - decay), old, new)
        layers = (*self.layers[:layer], new, *self.layers[layer + 1 :])
        return replace(self, layers=layers, steps=(*self.steps[:layer], step, *self.steps[layer + 1 :]))

    def stacked(self) -> HeadProfile:
        """All layers in one: float32 (L, H, K). Raises ValueError while a layer has not been measured."""
        missing = [index for index, layer in enumerate(self.layers) if layer is None]
        if missing:
            raise ValueError(f"layers {missing} have not been profiled yet")
        return _map(lambda *parts: torch.stack(parts), *self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and None, for JSON."""
        layers = [
            layer and {field.name: getattr(layer, field.name).tolist() for field in fields(layer)}
            for layer in self.layers
        ]
        return {"budgets": list(self.budgets), "steps": list(self.steps), "layers": layers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SparsityProfile":
        layers = tuple(
            layer and HeadProfile(**{name: torch.tensor(rows, dtype=torch.float32) for name, rows in layer.items()})
            for layer in data["layers"]
        )
        return cls(tuple(data["budgets"]), layers, tuple(data["steps"]))


class _Keys(NamedTuple):
    """What all query tiles share: k, v (B, H, S, D), their tile means (B, H, N, D), projected octants (B, H, O, r)."""

    k: Tensor
    v: Tensor
    k_mean: Tensor
    v_mean: Tensor
    k_oct: Tensor


class _Exact(NamedTuple):
    """Exact attention of one query tile, by key tile: `mass` (B, H, T, N), outputs `part` (B, H, T, N, D).

    `far` (B, H, T, N): what each tile would weigh if its mean stood for it, in the same unit as `mass`.
    """

    mass: Tensor
    part: Tensor
    far: Tensor


def _keys(k: Tensor, v: Tensor, heads: int, predictor: Predictor | None) -> _Keys:
    keys, values = (x.float().transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1) for x in (k, v))
    octants = project(octant_means(k), None if predictor is None else predictor.b, heads)
    return _Keys(keys, values, tile_means(keys, TILE), tile_means(values, TILE), octants)


def _row_sums(
    q: Tensor,
    keys: _Keys,
    grid: VideoGrid,
    predictor: Predictor | None,
    budgets: Sequence[float],
    row: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Sums over batch and tokens of one query tile, C = 2 choices (oracle, predictor), P = 2 peripheries (drop, pool).

    Kept mass (C, H, K), squared errors (P, C, H, K), squared norm of the exact output (H,), number of queries ().
    """
    tile = q[:, row * TILE : (row + 1) * TILE]
    exact = _exact(tile.float().transpose(1, 2), keys, scale)
    octants = project(octant_means(tile), None if predictor is None else predictor.a, q.shape[2])
    predicted = tile_mass(octants, keys.k_oct, tokens=grid.tokens, scale=scale, query_tile=TILE)
    args = (grid.tokens, grid.video, TILE, TILE, q.device)
    forced = forced_tiles(*args, first=row * TILE, queries=tile.shape[1])
    kept = torch.stack([_kept(mass, forced, budgets) for mass in (exact.mass.mean(2, keepdim=True), predicted)])
    out = exact.part.sum(-2)
    recall = torch.einsum("cbhkn,bhtn->chk", kept, exact.mass)
    errors = [_output(exact, keys.v_mean, kept, pooled) - out.unsqueeze(2) for pooled in (False, True)]
    squared = torch.stack([error.square().sum((1, -2, -1)) for error in errors])
    return recall, squared, out.square().sum((0, 2, 3)), torch.tensor(float(tile.shape[0] * tile.shape[1]))


def _exact(q: Tensor, keys: _Keys, scale: float) -> _Exact:
    """Of the queries q (B, H, T, D) of one tile."""
    tokens = keys.k.shape[2]
    logits = scale * q @ keys.k.mT
    lse = logits.logsumexp(-1, keepdim=True)
    spare = -tokens % TILE
    weights = pad((logits - lse).exp(), (0, spare)).unflatten(-1, (-1, TILE))
    values = pad(keys.v, (0, 0, 0, spare)).unflatten(2, (-1, TILE))
    part = torch.einsum("bhtnj,bhnjd->bhtnd", weights, values)
    bias = tile_sizes(tokens, TILE, q.device).float().log()
    far = (scale * q @ keys.k_mean.mT + bias - lse).exp()
    return _Exact(weights.sum(-1), part, far)


def _kept(mass: Tensor, forced: Tensor, budgets: Sequence[float]) -> Tensor:
    """float32 (B, H, K, N), 1 where a tile is kept at each budget, of mass (B, H, 1, N)."""
    heads, count = mass.shape[1], mass.shape[-1]
    words = [keep(mass, forced=forced, budget=torch.full((heads,), x, device=mass.device)) for x in budgets]
    return unpack(torch.cat(words, 2), count).float()


def _output(exact: _Exact, v_mean: Tensor, kept: Tensor, pooled: bool) -> Tensor:
    """Outputs (C, B, H, K, T, D) of the query tile over kept tiles (C, B, H, K, N), the others dropped or pooled."""
    total = torch.einsum("cbhkn,bhtn->cbhkt", kept, exact.mass)
    summed = torch.einsum("cbhkn,bhtnd->cbhktd", kept, exact.part)
    if pooled:
        total = total + torch.einsum("cbhkn,bhtn->cbhkt", 1 - kept, exact.far)
        summed = summed + torch.einsum("cbhkn,bhtn,bhnd->cbhktd", 1 - kept, exact.far, v_mean)
    return summed / total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)


def _averages(sums: list[Tensor]) -> HeadProfile:
    recall, squared, norm, count = sums
    recall = (recall / count).clamp(max=1)
    error = (squared / norm.clamp_min(torch.finfo(norm.dtype).tiny).unsqueeze(-1)).sqrt()
    return HeadProfile(
        recall_oracle=recall[0],
        recall_predicted=recall[1],
        error_drop=error[0, 1],
        error_pool=error[1, 1],
        error_drop_oracle=error[0, 0],
        error_pool_oracle=error[1, 0],
    )


def _map(function: Any, *profiles: Any) -> HeadProfile:
    """A HeadProfile of `function` applied to the same tensor of each of `profiles`."""
    columns = {field.name: [getattr(x, field.name) for x in profiles] for field in fields(HeadProfile)}
    return HeadProfile(**{name: function(*tensors) for name, tensors in columns.items()})
