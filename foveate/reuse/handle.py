"""`reuse`: outputs or attention states remembered across denoising steps, in one call.

    handle = fv.reuse(pipe, fv.ReuseConfig(quality=0.9))
    video = pipe(...)
    print(handle.report())
    handle.remove()

Shapes: see policy.py.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from foveate.attention import Dense
from foveate.models import adapters
from foveate.parallel.policy import Parallel
from foveate.reuse.branches import SplitBranches
from foveate.reuse.config import ReuseConfig
from foveate.reuse.output import HeldOutput
from foveate.reuse.policy import Place, Reuse
from foveate.reuse.ranks import Team
from foveate.reuse.report import ReuseReport

log = logging.getLogger("foveate")


def reuse(pipe_or_transformer: Any, config: ReuseConfig | None = None) -> "ReuseHandle":
    """Let a diffusers pipeline, or a transformer, reuse what earlier denoising steps computed, until `remove()`.

    A pipeline: every transformer of it that models/adapters.py knows (Wan 2.2 has two), step and noise level from its
    calls' `cache_context` or its scheduler. A transformer (or the built-in VideoDiT): from `cache_context`, which
    `foveate.sample.generate` enters too, or from `handle.during`. Under torchrun all ranks call it alike, and get the
    whole result. Where a policy is installed already (`sparsify`, `parallelize`), layers are computed by it and held
    whole. Raises ValueError for models that are not known.
    """
    return ReuseHandle(pipe_or_transformer, config or ReuseConfig())


class ReuseHandle:
    """What `reuse` gives back; a context manager too, the end of whose `with` removes it."""

    def __init__(self, target: Any, config: ReuseConfig):
        self.config = config
        pipe = None if isinstance(target, nn.Module) else target
        models = [target] if pipe is None else transformers(pipe)
        self.installed: list[adapters.Installed] = []
        self.policies: list[Reuse] = []
        self.outputs: list[HeldOutput] = []
        self._hooks: list[Any] = []
        self._undo: list[Callable[[], Any]] = []
        try:
            for model in models:
                self._install(model, pipe)
        except Exception:
            self.remove()
            raise

    def _install(self, model: nn.Module, pipe: Any) -> None:
        found = adapters.installed(model)
        inner = None if found is None else found.policy
        if isinstance(inner, Reuse):
            raise ValueError("the model reuses states already: remove() that first")
        installed = adapters.install(model, Dense()) if found is None else found
        self._undo.append(installed.remove if found is None else partial(setattr, installed, "policy", inner))
        team = None
        if isinstance(inner, Parallel):
            team = Team(installed, self.config, inner)
        elif found is None and dist.is_initialized() and dist.get_world_size() > 1:
            team = Team(installed, self.config)
            self._undo.append(team.remove)
        layers = self.config
        if self.config.hold == "output":  # what is computed is computed exactly
            layers = replace(self.config, hold="attention", quality=1.0, interval=None)
        policy = Reuse(
            len(installed.layers), layers, inner=inner, team=team, place=_scheduler(pipe),
            guidance=_guidance(pipe, model),
        )  # fmt: skip
        installed.policy = policy
        self.installed.append(installed)
        self.policies.append(policy)
        if team is not None and team.degrees.cfg == 2:
            self._undo.append(SplitBranches(installed, policy.drop_branch).remove)
        tell = _conditions(installed.root, policy)
        self._hooks.append(installed.root.register_forward_pre_hook(tell, with_kwargs=True))
        if self.config.hold == "output":
            now, guidance = partial(_now, installed, policy), _guidance(pipe, model)
            outputs = HeldOutput(
                installed.root, self.config, now, lambda: policy.conditions, guidance, lambda: policy.request,
                together=team is not None,
            )  # fmt: skip
            self.outputs.append(outputs)
            self._undo.append(outputs.remove)

    def report(self) -> ReuseReport:
        """What the newest request did, all transformers of the pipeline in turn. Waits for the device."""
        if self.outputs:
            return ReuseReport([record for outputs in self.outputs for record in outputs.records])
        return ReuseReport([record for policy in self.policies for record in policy.report().steps])

    @contextmanager
    def during(self, *, step: int, sigma: float, branch: str = "") -> Iterator[None]:
        """Around a forward of one's own loop: the denoising step, its noise level and the CFG branch."""
        for installed in self.installed:
            installed.set_context(step=step, branch=branch, sigma=sigma)
        try:
            yield
        finally:
            for installed in self.installed:
                installed.set_context()

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Around the forwards of one of several requests that take turns: each has its own states, until `forget`."""
        before = [policy.request for policy in self.policies]
        for policy in self.policies:
            policy.request = name
        try:
            yield
        finally:
            for policy, old in zip(self.policies, before, strict=True):
                policy.request = old

    def forget(self, name: str | None = None) -> None:
        """Free the states of a request, or of all. The next forward begins a new one."""
        for holder in (*self.policies, *self.outputs):
            holder.drop(name)

    def bytes_held(self) -> int:
        """Bytes of held states on this device now."""
        branches = [b for p in self.policies for request in p.requests.values() for b in request.branches.values()]
        return sum(branch.bytes() for branch in branches) + sum(outputs.bytes() for outputs in self.outputs)

    def remove(self) -> None:
        """Give the model back as it was and free all states. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        for undo in reversed(self._undo):
            undo()
        self.forget()
        self._hooks, self._undo = [], []

    def __enter__(self) -> "ReuseHandle":
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


def _now(installed: adapters.Installed, policy: Reuse) -> tuple[int, float, str]:
    """Step, noise level and branch of the forward that begins."""
    return *policy.place(installed.step, installed.sigma), installed.branch


def _conditions(model: nn.Module, policy: Reuse) -> Callable:
    """A forward hook that tells the policy what the model is conditioned on: its text, image or label."""
    names = tuple(inspect.signature(type(model).forward).parameters)[1:]

    def tell(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs = dict(zip(names, args, strict=False)) | kwargs
        policy.conditions = [
            value for name, value in inputs.items()
            if isinstance(value, Tensor) and (name == "condition" or name.startswith("encoder_hidden_states"))
        ]  # fmt: skip

    return tell


def transformers(pipe: Any) -> list[nn.Module]:
    """The transformers of a diffusers pipeline. Raises ValueError where there is none."""
    names = ("transformer", "transformer_2")
    found = [getattr(pipe, name, None) for name in names]
    models = [model for model in found if isinstance(model, nn.Module)]
    if not models:
        raise ValueError(
            f"{type(pipe).__name__} has no transformer; reuse takes a diffusers video pipeline or a transformer"
        )
    return models


def _scheduler(pipe: Any):
    """Step and noise level from a pipeline's scheduler, for pipelines whose cache_context does not say them."""

    def place() -> Place:
        scheduler = getattr(pipe, "scheduler", None)
        index = getattr(scheduler, "step_index", None)
        if scheduler is not None and index is None:
            index = getattr(scheduler, "begin_index", None)
        sigmas = getattr(scheduler, "sigmas", None)
        if index is None or sigmas is None:
            return None, None
        return int(index), float(sigmas[int(index)])

    return place


def _guidance(pipe: Any, model: nn.Module):
    """The guidance scale in use; a switch of transformers is a new model with its own states, not a change of scale."""
    second = getattr(pipe, "transformer_2", None) is model
    names = ("_guidance_scale_2",) if second else ("_guidance_scale",)
    return lambda: tuple(getattr(pipe, name, None) for name in names)
