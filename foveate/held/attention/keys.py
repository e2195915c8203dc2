"""Attention over chosen spans of the keys that a process has, and cutting and joining states by rows.

Shapes: B batch, t tokens of this process, r rows, H heads, G key/value heads, D head dim.
"""

import torch
from torch import Tensor

from foveate.attention import AttnState, attend, merge
from foveate.held.attention.cache import Span
from foveate.held.attention.layout import Layout
from foveate.held.attention.ranks import Fetched


class Keys:
    """Keys and values that this process has: its own tokens' k, v (B, t, G, D), and those that other ranks send."""

    def __init__(self, layout: Layout, q: Tensor, k: Tensor, v: Tensor, fetched: Fetched | None, backend: str):
        self._layout, self._k, self._v, self._fetched, self._backend = layout, k, v, fetched, backend
        # While keys of others are under way a rank attends to its own: once, for whichever state wants them.
        self._own = attend(q, k, v, backend=backend) if fetched is not None and fetched.own_wanted else None

    def attend(self, q: Tensor, rows: Span, spans: tuple[Span, ...]) -> AttnState:
        """Attention of rows q (B, r, H, D) over spans of tokens; the empty state over none."""
        if not spans:
            return AttnState.empty_like(q)
        if self._fetched is None:
            base = self._layout.rows[0]
            k, v = (_spans(x, spans, base) for x in (self._k, self._v))
            return attend(q, k, v, backend=self._backend)
        own, me = self._layout.rows, self._layout.mine[0]
        found = [self._fetched.keys(span, without=me) for span in spans]
        states = [attend(q, k, v, backend=self._backend) for k, v in (pair for pair in found if pair is not None)]
        if any(a <= own[0] < b for a, b in spans):
            assert self._own is not None
            states.append(self._own)
        return merge(*states) if len(states) > 1 else states[0]


def _spans(x: Tensor, spans: tuple[Span, ...], base: int) -> Tensor:
    """Tokens of x (B, t, ...) in spans, of which `base` is the first of x."""
    cut = [x[:, a - base : b - base] for a, b in spans]
    return cut[0] if len(cut) == 1 else torch.cat(cut, dim=1)


def at_rows(state: AttnState, rows: Tensor) -> AttnState:
    """A state's chosen rows."""
    return AttnState(state.out.index_select(1, rows), state.lse.index_select(2, rows))


def joined(pieces: list[AttnState]) -> AttnState:
    """States of neighbouring rows as one."""
    if len(pieces) == 1:
        return pieces[0]
    return AttnState(torch.cat([x.out for x in pieces], dim=1), torch.cat([x.lse for x in pieces], dim=2))
