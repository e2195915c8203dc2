"""What the demo found, as numbers and files of its folder: what its checks and its report are made of.

demo.json         losses on held-out clips, seconds of steps, machine, versions, command     sparse/ dense/ random/
clips.safetensors a held-out clip, with noise, and as each run's model restores it            the three runs
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from safetensors.torch import load_file, save_file
from torch import Tensor

from foveate.training import folder

FILE, CLIPS = "demo.json", "clips.safetensors"
TOLERANCE = 0.01  # of the dense twin's loss on held-out clips
SPEEDUP = 1.5  # at the longest clip; 1.9 to 2.1 measured on two idle cores: a first run must not fail by luck
SPARSE_SHARE, KEPT = 0.5, 0.35  # of the steps, at least; of the tiles in them, at most


@dataclass(frozen=True)
class Timing:
    """Seconds of a training step with sparse and with dense attention, a number a turn, at so many tokens."""

    tokens: int
    sparse: tuple[float, ...]
    dense: tuple[float, ...]

    @property
    def faster(self) -> float:
        """By the shortest times, which other load does not decide."""
        return min(self.dense) / min(self.sparse)


@dataclass(frozen=True)
class Check:
    """A promise of the demo, whether this run kept it, and the numbers."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """made: when, as ISO 8601. levels: noise of each held-out pair of clip and noise; losses: of each run on these
    pairs, after training.

    spent: seconds by part of the demo. Without losses the run never turned sparse.
    """

    made: str
    version: str
    command: str
    machine: Mapping[str, str]
    packages: Mapping[str, str]
    spent: Mapping[str, float]
    levels: Sequence[float] = ()
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    timings: Sequence[Timing] = ()

    def loss(self, run: str) -> float:
        return fmean(self.losses[run])

    def gap(self, run: str) -> float:
        """Loss of a run over the dense twin's, - 1."""
        return self.loss(run) / self.loss("dense") - 1

    def save(self, out: Path, clips: Mapping[str, Tensor]) -> None:
        (out / FILE).write_text(json.dumps(asdict(self), indent=1))
        if clips:
            save_file({name: clip.contiguous() for name, clip in clips.items()}, out / CLIPS)

    @classmethod
    def load(cls, out: Path) -> tuple["Findings", dict[str, Tensor]]:
        """Undoes `save`. ValueError for a file of another version."""
        try:
            found = json.loads((out / FILE).read_text())
            timings = [Timing(x["tokens"], tuple(x["sparse"]), tuple(x["dense"])) for x in found.pop("timings")]
            clips = load_file(out / CLIPS) if found["losses"] else {}
            return cls(**found, timings=timings), clips
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{out / FILE} was not written by this version of foveate demo: {error!r}") from None


def histories(out: Path) -> dict[str, list[dict]]:
    """Rows of the demo's runs, by name, from the first step on: the twins share the sparse run's dense steps."""
    found = {name: folder.rows(out / name / folder.HISTORY) for name in ("sparse", "dense", "random")}
    switch = switch_step(found["sparse"])
    if switch is None:
        return {"sparse": found["sparse"]}
    shared = found["sparse"][:switch]
    return {name: rows if name == "sparse" else shared + rows for name, rows in found.items()}


def switch_step(history: Sequence[Mapping]) -> int | None:
    """The step after which attention became sparse, None if it never did."""
    return next((row["step"] for row in history if row.get("switched")), None)


def checks(found: Findings, history: Sequence[Mapping]) -> list[Check]:
    """Every promise, measured. The last one is the control: without it the loss check would prove nothing.

    history: of the sparse run.
    """
    kept = [row["kept"] for row in history if row["kept"] < 1]
    if not found.losses:
        reasons = [row["reason"] for row in history if "reason" in row]
        gaps = [row["gap"] for row in history if "gap" in row]
        why = f"it never did: {reasons[-1]}" if reasons else "it never did: nothing was decided"
        why += f"; the last gap was {100 * gaps[-1]:+.2f} %" if gaps else ""
        return [Check("training turns sparse", False, why)]
    longest, gap, control = found.timings[-1], found.gap("sparse"), found.gap("random")
    share, mean = len(kept) / len(history), fmean(kept)
    return [
        Check(
            "training is sparse for most of its steps",
            share >= SPARSE_SHARE and mean <= KEPT,
            f"{len(kept)} of {len(history)} steps, {100 * mean:.0f} % of the attention computed in them",
        ),
        Check(
            f"a step on {longest.tokens:,} tokens is ≥ {SPEEDUP}× faster",
            longest.faster >= SPEEDUP,
            f"{longest.faster:.2f}×: {min(longest.dense):.2f} s dense, {min(longest.sparse):.2f} s sparse, the "
            f"shortest of {len(longest.dense)} turns",
        ),
        Check(
            f"the loss is kept within {100 * TOLERANCE:g} %",
            gap <= TOLERANCE,
            f"{100 * gap:+.2f} %: {found.loss('sparse'):.5f} on held-out clips, trained dense "
            f"{found.loss('dense'):.5f}",
        ),
        Check(
            "tiles chosen at random fail that check",
            control > TOLERANCE,
            f"{100 * control:+.2f} %: {found.loss('random'):.5f} with as many tiles",
        ),
    ]
