"""Where the tokens of one request are: parts of queries, groups of keys, bundles of groups. Pure.

A *part* is the contiguous run of queries (and keys) that one rank owns; on one process, which owns them all, parts
stand for the ranks there might be. A *group* is a run of parts whose keys are fetched together; it never crosses a
node boundary. A *bundle* is a run of groups that share one held state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from foveate.parallel.comm import Shards
from foveate.tiles import TILE

Span = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """bounds: token bounds of the parts, one more than parts. group_of: each part's group, ascending from 0.

    mine: the parts (from, to) that this process owns.
    """

    bounds: tuple[int, ...]
    group_of: tuple[int, ...]
    mine: Span

    @property
    def parts(self) -> int:
        return len(self.group_of)

    @property
    def groups(self) -> int:
        return self.group_of[-1] + 1

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @property
    def rows(self) -> Span:
        """Tokens of this process."""
        return self.bounds[self.mine[0]], self.bounds[self.mine[1]]

    def part(self, part: int) -> Span:
        """Tokens of a part."""
        return self.bounds[part], self.bounds[part + 1]

    def group(self, group: int) -> Span:
        """Tokens of a group."""
        first = self.group_of.index(group)
        return self.bounds[first], self.bounds[first + self.group_of.count(group)]

    def bundles(self, states: int) -> tuple[Span, ...]:
        """The groups (from, to) of each of at most `states` bundles, as even as they go."""
        return tuple(pairwise(_cuts(self.groups, min(states, self.groups))))

    def keys(self, part: int, bundle: Span, local: str) -> tuple[Span, ...]:
        """Tokens of the keys that a part's state of a bundle covers: all of them, or those without its own group's."""
        span = self.group(bundle[0])[0], self.group(bundle[1] - 1)[1]
        own = self.group_of[part]
        if local == "held" or not bundle[0] <= own < bundle[1]:
            return (span,)
        inner = self.group(own)
        return tuple((a, b) for a, b in ((span[0], inner[0]), (inner[1], span[1])) if a < b)


def one_process(tokens: int, groups: int) -> Layout:
    """All parts on this process, cut as ranks would be, as many as groups (fewer where there are fewer tiles)."""
    parts = min(groups, -(-tokens // TILE))
    return Layout(Shards.cut(tokens, parts).bounds, tuple(range(parts)), (0, parts))


def ranks(sizes: Sequence[int], rank: int, groups: int, node: int | None = None) -> Layout:
    """A part a rank, `sizes` tokens each, at most `groups` groups. node: ranks of a node, whose boundaries groups keep.

    Raises ValueError where the ranks do not divide into nodes.
    """
    world = len(sizes)
    node = world if node is None else node
    if world % node:
        raise ValueError(f"{world} ranks do not divide into nodes of {node}; give the ranks of one node, or None")
    nodes = world // node
    each = max(1, min(groups // nodes, node))  # groups of a node: at least one, so there may be more than asked for
    inside = [index for index, (a, b) in enumerate(pairwise(_cuts(node, each))) for _ in range(b - a)]
    group_of = tuple(one * each + index for one in range(nodes) for index in inside)
    return Layout(tuple(accumulate(sizes, initial=0)), group_of, (rank, rank + 1))


def _cuts(things: int, pieces: int) -> list[int]:
    """Bounds that cut things into pieces, as even as they go."""
    return [things * piece // pieces for piece in range(pieces + 1)]


def key_counts(layout: Layout, bundles: tuple[Span, ...], local: str) -> Tensor:
    """Keys of each part's states, and of what it computes at every step besides: (P, N + 1)."""
    rows = []
    for part in range(layout.parts):
        counts = [sum(b - a for a, b in layout.keys(part, bundle, local)) for bundle in bundles]
        rows.append([*counts, layout.tokens - sum(counts)])
    return torch.tensor(rows)
