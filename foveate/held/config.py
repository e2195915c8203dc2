"""What a user may set about state reuse: one frozen dataclass, checked when made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foveate.attention import BACKENDS
from foveate.held.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ReuseConfig:
    """How `reuse` decides. Steps are denoising steps; an anchor is a step that computes everything fresh.

    quality: in (0, 1], the one knob: 1 is exact (nothing is ever held), lower holds more. The planner turns it into the
        error that held states may add up to between two anchors (`plan.level_between`), or, where outputs are held,
        into the error of one of them (`plan.level_at_a_step`).
    interval: anchors every so many steps and everything held in between, instead of deciding by predicted errors; 1 is
        exact too. For comparisons at equal fresh work; `quality` is not used then.
    schedule: a `Schedule`, or the file of one (`foveate calibrate`): which steps compute, instead of
        deciding at run time.
    warmup: first steps of every request, all anchors; None: a fifth of its steps, 2 to 5, or 5 where nobody says how
        many there are.
    order: 1 extrapolates held states in the noise level from their last two fresh values, 0 leaves them.
    damping: factor of the extrapolation, a number in 0 ... 1, or None: fitted per layer, part and state at anchors; 1
        where outputs are held.
    mend: of outputs: at the first computed step after held ones, take back what these missed, as interpolation shows it
        (held/mend.py), where the sampler is Euler's for flow matching. It calls no model; False leaves computed outputs
        as the model gave them. None: with a schedule, whose anchors it was measured on; at fixed intervals it gained
        at some and lost at others (docs/log.md).
    hold: what is remembered: the `output` of the whole model, which is then not called at all between anchors
        (held/outputs.py), or the states of `attention`, layer by layer (held/attention). Of the settings below only
        `max_hold`, `cfg`, `head` and `ranks` matter for `output`.
    groups: into how many groups of keys the sequence is cut; under torchrun groups are runs of ranks.
    states: the most states kept per layer. 1 holds a layer whole; up to `groups` of them let the planner fetch and
        compute some groups and hold others.
    local: whether a part's own group of keys is `held` like all others or computed `fresh` at every step.
    memory_gib: cap of held bytes on each device; None: a quarter of what is free when the first request begins.
    dtype: of the `out` of held attention states; None: the model's own. Their log-sum-exps are float32.
    max_hold: the most steps in a row that a state is held when decided by quality; of outputs one fewer.
    rows: query rows a device samples, at least 8 a part, to measure errors and drift.
    audit: also compute every held state of the sampled rows, for `report()`'s actual errors at every step and not at
        anchors only. Costs rows / tokens of exact attention; one process only.
    clamp: largest change of a held log-sum-exp by extrapolation.
    cfg, head: under torchrun, how ranks are spread: cfg x sequence x head. cfg 2 gives each of two CFG branches half of
        the ranks. head: ranks that share the heads of the same tokens; None: the ranks of a node.
    ranks: under torchrun, whether they work `together` on one result, all given the same inputs, or are `independent`:
        every rank generates something of its own.
    backend: of the fresh attention, as `attend`'s.
    """

    quality: float = 0.9
    interval: int | None = None
    schedule: Schedule | str | Path | None = None
    warmup: int | None = None
    order: Literal[0, 1] = 1
    damping: float | None = None
    mend: bool | None = None
    hold: Literal["attention", "output"] = "output"
    groups: int = 8
    states: int = 1
    local: Literal["held", "fresh"] = "held"
    memory_gib: float | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    max_hold: int = 8
    rows: int = 512
    audit: bool = False
    clamp: float = 0.7
    cfg: Literal[1, 2] = 1
    head: int | None = None
    ranks: Literal["together", "independent"] = "together"
    backend: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.quality <= 1:
            raise ValueError(f"quality must lie in (0, 1], 1 being exact, got {self.quality}")
        if self.order not in (0, 1):
            raise ValueError(f"order must be 0 (plain hold) or 1 (extrapolated), got {self.order}")
        if self.interval is not None and self.interval < 1:
            raise ValueError(f"interval must be at least 1 (exact), or None to decide by quality, got {self.interval}")
        if isinstance(self.schedule, str | Path):
            object.__setattr__(self, "schedule", Schedule.read(self.schedule))
        if self.schedule is not None and (self.interval or self.warmup or self.hold != "output" or self.quality == 1):
            raise ValueError(
                "a schedule says itself which outputs are computed: leave interval, warmup and quality=1 out, and hold "
                "is 'output'"
            )
        if self.warmup is not None and self.warmup < 1 + self.order:
            raise ValueError(
                f"warmup must be at least {1 + self.order}: states of order {self.order} need so many fresh values, "
                f"got {self.warmup}"
            )
        if self.damping is not None and not 0 <= self.damping <= 1:
            raise ValueError(f"damping must lie in 0 ... 1, or be None to be fitted, got {self.damping}")
        if self.hold not in ("attention", "output"):
            raise ValueError(f"hold must be attention or output, got {self.hold!r}")
        if self.hold == "output" and (self.audit or not self.whole):
            raise ValueError(
                "hold='output', the default, holds no layer: states, local='fresh' and audit need hold='attention'"
            )
        if self.hold == "output" and (self.memory_gib is not None or self.dtype is not None):
            raise ValueError("memory_gib and dtype are for held attention states: give hold='attention' too")
        for name in ("groups", "states", "max_hold", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.states > self.groups:
            raise ValueError(f"states must be at most groups, {self.groups}, got {self.states}")
        if self.local not in ("held", "fresh"):
            raise ValueError(f"local must be held or fresh, got {self.local!r}")
        if self.memory_gib is not None and self.memory_gib < 0:
            raise ValueError(f"memory_gib must be at least 0, got {self.memory_gib}")
        if self.dtype not in (None, "bfloat16", "float16", "float32"):
            raise ValueError(f"dtype must be bfloat16, float16, float32 or None, got {self.dtype!r}")
        if self.cfg not in (1, 2):
            raise ValueError(f"cfg must be 1 or 2, got {self.cfg}")
        if self.ranks not in ("together", "independent"):
            raise ValueError(f"ranks must be together or independent, got {self.ranks!r}")
        if self.head is not None and self.head < 1:
            raise ValueError(f"head must be at least 1, or None for the ranks of a node, got {self.head}")
        if self.clamp <= 0:
            raise ValueError(f"clamp must be above 0, got {self.clamp}")
        if self.backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {self.backend!r}")

    @property
    def whole(self) -> bool:
        """Whether a layer is held or computed whole, by one state that covers all keys."""
        return self.states == 1 and self.local == "held"

    @property
    def mends(self) -> bool:
        """Whether what held outputs missed is taken back."""
        return self.schedule is not None if self.mend is None else self.mend

    @property
    def exact(self) -> bool:
        """Whether nothing may ever be held."""
        return self.interval == 1 if self.interval is not None else self.quality == 1

    @property
    def adaptive(self) -> bool:
        """Whether predicted errors decide."""
        return self.interval is None and self.schedule is None and not self.exact
