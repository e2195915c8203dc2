"""What holding a state would have cost, measured on a few sampled query rows.

At a fresh step the sampled rows' states are compared with what extrapolation would have given. That yields the error of
the layer's output per held state (weight and cross term included), the damping that would have been best, and nothing
that the host must wait for.

For a state c of weight w = exp(lse_c - lse) in an output W, to first order in what holding misses,

    error = w * [(base - out) + (base_lse - lse) (out - W)] + damping * w * ahead * [change + change_lse (out - W)]
          = a + damping * b,

so the inner products aa, ab, bb give the error at any damping, and the best one, -ab / bb.

Shapes: B batch, R sampled rows (P parts of equally many), H heads, D head dim, N states, and one more: the probe, the
part's own keys, which is compared at every step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.attention import AttnState
from foveate.held.attention.cache import Span

FIELDS = ("aa", "ab", "bb", "ww", "damping")
MEMORY = 0.5  # weight of the past in a damping's fit
MOVE = 10.0  # the furthest that a log-sum-exp is followed


@dataclass(frozen=True)
class Rows:
    """Sampled rows of this process, int64 (R,), equally many for each of its parts, evenly spread."""

    index: Tensor
    parts: int

    @classmethod
    def spread(cls, parts: list[Span], wanted: int, device: torch.device) -> "Rows":
        """About `wanted` rows in all; parts are rows from, to of this process."""
        each = max(1, min(max(8, wanted // len(parts)), *(b - a for a, b in parts)))
        picks = [a + (2 * torch.arange(each) + 1) * (b - a) // (2 * each) for a, b in parts]
        return cls(torch.cat(picks).to(device), len(parts))

    @property
    def each(self) -> int:
        return len(self.index) // self.parts

    def of(self, part: int) -> slice:
        """Where a local part's rows are among the sampled ones."""
        return slice(part * self.each, (part + 1) * self.each)


