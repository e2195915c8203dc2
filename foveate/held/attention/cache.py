"""Held states: attention over a bundle of keys, remembered and moved along its last change.

Shapes: B batch, S tokens of this process, H heads, D head dim.
"""

import torch
from torch import Tensor

from foveate.attention import AttnState
from foveate.held.held import Held

Span = tuple[int, int]


class HeldState(Held):
    """A `Held` of one layer and CFG branch: its values are the (out, lse) of attention to a bundle of keys.

    Rows may be renewed apart, so each may be of another step, and which noise levels those are is the planner's
    (`plan.History`). A row whose lse was or is not finite has no change; `before` has an lse of NaN where it is empty.
    Both values are kept and not their difference: an anchor then only changes names, and nothing is rounded twice.
    """

    def renew_rows(
        self, new: AttnState, rows: Span, *, slope: bool, again: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """Remember `new`, the fresh state of the rows from rows[0] to rows[1].

        slope: whether to keep the one before too. again: the newest value is of this very noise level, so that the
        change since tells no slope: the one before moves along, and the change stays.
        The first call must cover all rows. `new` is kept itself where it can be: it must not be written to later.
        """
        new = AttnState(new.out if dtype is None else new.out.to(dtype), new.lse)
        if not slope:
            self.before = ()
        if not self.last or new.out.shape == self.last[0].shape:
            assert self.last or rows[0] == 0, "the first value of a state must cover all its rows"
            if again and self.before:
                self.before = _values(_shifted(AttnState(*self.before), AttnState(*self.last), new))
            elif slope and not again:
                self.before = self.last
            self.last = _values(new)
            return
        part = _rows(self.last, rows)
        if slope and not again:
            if not self.before:
                self.before = torch.zeros_like(self.last[0]), torch.full_like(self.last[1], torch.nan)
            _write(part, _rows(self.before, rows))
        elif again and self.before:
            past = _rows(self.before, rows)
            _write(_shifted(past, part, new), past)
        _write(new, part)

    def moved(self, ahead: Tensor, rows: Span, clamp: float, dtype: torch.dtype) -> AttnState:
        """The state of some rows, extrapolated by `ahead` (rows,) of its change, with the lse's move within +-clamp.

        dtype: of the result's `out`.
        """
        assert self.last, "a held state is read before it was written"
        state = _rows(self.last, rows)
        if not self.before:
            return AttnState(state.out.to(dtype), state.lse)
        return extrapolate(state, _rows(self.before, rows), ahead, clamp, dtype)

    def moved_out(self, ahead: Tensor, rows: Span, dtype: torch.dtype) -> Tensor:
        """As `moved`, the output alone, for a state that covers all keys."""
        assert self.last, "a held state is read before it was written"
        out = self.last[0][:, slice(*rows)]
        if not self.before:
            return out.to(dtype)
        return _along(out, self.before[0][:, slice(*rows)], ahead[:, None, None], dtype)


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


def _rows(values: tuple[Tensor, ...], rows: Span) -> AttnState:
    return between(AttnState(*values), rows)


def _values(state: AttnState) -> tuple[Tensor, Tensor]:
    return state.out, state.lse


def _write(state: AttnState, into: AttnState) -> None:
    into.out.copy_(state.out)
    into.lse.copy_(state.lse)


def _shifted(before: AttnState, old: AttnState, new: AttnState) -> AttnState:
    """What has to stand before `new` so that the change is that from `before` to `old`."""
    out = new.out.float() - (old.out.float() - before.out.float())
    return AttnState(out.to(before.out.dtype), new.lse - (old.lse - before.lse))
