"""Which steps compute the model, planned once from exact runs and kept in a file. Pure, but for reading and writing it.

Anchors are placed by dynamic programming: the state is the last two of them, from which held steps are predicted; a
held step costs the error of its prediction in the exact run, times the step's length in the noise level, over the root
of the share that the clip has in what the step leaves behind (1 - noise level).

Shapes: N steps, S samples.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

NEAR = 0.01  # noise levels that differ by less are the same step's
KIND = "foveate schedule 1"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """model, scheduler: what it was made with, see `held/calibrate.py`; "" for a scheduler that is the user's own loop.

    sigmas: noise levels of all steps. anchors: the steps that compute, ascending. guidance: the scale of the runs, None
    where none was known. cost: what the plan expects of held steps, to compare schedules of one calibration by. clips:
    how many it was made from. Raises ValueError for what is no schedule.
    """

    model: str
    scheduler: str
    sigmas: tuple[float, ...]
    anchors: tuple[int, ...]
    guidance: float | None = None
    cost: float = 0.0
    clips: int = 0

    def __post_init__(self) -> None:
        steps = len(self.sigmas)
        ascending = all(a < b for a, b in zip(self.anchors, self.anchors[1:], strict=False))
        if not self.anchors or not ascending or self.anchors[0] != 0 or self.anchors[-1] >= steps:
            raise ValueError(f"anchors must ascend from 0 to at most {steps - 1}, the last step, got {self.anchors}")
        if not all(0 <= sigma <= 1 for sigma in self.sigmas):
            raise ValueError(f"noise levels must lie in 0 ... 1, got {self.sigmas}")

    @property
    def steps(self) -> int:
        return len(self.sigmas)

    @property
    def calls(self) -> float:
        """Share of the steps that compute."""
        return len(self.anchors) / self.steps

    def write(self, file: str | Path) -> None:
        Path(file).write_text(json.dumps({"kind": KIND, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, file: str | Path) -> "Schedule":
        """Raises ValueError for a file that is none of `write`'s, FileNotFoundError where there is none."""
        advice = f"{file} is no schedule; `foveate calibrate` or foveate.calibrate makes one"
        try:
            found = json.loads(Path(file).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(advice) from error
        if not isinstance(found, dict) or found.pop("kind", None) != KIND:
            raise ValueError(advice)
        try:
            for name, kind in (("sigmas", float), ("anchors", int)):
                found[name] = tuple(kind(x) for x in found[name])
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{advice} ({error!r})") from error

    def check(self, model: str, scheduler: str) -> None:
        """Raises ValueError where it was made with another model or scheduler."""
        for what, ours, theirs in (("model", self.model, model), ("scheduler", self.scheduler, scheduler)):
            if ours != theirs:
                raise ValueError(
                    f"the schedule was calibrated with the {what} {ours or 'of a loop of its own'}, this one is "
                    f"{theirs or 'a loop of its own'}: calibrate again, or leave schedule out"
                )

    def check_step(self, step: int, sigma: float, steps: int | None) -> None:
        """Raises ValueError where a step is not the one that it was planned for."""
        if (steps is not None and steps != self.steps) or not 0 <= step < self.steps:
            raise ValueError(
                f"the schedule is for {self.steps} steps, this run has {steps or f'at least {step + 1}'}: calibrate "
                "with as many, or leave schedule out"
            )
        if abs(sigma - self.sigmas[step]) > NEAR:
            raise ValueError(
                f"the schedule has noise level {self.sigmas[step]:.3f} at step {step}, this run {sigma:.3f}, as with "
                "another shift: calibrate with these levels, or leave schedule out"
            )


def identity(modules: list[nn.Module]) -> str:
    """Class and configuration of a pipeline's transformers: weights may be fine-tuned, the shape may not change."""
    return " + ".join(_identity(module) for module in modules)


def _identity(module: Any) -> str:
    while "_orig_mod" in getattr(module, "_modules", {}):
        module = module._orig_mod
    config: Any = getattr(module, "config", None)
    found: dict[str, Any] = dict(config or {}) if not is_dataclass(config) else asdict(cast(Any, config))
    plain = {name: value for name, value in found.items() if not name.startswith("_")}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{type(module).__name__} {digest}"


def scheduler_name(pipe: Any) -> str:
    return "" if pipe is None else type(getattr(pipe, "scheduler", None)).__name__


def held_errors(gram: Tensor, sigmas: Tensor) -> Tensor:
    """Relative errors (N, N, N) of predicting step k from steps h < i, in that order; mean over samples.

    gram: inner products of the exact run's outputs, float64 (S, N, N).
    """
    h, i, k = (sigmas.view(shape) for shape in ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))
    ahead = ((k - i) / (i - h)).nan_to_num(0.0, 0.0, 0.0)
    total = torch.zeros_like(ahead)
    for G in gram:
        own = G.diagonal()
        squared = (
            own.view(1, 1, -1) + (1 + ahead).square() * own.view(1, -1, 1) + ahead.square() * own.view(-1, 1, 1)
            - 2 * (1 + ahead) * G[None] + 2 * ahead * G[:, None] - 2 * ahead * (1 + ahead) * G[:, :, None]
        )  # fmt: skip
        total += (squared.clamp(min=0) / own.mean()).sqrt()
    return total / len(gram)


def place_anchors(
    gram: Tensor, sigmas: Iterable[float], count: int, required: Iterable[int] = ()
) -> tuple[list, float]:
    """The cheapest `count` anchors, of which the first two steps are always two, and their cost.

    required: steps that must be anchors. Raises ValueError for a count that cannot be.
    """
    levels = torch.tensor([*sigmas], dtype=torch.float64)
    steps, required = len(levels), sorted({0, 1, *required})
    if not len(required) <= count <= steps:
        raise ValueError(
            f"{count} of {steps} steps cannot compute: at least {len(required)} must, from two of which held ones are "
            f"predicted, and at most {steps}"
        )
    ends = torch.cat([levels[1:], levels.new_zeros(1)])
    weight = (levels - ends).abs() / (1 - ends).clamp(min=1e-3).sqrt()
    held = held_errors(gram, levels) * weight
    until = torch.cat([held.new_zeros(steps, steps, 1), held.cumsum(2)], 2)  # until[..., j]: of all steps before j
    cost = until - until.gather(2, torch.arange(1, steps + 1).view(1, -1, 1).expand(steps, -1, 1))
    place = torch.arange(steps + 1)
    earlier = place[:steps, None] < place[None, :steps]
    cost = cost.masked_fill(~(earlier[:, :, None] & (place[:steps, None] < place)[None]), torch.inf)
    for one in required:  # no jump over it
        cost[:, :one, one + 1 :] = torch.inf
    best, back = torch.full((steps, steps), torch.inf, dtype=torch.float64), []
    best[0, 1] = 0.0
    for _ in range(count - 2):  # from the pair (h, i) to (i, j)
        best, came = (best[:, :, None] + cost[:, :, :steps]).min(0)
        back.append(came)
    final = best + cost[:, :, steps]
    pair = int(final.argmin())
    total, (h, i) = float(final.flatten()[pair]), divmod(pair, steps)
    anchors = [i, h]
    for came in reversed(back):
        h, i = int(came[h, i]), h
        anchors.append(h)
    return sorted(anchors), total
