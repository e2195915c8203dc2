"""Held states: attention over a bundle of keys, remembered and moved along its last change.

Shapes: B batch, S tokens of this process, H heads, D head dim.
"""

import torch
from torch import Tensor

from foveate.attention import AttnState

Span = tuple[int, int]


class HeldState:
    """One state of one layer and CFG branch: the newest fresh (out, lse), and its change since the one before.

    Rows may be renewed apart, so each row may be of another step. A row whose lse was or is infinite has no change.
    """

    def __init__(self) -> None:
        self.state: AttnState | None = None
        self.change: AttnState | None = None  # change.lse is NaN where there is no change to follow

    def renew(
        self, new: AttnState, rows: Span, *, slope: bool, again: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """Remember `new`, the fresh state of the rows from rows[0] to rows[1].

        slope: whether to keep the change too. again: the newest value is of this very noise level, so that the change
        since tells no slope and the one before it stays.
        The first call must cover all rows. `new` is kept itself where it can be: it must not be written to later.
        """
        new = AttnState(new.out if dtype is None else new.out.to(dtype), new.lse)
        old, here = self.state, slice(*rows)
        whole = old is None or new.out.shape == old.out.shape
        if not slope:
            self.change = None
        if whole:
            assert old is not None or rows[0] == 0, "the first value of a state must cover all its rows"
            if slope and old is not None and not again:
                self.change = _change(new, old, into=old)
            self.state = new
            return
        assert old is not None
        part = AttnState(old.out[:, here], old.lse[..., here])
        if slope and not again:
            if self.change is None:
                self.change = AttnState(torch.zeros_like(old.out), torch.full_like(old.lse, torch.nan))
            moved = _change(new, part, into=AttnState(self.change.out[:, here], self.change.lse[..., here]))
            assert moved.out.data_ptr() == self.change.out[:, here].data_ptr()
        part.out.copy_(new.out)
        part.lse.copy_(new.lse)

    def moved(self, ahead: Tensor, rows: Span, clamp: float) -> AttnState:
        """The state of some rows, extrapolated by `ahead` (rows,) of its change, with the lse's move within +-clamp."""
        assert self.state is not None, "a held state is read before it was written"
        here = slice(*rows)
        out, lse = self.state.out[:, here], self.state.lse[..., here]
        if self.change is None:
            return AttnState(out, lse)
        return follow(
            AttnState(out, lse), AttnState(self.change.out[:, here], self.change.lse[..., here]), ahead, clamp
        )

    def moved_out(self, ahead: Tensor, rows: Span) -> Tensor:
        """As `moved`, the output alone, for a state that covers all keys: one pass."""
        assert self.state is not None, "a held state is read before it was written"
        here = slice(*rows)
        if self.change is None:
            return self.state.out[:, here]
        return torch.addcmul(
            self.state.out[:, here], self.change.out[:, here], ahead.to(self.state.out.dtype)[:, None, None]
        )

    def bytes(self) -> int:
        tensors = [x for state in (self.state, self.change) if state is not None for x in (state.out, state.lse)]
        return sum(x.numel() * x.element_size() for x in tensors)


def follow(state: AttnState, change: AttnState, ahead: Tensor, clamp: float) -> AttnState:
    """state + ahead * change, for ahead (S,) of the rows; the lse moves by at most clamp, infinite ones not at all."""
    known = ~change.lse.isnan()
    move = (ahead * change.lse).clamp(-clamp, clamp).where(known, 0.0)
    steps = torch.where(known, ahead, 0.0).transpose(-1, -2)[..., None]  # (B, S, H, 1)
    return AttnState(torch.addcmul(state.out, change.out, steps.to(state.out.dtype)), state.lse + move)


def _change(new: AttnState, old: AttnState, into: AttnState) -> AttnState:
    """new - old, written into the memory of `into`, which may be `old`."""
    both = old.lse.isfinite() & new.lse.isfinite()
    out = torch.sub(new.out, old.out, out=into.out)
    lse = torch.sub(new.lse, old.lse, out=into.lse).masked_fill_(~both, torch.nan)
    return AttnState(out, lse)
