"""`sparsify`: sparse attention in anybody's training loop or generation, in two lines.

    handle = fv.sparsify(model, fv.SparsityConfig(tolerance=0.005))
    ...                      # forward, backward, optimiser step, as ever
    handle.step()

The handle drives the policy: predictors learn beside training, profiles and paired losses are measured at a cadence,
and `controller` decides from them (DSV's two stages, arXiv 2502.07590, section 4, with a measured way back).
docs/training.md says what happens in which step.

Not covered: losses that are not a weighted mean square of the model's output, unless `step` is given a closure; block-
causal or KV-cached attention, which the adapters refuse.

Shapes: L layers, H heads, K budgets of a profile.
"""

import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foveate import costs as prices
from foveate.attention import Dense
from foveate.models import adapters
from foveate.sparsity import artifact, cadence, ranks
from foveate.sparsity.budgets import allowed
from foveate.sparsity.building import check_model, make_policy
from foveate.sparsity.captured import Captured
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.loss import Loss
from foveate.sparsity.pairs import Pair, closure_run
from foveate.sparsity.plan import Control, Decision
from foveate.sparsity.policy import length_class
from foveate.sparsity.predictor import Lesson
from foveate.sparsity.pricing import Pricing
from foveate.sparsity.probe import Probe, say_once
from foveate.sparsity.profile import SparsityProfile
from foveate.sparsity.ranks import Reduce
from foveate.sparsity.shapes import Search
from foveate.sparsity.summary import table
from foveate.sparsity.track import Measured, Track
from foveate.sparsity.tracks import CLASSES, Log, Tracks
from foveate.tiles import CUBE

log = logging.getLogger("foveate")


def sparsify(
    model: nn.Module,
    config: SparsityConfig | None = None,
    *,
    reduce: Reduce | None = None,
    log: Log | None = None,
    costs: prices.Costs | None = None,
) -> "Handle":
    """Make a video model's self-attention sparse where that costs no more than the tolerance; see `SparsityConfig`.

    model: the built-in VideoDiT, or a diffusers transformer that models/adapters.py knows; as it is, with compiled
    blocks, in DDP, or sharded by fully_shard (these before or after). A model that is compiled whole is given compiled.
    Call `handle.step()` after each optimiser step, on all ranks equally often.
    reduce: the mean of a float32 tensor over the ranks that decide together; all ranks of a job by default, and
    `lambda x: x` where every rank trains a model of its own. log: such as SummaryWriter.add_scalar, given (name, value,
    step). costs: prices of attention, the saved table of the model's device by default.
    Raises ValueError for models that are not known or are sparse already, and for a config that does not fit the model;
    then the model is left as it was.
    """
    return Handle(model, config or SparsityConfig(), reduce, log or (lambda *_: None), costs)


