"""Sequence-wise context parallelism: queries stay, the low-rank octant keys of all ranks are gathered first, each rank
chooses its tiles and fetches those it lacks, attending to its own meanwhile. Dense layers go round a ring (`ring.py`).

The two parts, own tiles and fetched tiles, are states `(out, lse)` over disjoint keys and merge exactly, own first, in
float32. The backward takes the merged pair (attention.py) and returns the gradients of fetched tiles to their owners.

Shapes: B batch, s tokens of this rank (of S in the group, tile order), H heads, G key/value heads, D head dim,
r rank of the predictor, R query tiles of this rank, N key tiles of the group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foveate.attention import AttnState, choose_backend, merge, no_autocast
from foveate.kernels.bits import pack, unpack
from foveate.kernels.select import forced_tiles, keep, octant_means, project, tile_mass
from foveate.parallel.buffers import Buffers
from foveate.parallel.comm import Group, Shards
from foveate.parallel.fetch import Fetch, Means, Place, Remote, return_means, spread_means, tiles_of
from foveate.tiles import OCTANT, TILE

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Kernel:
    """One backend's attention over a part of the keys, plain functions: nothing here is seen by autograd.

    Parts are float32 until they are merged. On the CPU, where kernels compute in float32 anyway, 16-bit inputs are
    widened first. On CUDA the triton kernels return what they summed; dense ones and flash-attn-4 round a part's
    results, once more than those of a whole, which makes the error of 16-bit inputs 1.27 times as large.
    """

    scale: float
    backend: str = "auto"
    query_tile: int = TILE
    kv_tile: int = TILE
    deterministic: bool = False

    def widen(self, x: Tensor) -> Tensor:
        return x if x.is_cuda else x.float()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, words: Tensor | None, pooled: Tensor | None, whole: bool = False
    ) -> Pair:
        """out (B, s, H, D), float32, and lse (B, H, s) over the tiles of `words` (B, H, R, W), None for all.

        whole: nothing will be merged, so out need not be float32.
        """
        q, k, v = (self.widen(x) for x in (q, k, v))
        tiles = self.query_tile, self.kv_tile
        options = self.backend, *tiles, self.scale, self.deterministic, not whole
        return torch.ops.foveate.attend(q, k, v, words, pooled, *options)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Pair,
        words: Tensor | None,
        pooled: Tensor | None,
        whole: bool = False,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this part, float32, if not the whole. state: the merged out and lse."""
        dout, q, k, v, out = (self.widen(x) for x in (dout, q, k, v, state[0]))
        tiles = self.query_tile, self.kv_tile
        return torch.ops.foveate.attend_backward(
            dout, dlse, q, k, v, out, state[1], words, pooled, self.backend, *tiles, self.scale, not whole
        )


@dataclass(frozen=True)
class Job:
    """What one sparse call needs besides tensors. pooled: bool (H,) of heads with a pooled periphery, or None.

    note: told how many tiles were fetched, and how many there are elsewhere.
    """

    group: Group
    shards: Shards
    kernel: Kernel
    pooled: Tensor | None
    where: str
    buffers: Buffers
    note: Callable[[int, int], None] = lambda got, others: None

    @property
    def place(self) -> Place:
        return Place(self.shards, self.group.rank, self.kernel.kv_tile)


def attend_sequence(q: Tensor, k: Tensor, v: Tensor, words: Tensor, job: Job) -> AttnState:
    """Sparse attention of this rank's queries q (B, s, H, D) over the kept tiles of all ranks; differentiable.

    k, v: (B, s, G, D) of this rank. words: int32 (B, H, R, W), the tiles of the whole sequence its query tiles keep.
    """
    return AttnState(*SequenceAttention.apply(q, k, v, words, job))  # type: ignore[misc]


