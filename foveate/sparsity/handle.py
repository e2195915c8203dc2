"""`sparsify`: sparse attention in anybody's training loop or generation, in two lines.

    handle = fv.sparsify(model, fv.SparsityConfig(tolerance=0.005))
    ...                      # forward, backward, optimiser step, as ever
    handle.step()

The handle drives the policy: predictors learn beside training, profiles and paired losses are measured at a cadence,
and `controller` decides from them (DSV's two stages, arXiv 2502.07590, section 4, with a measured way back).

Not covered: losses that are not a weighted mean square of the model's output, unless `step` is given a closure; block-
causal or KV-cached attention, which the adapters refuse.

Shapes: L layers, H heads, K budgets of a profile.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from foveate import costs as prices
from foveate.attention import Dense
from foveate.models import adapters
from foveate.sparsity import controller
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.controller import Control, Decision, Plan
from foveate.sparsity.pairs import Pair, Probe, gap
from foveate.sparsity.policy import Sparse
from foveate.sparsity.profile import SparsityProfile
from foveate.sparsity.summary import table

log = logging.getLogger("foveate")

Reduce = Callable[[Tensor], Tensor]
Log = Callable[[str, float, int], None]
MEMORY = 0.5  # what a profile keeps of its past at each measurement
SLOW = 0.2  # rate of the predictors' lessons in sparse training, relative to dense


def sparsify(
    model: nn.Module,
    config: SparsityConfig | None = None,
    *,
    reduce: Reduce | None = None,
    log: Log | None = None,
    costs: prices.Costs | None = None,
) -> "Handle":
    """Make a video model's self-attention sparse where that costs no more than the tolerance; see `SparsityConfig`.

    model: the built-in VideoDiT, or a diffusers transformer that models/adapters.py knows; as it is, compiled, wrapped
    in DDP, or sharded by fully_shard (before or after). Call `handle.step()` after each optimiser step.
    reduce: the mean of a float32 tensor over all ranks; every rank must call `step` equally often. log: such as
    SummaryWriter.add_scalar, given (name, value, step). costs: prices of attention, the saved table of the model's
    device by default. Raises ValueError for models that are not known or are sparse already.
    """
    return Handle(model, config or SparsityConfig(), reduce, log or (lambda *_: None), costs)


class Handle:
    """What `sparsify` gives back. `policy`, `profile`, `control` and `installed` (models/adapters.py) may be read."""

    def __init__(
        self, model: nn.Module, config: SparsityConfig, reduce: Reduce | None, log: Log, costs: prices.Costs | None
    ):
        self.config, self.reduce, self.log, self.steps = config, reduce, log, 0
        self.installed = adapters.install(model, Dense())
        _check_layers(config.dense_layers, self.installed)
        self._device = next(model.parameters()).device
        self.policy = _policy(self.installed, config, self._device)
        self.installed.policy = self.policy
        inner = unwrapped(model)
        self.policy.training = lambda: inner.training
        self.policy.freeze()
        self.control = controller.begin(config)
        self.profile = SparsityProfile.empty(len(self.policy.learners))
        self._influence: Tensor | None = None  # (L, H) of all ranks, at the last measurement
        self._probe = Probe(model, self.policy, self._before_forward)
        self._costs = costs
        self._tokens = 0.0  # of a sequence, mean over ranks
        self._pairs: list[Pair] = []  # of the measurement that has begun
        self._synced = self._placed = False  # all ranks' predictors have one origin; training-free layers are priced
        if config.training_free_steps:
            self.policy.free_steps, self.policy.mode = config.training_free_steps, "sparse"
        self._schedule()

    @property
    def decision(self) -> Decision:
        return self.control.decision

    def step(self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | float | None = None) -> None:
        """Call after every optimiser step: learn, and at a cadence measure and decide. On all ranks alike.

        By default the paired losses are those of the last training forward's inputs, its target worked out from the
        gradient that reached the model's output: exact for loss_weight * mean((output - target)^2). Otherwise give
        either `loss`, the number that `backward` was called on (then any one weight, as of a gradient scaler, is
        found from it), or `closure`, which returns the scalar loss of a fixed batch: it is called twice without
        gradients, with dense and with sparse attention, under the same random state.
        """
        self.steps += 1
        self.policy.step = self.steps
        self._share_lessons()
        self.policy.influence.take()
        self.policy.freeze()
        if self._measuring() and (closure is not None or self._probe.ready()):
            self._measure(closure, float(loss.detach()) if isinstance(loss, Tensor) else loss)
        self._schedule(quiet=closure is not None)

    def _measuring(self) -> bool:
        return not self.config.training_free_steps and self.policy.ready and self.steps >= self.control.due

    def _schedule(self, quiet: bool = False) -> None:
        """What the next training step has to do besides training."""
        upcoming = self.steps + 1
        due = upcoming >= self.control.due and not self.config.training_free_steps
        if self.steps and self._measuring() and not (self._probe.seen or quiet):
            say_once(
                "no training forward of the model was seen since the last step, so nothing can be measured: if it is "
                "compiled whole, sparsify the compiled module itself, or give handle.step a closure"
            )
        self._probe.next_step(due)
        active = self.decision.active
        self.policy.learning = not self.config.training_free_steps and (
            not active or upcoming % self.config.teach_every == 0
        )
        self.policy.weighs = self.policy.learning and self.config.goal is not None

    def _measure(self, closure: Callable[[], Tensor] | None, loss: float | None) -> None:
        """One pair, and after the last pair of a measurement the profile and a decision."""
        plan = self.decision.plan
        first = not self._pairs
        compare = plan is not None and any(plan.sparse)
        last = not compare or len(self._pairs) + 1 >= self.config.pairs
        run = self._probe.runs(closure, loss, self.config.loss_weight)
        with self.policy.using("dense"), self.policy.profiling() as found:
            dense = run()
        sparse = dense
        if compare:
            with self.policy.using("sparse"):
                sparse = run()
        self._pairs.append(Pair.of(dense, sparse))
        if not self._profile(found, first):
            self._pairs.pop()  # the same on all ranks, because the numbers are reduced
            say_once("a measurement was not finite and is left out; the gradients of that step were not either")
        elif last:
            self._decide(compare)

    def _profile(self, found: dict, first: bool) -> bool:
        """Reduce a pair and its profiles over ranks and take the latter in. False where they are not finite."""
        missing = [index for index in range(len(self.policy.learners)) if index not in found]
        if missing:
            raise RuntimeError(f"layers {missing} did not call the policy: was their attention processor replaced?")
        numbers = controller.heads([found[index] for index in range(len(found))])
        self._device = numbers.device
        tokens = max(self.policy.tokens.values())  # ranks may have clips of different lengths
        others = torch.tensor([*astuple(self._pairs[-1]), tokens], device=numbers.device)
        influence = self.policy.influence.mean
        worth = torch.ones(numbers.shape[1:3]) if influence is None else influence
        measured = torch.cat([numbers.flatten(), worth.flatten().to(numbers.device), others])
        reduced = (measured if self.reduce is None else self.reduce(measured)).cpu()
        if not bool(reduced.isfinite().all()):
            return False
        *losses, self._tokens = reduced[-4:].tolist()
        self._pairs[-1] = Pair(*losses)
        profiled, worth = reduced[:-4].split([numbers.numel(), worth.numel()])
        self._influence = worth.view(numbers.shape[1:3])
        for index, layer in enumerate(controller.unstack(profiled.view(numbers.shape))):
            # The pairs of one measurement are a few steps apart: together they are one look at the model.
            decay = MEMORY if first else 1 - (1 - MEMORY) / len(self._pairs)
            self.profile = self.profile.updated(index, layer, self.steps, decay)
        return True

    def _decide(self, compared: bool) -> None:
        found = gap(self._pairs, self.config.shift) if compared else None
        self._pairs = []
        before = self.control
        self.control = controller.advance(
            before, self.config, self.profile, found, self.steps, self._price, self._influence
        )
        if self.decision is not before.decision:
            self._apply()
        self._report(before, found)

    def _price(self, budgets: Sequence[float], pooled: Sequence[bool]) -> tuple[float, float]:
        """Milliseconds of a layer, sparse and dense. Where no forward has shown its length yet, sparse is free."""
        if self.config.force or not self._tokens:
            return 0.0, 1.0
        if self._costs is None:
            self._costs = prices.here(self._device)
        tokens, heads, dim = round(self._tokens), self.installed.heads, self.installed.dim
        passes = ("forward_ms",) if self.config.training_free_steps else prices.PASSES
        density, share = sum(budgets) / len(budgets), sum(pooled) / len(pooled)
        sparse = self._costs.sparse(tokens, heads, dim, density, pooled=share, passes=passes)
        return sparse, self._costs.dense(tokens, heads, dim, passes=passes)

    def _before_forward(self) -> None:
        """Training-free: once a dense forward has shown the length, is sparse attention worth it?"""
        if not self.config.training_free_steps or self._placed or not self.policy.tokens:
            return
        self._placed, self._tokens = True, max(self.policy.tokens.values())
        for index, (budget, pooled) in enumerate(zip(self.policy.budgets, self.policy.pooled, strict=True)):
            sparse, dense = self._price(budget.tolist(), pooled.tolist())
            self.policy.sparse_layers[index] = index not in self.config.dense_layers and sparse < dense
        if not any(self.policy.sparse_layers):
            log.info("sparse attention does not pay at %d tokens: all layers stay dense", self._tokens)

    def _apply(self) -> None:
        """Put the decision into the policy."""
        plan, active = self.decision.plan, self.decision.active
        if plan is not None:
            for index, row in enumerate(zip(plan.budgets, plan.pooled, plan.sparse, strict=True)):
                self.policy.assign(index, *row)
        self.policy.mode = "sparse" if active else "dense"
        for learner in self.policy.learners:
            learner.lr = self.policy.rate * (SLOW if active else 1.0)

    def _report(self, before: Control, found: float | None) -> None:
        """One line a change; scalars of every measurement."""
        decision, plan = self.decision, self.decision.plan
        kept = plan.kept if plan is not None and decision.active else 1.0
        values = {"kept": kept, "epsilon": self.control.epsilon, "active": float(decision.active)}
        values |= {} if found is None else {"gap": found}
        for name, value in values.items():
            self.log(f"foveate/{name}", value, self.steps)
        if decision is before.decision or plan is None:
            return
        dense = [index for index, on in enumerate(plan.sparse) if not on]
        log.info(
            "step %d: %s, %s; %.1f %% of the tiles kept, %d of %d layers sparse%s, error level %.3f, gap %s",
            self.steps, "sparse" if decision.active else "dense", decision.reason, 100 * plan.kept, sum(plan.sparse),
            len(plan.sparse), f" (dense: {dense})" if dense else "", self.control.epsilon,
            "not measured" if found is None else f"{100 * found:+.3f} %",
        )  # fmt: skip

    def _share_lessons(self) -> None:
        """Mean of the predictors over ranks, so that all choose alike; the closed form from the mean of all moments."""
        if self.reduce is None or not (self.policy.learning and self.policy.ready):
            return
        state = self.policy.state_dict()
        names = ("moments.cq", "moments.ck") if not self._synced else ("weights", "first", "second")
        chosen = [name for name in sorted(state) if name.partition(".")[2] in names]
        flat = torch.cat([state[name].flatten() for name in chosen])
        shared = self.reduce(flat).split([state[name].numel() for name in chosen])
        state |= {name: part.view(state[name].shape) for name, part in zip(chosen, shared, strict=True)}
        self.policy.load_state_dict(state)
        if not self._synced:
            self.policy.begin_again()
        self._synced = True

    def restart(self) -> None:
        """Training-free inference: the next forward is the first of a new generation, and is dense and teaches."""
        self.policy.restart()

    def state_dict(self) -> dict[str, Any]:
        """`predictors`: flat tensors (inference needs them too); `control`: everything else, plain for JSON."""
        control = {
            "control": asdict(self.control), "profile": self.profile.to_dict(), "steps": self.steps,
            "pairs": [asdict(pair) for pair in self._pairs], "synced": self._synced, "rank": self.config.rank,
            "budget": _plain(self.config.budget), "tokens": self._tokens,
            "influence": _rows(self.policy.influence.mean), "weighed": self.policy.influence.count,
        }  # fmt: skip
        return {"predictors": self.policy.state_dict(), "control": control}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, exactly. ValueError where it is of a model of another shape or another rank."""
        saved = state["control"]
        if saved["rank"] != self.config.rank:
            raise ValueError(f"the predictors were saved with rank {saved['rank']}; set SparsityConfig(rank=...) to it")
        self.policy.load_state_dict(dict(state["predictors"]))
        self.control, self.profile = _control(saved["control"]), SparsityProfile.from_dict(saved["profile"])
        self.steps, self._synced, self._tokens = saved["steps"], saved["synced"], saved["tokens"]
        self._pairs = [Pair(**pair) for pair in saved["pairs"]]
        self.policy.influence.restore(saved.get("influence"), saved.get("weighed", 0))
        self.policy.step = self.steps
        if self.config.budget is not None and _plain(self.config.budget) != saved["budget"]:
            budgets, pooled = controller.at_budget(self.profile, self.config.budget, self.config.periphery)
            plan = controller.place(budgets, pooled, self._price, None, self.config.dense_layers)
            self.control = replace(self.control, decision=Decision(self.steps, True, plan, "as configured"))
        self._apply()
        self._schedule()

    def summary(self) -> str:
        """A table, per layer: sparse or dense, kept share, pooled heads, measured error and recall at what is kept."""
        return table(self.control, self.profile, self.steps)

    def __str__(self) -> str:
        return self.summary()

    def remove(self) -> None:
        """Give the model back as it was."""
        self._probe.remove()
        self.installed.remove()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and DDP's wrappers."""
    ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    inner = model.module if ddp else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def _check_layers(dense: Sequence[int], installed: adapters.Installed) -> None:
    if any(index >= len(installed.layers) for index in dense):
        installed.remove()
        raise ValueError(f"dense_layers {tuple(dense)} of a model of {len(installed.layers)} layers: count from 0")


