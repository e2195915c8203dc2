"""Paired losses: the same batch, noise and randomness with dense and with sparse attention, without gradients.

Nobody has to hand over a loss function. Of one training forward the arguments are kept, its output y, the gradient g
that reached it, and the loss L that backward was called on. For L = w * mean((y - target)^2) over n elements g is
2 w (y - target) / n, so the target is y - n g / (2 w), and the loss of any other output follows, whatever the optimiser
has done to the weights since. The weight is n |g|^2 / (4 L). Losses of that form have simple weights: 1, a gradient
scaler's power of two, 1 / k for k accumulated batches, sizes of dimensions that are summed instead of averaged. Any
other number tells of another loss (weighted by noise level, Huber, several terms), and then nothing is compared.
Elements without a gradient are masked out.

Shapes: n elements of the output.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Run = Callable[[], tuple[float, Tensor | None]]
NEAR = 2e-4  # relative: float32 sums of one loss in two orders agree better than that
PARTS = 64  # most batches whose gradients may be accumulated


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


@dataclass(frozen=True)
class Facts:
    """What one backward says of the loss: its value, the squared norm of the gradient at the output, the elements that
    got one, the output's shape, and the precision of the loss, relative. loss None: it was not seen."""

    loss: float | None
    square: float
    reached: int
    shape: tuple[int, ...]
    precision: float

    @property
    def weight(self) -> float | None:
        """w, of a loss w * mean((y - target)^2). None where it was not seen, or something is not finite or zero."""
        if self.loss is None or not math.isfinite(self.square) or not 0 < self.loss < math.inf or not self.square:
            return None
        return math.prod(self.shape) * self.square / (4 * self.loss)

    def simple(self, stated: float) -> bool:
        """Whether the weight is one that losses of this form have. stated: the user's own."""
        weight = self.weight
        if weight is None:
            return False
        near = max(NEAR, 4 * self.precision)
        masked = weight * self.reached / math.prod(self.shape)  # of a mean over the elements that count
        powers = [weight / stated, masked / stated]
        if any(_power_of_two(x, near) for x in powers):
            return True
        if near > NEAR:  # a coarse number would be close to some simple one by chance
            return False
        scaled = any(_power_of_two(x * k, near) for x in powers for k in (*range(1, PARTS + 1, 2), 0.04, 0.2, 0.008))
        sizes = {math.prod(some) for r in range(len(self.shape) + 1) for some in itertools.combinations(self.shape, r)}
        return scaled or any(abs(x / size - 1) <= near for x in powers for size in sizes)


def _power_of_two(x: float, near: float) -> bool:
    return abs(x / 2.0 ** round(math.log2(x)) - 1) <= near if x > 0 else False


@dataclass
class Sample:
    """One training forward: what it was given, in which state of random numbers and autocast, and what came of it."""

    args: tuple
    kwargs: dict[str, Any]
    random: list[Tensor]
    device: torch.device
    autocast: tuple[bool, torch.dtype]
    tokens: int = 0
    output: Tensor | None = None
    gradient: Tensor | None = None
    loss: Tensor | None = None

    @classmethod
    def of(cls, args: tuple, kwargs: dict[str, Any]) -> "Sample":
        args, kwargs = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
        device = next(x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        return cls(args, kwargs, random_state(device), device, autocast)

    def facts(self) -> Facts:
        assert self.gradient is not None
        return facts(self.gradient, self.loss)

    def replay(self, model: nn.Module, weight: float) -> Run:
        """A function that computes loss and output (times the root of the weight) with the model as it is now."""
        assert self.output is not None
        assert self.gradient is not None
        gradient = self.gradient.float()
        target = self.output.float() - gradient * (gradient.numel() / (2 * weight))
        scale = weight**0.5 * (gradient != 0)  # so that mean squares of outputs are losses

        def run() -> tuple[float, Tensor | None]:
            enabled, dtype = self.autocast
            random = randomness(self.random, self.device)
            with torch.no_grad(), random, torch.autocast(self.device.type, dtype, enabled):
                output = first_tensor(model(*self.args, **self.kwargs))
            assert output is not None
            output = output.float()
            return float((scale * (output - target)).square().mean()), scale * output

        return run


def facts(gradient: Tensor, loss: Tensor | None) -> Facts:
    """Of a gradient at the output and the loss whose backward brought it. Waits for the device."""
    square, reached = gradient.float().square().sum(dtype=torch.float64), (gradient != 0).sum()
    found = torch.stack([square, reached.double(), square if loss is None else loss.to(square.device).double()])
    square, reached, value = found.tolist()
    dtype = torch.float32 if loss is None or not loss.is_floating_point() else loss.dtype
    precision = max(torch.finfo(dtype).eps, 1e-7)
    return Facts(None if loss is None else value, square, int(reached), tuple(gradient.shape), precision)


class Losses:
    """Sees the loss that a backward begins from, while a training forward waits for its gradient.

    A gradient hook is not told; so torch.autograd.backward is wrapped for the time of the wait, and only then.
    """

    def __init__(self) -> None:
        self.waiting, self.current, self._backward = 0, None, torch.autograd.backward

    def watch(self) -> None:
        self.waiting += 1
        if self.waiting == 1:
            self._backward = torch.autograd.backward
            torch.autograd.backward = self._watched

    def stop(self) -> None:
        self.waiting = max(0, self.waiting - 1)
        if not self.waiting and torch.autograd.backward == self._watched:
            torch.autograd.backward = self._backward

    def _watched(self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        weights = [grad_tensors] * len(roots) if isinstance(grad_tensors, Tensor | None) else list(grad_tensors)
        try:
            with torch.no_grad():
                values = [x.detach() if g is None else (x * g).sum() for x, g in zip(roots, weights, strict=True)]
            self.current = values[0] if len(values) == 1 else torch.stack(values).sum()
        except (RuntimeError, TypeError, ValueError):  # torch will say what is wrong with them
            self.current = None
        try:
            self._backward(tensors, grad_tensors, *args, **kwargs)
        finally:
            self.current = None


LOSSES = Losses()


def closure_run(closure: Callable[[], Tensor], device: torch.device) -> Run:
    """A function that computes the loss by the user's own, twice under the same randomness; no output is known."""
    random = random_state(device)

    def run() -> tuple[float, Tensor | None]:
        with torch.no_grad(), randomness(random, device):
            return float(closure()), None

    return run


def first_tensor(output: Any) -> Tensor | None:
    """The model's prediction in what its forward returns: a tensor, or the first of a tuple, list or output object."""
    for leaf in pytree.tree_leaves(
        list(output.values()) if hasattr(output, "values") and not isinstance(output, Tensor) else output
    ):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    return None


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
