"""From queries and keys to the `Selection` that attention computes.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads (G divides H), D head dim, R query tiles,
N key tiles.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foveate.attention import choose_backend, no_autocast
from foveate.kernels.bits import WORD
from foveate.kernels.select import keep
from foveate.sparsity.predictor import Predictor
from foveate.tiles import TILE, Selection, VideoGrid

PerHead = float | Sequence[float] | Tensor


@torch.no_grad()
def select(
    q: Tensor,
    k: Tensor,
    grid: VideoGrid,
    *,
    predictor: Predictor | None = None,
    budget: PerHead | None = None,
    mass: PerHead | None = None,
    query_tile: int = 64,
    kv_tile: int = TILE,
    scale: float | None = None,
) -> Selection:
    """The key tiles worth attending to, for every head and query tile of q (B, S, H, D) and k (B, S, G, D).

    Tiles are taken by predicted mass: octant means projected by `predictor`, at full rank without
    one. Exactly one of, one value or one per head, in (0, 1] (values in tensors are trusted, so nothing waits for the
    device):
    budget: the fraction of key tiles to keep, rounded to the nearest count, at least one.
    mass: keep the shortest prefix that holds this much of the predicted mass.
    Own tile and text tiles are always kept, inside the budget; a query tile with text keeps all. scale: of the
    logits, 1 / sqrt(D) by default. Not differentiable. Raises ValueError for arguments that do not fit.
    """
    _check(q, k, grid, predictor)
    if (budget is None) == (mass is None):
        raise ValueError("pass exactly one of budget and mass")
    heads, dim = q.shape[2:]
    a, b = (None, None) if predictor is None else (predictor.a, predictor.b)
    budget = None if budget is None else per_head("budget", budget, heads, q.device)
    mass = None if mass is None else per_head("mass", mass, heads, q.device)
    scale = dim**-0.5 if scale is None else scale
    with no_autocast(q.device):
        words = _predict_words(q, k, a, b, budget, mass, grid.video, scale, query_tile, kv_tile)
    return Selection(words, grid, query_tile, kv_tile)


@torch.library.custom_op("foveate::select", mutates_args=())
def _predict_words(
    q: Tensor, k: Tensor, a: Tensor | None, b: Tensor | None, budget: Tensor | None, mass: Tensor | None, video: int,
    scale: float, query_tile: int, kv_tile: int,
) -> Tensor:  # fmt: skip
    """The bitmap as one operator, by the fused kernel where `auto` takes the triton backend."""
    if choose_backend(q.device.type)[0] == "triton":
        from foveate.kernels.triton_select import predict_words
    else:
        from foveate.kernels.select import predict_words
    dials = {"video": video, "scale": scale, "query_tile": query_tile, "kv_tile": kv_tile}
    return predict_words(q, k, a, b, **dials, budget=budget, mass_target=mass)


@_predict_words.register_fake
def _(q, k, a, b, budget, mass, video, scale, query_tile, kv_tile):
    rows, columns = (-(-q.shape[1] // tile) for tile in (query_tile, kv_tile))
    shape = (q.shape[0], q.shape[2], rows, -(-columns // WORD))
    return q.new_empty(shape, dtype=torch.int32)


def select_random(
    grid: VideoGrid,
    batch: int,
    heads: int,
    *,
    budget: PerHead,
    generator: torch.Generator,
    device: torch.device | str,
    query_tile: int = 64,
    kv_tile: int = TILE,
) -> Selection:
    """Uniformly random key tiles, as many as `select` keeps of a video: the control that shows what choosing is worth.

    No tile is sure of its place, neither the own one nor text. `generator` must live on `device`.
    """
    rows, columns = grid.tiles(query_tile), grid.tiles(kv_tile)
    lots = torch.rand(batch, heads, rows, columns, generator=generator, device=device)
    forced = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    kept = keep(lots, forced=forced, budget=per_head("budget", budget, heads, lots.device))
    return Selection(kept, grid, query_tile, kv_tile)


def per_head(name: str, value: PerHead, heads: int, device: torch.device) -> Tensor:
    """float32 (H,) of one value or one per head. ValueError for other counts and for Python values outside (0, 1]."""
    if isinstance(value, Tensor):
        tensor = value
    else:
        listed = list(value) if isinstance(value, Sequence) else [value] * heads
        if not all(0 < x <= 1 for x in listed):
            raise ValueError(f"{name} must be greater than 0 and at most 1, got {value}")
        tensor = torch.tensor(listed)
    if tensor.shape not in ((), (heads,)):
        raise ValueError(f"{name} must be one value or one for each of {heads} heads, got {tuple(tensor.shape)}")
    return tensor.to(device, torch.float32, non_blocking=True).expand(heads)


def _check(q: Tensor, k: Tensor, grid: VideoGrid, predictor: Predictor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q must be (B, S, H, D) and k (B, S, G, D), got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[1] != grid.tokens:
        raise ValueError(f"q and k have {q.shape[1]} tokens, {grid} has {grid.tokens}")
    heads, groups = q.shape[2], k.shape[2]
    if groups == 0 or heads % groups:
        raise ValueError(f"the {heads} query heads do not divide into {groups} key/value heads")
    if predictor is not None and predictor.a.shape[:2] != (heads, q.shape[3]):
        raise ValueError(
            f"the predictor is for heads, head dim {tuple(predictor.a.shape[:2])}, q has {(heads, q.shape[3])}"
        )