def _policy(installed: adapters.Installed, config: SparsityConfig, device: torch.device) -> Sparse:
    device = torch.device("cpu") if device.type == "meta" else device  # the policy follows its queries later
    return Sparse(
        len(installed.layers), installed.heads, installed.dim,
        budget=1.0 if config.budget is None else config.budget,
        periphery="drop" if config.rule == "dsv" else "pool" if config.periphery == "auto" else config.periphery,
        rank=config.rank,
        query_tile=config.query_tile or (128 if config.backend == "fa4" else prices.here(device).tile),
        seed=config.seed, backend=config.backend, device=device,
        start=max(1, config.training_free_steps // 2) if config.training_free_steps else config.learn_from,
    )  # fmt: skip


def _plain(budget: float | Sequence[float] | None) -> float | list[float] | None:
    return list(budget) if isinstance(budget, Sequence) else budget


def _rows(numbers: Tensor | None) -> list[list[float]] | None:
    return None if numbers is None else numbers.tolist()


@cache
def say_once(message: str) -> None:
    log.warning(message)


def _control(saved: Mapping[str, Any]) -> Control:
    decision = dict(saved["decision"])
    if decision["plan"] is not None:
        plan = decision["plan"]
        rows = {name: tuple(tuple(row) for row in plan[name]) for name in ("budgets", "pooled")}
        decision["plan"] = Plan(**rows, sparse=tuple(plan["sparse"]))
    return Control(**{**saved, "decision": Decision(**decision)})
