"""How often to look and to learn, by what that costs: lessons, checks and validation stay within 5 % of the run's time.

Counted from the cost table and the shapes, never from a clock, so that runs repeat and ranks agree. Linear layers are
priced by the model's parameters, at the rate of dense attention in the same table.

Times are in milliseconds a sequence. Shapes: L layers, H heads, D head dim.
"""

import math
from dataclasses import dataclass

from foveate import costs as prices

SHARE, VALIDATION = 0.04, 0.01  # of the run's time: for lessons and checks together, and for validation losses
FORWARD = 1 / 3  # of a training step
FOR_LESSONS = 0.4  # of that share
# One small operator: on a CPU, and on an H200, where the host is what takes that long (docs/log.md, Training step).
LAUNCH_MS = {"cpu": 0.008, "cuda": 0.045}
LESSON_OPERATORS, PROFILE_OPERATORS = 125, 300  # of a layer; counted on the CPU (docs/log.md, Training step)
OFTEN, RARE, TEACH_EVERY, VALIDATE_EVERY = 50, 1000, 4, 200  # never oftener, however cheap


@dataclass(frozen=True)
class Work:
    """What is trained: sequences of `tokens`, `layers` of attention (H, D), and `parameters` that every token meets.
    device: its type."""

    tokens: int
    layers: int
    heads: int
    dim: int
    parameters: int
    device: str = "cuda"


@dataclass(frozen=True)
class Cadence:
    """Steps between checks (at first and at most) and between lessons; `share` of the step time that both take."""

    often: int
    rare: int
    teach_every: int
    share: float

    def __str__(self) -> str:
        return (
            f"checks every {self.often} to {self.rare} steps, lessons every {self.teach_every}: about "
            f"{100 * self.share:.1f} % of the step time by the cost table"
        )


def plan(
    work: Work,
    costs: prices.Costs,
    attention: tuple[float, float],
    pairs: int,
    often: int | None = None,
    rare: int | None = None,
    teach_every: int | None = None,
) -> Cadence:
    """attention: forward and backward of all layers as they are now, forward of all layers sparse, milliseconds.

    pairs: dense and sparse forwards of one check. often, rare, teach_every: what the user has fixed.
    """
    dense = work.layers * costs.dense(work.tokens, work.heads, work.dim, passes=("forward_ms",))
    linear = dense * work.parameters / (2 * work.tokens * work.heads * work.dim * work.layers)
    step = 3 * linear + attention[0]
    launch = LAUNCH_MS.get(work.device, LAUNCH_MS["cuda"])
    lesson = work.layers * LESSON_OPERATORS * launch + dense * 4 * 64 / work.tokens
    profile = work.layers * PROFILE_OPERATORS * launch + dense * 12 * 256 / work.tokens
    check = pairs * (2 * linear + dense + attention[1] + profile)
    teach = teach_every or max(TEACH_EVERY, math.ceil(lesson / (FOR_LESSONS * SHARE * step)))
    left = max(SHARE - lesson / (teach * step), (1 - FOR_LESSONS) * SHARE)
    first = often or max(OFTEN, math.ceil(check / (left * step)))
    last = rare or max(RARE, first)
    return Cadence(first, max(first, last), teach, lesson / (teach * step) + check / (first * step))


def validation(forwards: int, batch: int, every: int | None = None) -> tuple[int, float]:
    """Steps between validation losses of so many forwards of one clip, and their share of the run's time.

    batch: clips of a training step. every: what the user has fixed.
    """
    cost = forwards * FORWARD / batch
    steps = every or max(VALIDATE_EVERY, math.ceil(cost / VALIDATION))
    return steps, cost / (steps + cost)
