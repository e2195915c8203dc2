"""Paired losses: the same batch, noise and randomness with dense and with sparse attention, without gradients.

Nobody has to hand over a loss function. Of one training forward the arguments are kept, its output y and, once the
backward has run, the gradient g that reached it. For a loss w * mean((y - target)^2) over n elements g is
2 w (y - target) / n, so the target is y - n g / (2 w), and the loss of any other output follows, whatever the optimiser
has done to the weights since.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from foveate.sparsity.policy import Sparse

Run = Callable[[], tuple[float, Tensor | None]]


@dataclass(frozen=True)
class Pair:
    """Losses with dense and with sparse attention, and `shift`, the mean square of the outputs' difference.

    At a minimum of the dense loss the expected difference of the losses is the shift, which is measured with less
    noise. And where sparse training has bent the model to its own pattern, sparse - dense goes to zero and below (a
    model that sees only 5 % does worse when it suddenly sees all), and the shift does not: `gap` takes the larger.
    """

    dense: float
    sparse: float
    shift: float

    @classmethod
    def of(cls, dense: tuple[float, Tensor | None], sparse: tuple[float, Tensor | None]) -> "Pair":
        """Of two runs. Without outputs a sparse loss that is lower counts as much as one that is higher."""
        shift = abs(sparse[0] - dense[0])
        if dense[1] is not None and sparse[1] is not None:
            shift = float((sparse[1] - dense[1]).square().mean())
        return cls(dense[0], sparse[0], shift)


def gap(pairs: Sequence[Pair], weight: float = 1.0) -> float:
    """Relative increase of the loss through sparse attention, over all pairs; `weight` is that of the shift."""
    dense, sparse, shift = (sum(getattr(pair, name) for pair in pairs) for name in ("dense", "sparse", "shift"))
    return max(sparse - dense, weight * shift) / max(dense, 1e-30)


@dataclass
class Sample:
    """One training forward: what it was given, in which state of random numbers and autocast, and what came of it."""

    args: tuple
    kwargs: dict[str, Any]
    random: list[Tensor]
    device: torch.device
    autocast: tuple[bool, torch.dtype]
    output: Tensor | None = None
    gradient: Tensor | None = field(default=None)


class Probe:
    """Hooks on a model: tells the policy which forwards train, and keeps a sample of one when asked to.

    model: the outermost module that training calls; hooks inside a module that is compiled whole do nothing.
    before: called at the start of every forward.
    """

    def __init__(self, model: nn.Module, policy: Sparse, before: Callable[[], None] = lambda: None):
        self.model, self.policy, self.before = model, policy, before
        self.seen, self._wanted, self._busy = False, False, False
        self._sample: Sample | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.policy.whole, self._sample = None, None

    def next_step(self, wanted: bool) -> None:
        """A new training step begins; is a sample of it wanted?"""
        self.seen, self._wanted, self._sample = False, wanted, None

    def ready(self) -> bool:
        """Whether a sample with its gradient is there."""
        return self._sample is not None and self._sample.gradient is not None

    def runs(self, closure: Callable[[], Tensor] | None, loss: float | None, weight: float) -> Run:
        """A function that computes loss and output under whatever mode the policy is in: same inputs and randomness.

        closure: computes the loss itself, and no output is known. loss: what `backward` was called on; the weight is
        then found from it.
        """
        if closure is None:
            assert self._sample is not None
            return _replay(self, self._sample, loss, weight)
        device = next(self.model.parameters()).device
        random = random_state(device)

        def run() -> tuple[float, Tensor | None]:
            with self.aside(), torch.no_grad(), randomness(random, device):
                return float(closure()), None

        return run

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forwards inside are ours: they are neither training nor samples."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._busy:
            return
        self.before()
        live = torch.is_grad_enabled() and module.training
        self.policy.whole = live
        if live and self._wanted and not self.seen:
            self._sample = _sample(args, kwargs)
        self.seen = self.seen or live

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        if torch.compiler.is_compiling() or self._busy:
            return
        self.policy.whole = None
        sample = self._sample
        if sample is None or sample.output is not None:
            return
        y = first_tensor(output)
        if y.requires_grad:
            sample.output = y.detach().clone()
            y.register_hook(lambda gradient: setattr(sample, "gradient", gradient.detach()))


def _replay(probe: Probe, sample: Sample, loss: float | None, weight: float) -> Run:
    assert sample.output is not None
    assert sample.gradient is not None
    y, gradient = sample.output.float(), sample.gradient.float()
    if loss is not None:
        weight = y.numel() * float(gradient.square().sum()) / (4 * loss)
    target = y - gradient * (y.numel() / (2 * weight))
    scale = weight**0.5  # so that mean squares of outputs are losses
    enabled, dtype = sample.autocast

    def run() -> tuple[float, Tensor | None]:
        random = randomness(sample.random, sample.device)
        with probe.aside(), torch.no_grad(), random, torch.autocast(sample.device.type, dtype, enabled):
            output = first_tensor(probe.model(*sample.args, **sample.kwargs))
        output = scale * output.float()
        return float((output - scale * target).square().mean()), output

    return run


def _sample(args: tuple, kwargs: dict[str, Any]) -> Sample:
    def keep(x: Any) -> Any:
        return x.detach().clone() if isinstance(x, Tensor) else x

    args, kwargs = pytree.tree_map(keep, (args, kwargs))
    device = next(x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
    return Sample(args, kwargs, random_state(device), device, autocast)


def first_tensor(output: Any) -> Tensor:
    """The model's prediction in what its forward returns: a tensor, or the first of a tuple, list or output object."""
    for leaf in pytree.tree_leaves(
        list(output.values()) if hasattr(output, "values") and not isinstance(output, Tensor) else output
    ):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError(f"the model returned no floating-point tensor but {type(output).__name__}; give step a closure")


def random_state(device: torch.device) -> list[Tensor]:
    """Of the CPU's generator and of the device's."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def randomness(state: list[Tensor], device: torch.device) -> Iterator[None]:
    """Random numbers from this state on, and afterwards from where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(state[1], device)
        yield
