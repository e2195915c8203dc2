"""How much the model's output depends on each head's: what errors of heads are weighed by.

An error d in a head's output moves the model's output by J d. The gradient that a step of training sends into that
output is J^T r, r the residual of the loss, and where r is like white noise |J^T r|^2 is |J|^2 but for one factor. So
|gradient|^2 |output|^2, on average over tokens, says how far a relative error of the head moves the model's output, up
to a factor that all heads share. It costs two norms a call, and nothing waits for the device (docs/log.md, Controller).

Shapes: B batch, S tokens, L layers, H heads, D head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

WINDOW = 20  # steps that the running mean looks back on


class Influence:
    """Running mean over training steps of every head's share: `mean` float32 (L, H), 1 on average; None at first.

    `watch` outputs while they are computed, `take` when a step is over. Layers that no gradient reaches count 1.
    """

    def __init__(self, layers: int, heads: int) -> None:
        self.shape = layers, heads
        self.mean: Tensor | None = None
        self.count = 0
        self._step: dict[int, Tensor] = {}
        self._watched: set[int] = set()

    def watch(self, index: int, out: Tensor, total: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Wait for the gradient of a layer's out (B, S, H, D). Recomputation of what is watched already is not.

        total: where tokens are spread over ranks, a number of each head summed over them, up to a common factor.
        """
        again = torch._C._current_graph_task_id() >= 0
        if not out.requires_grad or (again and index in self._watched):
            return
        self._watched.add(index)
        size = total(squares(out.detach()))
        out.register_hook(lambda gradient: self.note(index, size, gradient, total))

    def note(self, index: int, size: Tensor, gradient: Tensor, total: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """`gradient` (B, S, H, D) has reached a layer's output, whose sum of squares by head is `size` (H,)."""
        self._watched.discard(index)
        found = size * total(squares(gradient.detach()))
        self._step[index] = self._step[index] + found if index in self._step else found

    def take(self) -> None:
        """A step is over. What is not finite, after an overflow of scaled gradients say, is left out."""
        found, self._step = self._step, {}
        self._watched.clear()
        if not found:
            return
        usual = torch.stack(list(found.values())).mean(0).mean().expand(self.shape[1])
        shares = torch.stack([found.get(index, usual) for index in range(self.shape[0])])
        shares = shares / shares.mean()
        self.count += 1
        before = torch.ones_like(shares) if self.mean is None else self.mean.to(shares.device)
        after = before.lerp(shares, 1 / min(self.count, WINDOW))
        self.mean = torch.where(shares.isfinite().all(), after, before)

    def restore(self, mean: list[list[float]] | None, count: int) -> None:
        """Go on from the numbers of another."""
        self.mean, self.count = None if mean is None else torch.tensor(mean), count


def squares(x: Tensor) -> Tensor:
    """Sum of squares of x (B, S, H, D) by head, float32 (H,)."""
    return torch.linalg.vector_norm(x, dim=(0, 1, 3), dtype=torch.float32).square()
