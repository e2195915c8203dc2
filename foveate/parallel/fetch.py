"""The exchange of selected tiles: every rank gets the key/value tiles that its queries keep, and no others.

Ranks tell each other which tiles they want (one bit a tile and head), owners send those, and gradients of fetched tiles
travel back the same way. Nothing is cut off: exchanges are as long as what was asked for. The lengths are copied to the
host while local tiles are attended.

Shapes: B batch, s tokens of this rank, G key/value heads, D head dim, P ranks of the group, N key tiles of T tokens, of
which n are this rank's and m the others', L tiles received.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.kernels.bits import pack, unpack
from foveate.kernels.reference import tile_sizes
from foveate.parallel.buffers import Buffers, HostNumbers
from foveate.parallel.comm import Group, Shards


@dataclass(frozen=True)
class Place:
    """Where this rank's tiles lie among those of its group."""

    shards: Shards
    rank: int
    tile: int

    @cached_property
    def bounds(self) -> list[int]:
        """Tile i belongs to rank r where bounds[r] <= i < bounds[r + 1]."""
        return [-(-bound // self.tile) for bound in self.shards.bounds]

    @property
    def own(self) -> tuple[int, int]:
        return self.bounds[self.rank], self.bounds[self.rank + 1]

    @property
    def tiles(self) -> int:
        """N."""
        return self.bounds[-1]

    @property
    def others(self) -> int:
        """m, the number of tiles elsewhere."""
        return self.tiles - (self.own[1] - self.own[0])

    @property
    def other_tokens(self) -> int:
        return self.shards.bounds[-1] - self.shards.sizes[self.rank]

    def split(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """mask (..., N) -> own (..., n), others (..., m)."""
        first, stop = self.own
        return mask[..., first:stop], torch.cat([mask[..., :first], mask[..., stop:]], -1)


class Fetch:
    """One layer's exchange: made from what this rank's queries keep, `mask` bool (B, H, R, N)."""

    def __init__(self, mask: Tensor, groups: int, place: Place, group: Group, where: str):
        self.place, self.group, self.where, self.groups = place, group, where, groups
        first, stop = place.own
        need = mask.any(2).unflatten(1, (groups, -1)).any(2)
        need[..., first:stop] = False
        told = group.gather(pack(need).unsqueeze(0), [1] * group.size, f"wanted tiles of {where}").wait()
        given = unpack(torch.cat(told), place.tiles)[..., first:stop]  # (P, B, G, n): by whom my tiles are wanted
        wanted = [need[..., a:b].flatten() for a, b in pairwise(place.bounds)]
        # Everything is worked out here, for as many tiles as there are; once the counts are known it is only cut off.
        self._given = _given_places(given)
        known = _places(need.shape[0], groups, tuple(place.bounds), place.rank, need.device)
        self._got = known[:, _true_first(torch.cat(wanted))]
        self._counts = HostNumbers(torch.stack([given.flatten(1).sum(1), torch.stack([x.sum() for x in wanted])]))
        self.ready = self._counts.event

    @cached_property
    def counts(self) -> tuple[list[int], list[int]]:
        """Tiles sent to and received from each rank. Waits for this one copy where it has not arrived yet."""
        send, receive = self._counts.get()
        return send, receive

    @property
    def given(self) -> Tensor:
        """int64 (3, tiles sent): batch, tile and head of each, in the order they are sent."""
        return self._given[:, : sum(self.counts[0])]

    @property
    def got(self) -> Tensor:
        """int64 (3, L): batch, tile (counted among the others' tiles) and head of each, in the order of arrival."""
        return self._got[:, : sum(self.counts[1])]

    def start(self, k: Tensor, v: Tensor):
        """Send the wanted tiles of k, v (B, s, G, D); result: Pending of tiles (L, 2, T, D), keys and values."""
        with self.group.aside(self.ready):
            batch, tile, head = self.given
            sent = torch.stack([tiles_of(x, self.place.tile)[batch, tile, :, head] for x in (k, v)], 1)
            self.group.lend(k, v, self._given)
            return self.group.all_to_all(sent, *self.counts, f"selected tiles of {self.where}")

    def start_back(self, gradients: Tensor):
        """Return gradients (L, 2, T, D) of the fetched tiles to their owners; Pending of those of the tiles sent."""
        send, receive = self.counts
        return self.group.all_to_all(gradients, receive, send, f"gradients of tiles of {self.where}")

    def add_back(self, returned: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add what `start_back` brought to the gradients of own tiles (B, n, T, G, D), rank by rank, in place."""
        at = 0
        for count in self.counts[0]:
            batch, tile, head = self.given[:, at : at + count]
            for total, part in ((dk, returned[at : at + count, 0]), (dv, returned[at : at + count, 1])):
                total[batch, tile, :, head] += part  # one rank asks for a tile once: no index occurs twice
            at += count


class Means:
    """Means of all ranks' tiles, for a pooled periphery: 1 / T of the keys and values."""

    def __init__(self, k: Tensor, v: Tensor, place: Place, group: Group, where: str):
        self.place, self.group, self.where = place, group, where
        self.rows = [stop - start for start, stop in pairwise(place.bounds)]
        means = torch.stack([_means(x, place.tile) for x in (k, v)]).movedim(2, 0)
        self._pending = group.gather(means.to(k.dtype).contiguous(), self.rows, f"tile means of {where}")

    def wait(self) -> Tensor:
        """(2, B, m, G, D): of the other ranks' tiles."""
        parts = self._pending.wait()
        return torch.cat(parts[: self.place.rank] + parts[self.place.rank + 1 :]).movedim(0, 2)


def return_means(gradients: Tensor, place: Place, group: Group, where: str):
    """Gradients (2, B, m, G, D) of other ranks' tile means to their owners; result: a function that waits and gives
    (2, B, n, G, D), summed over ranks in order."""
    rows = [stop - start for start, stop in pairwise(place.bounds)]
    own = rows[place.rank]
    send_rows = [0 if rank == place.rank else count for rank, count in enumerate(rows)]
    receive_rows = [0 if rank == place.rank else own for rank in range(group.size)]
    what = f"gradients of tile means of {where}"
    pending = group.all_to_all(gradients.movedim(2, 0).contiguous(), send_rows, receive_rows, what)
    return lambda: pending.wait().unflatten(0, (group.size - 1, own)).sum(0).movedim(0, 2)


@dataclass(frozen=True)
class Remote:
    """The other ranks' keys and values as one sequence of m tiles: fetched ones in place, the others their mean, or 0.

    tiles (L, 2, T, D), at `got` int64 (3, L): batch, tile, head; means (2, B, m, G, D) or None.
    """

    tiles: Tensor
    got: Tensor
    means: Tensor | None
    place: Place
    shape: tuple[int, int, int]  # B, G, D

    def expand(self, like: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """k, v (B, other tokens, G, D) in the dtype of `like`, in a scratch buffer: valid until the next call.

        A mean stands in all T places of its tile, so that a kernel which pools tiles finds it again. Places nobody
        fills are 0, not leftovers: a kernel may multiply them by a weight of 0.
        """
        batch, groups, dim = self.shape
        full = buffers.take("remote", (2, batch, self.place.others, self.place.tile, groups, dim), like)
        if self.means is None:
            full.zero_()
        else:
            full.copy_(self.means.unsqueeze(3))
        b, tile, head = self.got
        for side in (0, 1):
            full[side][b, tile, :, head] = self.tiles[:, side].to(full.dtype)
        k, v = full.flatten(2, 3)[:, :, : self.place.other_tokens]
        return k, v

    def collect(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor | None]:
        """From gradients of `expand`'s k, v: those of fetched tiles (L, 2, T, D), and of means (2, B, m, G, D)."""
        b, tile, head = self.got
        spread = [tiles_of(x.float(), self.place.tile) for x in (dk, dv)]
        tiles = torch.stack([x[b, tile, :, head] for x in spread], 1)
        if self.means is None:
            return tiles, None
        for x in spread:
            x[b, tile, :, head] = 0.0
        return tiles, torch.stack([x.sum(2) for x in spread])


def tiles_of(x: Tensor, tile: int) -> Tensor:
    """(B, s, G, D) -> (B, n, T, G, D), the last tile filled up with zeros. A view where nothing has to be filled."""
    spare = -x.shape[1] % tile
    return (pad(x, (0, 0, 0, 0, 0, spare)) if spare else x).unflatten(1, (-1, tile))


def spread_means(gradients: Tensor, tokens: int, tile: int) -> Tensor:
    """Gradients (B, n, G, D) of tile means, shared out to their tokens: (B, n, 1, G, D), of a sequence of `tokens`."""
    return (gradients / tile_sizes(tokens, tile, gradients.device)[:, None, None]).unsqueeze(2)


def _means(x: Tensor, tile: int) -> Tensor:
    """(B, s, G, D) -> (B, n, G, D) in float32."""
    sums = tiles_of(x, tile).sum(2, dtype=torch.float32)
    return sums / tile_sizes(x.shape[1], tile, x.device)[:, None, None]


def _true_first(mask: Tensor) -> Tensor:
    """Places of a flat mask, True ones first, ascending: what nonzero gives, of a size that does not depend on data."""
    return torch.argsort(mask.to(torch.uint8), descending=True, stable=True)


def _given_places(given: Tensor) -> Tensor:
    """int64 (3, P * B * G * n): batch, tile and head by `_true_first` of a mask (P, B, G, n)."""
    flat = _true_first(given.flatten())
    _, batch, groups, tiles = given.shape
    return torch.stack([flat // (groups * tiles) % batch, flat % tiles, flat // tiles % groups])


@lru_cache(maxsize=64)
def _places(batch: int, groups: int, bounds: tuple[int, ...], rank: int, device: torch.device) -> Tensor:
    """int64 (3, B * G * N): batch, tile and head by rank, batch, head, tile; own tiles are not counted."""
    own = bounds[rank + 1] - bounds[rank]
    parts = []
    for owner, (start, stop) in enumerate(pairwise(bounds)):
        tile = torch.arange(start, stop, device=device) - (own if owner > rank else 0)
        grid = (torch.arange(batch, device=device), torch.arange(groups, device=device), tile)
        b, g, t = torch.meshgrid(*grid, indexing="ij")
        parts.append(torch.stack([b.flatten(), t.flatten(), g.flatten()]))
    return torch.cat(parts, 1)
