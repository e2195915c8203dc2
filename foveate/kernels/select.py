"""Which key/value tiles each query tile attends to, in plain torch for any device: the oracle and the CPU path.

Queries and keys are stood for by the means of their octants (8 consecutive tokens), projected to rank r. The predicted
mass of a key tile is a softmax over all key octants, summed over the tile's octants and averaged over the query tile's
octants, so that a tile wanted badly by one octant is not averaged away. `triton_select` is the same, fused.

Shapes: B batch, S tokens, H heads, G key/value heads, D head dim, r rank, O octants (Q of them queries, when queries
are a part of the sequence), R query tiles, N key tiles, W = ceil(N / 32) words.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.kernels.bits import pack

OCTANT = 8
REACHED = 1 - 1e-5  # of a mass target counts as all of it: float32 sums of exact shares may miss by a rounding
CHUNK = 1 << 22  # octant scores held at once: 16 MB in float32


def octant_means(x: Tensor) -> Tensor:
    """float32 (B, H, O, D): the mean of each 8 tokens of x (B, S, H, D); the last octant over the tokens it has."""
    tokens = x.shape[1]
    sums = pad(x, (0, 0, 0, 0, 0, -tokens % OCTANT)).unflatten(1, (-1, OCTANT)).sum(2, dtype=torch.float32)
    return (sums / octant_sizes(tokens, x.device)[:, None, None]).transpose(1, 2)


def octant_sizes(tokens: int, device: torch.device) -> Tensor:
    """float32 (O,): tokens in each octant; all 8 but the last."""
    starts = torch.arange(0, tokens, OCTANT, device=device)
    return (tokens - starts).clamp(max=OCTANT).float()


def project(means: Tensor, matrix: Tensor | None, heads: int) -> Tensor:
    """Octant means (B, G, O, D) of each of H = `heads` heads, times its own matrix (H, D, r); None: unchanged."""
    means = means.repeat_interleave(heads // means.shape[1], dim=1)
    return means if matrix is None else means @ matrix.to(means.dtype)


def tile_mass(q_oct: Tensor, k_oct: Tensor, *, tokens: int, scale: float, query_tile: int, kv_tile: int = 64) -> Tensor:
    """Predicted attention mass (B, H, R, N) of every key tile, each row summing to 1.

    q_oct: (B, H, Q, r); k_oct: (B, H, O, r) of a sequence of `tokens` keys. An octant of n tokens weighs n.
    """
    batch, heads, octants, _ = q_oct.shape
    rows, columns = -(-octants * OCTANT // query_tile), -(-tokens // kv_tile)
    bias = octant_sizes(tokens, k_oct.device).log()
    mass = q_oct.new_empty(batch, heads, rows, columns)
    per_tile = query_tile // OCTANT
    step = max(1, CHUNK // (k_oct.shape[2] * per_tile))
    for b in range(batch):
        for h in range(heads):
            keys = k_oct[b, h].T * scale
            for first in range(0, rows, step):
                queries = q_oct[b, h, first * per_tile : (first + step) * per_tile]
                shares = torch.addmm(bias.to(keys.dtype), queries, keys).softmax(-1)
                by_tile = _sum_runs(shares.T, kv_tile // OCTANT).T
                mass[b, h, first : first + step] = _mean_runs(by_tile, per_tile)
    return mass


def _sum_runs(x: Tensor, length: int) -> Tensor:
    """Sums over consecutive runs of rows of x (L, C) -> (ceil(L / length), C)."""
    return pad(x, (0, 0, 0, -x.shape[0] % length)).unflatten(0, (-1, length)).sum(1)


def _mean_runs(x: Tensor, length: int) -> Tensor:
    starts = torch.arange(0, x.shape[0], length, device=x.device)
    return _sum_runs(x, length) / (x.shape[0] - starts).clamp(max=length)[:, None]


def forced_tiles(
    tokens: int,
    video: int,
    query_tile: int,
    kv_tile: int,
    device: torch.device,
    *,
    first: int = 0,
    queries: int | None = None,
) -> Tensor:
    """bool (R, N): tiles that are always kept, for `video` video tokens followed by text up to `tokens`.

    The key tiles that overlap the query tile, every key tile with a text token, and all of a query tile with any text.
    Rows are those of `queries` queries (all by default) that begin at token `first`, a multiple of `query_tile`.
    """
    stop = tokens if queries is None else first + queries
    rows = torch.arange(first, stop, query_tile, device=device)
    columns = torch.arange(0, tokens, kv_tile, device=device)
    own = (columns < rows[:, None] + query_tile) & (columns + kv_tile > rows[:, None])
    if video == tokens:
        return own
    return own | (columns + kv_tile > video) | ((rows + query_tile).clamp(max=stop) > video)[:, None]


def keep(mass: Tensor, *, forced: Tensor, budget: Tensor | None = None, mass_target: Tensor | None = None) -> Tensor:
    """Bitmap words int32 (B, H, R, W) of the tiles to keep, of predicted mass (B, H, R, N). Deterministic.

    forced: bool (R, N), tiles that always stay and count inside the budget; the rest are taken by mass, largest first,
    lower index first among equals. Exactly one of, float32 (H,):
    budget: fraction of the N tiles to keep, rounded half up, at least one tile.
    mass_target: keep the shortest prefix whose summed mass reaches it (tiles of no mass at all cannot help, and go).
    """
    value = exactly_one(budget, mass_target)
    count = mass.shape[-1]
    order = torch.argsort(mass.masked_fill(forced, torch.inf), dim=-1, descending=True, stable=True)
    if budget is not None:
        wanted = (value.float() * count + 0.5).floor().long()[:, None].expand(mass.shape[:3])
    else:
        sums = mass.gather(-1, order).cumsum(-1, dtype=torch.float64)
        wanted = 1 + (sums < REACHED * value.double()[:, None, None]).sum(-1)
        wanted = torch.minimum(wanted, (forced | (mass > 0)).sum(-1))
    wanted = torch.maximum(wanted, forced.sum(-1)).clamp(1, count)
    kept = torch.zeros_like(mass, dtype=torch.bool)
    kept.scatter_(-1, order, torch.arange(count, device=mass.device) < wanted.unsqueeze(-1))
    return pack(kept)


def select_octants(
    q_oct: Tensor,
    k_oct: Tensor,
    *,
    tokens: int,
    video: int | None = None,
    first: int = 0,
    queries: int | None = None,
    scale: float,
    query_tile: int = 64,
    kv_tile: int = 64,
    budget: Tensor | None = None,
    mass_target: Tensor | None = None,
) -> Tensor:
    """Words int32 (B, H, R, W) from projected octants: q_oct (B, H, Q, r), k_oct (B, H, O, r).

    tokens: keys in the whole sequence, of which the first `video` (None: all) are video and the rest text.
    The queries may be a part of the sequence: `queries` of them (None: all) from token `first`, a multiple of a tile.
    budget, mass_target: see `keep`. scale: of the logits.
    """
    exactly_one(budget, mass_target)
    mass = tile_mass(q_oct, k_oct, tokens=tokens, scale=scale, query_tile=query_tile, kv_tile=kv_tile)
    video = tokens if video is None else video
    forced = forced_tiles(tokens, video, query_tile, kv_tile, mass.device, first=first, queries=queries)
    return keep(mass, forced=forced, budget=budget, mass_target=mass_target)


def predict_words(
    q: Tensor,
    k: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    video: int | None = None,
    scale: float,
    query_tile: int = 64,
    kv_tile: int = 64,
    budget: Tensor | None = None,
    mass_target: Tensor | None = None,
) -> Tensor:
    """The whole chain: words int32 (B, H, R, W) of the tiles that q (B, S, H, D) keeps of k (B, S, G, D).

    a, b: the predictor's matrices (H, D, r) for queries and keys; None: octant means at full rank. Queries and keys
    are the same S tokens, the first `video` (None: all) of them video, the rest text. See `select_octants`.
    """
    heads = q.shape[2]
    return select_octants(
        project(octant_means(q), a, heads),
        project(octant_means(k), b, heads),
        tokens=k.shape[1],
        video=video,
        scale=scale,
        query_tile=query_tile,
        kv_tile=kv_tile,
        budget=budget,
        mass_target=mass_target,
    )


def exactly_one(budget: Tensor | None, mass_target: Tensor | None) -> Tensor:
    """The one of the two rules that is given; ValueError where both are, or neither."""
    if budget is not None and mass_target is None:
        return budget
    if mass_target is not None and budget is None:
        return mass_target
    raise ValueError("pass exactly one of budget and mass_target, float32 tensors of one value a head")
