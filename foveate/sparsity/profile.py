"""What sparsity costs, measured: recall and output error by budget, of the oracle's and the predictor's choice.

Recall is the attention mass that the kept tiles hold. The error is what counts: ||out_sparse - out|| / ||out|| against
exact attention in float32, with the periphery dropped, pooled, or pooled with one of a few constants on its logits
(`attend`). Measured on a few query tiles, key by key tile in two passes: what each tile weighs, then, once tiles are
chosen, what they add up to. So memory does not grow with S x D, and where keys are spread over ranks only sampled rows
travel (parallel/lessons.py).

Shapes: B batch, S tokens in tile order, H heads, G key/value heads (G divides H), D head dim, R sampled query tiles,
T = 64 tokens of each, N key tiles, n of a chunk, L layers, K budgets, P constants of the periphery, C = 2 choices
(oracle, predictor).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.attention import no_autocast
from foveate.kernels.reference import tile_means, tile_sizes
from foveate.kernels.select import forced_tiles, octant_means, octant_sizes, project
from foveate.sparsity.predictor import Predictor
from foveate.sparsity.sight import Sight
from foveate.tiles import OCTANT, TILE, VideoGrid

BUDGETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5)
DROP, POOL = -math.inf, 0.0
CONSTANTS = (DROP, -4.0, -2.0, -1.0, -0.5, POOL, 0.5)  # more of them find nothing better (docs/log.md, Tile shapes)
SHARE = 16  # one query tile in so many at most: a profile must stay cheap beside the layer it measures
CHUNK = 1 << 24  # numbers that one chunk's outputs by key tile may have: 64 MB


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadProfile:
    """Measurements of one layer, float32, averaged over batch and sampled queries.

    recall_*: mass kept (H, K), in 0 ... 1, of the oracle's choice of tiles and of the predictor's. error_*: relative
    output error of the same choices by constant of the periphery (H, P, K).
    """

    recall_oracle: Tensor
    recall_predicted: Tensor
    error_oracle: Tensor
    error_predicted: Tensor

    def cpu(self) -> "HeadProfile":
        return _map(lambda x: x.cpu(), self)

    def flat(self) -> Tensor:
        """float32 (H, 2 + 2 P, K): all of it."""
        return torch.cat([x.unsqueeze(1) if x.dim() == 2 else x for x in vars(self).values()], 1)

    @classmethod
    def from_flat(cls, flat: Tensor) -> "HeadProfile":
        oracle, predicted, *errors = flat.split([1, 1, *[flat.shape[1] // 2 - 1] * 2], 1)
        return cls(
            recall_oracle=oracle.squeeze(1), recall_predicted=predicted.squeeze(1),
            error_oracle=errors[0], error_predicted=errors[1],
        )  # fmt: skip


@torch.no_grad()
def profile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: VideoGrid,
    *,
    predictor: Predictor | None,
    budgets: Sequence[float] = BUDGETS,
    constants: Sequence[float] = CONSTANTS,
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
    options = {"budgets": budgets, "constants": constants, "rows": rows, "generator": generator, "scale": scale}
    return measure(Sight(q, k, v), grid, predictor, **options)


@torch.no_grad()
def measure(
    sight: Sight,
    grid: VideoGrid,
    predictor: Predictor | None,
    *,
    budgets: Sequence[float] = BUDGETS,
    constants: Sequence[float] = CONSTANTS,
    rows: int = 4,
    generator: torch.Generator,
    scale: float | None = None,
) -> HeadProfile:
    """As `profile`, from whatever gives the sight; it must have v."""
    scale = float(sight.q.shape[-1] ** -0.5 if scale is None else scale)
    tiles = grid.tiles()
    drawn = torch.randperm(tiles, generator=generator, device=generator.device)[: min(rows, max(1, tiles // SHARE))]
    together = max(1, CHUNK // (sight.q.shape[0] * sight.heads * TILE * tiles))
    with no_autocast(sight.q.device):
        parts = [_sums(sight, grid, predictor, budgets, constants, part, scale) for part in drawn.split(together)]
    recall, squared, norm, count = (torch.stack(x).sum(0) for x in zip(*parts, strict=True))
    recall = (recall / count).clamp(max=1)
    error = (squared / norm.clamp_min(torch.finfo(norm.dtype).tiny)).sqrt()
    oracle, chosen = slice(len(budgets)), slice(len(budgets), None)
    return HeadProfile(
        recall_oracle=recall[:, oracle], recall_predicted=recall[:, chosen],
        error_oracle=error[..., oracle], error_predicted=error[..., chosen],
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class SparsityProfile:
    """Running profiles of all layers of a model, a value: `layers` has a HeadProfile for each, None until measured.

    `steps`: the training step of each layer's last measurement, -1 before any.
    """

    budgets: tuple[float, ...]
    constants: tuple[float, ...]
    layers: tuple[HeadProfile | None, ...]
    steps: tuple[int, ...]

    @classmethod
    def empty(
        cls, layers: int, budgets: Sequence[float] = BUDGETS, constants: Sequence[float] = CONSTANTS
    ) -> "SparsityProfile":
        return cls(tuple(budgets), tuple(constants), (None,) * layers, (-1,) * layers)

    def updated(self, layer: int, head_profile: HeadProfile, step: int, decay: float = 0.9) -> "SparsityProfile":
        """With a new measurement of one layer: old * decay + new * (1 - decay), on the CPU; the first counts whole."""
        new, old = head_profile.cpu(), self.layers[layer]
        if new.error_predicted.shape[1:] != (len(self.constants), len(self.budgets)):
            raise ValueError(
                f"the profile has constants and budgets {tuple(new.error_predicted.shape[1:])}, this one "
                f"{self.constants} and {self.budgets}"
            )
        if old is not None:
            new = _map(lambda a, b: a * decay + b * (1 - decay), old, new)
        layers = (*self.layers[:layer], new, *self.layers[layer + 1 :])
        return replace(self, layers=layers, steps=(*self.steps[:layer], step, *self.steps[layer + 1 :]))

    def stacked(self) -> HeadProfile:
        """All layers in one: float32 (L, H, K), (L, H, P, K). Raises ValueError while a layer has not been measured."""
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
        about = {"budgets": list(self.budgets), "constants": plain(self.constants)}
        return {**about, "steps": list(self.steps), "layers": layers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SparsityProfile":
        layers = tuple(
            layer and HeadProfile(**{name: torch.tensor(rows, dtype=torch.float32) for name, rows in layer.items()})
            for layer in data["layers"]
        )
        return cls(tuple(data["budgets"]), unplain(data["constants"]), layers, tuple(data["steps"]))


def plain(constants: Sequence[float]) -> list[float | None]:
    """Constants of a periphery as JSON may hold them: None where it is dropped."""
    return [None if x == DROP else x for x in constants]


def unplain(constants: Sequence[float | None]) -> tuple[float, ...]:
    """Undoes `plain`."""
    return tuple(DROP if x is None else x for x in constants)


def _sums(
    sight: Sight,
    grid: VideoGrid,
    predictor: Predictor | None,
    budgets: Sequence[float],
    constants: Sequence[float],
    drawn: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """Over batch and existing queries of the query tiles `drawn` (R,): mass kept (H, C K), squared errors (H, P, C K),
    squared norm of the exact output (H, 1, 1), and the number of queries."""
    queries, valid = sight.queries(drawn)
    look = _Look(sight, queries * scale, valid, predictor)
    near, far, predicted = look.weights()
    true = torch.einsum("bhrtn,rt->bhrn", near, valid / valid.sum(-1, keepdim=True))
    forced = _forced(grid, drawn, sight.q.device)
    kept = torch.cat([_kept(mass, forced, budgets) for mass in (true, predicted)], -2)  # (B, H, R, C K, N)
    out, totals, sums = look.outputs(kept, near, far)
    there = valid[:, None].float()
    squared = [(x * there).sum((0, 2, 4)) for x in _squared_errors(out.unsqueeze(3), totals, sums, constants)]
    norm = (out.square().sum(-1) * valid).sum((0, 2, 3))[:, None, None]
    return (totals[0] * there).sum((0, 2, 4)), torch.stack(squared, 1), norm, valid.sum() * near.shape[0]


def _squared_errors(out: Tensor, totals: list[Tensor], sums: list[Tensor], constants: Sequence[float]) -> list[Tensor]:
    """Of each constant (..., T), of kept and pooled tiles' total weights (..., T) and weighted values (..., T, D)
    against the exact output: |(near + w far) / (total + w far's) - out|^2 with w = e^constant, from three products."""
    near, far = (value - total.unsqueeze(-1) * out for value, total in zip(sums, totals, strict=True))
    square, cross, far_square = (near * near).sum(-1), (near * far).sum(-1), (far * far).sum(-1)
    found = []
    for constant in constants:
        weight = math.exp(constant)
        total = (totals[0] + weight * totals[1]).clamp_min(torch.finfo(out.dtype).tiny)
        found.append((square + weight * (2 * cross + weight * far_square)).clamp_min(0) / total / total)
    return found


class _Look:
    """Sampled queries (B, H, R, T, D), scaled, of which `valid` (R, T) exist, against all keys, chunk by chunk."""

    def __init__(self, sight: Sight, queries: Tensor, valid: Tensor, predictor: Predictor | None):
        assert sight.v is not None
        self.sight, self.rows = sight, queries.shape[2]
        self.queries = queries.flatten(2, 3)
        existing = valid.unflatten(-1, (-1, OCTANT)).sum(-1)  # tokens in each octant
        octants = queries.unflatten(3, (-1, OCTANT)).sum(4) / existing.clamp(min=1)[:, :, None]
        self.octants = project(octants.flatten(2, 3), None if predictor is None else predictor.a, queries.shape[1])
        exist = (existing > 0).float()
        self.of_octants = exist / exist.sum(-1, keepdim=True)
        self.b = None if predictor is None else predictor.b
        numbers = self.queries.numel()
        self.step = TILE * max(1, CHUNK // numbers)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """What every key tile weighs: exactly and by its mean (B, H, R, T, N), in one unit, and as predicted
        (B, H, R, N)."""
        tiles = -(-self.sight.k.shape[1] // TILE)
        sides = (self.queries, self.queries, self.octants)
        found = [x.new_empty(*x.shape[:3], tiles) for x in sides]  # filled in: pieces would fragment the memory
        for first in range(0, tiles, self.step // TILE):
            part = slice(first * TILE, first * TILE + self.step)
            for whole, piece in zip(found, self._weigh(self.sight.k[:, part]), strict=True):
                whole[..., first : first + self.step // TILE] = piece
        near, far, guess = (self.sight.join(x) for x in found)
        lse = near.logsumexp(-1, keepdim=True)
        near, far = (x.sub_(lse).exp_().unflatten(2, (self.rows, TILE)) for x in (near, far))
        guess = guess.softmax(-1).unflatten(2, self.of_octants.shape)
        return near, far, torch.einsum("bhron,ro->bhrn", guess, self.of_octants)

    def _weigh(self, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-sum-exps by key tile of a chunk (B, s, G, D) of keys."""
        heads, tokens = self.sight.heads, k.shape[1]
        octants = project(octant_means(k), self.b, heads)
        guess = octant_sizes(tokens, k.device).log() + self.octants @ octants.mT
        keys = _by_head(k, heads)
        far = self.queries @ tile_means(keys, TILE).mT + tile_sizes(tokens, TILE, k.device).float().log()
        return _lse_by_tile(self.queries @ keys.mT, TILE), far, _lse_by_tile(guess, TILE // OCTANT)

    def outputs(self, kept: Tensor, near: Tensor, far: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Exact outputs (B, H, R, T, D), and of every choice of tiles `kept` (B, H, R, C K, N) the total weight and the
        weighted sum of values, (B, H, R, C K, T) and (..., D): of kept tiles, and of the means of the others."""
        own = self.sight.tiles(kept.shape[-1])
        kept_here, far_here = kept[..., own], far[..., own]
        lse = near.flatten(2, 3)[..., own]
        found: Tensor | None = None
        for first in range(0, self.sight.k.shape[1], self.step):
            tiles = slice(first // TILE, (first + self.step) // TILE)
            part = self._add(first, kept_here[..., tiles], lse[..., tiles], far_here[..., tiles])
            found = part if found is None else found.add_(part)
        assert found is not None
        found = self.sight.total(found)
        exact, kept_sum, far_sum = found.split([1, kept.shape[-2], kept.shape[-2]], dim=3)
        return exact.squeeze(3), [kept @ near.mT, (1 - kept) @ far.mT], [kept_sum, far_sum]

    def _add(self, first: int, kept: Tensor, mass: Tensor, far: Tensor) -> Tensor:
        """(B, H, R, 1 + 2 C K, T, D): sums over one chunk of tiles: all of them, kept ones, pooled others."""
        heads = self.sight.heads
        assert self.sight.v is not None
        keys, values = (_by_head(x[:, first : first + self.step], heads) for x in (self.sight.k, self.sight.v))
        spare = -keys.shape[2] % TILE
        logits = pad(self.queries @ keys.mT, (0, spare), value=-torch.inf).unflatten(-1, (-1, TILE))
        # Within a tile by softmax, times the tile's mass: nothing of the size of S but the mass is kept between passes.
        weights = logits.softmax(-1).mul_(mass.unsqueeze(-1)).transpose(2, 3)  # (B, H, n, R T, 64)
        part = weights @ pad(values, (0, 0, 0, spare)).unflatten(2, (-1, TILE))
        part = part.unflatten(3, (self.rows, TILE)).movedim(3, 2)  # (B, H, R, n, T, D)
        every = torch.cat([torch.ones_like(kept[..., :1, :]), kept], -2)
        near = (every @ part.flatten(4)).unflatten(-1, part.shape[-2:])
        away = (1 - kept).unsqueeze(-2) * far.unsqueeze(3)  # (B, H, R, C K, T, n)
        return torch.cat([near, away @ tile_means(values, TILE)[:, :, None, None]], 3)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """float32 (B, H, s, D) of keys or values (B, s, G, D)."""
    return x.float().transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


def _lse_by_tile(logits: Tensor, length: int) -> Tensor:
    spare = -logits.shape[-1] % length
    return pad(logits, (0, spare), value=-torch.inf).unflatten(-1, (-1, length)).logsumexp(-1)


def _forced(grid: VideoGrid, drawn: Tensor, device: torch.device) -> Tensor:
    """bool (R, N): the tiles that sampled query tiles keep in any case."""
    rows = []
    for row in drawn.tolist():
        queries = min(TILE, grid.tokens - row * TILE)
        rows.append(forced_tiles(grid.tokens, grid.video, TILE, TILE, device, first=row * TILE, queries=queries))
    return torch.cat(rows)


def _kept(mass: Tensor, forced: Tensor, budgets: Sequence[float]) -> Tensor:
    """float32 (B, H, R, K, N), 1 where a tile is kept at each budget, of mass (B, H, R, N): as kernels.select.keep."""
    count = mass.shape[-1]
    order = torch.argsort(mass.masked_fill(forced, torch.inf), dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(count, device=mass.device).expand_as(order))
    wanted = (torch.tensor(list(budgets), device=mass.device) * count + 0.5).floor().clamp(1, count)
    wanted = torch.maximum(wanted, forced.sum(-1, keepdim=True))  # (R, K)
    return (rank.unsqueeze(-2) < wanted.unsqueeze(-1)).float()


def _map(function: Any, *profiles: Any) -> HeadProfile:
    """A HeadProfile of `function` applied to the same tensor of each of `profiles`."""
    columns = {field.name: [getattr(x, field.name) for x in profiles] for field in fields(HeadProfile)}
    return HeadProfile(**{name: function(*tensors) for name, tensors in columns.items()})
