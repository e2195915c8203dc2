"""The sparse attention policy: learns which tiles matter while attention is dense, then computes only those.

Two stages (DSV, arXiv 2502.07590, section 4): in stage 1 attention is dense and each layer's predictor learns; in
stage 2 the predictor chooses the tiles. Who decides when to switch, and the budgets, is the trainer's business.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads, D head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foveate.attention import AttnState, Layer, attend, no_autocast
from foveate.sparsity import compiled
from foveate.sparsity.influence import Influence
from foveate.sparsity.predictor import Learner, Predictor, Sight
from foveate.sparsity.profile import HeadProfile, profile
from foveate.sparsity.select import per_head, select, select_random
from foveate.tiles import Selection

MODES = ("dense", "sparse", "random")
LESSONS = 8  # fine-tuning steps of a predictor at each dense call of a training-free run


class Sparse:
    """Policy of one model: a predictor a layer, and for every layer whether it is sparse, budgets and peripheries.

    budget, periphery: of every layer at first, one value or one per head; `assign` changes a layer. They live on the
    device as tensors. mode: `dense` (stage 1), `sparse` (stage 2, in the layers of `sparse_layers`), or `random`, which
    keeps as many tiles but any: the control that shows that the choice matters. learning: whether training forwards
    teach the predictors. `computed` counts the layers computed in each mode, so that a caller can tell that what was
    asked for really ran. learner: further arguments of every layer's `Learner`.

    weighs: whether the gradients of this step's outputs are asked what each head is worth (`influence`).
    training: asked at every call; False keeps it from teaching (a model in eval()). whole: what a model's outermost
    forward says of gradients, for reentrant checkpointing, which runs the blocks without any; None where not known.
    free_steps: a layer's first calls, or denoising steps, that are dense and teach even without gradients.

    Recomputation under activation checkpointing runs inside a backward: it teaches nothing and takes the very tiles of
    its forward, or, where several forwards wait for their backward, chooses again with the same predictor (`freeze`).
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
        backend: str = "auto",
        device: torch.device | str = "cpu",
        **learner: Any,
    ):
        self.heads, self.query_tile, self.seed, self.backend = heads, query_tile, seed, backend
        self.token = compiled.register(self)
        self._make: Callable[[torch.device | str], Learner]
        self._make = lambda where: Learner(heads, dim, rank=rank, device=where, **learner)
        self.learners = [self._make(device) for _ in range(layers)]
        self.rate = self.learners[0].lr
        device = torch.device(device)
        names = [periphery] * heads if isinstance(periphery, str) else list(periphery)
        self.budgets = [per_head("budget", budget, heads, device).clone() for _ in range(layers)]
        self.pooled = [torch.tensor([name == "pool" for name in names], device=device) for _ in range(layers)]
        self.drops = [all(name == "drop" for name in names)] * layers
        self.sparse_layers = [True] * layers
        self.mode, self.learning, self.step = "dense", False, 0
        self.training: Callable[[], bool] = lambda: True
        self.influence, self.weighs = Influence(layers, heads), False
        self.whole: bool | None = None
        self.free_steps = 0
        self.computed: dict[str, int] = dict.fromkeys(MODES, 0)
        self._profiles: dict[int, HeadProfile] | None = None
        self._frozen: list[Predictor | None] | None = None
        self._kept: dict[int, _Kept] = {}
        self._calls = [0] * layers
        self.tokens: dict[int, int] = {}  # layer -> length of its last sequence

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return compiled.attention(self.token, self.query_tile, layer, q, k, v)
        mode, selection = self.choose(layer, q, k, v, torch.is_grad_enabled())
        out = self.compute(layer, mode, selection, q, k, v).out
        if self.weighs:
            self.influence.watch(layer.index, out)
        return out

    def choose(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, grad: bool) -> tuple[str, Selection | None]:
        """Learn and measure from one call, and say how it is to be computed: the mode, and the tiles it keeps."""
        call = self.begin(layer, Sight(q, k), lambda: (q, k, v), grad)
        if call.mode == "dense":
            return call.mode, None
        return call.mode, self.kept(call, (q.shape[0], q.shape[2]), lambda: self.selection(layer, q, k))

    def begin(
        self, layer: Layer, sight: Sight, whole: Callable[[], tuple[Tensor, Tensor, Tensor]], grad: bool
    ) -> "Call":
        """The first half of `choose`, which context parallelism calls by itself: learn, measure, say the mode.

        sight: what a lesson looks at. whole: gives q, k, v of whole sequences and all heads, for a profile.
        """
        index = layer.index
        self._settle(index, sight.q.device)
        self.tokens[index] = layer.grid.tokens
        again = torch._C._current_graph_task_id() >= 0  # inside a backward: recomputation
        live = grad if self.whole is None else self.whole
        free = self._free(layer, again)
        if not again:
            if free or (self.learning and live and self.training()):
                self._teach(layer, sight, LESSONS if free else 1)
            if self._profiles is not None:
                self._profiles[index] = self._profile(layer, *whole())
        mode = "dense" if free or not self.sparse_layers[index] else self.mode
        self.computed[mode] += 1
        return Call(layer, mode, again, live)

    def kept(self, call: "Call", shape: tuple[int, int], select: Callable[[], Any]) -> Any:
        """The second half: what `select` chooses (a Selection, or a part of one), or in recomputation chose before.

        shape: batch and heads that it is for.
        """
        index, key = call.layer.index, (call.layer.grid.tokens, *shape)
        kept = self._kept.get(index)
        if call.again and kept is not None and kept.waiting == 1 and kept.key == key:
            kept.replayed = True
            return kept.selection
        selection = select()
        if call.live and not call.again:
            waiting = 1 if kept is None or kept.replayed else kept.waiting + 1
            self._kept[index] = _Kept(selection, key, waiting)
        return selection

    def compute(
        self, layer: Layer, mode: str, selection: Selection | None, q: Tensor, k: Tensor, v: Tensor
    ) -> AttnState:
        """Attention as `choose` said, in the precision of q, k, v whatever autocast says."""
        with no_autocast(q.device):
            if mode == "dense":
                return attend(q, k, v)
            return attend(q, k, v, selection, periphery=self.periphery(layer.index), backend=self.backend)

    def periphery(self, index: int) -> Any:
        """`drop`, or which heads of a layer are pooled, bool (H,)."""
        return "drop" if self.drops[index] else self.pooled[index]

    def assign(self, index: int, budget: Sequence[float], pooled: Sequence[bool], sparse: bool) -> None:
        """Give a layer other budgets (H) and peripheries (H), in place: compiled code sees them without recompiling."""
        self.budgets[index].copy_(per_head("budget", budget, self.heads, self.budgets[index].device))
        self.pooled[index].copy_(torch.tensor(list(pooled)))
        self.drops[index], self.sparse_layers[index] = not any(pooled), sparse

    def selection(self, layer: Layer, q: Tensor, k: Tensor) -> Selection:
        """The tiles this layer keeps now."""
        budget = self.budgets[layer.index]
        with torch.no_grad():
            if self.mode == "random":
                return self.random(layer, q.shape[0], q.device)
            predictor = self.predictor(layer.index)
            tiles = {"query_tile": self.query_tile, "kv_tile": self.kv_tile}
            return select(q, k, layer.grid, predictor=predictor, budget=budget, **tiles)

    def random(self, layer: Layer, batch: int, device: torch.device) -> Selection:
        """As many tiles as this layer keeps, but any."""
        budget, generator = self.budgets[layer.index], self._generator(layer, device)
        options = {"budget": budget, "generator": generator, "device": device, "query_tile": self.query_tile}
        return select_random(layer.grid, batch, self.heads, **options, kv_tile=self.kv_tile)

    def predictor(self, index: int) -> Predictor | None:
        """What chooses a layer's tiles now."""
        return self.learners[index].predictor if self._frozen is None else self._frozen[index]

    @property
    def kv_tile(self) -> int:
        """Tokens of a key tile: a policy's tiles are as long for keys as for queries."""
        return self.query_tile

    @property
    def ready(self) -> bool:
        """Whether every layer's predictor exists."""
        return all(learner.predictor is not None for learner in self.learners)

    def freeze(self) -> None:
        """Choose with the predictors as they are now until the next call, whatever they learn in between."""
        self._frozen = [learner.predictor for learner in self.learners]
        self._kept.clear()

    def begin_again(self) -> None:
        """Every predictor becomes the closed form of its layer's moments, with nothing learned beyond."""
        for learner in self.learners:
            closed, state = Predictor.from_moments(learner.moments, learner.rank), learner.state_dict()
            state |= {"weights": torch.stack([closed.a, closed.b]), "tuned": torch.tensor(0)}
            learner.load_state_dict(state | {name: torch.zeros_like(state[name]) for name in ("first", "second")})

    def restart(self) -> None:
        """The next call is the first of a generation: `free_steps` count from it."""
        self._calls = [0] * len(self._calls)

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
        """Take up learners' tensors. ValueError where they are for other layers, heads, head dim or rank."""
        layers = {int(name.partition(".")[0]) for name in state}
        if layers != set(range(len(self.learners))):
            raise ValueError(f"the saved predictors are for {len(layers)} layers, the model has {len(self.learners)}")
        for index, learner in enumerate(self.learners):
            prefix = f"{index}."
            learner.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})
        if self._frozen is not None:
            self.freeze()

    def _teach(self, layer: Layer, sight: Sight, lessons: int) -> None:
        learner = self.learners[layer.index]
        # What a lesson saves for its own backward is none of checkpointing's business, whose hooks would count it.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            # The closed form takes each sequence in once; only fine-tuning draws something new at every lesson.
            for lesson in range(lessons if learner.predictor is not None else 1):
                learner.learn(sight, layer.grid, seed=self._seed(layer) + lesson)

    def _free(self, layer: Layer, again: bool) -> bool:
        """Whether this is one of the dense calls that begin a training-free generation."""
        if not self.free_steps or self._profiles is not None:
            return False
        if layer.step is not None:
            return layer.step < self.free_steps
        self._calls[layer.index] += not again
        return self._calls[layer.index] <= self.free_steps

    def _settle(self, index: int, device: torch.device) -> None:
        """Move a layer's tensors to where its queries are: a model may be moved after the policy was installed."""
        learner = self.learners[index]
        if learner.moments.cq.device == device:
            return
        self.learners[index] = moved = self._make(device)
        moved.load_state_dict(learner.state_dict())
        moved.lr = learner.lr
        self.budgets[index], self.pooled[index] = self.budgets[index].to(device), self.pooled[index].to(device)
        if self._frozen is not None:
            self._frozen[index] = self.learners[index].predictor

    def _profile(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> HeadProfile:
        predictor = self.predictor(layer.index)
        return profile(q, k, v, layer.grid, predictor=predictor, generator=self._generator(layer, q.device))

    def _seed(self, layer: Layer) -> int:
        return hash((self.seed, self.step, layer.index)) & 0x7FFFFFFF

    def _generator(self, layer: Layer, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self._seed(layer))


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Call:
    """One call of a layer: its mode, whether it is a recomputation, and whether it is part of training."""

    layer: Layer
    mode: str
    again: bool
    live: bool


class _Kept:
    """The tiles of a layer's last training forward, for its recomputation. `waiting`: forwards without a backward."""

    def __init__(self, selection: Any, key: tuple[int, ...], waiting: int):
        self.selection, self.key, self.waiting, self.replayed = selection, key, waiting, False