class SequenceAttention(torch.autograd.Function):
    """`attend_sequence`: local tiles while selected ones travel, and back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, words: Tensor, job: Job) -> Pair:
        state, local, fetch, remote = sequence_forward(q, k, v, words, job)
        # Tensors through save_for_backward alone: checkpointing throws them away and makes them again.
        ctx.job, ctx.fetch = job, fetch
        far = (None, None, None) if remote is None else (remote[0].tiles, remote[0].means, remote[1])
        ctx.save_for_backward(q, k, v, *state, local, *far)
        ctx.set_materialize_grads(False)
        return state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        q, k, v, out, lse, local, tiles, means, words_far = ctx.saved_tensors
        remote = None
        if tiles is not None:
            shape = (k.shape[0], k.shape[2], k.shape[3])
            remote = Remote(tiles, ctx.fetch.got, means, ctx.job.place, shape), words_far
        dout, dlse = torch.zeros_like(out) if grads[0] is None else grads[0], grads[1]
        dq, dk, dv = sequence_backward(dout, q, k, v, (out, lse), local, ctx.fetch, remote, ctx.job, dlse)
        return dq, dk, dv, None, None


def sequence_forward(q: Tensor, k: Tensor, v: Tensor, words: Tensor, job: Job):
    """The merged (out in q's dtype, lse), words of own tiles, the exchange, and (the fetched keys, their words)."""
    place, kernel = job.place, job.kernel
    mine, others = place.split(unpack(words, place.tiles))
    local = pack(mine)
    if job.group.size == 1:
        out, lse = kernel.forward(q, k, v, local, job.pooled, whole=True)
        return (out.to(q.dtype), lse), local, None, None
    fetch = Fetch(unpack(words, place.tiles), k.shape[2], place, job.group, job.where)
    means = None if job.pooled is None else Means(k, v, place, job.group, job.where)
    if q.is_cuda:  # launches return at once: the sizes arrive while own tiles are attended
        near = kernel.forward(q, k, v, local, job.pooled)
        arriving = fetch.start(k, v)
    else:
        arriving = fetch.start(k, v)
        near = kernel.forward(q, k, v, local, job.pooled)
    shape = (k.shape[0], k.shape[2], k.shape[3])
    remote = Remote(arriving.wait(), fetch.got, None if means is None else means.wait(), place, shape)
    words_far = pack(others)
    job.note(sum(fetch.counts[1]), k.shape[0] * k.shape[2] * place.others)
    k_far, v_far = remote.expand(kernel.widen(k), job.buffers)
    far = kernel.forward(q, k_far, v_far, words_far, job.pooled)
    merged = merge(*(AttnState(*part) for part in (near, far)))
    return (merged.out.to(q.dtype), merged.lse), local, fetch, (remote, words_far)


def sequence_backward(
    dout: Tensor, q, k, v, state: Pair, local: Tensor, fetch: Fetch | None, remote, job: Job, dlse: Tensor | None = None
):
    """dq, dk, dv in the inputs' dtypes. Fetched tiles first, so that their gradients travel while own ones are made."""
    kernel, place = job.kernel, job.place
    dout = dout.contiguous()
    if fetch is None:
        grads = kernel.backward(dout, q, k, v, state, local, job.pooled, whole=True, dlse=dlse)
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
    far, words_far = remote
    k_far, v_far = far.expand(kernel.widen(k), job.buffers)
    dq_far, dk_far, dv_far = kernel.backward(dout, q, k_far, v_far, state, words_far, job.pooled, dlse=dlse)
    tiles, means = far.collect(dk_far, dv_far)
    returning = fetch.start_back(tiles)
    returning_means = None if means is None else return_means(means, place, job.group, job.where)
    dq, dk, dv = kernel.backward(dout, q, k, v, state, local, job.pooled, dlse=dlse)
    dk, dv = (tiles_of(x, place.tile).clone() for x in (dk, dv))
    fetch.add_back(returning.wait(), dk, dv)
    if returning_means is not None:
        for total, part in zip((dk, dv), returning_means(), strict=True):
            total += spread_means(part, q.shape[1], place.tile)
    dq = dq + dq_far
    dk, dv = (x.flatten(1, 2)[:, : q.shape[1]] for x in (dk, dv))
    return tuple(grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v), strict=True))


@dataclass(frozen=True)
class Choice:
    """How tiles are chosen: matrices (H, D, r) of this rank's heads or None (full rank), budgets float32 (H,).

    video: tokens of the whole sequence that are video; the rest is text. fetch_cap: see `select_sequence`.
    """

    a: Tensor | None
    b: Tensor | None
    budget: Tensor
    video: int
    query_tile: int = TILE
    fetch_cap: float | None = None


@torch.no_grad()
def select_sequence(
    q: Tensor, k: Tensor, choice: Choice, shards: Shards, group: Group, where: str, kv_tile: int = TILE
) -> Tensor:
    """Words int32 (B, H, R, W): what this rank's q (B, s, H, D) keeps of all ranks' keys, as `select` would.

    k: (B, s, G, D) of this rank. Only octant means in rank r travel. With a fetch cap at most that fraction of the
    others' tiles stays in reach of a key/value head, those that the kept predicted mass of all its queries is largest
    in; a query tile whose choice is out of reach takes the next best in reach. That is no longer the exact selection.
    """
    heads, groups = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5
    with no_autocast(q.device):
        own = project(octant_means(k), choice.b, heads).movedim(2, 0).contiguous()
        octants = [-(-size // OCTANT) for size in shards.sizes]
        arriving = group.gather(own, octants, f"octant keys of {where}")
        q_oct = project(octant_means(q), choice.a, heads)
        k_oct = torch.cat(arriving.wait()).movedim(0, 2).contiguous()
    tokens, first = shards.bounds[-1], shards.bounds[group.rank]
    tiles = {"query_tile": choice.query_tile, "kv_tile": kv_tile}
    options = {"tokens": tokens, "scale": scale, **tiles}
    if choice.fetch_cap is not None and group.size > 1:
        mass = tile_mass(q_oct, k_oct, **options)
        rows = {"first": first, "queries": q.shape[1]}
        forced = forced_tiles(tokens, choice.video, choice.query_tile, kv_tile, q.device, **rows)
        return _capped(mass, forced, choice, groups, Place(shards, group.rank, kv_tile))
    if choose_backend(q.device.type)[0] == "triton":
        from foveate.kernels.triton_select import select_octants
    else:
        from foveate.kernels.select import select_octants
    options |= {"video": choice.video, "first": first, "queries": q.shape[1]}
    return select_octants(q_oct, k_oct, **options, budget=choice.budget)


def _capped(mass: Tensor, forced: Tensor, choice: Choice, groups: int, place: Place) -> Tensor:
    """Words kept of predicted mass (B, H, R, N) when only a part of the others' tiles may be fetched."""
    assert choice.fetch_cap is not None
    first, stop = place.own
    kept = unpack(keep(mass, forced=forced, budget=choice.budget), place.tiles)
    worth = (mass * kept).sum(2).unflatten(1, (groups, -1)).sum(2)  # (B, G, N)
    text = forced.all(0)  # every query wants text: it is fetched in any case
    worth = worth.masked_fill(text, torch.inf)
    worth[..., first:stop] = -1.0
    count = min(place.others, max(1, round(choice.fetch_cap * place.others)))
    best = worth.topk(count, -1).indices
    near = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, best, True)
    near[..., first:stop] = True
    reach = near.repeat_interleave(mass.shape[1] // groups, dim=1).unsqueeze(2)
    again = unpack(keep(mass.masked_fill(~reach, -1.0), forced=forced, budget=choice.budget), place.tiles)
    return pack(again & reach)
