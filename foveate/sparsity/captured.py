"""Forward and backward of a training step as one CUDA graph: launched by one call instead of a thousand.

A sparse step of a small model computes for 40 ms and its launches take the host 70 (docs/training.md). A graph replays
kernels, not Python, so it may stand for a step only while Python would do nothing but launch the same ones: no lesson,
no measurement, no user's hook. In all other steps, and where a graph cannot be made, the step runs as ever.

Shapes: L layers, H heads.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foveate.models.copies import Hook
from foveate.sparsity.policy import Sparse
from foveate.sparsity.probe import say_once

if TYPE_CHECKING:
    from foveate.sparsity.handle import Handle

log = logging.getLogger("foveate")

PATIENCE = 3  # calls of one kind, one after the other, before a graph is made of it

Loss = Callable[..., Tensor]


@dataclass
class Record:
    """A graph, what it reads (arguments, and `ours`: the policy's tensors) and what it writes (gradients, loss)."""

    key: Any
    graph: Any
    arguments: list[Tensor | None]
    ours: list[Tensor]
    gradients: list[Tensor | None]
    loss: Tensor
    tokens: int
    computed: dict[str, int]


class Captured:
    """`captured(*tensors)` for `loss = loss_of(*tensors); loss.backward()`; it returns the loss, detached.

    Everything that changes from step to step must be an argument, a tensor or None: a Python number inside `loss_of` is
    what it was when the graph was made. Autocast belongs inside `loss_of`. Gradients are written into the same tensors
    at every step, so a loop that keeps them copies them. Steps that add to gradients already there run as ever.
    A graph keeps room for its activations beside that of launched steps.
    """

    def __init__(self, model: nn.Module, loss_of: Loss, handle: "Handle | None" = None):
        self.model, self.loss_of, self.handle = model, loss_of, handle
        self.replays = self.captures = 0
        self._record: Record | None = None
        self._tokens: dict[Any, int] = {}
        self._last: tuple[Any, int] = None, 0
        self._refused = ""

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        key = self._key(arguments)
        if key is None:
            return self._plainly(arguments)
        if self._record is None or self._record.key != key:
            self._last = (key, self._last[1] + 1 if key == self._last[0] else 1)
            if self._last[1] <= PATIENCE or not self._capture(key, arguments):
                return self._plainly(arguments)
        return self._replay(arguments)

    @property
    def _policy(self) -> Sparse | None:
        return None if self.handle is None else self.handle.policy

    def _plainly(self, arguments: Sequence[Tensor | None]) -> Tensor:
        loss = self.loss_of(*arguments)
        loss.backward()
        lengths = {0} if self._policy is None else set(self._policy.tokens.values())
        if len(lengths) == 1:
            self._tokens[_shapes(arguments)] = lengths.pop()
        return loss.detach()

    def _key(self, arguments: Sequence[Tensor | None]) -> Any:
        """What a graph holds for; None where this step is more than its kernels."""
        if self._refused or not (self.handle is None or self.handle.steady):
            return None
        tokens = self._tokens.get(shapes := _shapes(arguments))
        weights = list(self.model.parameters())
        if tokens is None or any(weight.grad is not None for weight in weights):
            return None
        if reason := _unfit(self.model, arguments):
            say_once(f"steps are not captured as a CUDA graph: {reason}")
            return None
        ours = None
        if self.handle is not None:
            ours = self.handle.installed.tile_shape, self.handle.policy.structure(tokens)
        places = tuple((weight.data_ptr(), weight.requires_grad) for weight in weights)
        modes = tuple(module.training for module in self.model.modules())
        around = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return shapes, modes, around, torch.are_deterministic_algorithms_enabled(), places, ours

    def _capture(self, key: Any, arguments: Sequence[Tensor | None]) -> bool:
        """Make the graph. False where that fails, for good, and the reason is logged."""
        self._record = None  # its memory goes first
        policy, tokens = self._policy, self._tokens[key[0]]
        fixed = [None if x is None else x.detach().clone() for x in arguments]
        weights = list(self.model.parameters())
        before = {} if policy is None else dict(policy.computed)
        torch.clear_autocast_cache()  # of a caller's autocast: the graph must cast weights anew at every replay
        try:
            graph = torch.cuda.CUDAGraph()
            if policy is None or self.handle is None:
                ours, loss = [], self._graphed(graph, fixed)
            else:
                with self.handle.aside(), policy.pinned(tokens) as ours:
                    loss = self._graphed(graph, fixed)
        except RuntimeError as error:
            for weight in weights:
                weight.grad = None
            self._refused = str(error).strip().split("\n")[0]
            say_once(f"steps are not captured as a CUDA graph, they run as ever: {self._refused}")
            return False
        finally:
            torch.clear_autocast_cache()  # and nobody else may use what it casts
            after = {} if policy is None else policy.computed
            if policy is not None:
                policy.computed = before
        computed = {mode: count - before[mode] for mode, count in after.items()}
        gradients = [weight.grad for weight in weights]
        self._record = Record(key, graph, fixed, ours, gradients, loss, tokens, computed)
        self.captures += 1
        log.info("step captured as a CUDA graph (%d so far)", self.captures)
        return True

    def _graphed(self, graph: Any, arguments: Sequence[Tensor | None]) -> Tensor:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may load data meanwhile
            loss = self.loss_of(*arguments)
            loss.backward()
        return loss.detach()

    def _replay(self, arguments: Sequence[Tensor | None]) -> Tensor:
        record, policy = self._record, self._policy
        assert record is not None
        for mine, given in zip(record.arguments, arguments, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given, non_blocking=True)
        if policy is not None:
            torch._foreach_copy_(record.ours, policy.tensors(record.tokens))
        record.graph.replay()
        for weight, gradient in zip(self.model.parameters(), record.gradients, strict=True):
            weight.grad = gradient
        if self.handle is not None and policy is not None:
            for mode, count in record.computed.items():
                policy.computed[mode] += count
            self.handle.replayed(record.tokens)
        self.replays += 1
        return record.loss.clone()


def _shapes(arguments: Sequence[Tensor | None]) -> Any:
    return tuple(None if x is None else (x.shape, x.dtype, x.device) for x in arguments)


def _unfit(model: nn.Module, arguments: Sequence[Tensor | None]) -> str:
    """Why steps of a model cannot be replayed as they are; empty where they can."""
    tensors = [x for x in arguments if x is not None]
    if any(x.requires_grad for x in tensors):
        return "an input wants gradients"
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return "it is one of several ranks, whose collectives stay outside of graphs"
    if any(x._backward_hooks or x._post_accumulate_grad_hooks for x in model.parameters()):
        return "a parameter has hooks, which a graph would not call"
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(not isinstance(hook, Hook) for some in hooks for hook in some.values()):
            return f"{name or 'the model'} has hooks, which a graph would not call"
    if any(x.device.type != "cuda" for x in (*tensors, *model.parameters())):
        return "the model and its inputs must be on a CUDA device"
    return ""
