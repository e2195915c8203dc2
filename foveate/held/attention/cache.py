"""Held states: attention over a bundle of keys, remembered and moved along its last change.

Shapes: B batch, S tokens of this process, H heads, D head dim.
"""

import torch
from torch import Tensor

from foveate.attention import AttnState

Span = tuple[int, int]


class HeldState:
    """One state of one layer and CFG branch: the newest fresh (out, lse), and the one before it.

    Rows may be renewed apart, so each row may be of another step. A row whose lse was or is not finite has no change.
    Both values are kept and not their difference: an anchor then only changes names, and nothing is rounded twice.
    """

    def __init__(self) -> None:
        self.state: AttnState | None = None
        self.before: AttnState | None = None  # before.lse is NaN where there is none

    def renew(
        self, new: AttnState, rows: Span, *, slope: bool, again: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """Remember `new`, the fresh state of the rows from rows[0] to rows[1].

        slope: whether to keep the one before too. again: the newest value is of this very noise level, so that the
        change since tells no slope: the one before moves along, and the change stays.
        The first call must cover all rows. `new` is kept itself where it can be: it must not be written to later.
        """
        new = AttnState(new.out if dtype is None else new.out.to(dtype), new.lse)
        old = self.state
        if not slope:
            self.before = None
        if old is None or new.out.shape == old.out.shape:
            assert old is not None or rows[0] == 0, "the first value of a state must cover all its rows"
            if again and old is not None and self.before is not None:
                self.before = _shifted(self.before, old, new)
            elif slope and not again:
                self.before = old
            self.state = new
            return
        part = between(old, rows)
        if slope and not again:
            if self.before is None:
                self.before = AttnState(torch.zeros_like(old.out), torch.full_like(old.lse, torch.nan))
            _write(part, between(self.before, rows))
        elif again and self.before is not None:
            past = between(self.before, rows)
            _write(_shifted(past, part, new), past)
        _write(new, part)

    def moved(self, ahead: Tensor, rows: Span, clamp: float, dtype: torch.dtype) -> AttnState:
        """The state of some rows, extrapolated by `ahead` (rows,) of its change, with the lse's move within +-clamp.

        dtype: of the result's `out`.
        """
        assert self.state is not None, "a held state is read before it was written"
        state = between(self.state, rows)
        if self.before is None:
            return AttnState(state.out.to(dtype), state.lse)
        return extrapolate(state, between(self.before, rows), ahead, clamp, dtype)

    def moved_out(self, ahead: Tensor, rows: Span, dtype: torch.dtype) -> Tensor:
        """As `moved`, the output alone, for a state that covers all keys."""
        assert self.state is not None, "a held state is read before it was written"
        out = self.state.out[:, slice(*rows)]
        if self.before is None:
            return out.to(dtype)
        return _along(out, self.before.out[:, slice(*rows)], ahead[:, None, None], dtype)

    def bytes(self) -> int:
        tensors = [x for state in (self.state, self.before) if state is not None for x in (state.out, state.lse)]
        return sum(x.numel() * x.element_size() for x in tensors)


def extrapolate(state: AttnState, before: AttnState, ahead: Tensor, clamp: float, dtype: torch.dtype) -> AttnState:
    """state + ahead * (state - before), for float32 ahead (S,); the lse moves by at most clamp. dtype: of the `out`.

    Rows with an lse that is not finite, now or before, stay.
    """
    change = state.lse - before.lse
    known = change.isfinite()
    move = (ahead * change).clamp(-clamp, clamp).where(known, 0.0)
    steps = torch.where(known, ahead, 0.0).transpose(-1, -2)  # (B, S, H)
    return AttnState(_along(state.out, before.out, steps[..., None], dtype), state.lse + move)


def _along(out: Tensor, before: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """out + steps * (out - before), for out (B, S, H, D) and float32 steps that broadcast to it."""
    return torch.addcmul(out, out - before, steps.to(out.dtype)).to(dtype)


def between(state: AttnState, rows: Span) -> AttnState:
    """A view of the rows from rows[0] to rows[1]."""
    here = slice(*rows)
    return AttnState(state.out[:, here], state.lse[..., here])


def _write(state: AttnState, into: AttnState) -> None:
    into.out.copy_(state.out)
    into.lse.copy_(state.lse)


def _shifted(before: AttnState, old: AttnState, new: AttnState) -> AttnState:
    """What has to stand before `new` so that the change is that from `before` to `old`."""
    out = new.out.float() - (old.out.float() - before.out.float())
    return AttnState(out.to(before.out.dtype), new.lse - (old.lse - before.lse))
