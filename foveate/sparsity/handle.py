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
from foveate.sparsity import artifact, cadence, controller, ranks
from foveate.sparsity.building import check_model, make_policy
from foveate.sparsity.captured import Captured
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.controller import Control, Decision
from foveate.sparsity.pairs import Pair, Run, closure_run, gap
from foveate.sparsity.policy import Sparse, length_class
from foveate.sparsity.predictor import Lesson
from foveate.sparsity.pricing import Pricing
from foveate.sparsity.probe import Probe, say_once
from foveate.sparsity.profile import SparsityProfile
from foveate.sparsity.ranks import Reduce
from foveate.sparsity.shapes import Search
from foveate.sparsity.summary import table
from foveate.sparsity.track import Measured, Track
from foveate.tiles import CUBE

log = logging.getLogger("foveate")

Log = Callable[[str, float, int], None]
SLOW = 0.2  # rate of the predictors' lessons in sparse training, relative to dense
CLASSES = 32  # of lengths
MISSES = 3  # steps in a row whose loss is no longer understood, before training goes dense


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
        self.config, self.reduce, self.log, self.steps = config, reduce, log, 0
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
        self.tracks: dict[int, Track] = {}
        self._model = model
        self.pricing = Pricing(config, self.policy, self.installed.root, costs)
        self._probe = Probe(model, self.policy, self._before_forward)
        self._placed = False  # training-free layers are priced
        self._understood = bool(config.training_free_steps)  # the loss is one that can be compared
        self._misses = 0
        self._stopped = ""
        if config.training_free_steps:
            self.policy.free_steps, self.policy.mode = config.training_free_steps, "sparse"
        else:
            self.policy.collect, self.policy.active = True, set()
            self.policy.open = config.budget is not None
        self._schedule()

    @property
    def main(self) -> Track:
        """The class of lengths that most of the attention seen so far belongs to."""
        if not self.tracks:
            return Track(controller.begin(self.config), self._nothing_known())
        return max(self.tracks.values(), key=lambda track: (track.work, track.tokens))

    def _nothing_known(self) -> SparsityProfile:
        return SparsityProfile.empty(len(self.policy.learners), constants=self.policy.profiled)

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
        return (
            []
            if self._stopped or self.policy.look
            else [c for c, track in self.tracks.items() if step >= track.control.due]
        )

    def _schedule(self) -> None:
        """What the next training step has to do besides training."""
        upcoming, policy = self.steps + 1, self.policy
        searches = self.search.wanted(upcoming) and policy.mode == "dense" and not self._stopped
        policy.look = self.search.look(self.config.budget, self._constants, len(policy.learners)) if searches else None
        due = self._due(upcoming)
        waits = not (self._stopped or policy.look) and not self.tracks and upcoming >= self.config.warmup
        if not self.config.training_free_steps:
            self._probe.wanted = lambda tokens, kept: kept is None or self._rank(tokens) < self._rank(kept)
            self._probe.next_step(bool(due) or waits, not self._understood)
            early = upcoming <= self.config.warmup or not policy.ready
            pace = self.main.pace
            teach = self.config.teach_every or (cadence.TEACH_EVERY if pace is None else pace.teach_every)
            policy.learning = early or upcoming % teach == 0
        policy.weighs = policy.learning and self.config.goal is not None

    def _rank(self, tokens: int) -> float:
        """Which sample is wanted most: of the class whose measurement has been due longest."""
        track = self.tracks.get(length_class(tokens))
        return -1.0 if track is None else float(track.control.due)

    def _exchange(self, closure: Any, loss: Tensor | float | None, due: bool) -> bool:
        """Lessons, what lengths were seen and whether the loss is understood, over all ranks. True: measure now."""
        checking = not (self._understood or closure is not None or self._stopped)
        look = self.policy.look
        if not (self.policy.learning or due or checking or look or not self.tracks):
            return False
        lessons = _padded(self.policy) if self.policy.learning else []
        self.policy.lessons = {}
        counts = [0.0] * CLASSES
        for tokens in self._probe.lengths or set(self.policy.tokens.values()):
            counts[length_class(tokens)] = 1.0
        sampled = closure is not None or self._probe.ready()
        wanted = sampled and self._is_due(self._sample_class())
        seen, bad = self._check(loss) if checking else (0.0, 0.0)
        flags = torch.tensor([float(sampled), float(wanted), seen, bad, *counts], device=self._device)
        parts = [x for lesson in lessons for x in (lesson.total.flatten(), lesson.weight.view(1))]
        layers, heads = range(len(self.policy.learners)), self.policy.heads
        if look is not None:
            seen_tiles = [self.policy.looks.get(index, look.nothing(heads)).to(self._device) for index in layers]
            parts += [torch.stack(seen_tiles).flatten(), self._influence().flatten()]
        flat = torch.cat([*(x.to(self._device) for x in parts), flags])
        flat = flat if self.reduce is None else self.reduce(flat)
        found, flags = flat[: -len(flags)], flat[-len(flags) :].tolist()
        sizes = [x.numel() for x in parts]
        totals = iter(found.split(sizes) if sizes else ())
        self.policy.learn(
            {i: Lesson(next(totals).view_as(x.total), next(totals).view(())) for i, x in enumerate(lessons)}
        )
        sampled, wanted, seen, bad, *counts = flags
        self._meet(counts)
        if look is not None:
            self._looked(next(totals).view(len(layers), -1, heads), next(totals).view(len(layers), heads))
        if checking and seen:
            self._understand(bad > 0)
        return sampled == 1 and wanted > 0 and look is None and not self._stopped

    @property
    def _constants(self) -> tuple[float, ...]:
        """Of the periphery, that heads may be given."""
        config = self.config
        return controller.allowed(self.policy.profiled, "drop" if config.rule == "dsv" else config.periphery)

    def _influence(self) -> Tensor:
        """(L, H), of this rank."""
        mean = self.policy.influence.mean
        return torch.ones(len(self.policy.learners), self.policy.heads) if mean is None else mean

    def _looked(self, found: Tensor, influence: Tensor) -> None:
        """Tiles of several shapes were looked at, on all ranks: found (L, C + 1, H), influence (L, H)."""
        self.policy.looks = {}
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
        for track in self.tracks.values():
            track.control, track.profile = controller.begin(self.config, self.steps), self._nothing_known()
            track.pairs, track.looks = [], 0
        self._apply()

    def _is_due(self, length: int) -> bool:
        if length not in self.tracks:
            return self.steps >= self.config.warmup
        return length in self._due(self.steps)

    def _sample_class(self) -> int:
        return length_class(self._sample_tokens())

    def _sample_tokens(self) -> int:
        sample = self._probe.sample
        return max(self.policy.tokens.values()) if sample is None else sample.tokens

    def _meet(self, counts: Sequence[float]) -> None:
        """Lengths were trained on, on some rank: `counts` is the mean over ranks, by class."""
        known = len(self.tracks)
        for index, count in enumerate(counts):
            if not count:
                continue
            if index not in self.tracks:
                self._begin(index)
            self.tracks[index].work += count * 4.0**index
        if len(self.tracks) > known:
            self._apply()

    def _begin(self, index: int) -> None:
        """A class of lengths that is new. Given budgets hold for it too, where they pay at its longest."""
        track = Track(controller.begin(self.config, self.steps), self._nothing_known())
        main = self.main
        if self.config.budget is not None and main.decision.plan is not None:
            track.tokens = 2.0**index
            plan = main.decision.plan
            budgets, constants = torch.tensor(plan.budgets), torch.tensor(plan.constants, dtype=torch.float64)
            plan = controller.place(budgets, constants, self.pricing.of(track), None, self.config.dense_layers)
            decision = Decision(self.steps, any(plan.sparse), plan, "as configured")
            track.control = replace(main.control, decision=decision, gap=None)
        self.tracks[index] = track

    def _check(self, loss: Tensor | float | None) -> tuple[float, float]:
        """Whether something was to be seen of the loss in this step, and whether it is not understood."""
        facts = self._probe.seen_loss(loss)
        if facts is None:
            return 0.0, 0.0
        if facts.loss is None:
            self._why = "foveate did not see the loss that the backward began from"
            return 1.0, float(self.config.loss_weight is None)
        if facts.weight is None:
            return 0.0, 0.0  # not finite, as the first steps of a gradient scaler may be
        self._why = (
            f"the loss is not w * mean((output - target)^2) with a w that can be told: {facts.weight:.6g} would be odd"
        )
        return 1.0, float(loss is None and not facts.simple(self.config.loss_weight or 1.0))

    _why = "another rank's loss is not understood"

    def _understand(self, bad: bool) -> None:
        """The first steps have shown what the loss is like, on all ranks."""
        self._understood = True
        if not bad:
            return
        way_out = (
            "dense and sparse attention cannot be compared by it. Give handle.step(closure) a function that returns "
            "the loss of a fixed batch; or handle.step(loss=loss) or SparsityConfig(loss_weight=w), if it is a mean "
            "square times one number all the same"
        )
        if self.config.goal is None:
            self._comparable = False
            say_once(f"{self._why}: gaps are not measured, budgets do not need them. {way_out}")
            return
        self._stopped = self._why
        raise ValueError(f"{self._why}, so {way_out}; or SparsityConfig(budget=...) for one that is fixed")

    _comparable = True

    def _measure(self, closure: Callable[[], Tensor] | None, loss: Tensor | float | None, due: Sequence[int]) -> None:
        """One look at the model, and after the last look of a measurement a decision."""
        run = self._run(closure, loss)
        with self._probe.aside(), self.policy.using("dense"), self.policy.profiling() as found:
            dense = run()
        # All ranks run the model equally often, as FSDP wants, whatever the lengths of their samples.
        pair = None
        if any(track.compares for track in self.tracks.values()):
            with self._probe.aside(), self.policy.using("sparse"):
                sparse = run()
            pair = Pair.of(dense, sparse) if self._comparable else None
        own = self._sample_class()
        if own not in due or not self.tracks[own].compares:
            pair = None
        missing = [index for index in range(len(self.policy.learners)) if index not in found]
        if missing:
            raise RuntimeError(f"layers {missing} did not call the policy: was their attention processor replaced?")
        heads = controller.heads([found[index] for index in range(len(found))])
        measured = Measured(heads, self._influence(), float(self._sample_tokens()), pair).flat()
        for index, flat in zip(due, self._reduced(measured, own, due), strict=True):
            if flat is not None:
                self._take(index, flat, *heads.shape[:2])

    def _run(self, closure: Callable[[], Tensor] | None, loss: Tensor | float | None) -> Run:
        if closure is not None:
            return closure_run(closure, self._device)
        sample = self._probe.sample
        assert sample is not None
        weight = self.config.loss_weight or 1.0
        if self._comparable:
            if loss is not None:
                sample.loss = torch.as_tensor(loss).detach()
            facts = sample.facts()
            if facts.weight is None:
                weight = weight if facts.loss is None else float("nan")
            elif loss is not None or facts.simple(weight):
                weight, self._misses = facts.weight, 0
            else:
                weight, self._misses = float("nan"), self._misses + 1
        return sample.replay(self._model, weight)

    def _reduced(self, measured: Tensor, own: int, due: Sequence[int]) -> list[Tensor | None]:
        """Of each due class the mean over the ranks that measured it; None where none did, or it was not finite."""
        fine = measured.isfinite().all()
        rows = [torch.where(fine, measured, 0.0) if index == own else torch.zeros_like(measured) for index in due]
        marks = torch.tensor([float(index == own) for index in due], device=measured.device)
        lost = torch.tensor([float(self._misses >= MISSES)], device=measured.device)
        flat = torch.cat([*rows, marks, (~fine).float().view(1), lost]).to(self._device)
        flat = (flat if self.reduce is None else self.reduce(flat)).cpu()
        *marks, broken, lost = flat[-len(due) - 2 :].tolist()
        if lost:
            self._lose()
        if broken:
            say_once("a measurement was not finite, or its loss not understood, and is left out")
            return [None] * len(due)
        parts = flat[: -len(due) - 2].split(measured.numel())
        return [part / mark if mark else None for part, mark in zip(parts, marks, strict=True)]

    def _lose(self) -> None:
        """The loss has become one that is not understood: back to dense attention for good."""
        self._stopped = "the loss is no longer a weighted mean square of the output"
        if self.config.goal is None:
            self._comparable, self._stopped = False, ""
            return
        say_once(
            f"{self._stopped}: training goes on with dense attention. Give handle.step(closure) a function that "
            "returns the loss of a fixed batch, or set a fixed SparsityConfig(budget=...)"
        )
        for track in self.tracks.values():
            decision = replace(track.decision, step=self.steps, active=False, reason=self._stopped)
            track.control = replace(track.control, decision=decision)
        self._apply()

    def _take(self, index: int, flat: Tensor, layers: int, heads: int) -> None:
        track = self.tracks[index]
        compared = track.compares and self._comparable
        track.take(Measured.from_flat(flat, layers, heads), self.steps)
        if track.looks < (self.config.pairs if track.compares else 1):
            return
        found = gap(track.pairs, self.config.shift) if compared and track.pairs else None
        track.pairs, track.looks, before = [], 0, track.control
        pace = self.pricing.cadence(track)
        config = replace(self.config, often=pace.often, rare=pace.rare)
        tile, price = self.policy.kv_tile, self.pricing.of(track)
        control = controller.advance(
            before, config, track.profile, found, self.steps, price, track.influence, tile / max(track.tokens, tile)
        )
        track.control = control
        track.pace = self.pricing.cadence(track)  # steps that are sparse from now on are shorter
        interval = max(control.interval, track.pace.often)
        track.control = replace(control, interval=interval, due=self.steps + interval)
        if track.decision is not before.decision:
            self._apply()
        self._report(index, before, found)

    def _before_forward(self) -> None:
        """Training-free: price the layers once a dense forward has shown the length."""
        if self.config.training_free_steps and not self._placed and self.policy.tokens:
            self._placed = True
            self.pricing.place()

    def _apply(self) -> None:
        """Put the decisions into the policy."""
        main = self.main
        for length, track in self.tracks.items():
            plan = track.decision.plan
            if plan is None:
                continue
            for index, row in enumerate(zip(plan.budgets, plan.constants, plan.sparse, strict=True)):
                self.policy.assign(index, *row, length=length)
                if track is main:
                    self.policy.assign(index, *row)
        self.policy.active = {length for length, track in self.tracks.items() if track.decision.active}
        self.policy.mode = "sparse" if self.policy.active else "dense"
        for learner in self.policy.learners:
            learner.lr = self.policy.rate * (SLOW if main.decision.active else 1.0)

    def _report(self, index: int, before: Control, found: float | None) -> None:
        """One line a change; scalars of every measurement of the main lengths."""
        track = self.tracks[index]
        decision, plan = track.decision, track.decision.plan
        kept = plan.kept if plan is not None and decision.active else 1.0
        values = {"kept": kept, "epsilon": track.control.epsilon, "active": float(decision.active)}
        values |= {} if found is None else {"gap": found}
        for name, value in values.items() if track is self.main else ():
            self.log(f"foveate/{name}", value, self.steps)
        if decision is before.decision or plan is None:
            return
        dense = [index for index, on in enumerate(plan.sparse) if not on]
        log.info(
            "step %d: %s at %.0f tokens, %s; %.1f %% of the tiles kept, %d of %d layers sparse%s, error level %.3f, "
            "gap %s; %s",
            self.steps, "sparse" if decision.active else "dense", track.tokens, decision.reason, 100 * plan.kept,
            sum(plan.sparse), len(plan.sparse), f" (dense: {dense})" if dense else "", track.control.epsilon,
            "not measured" if found is None else f"{100 * found:+.3f} %", track.pace,
        )  # fmt: skip

    def restart(self) -> None:
        """Training-free inference: the next forward is the first of a new generation, is dense and teaches; what the
        last one taught is forgotten. Under `reuse` new requests are noticed without it."""
        self.policy.restart()

    def state_dict(self) -> dict[str, Any]:
        """`predictors`: flat tensors of fixed shapes; `control`: everything else, as one JSON text."""
        influence = self.policy.influence
        control = {
            "tracks": {str(index): track.to_dict() for index, track in self.tracks.items()},
            "search": self.search.to_dict(), "steps": self.steps,
            "rank": self.config.rank, "budget": _plain(self.config.budget),
            "understood": self._understood, "comparable": self._comparable, "stopped": self._stopped,
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
        self.tracks = {
            int(index): Track.from_dict(track, self.policy.profiled) for index, track in saved["tracks"].items()
        }
        self.steps, self._understood = saved["steps"], saved["understood"]
        self._comparable, self._stopped = saved["comparable"], saved["stopped"]
        self.policy.influence.restore(saved["influence"], saved["weighed"])
        self.policy.step = self.steps
        if self.config.budget is not None and _plain(self.config.budget) != saved["budget"]:
            for track in self.tracks.values():
                self._rebudget(track)
        self._apply()
        self._schedule()

    def _rebudget(self, track: Track) -> None:
        """Another fixed budget than the saved one."""
        if self.config.budget is None or track.decision.plan is None:
            return
        plan = track.decision.plan
        budgets = torch.as_tensor(self.config.budget, dtype=torch.float64).expand(len(plan.budgets), self.policy.heads)
        constants = torch.tensor(plan.constants, dtype=torch.float64)
        if None not in track.profile.layers:
            budgets, constants = controller.at_budget(track.profile, self.config.budget, self.config.periphery, plan)
        plan = controller.place(budgets, constants, self.pricing.of(track), None, self.config.dense_layers)
        decision = Decision(self.steps, any(plan.sparse), plan, "as configured")
        track.control = replace(track.control, decision=decision)

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


def _padded(policy: Sparse) -> list[Lesson]:
    """Every layer's lesson of this step; one of no weight where there was none, so that all ranks' have one shape."""
    found = []
    for index, learner in enumerate(policy.learners):
        heads, dim = learner.moments.cq.shape[:2]
        width = dim if learner.seen < learner.start else learner.rank
        nothing = torch.zeros(2, heads, dim, width, device=learner.moments.cq.device)
        found.append(policy.lessons.get(index, Lesson(nothing, nothing.new_zeros(()))))
    return found


def _plain(budget: float | Sequence[float] | None) -> float | list[float] | None:
    return list(budget) if isinstance(budget, Sequence) else budget