class LayerMeter:
    """The sampled rows' states of one layer: newest value, change and fitted damping of each state and of the probe."""

    def __init__(self, rows: Rows, states: int, damping: float | None, own_apart: bool, device: torch.device):
        """own_apart: whether the part's own keys are no held state's, so that the probe is a piece of the output."""
        self.rows, self.fixed, self._pieces = rows, damping, states + own_apart
        start = 1.0 if damping is None else damping
        self.damping = torch.full((rows.parts, states + 1), start, device=device)
        self._fit = torch.zeros(2, rows.parts, states + 1, device=device)
        self.base: AttnState | None = None  # stacked over N + 1, float32
        self.change: AttnState | None = None

    def observe(self, new: AttnState, seen: Tensor, fresh: Tensor, ahead: Tensor, *, again: bool = False) -> Tensor:
        """Compare with the newest values and take the fresh ones in. float32 (P, N + 1, 5): `FIELDS`, 0 where not seen.

        new: states of the sampled rows, out (N + 1, B, R, H, D), lse (N + 1, B, H, R); anything where not seen. seen,
        fresh: bool (P, N + 1), what `new` tells and what of it becomes the newest value. ahead (P, N + 1). again: the
        newest values are of this very noise level, so what changed since is no slope.
        """
        if self.base is None:
            self.base = new
            return torch.zeros(*seen.shape, len(FIELDS), device=new.out.device)
        old, change = self.base, self.change
        if self._pieces == 1:  # the state is the output: it weighs 1, and `off` is 0
            a, weighted = old.out - new.out, new.out
            b = torch.zeros_like(a) if change is None else self._per_row(ahead)[:, None, :, None, None] * change.out
        else:
            whole = self._moved(old, change, new, seen, ahead)
            a, b, weighted = self._residuals(whole, new, old, change, ahead)
        sums = [self._sum(x, y) for x, y in ((a, a), (a, b), (b, b), (weighted, weighted))]
        found = torch.stack([*sums, self.damping], -1) * seen[..., None]
        if self.fixed is None:
            self._refit(sums[1], sums[2], fresh)
        self._take(new, old, fresh, again)
        return found

    def glance(self, probe: AttnState, ahead: Tensor) -> Tensor:
        """`observe` at a step where only the probe, out (B, R, H, D), is new, and nothing becomes the newest value."""
        found = torch.zeros(self.rows.parts, self.damping.shape[1], len(FIELDS), device=probe.out.device)
        if self.base is None:
            return found
        a, b = self.base.out[-1] - probe.out, torch.zeros(())
        pairs = [(a, a), (probe.out, probe.out)]
        if self.change is not None:
            b = self._per_row(ahead)[-1][:, None, None] * self.change.out[-1]
            pairs += [(a, b), (b, b)]
        sums = [(x * y).sum((0, 2, 3)).unflatten(0, (self.rows.parts, -1)).sum(-1) for x, y in pairs]
        aa, ww, ab, bb = (*sums, *[torch.zeros_like(sums[0])] * (4 - len(sums)))
        found[:, -1] = torch.stack([aa, ab, bb, ww, self.damping[:, -1]], -1)
        return found

    def _moved(
        self, old: AttnState, change: AttnState | None, new: AttnState, seen: Tensor, ahead: Tensor
    ) -> AttnState:
        """The layer's output on the rows, (1, B, R, H, D): new values where seen, extrapolated ones elsewhere."""
        states = []
        for index in range(self._pieces):
            held = AttnState(old.out[index], old.lse[index])
            if change is not None:
                step = self._per_row(ahead * self.damping)[index]
                held = _follow(held, AttnState(change.out[index], change.lse[index]), step)
            here = self._per_row(seen)[index]
            out = torch.where(here[:, None, None], new.out[index], held.out)
            states.append(AttnState(out, torch.where(here, new.lse[index], held.lse)))
        lses = torch.stack([state.lse for state in states])
        total = lses.logsumexp(0)
        shares = (lses - total).exp().transpose(-1, -2)[..., None]
        return AttnState((shares * torch.stack([state.out for state in states])).sum(0), total)

    def _residuals(self, whole: AttnState, new: AttnState, old: AttnState, change: AttnState | None, ahead: Tensor):
        """a, b and the output they are relative to, each (N + 1, B, R, H, D). The probe is compared by itself."""
        weight = (new.lse - whole.lse).exp().transpose(-1, -2)[..., None].clone()
        weight[-1] = 1.0
        output = whole.out[None].expand_as(new.out).clone()
        output[-1] = new.out[-1]
        off = new.out - output
        missed = _finite(old.lse - new.lse).transpose(-1, -2)[..., None]
        a = weight * (old.out - new.out + missed * off)
        if change is None:
            return a, torch.zeros_like(a), output
        steps = self._per_row(ahead)[:, None, :, None, None]
        slope = change.out.nan_to_num() + _finite(change.lse).transpose(-1, -2)[..., None] * off
        return a, weight * steps * slope, output

    def _refit(self, ab: Tensor, bb: Tensor, seen: Tensor) -> None:
        """Least squares over this and, decaying, earlier steps; where nothing moved the damping stays."""
        usable = seen & (bb > 0)
        self._fit = torch.where(usable, MEMORY * self._fit + torch.stack([ab, bb]), self._fit)
        best = (-self._fit[0] / self._fit[1].clamp_min(torch.finfo(torch.float32).tiny)).clamp(0.0, 1.0)
        self.damping = torch.where(usable, best, self.damping)

    def _take(self, new: AttnState, old: AttnState, fresh: Tensor, again: bool) -> None:
        rows = self._per_row(fresh)
        wide, thin = rows[:, None, :, None, None], rows[:, None, None]
        self.base = AttnState(torch.where(wide, new.out, old.out), torch.where(thin, new.lse, old.lse))
        if again:
            return
        change = AttnState(new.out - old.out, new.lse - old.lse)
        if self.change is not None:
            change = AttnState(
                torch.where(wide, change.out, self.change.out), torch.where(thin, change.lse, self.change.lse)
            )
        else:
            change = AttnState(change.out * wide, change.lse.masked_fill(~thin, torch.nan))
        self.change = change

    def _per_row(self, x: Tensor) -> Tensor:
        """(P, N + 1) -> (N + 1, R)."""
        return x.repeat_interleave(self.rows.each, 0).T

    def _sum(self, x: Tensor, y: Tensor) -> Tensor:
        """Inner products (P, N + 1) of (N + 1, B, R, H, D)."""
        products = (x * y).sum((1, 3, 4))
        return products.unflatten(1, (self.rows.parts, -1)).sum(-1).T

    def forget_changes(self) -> None:
        """The trajectory bends: what was learned of slopes is of another one."""
        self.change = None
        self._fit.zero_()


def _follow(state: AttnState, change: AttnState, ahead: Tensor) -> AttnState:
    """state + ahead * change, for ahead (R,); rows without a known change stay. float32."""
    known = ~change.lse.isnan()
    move = (ahead * change.lse).clamp(-MOVE, MOVE).where(known, 0.0)
    steps = torch.where(known, ahead, 0.0).transpose(-1, -2)[..., None]  # (B, R, H, 1)
    return AttnState(torch.addcmul(state.out, change.out, steps), state.lse + move)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def errors(sums: Tensor) -> tuple[Tensor, Tensor]:
    """From (..., 5): relative errors of the output with the damping given, and of a plain hold. NaN where not seen."""
    aa, ab, bb, ww, damping = sums.double().unbind(-1)
    first = (aa + 2 * damping * ab + damping.square() * bb).clamp_min(0.0)
    return (first / ww).sqrt(), (aa / ww).sqrt()