class Handle:
    """What `sparsify` gives back. `policy`, `tracks` (by class of length), `search` (for a shape of tiles) and
    `installed` (models/adapters.py) may be read. It is `Stateful` for torch.distributed.checkpoint: the structure of
    its state never changes."""

    def __init__(
        self, model: nn.Module, config: SparsityConfig, reduce: Reduce | None, log: Log, costs: prices.Costs | None
    ):
        self.config, self.reduce, self.steps = config, reduce, 0
        device = check_model(model, config)
        self.installed = adapters.install(model, Dense())
        try:
            self.policy = make_policy(self.installed, config, device)
        except BaseException:
            self.installed.remove()
            raise
        self.installed.policy = self.policy
        shape = CUBE if config.tile_shape == "auto" else config.tile_shape
        self.search = Search(shape, fixed=config.tile_shape != "auto" or config.training_free_steps > 0)
        self.installed.tile_shape = shape
        self._copies = list[Callable[[], adapters.Installed | None]]()
        if not config.training_free_steps:  # what its dense steps teach is used at once
            self.policy.freeze()
        self._model = model
        self.pricing = Pricing(config, self.policy, self.installed.root, costs)
        self.tracks = Tracks(config, self.policy, self.pricing, log)
        self.loss = Loss(config)
        self._probe = Probe(model, self.policy, self._before_forward)
        self._placed = False  # training-free layers are priced
        if config.training_free_steps:
            self.policy.free_steps, self.policy.mode = config.training_free_steps, "sparse"
        else:
            self.policy.collect, self.policy.active = True, set()
            self.policy.open = config.budget is not None
        self._schedule()

    @property
    def main(self) -> Track:
        """The class of lengths that most of the attention seen so far belongs to."""
        return self.tracks.main

    @property
    def control(self) -> Control:
        return self.main.control

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def decision(self) -> Decision:
        return self.main.decision

    @property
    def profile(self) -> SparsityProfile:
        return self.main.profile

    @property
    def steady(self) -> bool:
        """Whether the next training step is that and nothing else: no lesson, no look, no sample, no profile."""
        if not self.installed.live or self.installed.policy is not self.policy:
            return False
        busy = self.policy.learning or self.policy.weighs or self.policy.look or self.config.training_free_steps
        return not (busy or self._probe.sampling or self._probe.checking)

    def captured(self, loss_of: Callable[..., Tensor]) -> Captured:
        """`loss_of(*tensors).backward()` as one call, which replays a CUDA graph wherever it may: see `Captured`."""
        return Captured(self._model, loss_of, self)

    def aside(self) -> AbstractContextManager[None]:
        """Forwards inside a `with` are neither training nor samples."""
        return self._probe.aside()

    def replayed(self, tokens: int) -> None:
        """A training step of sequences of this length was replayed by a CUDA graph."""
        self._probe.replayed(tokens)

    def step(self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | float | None = None) -> None:
        """Call after every optimiser step: learn, and at a cadence measure and decide. On all ranks alike.

        By default the paired losses are those of a training forward's inputs, its target worked out from the gradient
        that reached the model's output and the loss that backward began from: exact for w * mean((output - target)^2)
        with a simple w, masked or not (pairs.py). The first step checks that the loss is of that form, and raises
        ValueError where a tolerance could not be held. Otherwise give either `loss`, the number that `backward` was
        called on, for any one weight; or `closure`, which returns the scalar loss of a fixed batch: it is called twice
        without gradients, with dense and with sparse attention, under the same random state.
        """
        if self.config.training_free_steps:
            return
        if self.reduce is None:
            self.reduce = ranks.found()
        self._probe.notice(closure is not None)
        self.steps += 1
        self.policy.step = self.steps
        due = self._due(self.steps)
        try:
            ready = self._exchange(closure, loss, bool(due))
            self.policy.influence.take()
            self.policy.freeze()
            if ready and self.policy.ready:
                self._measure(closure, loss, self._due(self.steps))
        finally:
            self._schedule()

    def _due(self, step: int) -> list[int]:
        """The classes of lengths whose next measurement is due. None while the loss is not understood, or tiles are
        looked at: measurements are of one shape."""
        return [] if self.loss.stopped or self.policy.look else self.tracks.due(step)

    def _schedule(self) -> None:
        """What the next training step has to do besides training."""
        upcoming, policy, stopped = self.steps + 1, self.policy, self.loss.stopped
        searches = self.search.wanted(upcoming) and policy.mode == "dense" and not stopped
        policy.look = self.search.look(self.config.budget, self._constants, len(policy.learners)) if searches else None
        due = self._due(upcoming)
        waits = not (stopped or policy.look) and not self.tracks and upcoming >= self.config.warmup
        if not self.config.training_free_steps:
            rank = self.tracks.rank
            self._probe.wanted = lambda tokens, kept: kept is None or rank(tokens) < rank(kept)
            self._probe.next_step(bool(due) or waits, not self.loss.understood)
            early = upcoming <= self.config.warmup or not policy.ready
            pace = self.main.pace
            teach = self.config.teach_every or (cadence.TEACH_EVERY if pace is None else pace.teach_every)
            policy.learning = early or upcoming % teach == 0
        policy.weighs = policy.learning and self.config.goal is not None

    def _exchange(self, closure: Any, loss: Tensor | float | None, due: bool) -> bool:
        """Lessons, what lengths were seen and whether the loss is understood, over all ranks. True: measure now."""
        checking = not (self.loss.understood or closure is not None or self.loss.stopped)
        policy, look = self.policy, self.policy.look
        if not (policy.learning or due or checking or look or not self.tracks):
            return False
        lessons = policy.step_lessons() if policy.learning else []
        parts = [x for lesson in lessons for x in (lesson.total, lesson.weight)]
        if look is not None:
            parts += [policy.step_looks(look), self._influence()]
        sampled = closure is not None or self._probe.ready()
        wanted = sampled and self.tracks.is_due(self._sample_tokens(), self.steps)
        seen, bad = self.loss.look(self._probe.seen_loss(loss), loss is not None) if checking else (0.0, 0.0)
        lengths = {length_class(tokens) for tokens in self._probe.lengths or set(policy.tokens.values())}
        counts = [float(index in lengths) for index in range(CLASSES)]
        flags = torch.tensor([float(sampled), float(wanted), seen, bad, *counts])
        *found, flags = ranks.mean([*parts, flags], self.reduce, self._device)
        policy.learn({index: Lesson(*found[2 * index : 2 * index + 2]) for index in range(len(lessons))})
        sampled, wanted, seen, bad, *counts = flags.tolist()
        self.tracks.meet(counts, self.steps)
        if look is not None:
            self._looked(*found[-2:])
        if checking and seen:
            self.loss.understand(bad > 0)
        return sampled == 1 and wanted > 0 and look is None and not self.loss.stopped

    @property
    def _constants(self) -> tuple[float, ...]:
        """Of the periphery, that heads may be given."""
        config = self.config
        return allowed(self.policy.profiled, "drop" if config.rule == "dsv" else config.periphery)

    def _influence(self) -> Tensor:
        """(L, H), of this rank."""
        mean = self.policy.influence.mean
        return torch.ones(len(self.policy.learners), self.policy.heads) if mean is None else mean

    def _looked(self, found: Tensor, influence: Tensor) -> None:
        """Tiles of several shapes were looked at, on all ranks: found (L, C + 1, H), influence (L, H)."""
        before, self.search = self.search, self.search.take(found, influence, self.steps, self.config.warmup)
        if self.search.said != before.said:
            log.info("step %d: %s", self.steps, self.search.said)
        if self.search.shape != before.shape:
            self._reshape()

    def _reshape(self) -> None:
        """Tiles of another shape from now on: predictors learn anew, and what was measured is forgotten."""
        for installed in (self.installed, *(copy() for copy in self._copies)):
            if installed is not None:
                installed.tile_shape = self.search.shape
        self.policy.forget()
        self.policy.by_class.clear()
        self.tracks.forget(self.steps)

    def _sample_tokens(self) -> int:
        sample = self._probe.sample
        return max(self.policy.tokens.values()) if sample is None else sample.tokens

    def _measure(self, closure: Callable[[], Tensor] | None, loss: Tensor | float | None, due: Sequence[int]) -> None:
        """One look at the model, and after the last look of a measurement a decision."""
        if closure is not None:
            run = closure_run(closure, self._device)
        else:
            assert self._probe.sample is not None
            run = self.loss.run(self._probe.sample, self._model, loss)
        with self._probe.aside(), self.policy.using("dense"), self.policy.profiling() as found:
            dense = run()
        # All ranks run the model equally often, as FSDP wants, whatever the lengths of their samples.
        pair = None
        if any(track.compares for track in self.tracks.values()):
            with self._probe.aside(), self.policy.using("sparse"):
                sparse = run()
            pair = Pair.of(dense, sparse) if self.loss.comparable else None
        own = length_class(self._sample_tokens())
        if own not in due or not self.tracks[own].compares:
            pair = None
        missing = [index for index in range(len(self.policy.learners)) if index not in found]
        if missing:
            raise RuntimeError(f"layers {missing} did not call the policy: was their attention processor replaced?")
        heads = torch.stack([found[index].flat() for index in range(len(found))])
        measured = Measured(heads, self._influence(), float(self._sample_tokens()), pair).flat()
        for index, flat in zip(due, self._reduced(measured, own, due), strict=True):
            if flat is not None:
                mean = Measured.from_flat(flat, *heads.shape[:2])
                self.tracks.take(index, mean, self.steps, self.loss.comparable)

    def _reduced(self, measured: Tensor, own: int, due: Sequence[int]) -> list[Tensor | None]:
        """Of each due class the mean over the ranks that measured it; None where none did, or it was not finite."""
        fine = measured.isfinite().all()
        rows = [torch.where(fine, measured, 0.0) if index == own else torch.zeros_like(measured) for index in due]
        marks = torch.tensor([float(index == own) for index in due])
        signs = torch.stack([~fine, torch.tensor(self.loss.lost, device=fine.device)]).float()
        *rows, marks, signs = (x.cpu() for x in ranks.mean([*rows, marks, signs], self.reduce, self._device))
        broken, lost = signs.tolist()
        if lost:
            self.loss.lose()
            if self.loss.stopped:
                self.tracks.stop(self.loss.stopped, self.steps)
        if broken:
            say_once("a measurement was not finite, or its loss not understood, and is left out")
            return [None] * len(due)
        return [row / mark if mark else None for row, mark in zip(rows, marks.tolist(), strict=True)]

    def _before_forward(self) -> None:
        """Training-free: price the layers once a dense forward has shown the length."""
        if self.config.training_free_steps and not self._placed and self.policy.tokens:
            self._placed = True
            self.pricing.place()

    def restart(self) -> None:
        """Training-free inference: the next forward is the first of a new generation, is dense and teaches; what the
        last one taught is forgotten. Under `reuse` new requests are noticed without it."""
        self.policy.restart()

    def state_dict(self) -> dict[str, Any]:
        """`predictors`: flat tensors of fixed shapes; `control`: everything else, as one JSON text."""
        influence = self.policy.influence
        control = {
            "tracks": self.tracks.to_dict(), "search": self.search.to_dict(), "steps": self.steps,
            "rank": self.config.rank, "budget": _plain(self.config.budget), "loss": self.loss.to_dict(),
            "influence": None if influence.mean is None else influence.mean.tolist(), "weighed": influence.count,
        }  # fmt: skip
        return {"predictors": self.policy.state_dict(), "control": json.dumps(control, allow_nan=False)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, exactly. ValueError where it is of a model of another shape or another rank."""
        if "control" not in state or "predictors" not in state:
            raise ValueError(
                "this is not the state of a handle (its predictors and control): save handle.state_dict() as a whole "
                "to go on training; to generate, use handle.save(folder) and fv.load_sparse(model, folder)"
            )
        control = state["control"]
        saved = json.loads(control) if isinstance(control, str) else control
        if saved["rank"] != self.config.rank:
            raise ValueError(f"the predictors were saved with rank {saved['rank']}; set SparsityConfig(rank=...) to it")
        search = Search.from_dict(saved["search"])
        if self.config.tile_shape not in ("auto", search.shape):
            raise ValueError(
                f"the predictors were saved for tiles of {search.shape}; set SparsityConfig(tile_shape=...) to it"
            )
        self.policy.load_state_dict(dict(state["predictors"]))
        self.search = replace(search, fixed=self.search.fixed)
        self.installed.tile_shape = search.shape
        self.steps = self.policy.step = saved["steps"]
        self.loss.load(saved["loss"])
        self.policy.influence.restore(saved["influence"], saved["weighed"])
        self.tracks.load(saved["tracks"], self.steps, _plain(self.config.budget) == saved["budget"])
        self._schedule()

    def save(self, folder: Path | str) -> None:
        """Write what inference needs, predictors and plan, for `fv.load_sparse(model, folder)`. Nothing is pickled."""
        artifact.save(folder, self.installed, self.policy, {c: t.decision for c, t in self.tracks.items()}, self.steps)

    def follow(self, copy: nn.Module) -> adapters.Installed:
        """Let a copy of the model, such as its EMA, be as sparse as the model is now and later. It teaches nothing.

        Raises ValueError where the copy has another shape, or something installed. `remove()` on what is returned ends
        it.
        """
        installed = artifact.follow(copy, self.installed, self.policy)
        self._copies.append(weakref.ref(installed))
        return installed

    def summary(self) -> str:
        """A table, per layer: sparse or dense, kept share, pooled heads, measured error and recall; and of
        what shape tiles are, where that was looked at."""
        return "\n".join(filter(None, [table(self.control, self.profile, self.steps), self.search.said]))

    def __str__(self) -> str:
        others = [track for track in self.tracks.values() if track is not self.main]
        tables = [table(x.control, x.profile, self.steps, round(x.tokens)) for x in others]
        return "\n".join([self.summary(), *tables])

    def remove(self) -> None:
        """Give the model back as it was."""
        self._probe.remove()
        self.installed.remove()


def _plain(budget: float | Sequence[float] | None) -> float | list[float] | None:
    return list(budget) if isinstance(budget, Sequence) else budget
