"""The sparse attention policy: learns which tiles matter while attention is dense, then computes only those.

Two stages (DSV, arXiv 2502.07590, section 4): in stage 1 attention is dense and each layer's predictor learns; in
stage 2 the predictor chooses the tiles. Who decides when to switch, and the budget, is the trainer's business.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads, D head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foveate.attention import Layer, attend
from foveate.sparsity.predictor import Learner
from foveate.sparsity.profile import HeadProfile, profile
from foveate.sparsity.select import select, select_random
from foveate.tiles import Selection

MODES = ("dense", "sparse", "random")


class Sparse:
    """Policy of one model: a predictor a layer, one budget and periphery (or one a head) for all of them.

    mode: `dense` (stage 1), `sparse` (stage 2), or `random`, which keeps as many tiles but any: the control that shows
    that the choice matters. learning: whether training forwards teach the predictors. `computed` counts the layers
    computed in each mode, so that a caller can tell that what was asked for really ran. learner: further
    arguments of every layer's `Learner`.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        dim: int,
        *,
        budget: float | Sequence[float],
        periphery: str | Sequence[str] = "pool",
        rank: int = 16,
        query_tile: int = 64,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **learner: Any,
    ):
        self.budget, self.periphery, self.query_tile, self.seed = budget, periphery, query_tile, seed
        self.learners = [Learner(heads, dim, rank=rank, device=device, **learner) for _ in range(layers)]
        self.mode, self.learning, self.step = "dense", False, 0
        self.computed = dict.fromkeys(MODES, 0)
        self._profiles: dict[int, HeadProfile] | None = None

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.learning and torch.is_grad_enabled():
            self.learners[layer.index].observe(q, k, layer.grid, seed=self._seed(layer))
        if self._profiles is not None:
            self._profiles[layer.index] = self._profile(layer, q, k, v)
        self.computed[self.mode] += 1
        if self.mode == "dense":
            return attend(q, k, v).out
        return attend(q, k, v, self.selection(layer, q, k), periphery=self.periphery).out

    def selection(self, layer: Layer, q: Tensor, k: Tensor) -> Selection:
        """The tiles this layer keeps now."""
        with torch.no_grad():
            if self.mode == "random":
                return select_random(
                    layer.grid, q.shape[0], q.shape[2], budget=self.budget, generator=self._generator(layer, q.device),
                    device=q.device, query_tile=self.query_tile,
                )  # fmt: skip
            predictor = self.learners[layer.index].predictor
            return select(q, k, layer.grid, predictor=predictor, budget=self.budget, query_tile=self.query_tile)

    @property
    def ready(self) -> bool:
        """Whether every layer's predictor exists."""
        return all(learner.predictor is not None for learner in self.learners)

    @contextmanager
    def using(self, mode: str, *, learning: bool = False) -> Iterator[None]:
        """Another mode for the length of a `with`: evaluations neither teach nor change anything."""
        before = self.mode, self.learning
        self.mode, self.learning = mode, learning
        try:
            yield
        finally:
            self.mode, self.learning = before

    @contextmanager
    def profiling(self) -> Iterator[dict[int, HeadProfile]]:
        """Collect each layer's profile during the forwards inside a `with`; the last forward's stays."""
        self._profiles = {}
        try:
            yield self._profiles
        finally:
            self._profiles = None

    def state_dict(self) -> dict[str, Tensor]:
        """All learners' tensors, flat, named by layer."""
        return {
            f"{index}.{name}": tensor
            for index, learner in enumerate(self.learners)
            for name, tensor in learner.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for index, learner in enumerate(self.learners):
            prefix = f"{index}."
            learner.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})

    def _profile(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> HeadProfile:
        predictor = self.learners[layer.index].predictor
        return profile(q, k, v, layer.grid, predictor=predictor, generator=self._generator(layer, q.device))

    def _seed(self, layer: Layer) -> int:
        return hash((self.seed, self.step, layer.index)) & 0x7FFFFFFF

    def _generator(self, layer: Layer, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self._seed(layer))
