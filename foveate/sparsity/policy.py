"""The sparse attention policy: learns which tiles matter while attention is dense, then computes only those.

Two stages (DSV, arXiv 2502.07590, section 4): in stage 1 attention is dense and each layer's predictor learns; in
stage 2 the predictor chooses the tiles. Who decides when to switch, and the budgets, is the handle's business. Lengths
within a factor of two are a class that shares a decision: what pays for a video need not for an image.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads, D head dim.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foveate.attention import AttnState, Layer, Periphery, attend, no_autocast, periphery_constants
from foveate.sparsity import compiled
from foveate.sparsity.influence import Influence
from foveate.sparsity.learner import Learner
from foveate.sparsity.plan import Plan
from foveate.sparsity.predictor import Lesson, Predictor
from foveate.sparsity.profile import CONSTANTS, DROP, HeadProfile, measure
from foveate.sparsity.select import per_head, select
from foveate.sparsity.shapes import Look
from foveate.sparsity.sight import Sight
from foveate.tiles import Selection

MODES = ("dense", "sparse")
LESSONS = 8  # fine-tuning steps of a predictor at each dense call of a training-free run


def length_class(tokens: int) -> int:
    """Sequences of up to 2^class tokens, and of more than half as many."""
    return (tokens - 1).bit_length()


@dataclass
class Setting:
    """What a model's layers do when attention is sparse: budgets and constants of the periphery, float32 (H,),
    of each."""

    budgets: list[Tensor]
    constants: list[Tensor]
    drops: list[bool]  # layers without a pooled head
    sparse_layers: list[bool]

    def copy(self) -> "Setting":
        budgets, constants = ([x.clone() for x in row] for row in (self.budgets, self.constants))
        return Setting(budgets, constants, list(self.drops), list(self.sparse_layers))


@dataclass
class Forward:
    """One forward of the model that may be part of training: it is once a backward has reached its output.

    live: gradients are wanted, which reentrant checkpointing hides from the blocks; None where not known.
    """

    live: bool | None = None
    lessons: dict[int, Lesson] = field(default_factory=dict)
    looks: dict[int, Tensor] = field(default_factory=dict)
    tokens: int = 0
    sample: Any = None  # pairs.Sample, where one is wanted


class Sparse:
    """Policy of one model: a predictor a layer, and for every layer whether it is sparse, budgets and peripheries.

    budget, periphery: of every layer at first, one value or one per head; `assign` changes a layer. They live on the
    device as tensors. mode: `dense` (stage 1), or `sparse` (stage 2, in the layers of `sparse_layers`).
    learning: whether training forwards teach the predictors. `computed` counts the layers computed in each mode, so
    that a caller can tell that what was asked for really ran. learner: further arguments of every layer's `Learner`.

    by_class: settings of length classes that have their own. active: the classes that are sparse in mode `sparse`,
    all where None; open: and those that have no setting of their own. nearest: these follow the one nearest in length.
    collect: lessons wait in `lessons` until `learn`, and count only once their forward's backward has come.
    look: what shapes of tiles training forwards are measured with now; the sums by layer wait in `looks`.
    weighs: whether the gradients of this step's outputs are asked what each head is worth (`influence`).
    profiled: constants of the periphery that profiles measure.
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
        periphery: Periphery = "pool",
        profiled: Sequence[float] = CONSTANTS,
        rank: int = 16,
        query_tile: int = 64,
        seed: int = 0,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        **learner: Any,
    ):
        self.heads, self.dim, self.rank, self.query_tile, self.seed, self.backend = (
            heads, dim, rank, query_tile, seed, backend,
        )  # fmt: skip
        self.profiled = tuple(profiled)
        self.token = compiled.register(self)
        self._make: Callable[[torch.device | str], Learner]
        self._make = lambda where: Learner(heads, dim, rank=rank, device=where, **learner)
        self.learners = [self._make(device) for _ in range(layers)]
        self.rate = self.learners[0].lr
        device = torch.device(device)
        constants = periphery_constants(periphery, heads, device)
        drops = constants is None
        constants = torch.full((heads,), DROP, device=device) if constants is None else constants.clone()
        self.default = Setting(
            [per_head("budget", budget, heads, device).clone() for _ in range(layers)],
            [constants.clone() for _ in range(layers)],
            [drops] * layers,
            [True] * layers,
        )
        self.by_class: dict[int, Setting] = {}
        self.active: set[int] | None = None
        self.nearest = self.open = False
        self.mode, self.learning, self.step = "dense", False, 0
        self.collect, self.lessons = False, dict[int, Lesson]()
        self.look: Look | None = None
        self.looks: dict[int, Tensor] = {}
        self.influence, self.weighs = Influence(layers, heads), False
        self.free_steps = 0
        self.computed: dict[str, int] = dict.fromkeys(MODES, 0)
        self.inside_graphs = 0  # calls with gradients that a compiled graph made
        self._forced = False
        self._profiles: dict[int, HeadProfile] | None = None
        self._frozen: list[Predictor | None] | None = None
        self._pinned: Setting | None = None  # what all calls follow while a graph is made
        self._kept: dict[int, _Kept] = {}
        self._here = threading.local()  # of this thread: its forward, and its calls by layer
        self.tokens: dict[int, int] = {}  # layer -> length of its last sequence

    @property
    def forward(self) -> Forward | None:
        """The model's forward that runs in this thread, as its outermost hooks say; None where they do not."""
        return getattr(self._here, "forward", None)

    @forward.setter
    def forward(self, forward: Forward | None) -> None:
        self._here.forward = forward

    def setting(self, tokens: int) -> Setting:
        """What sequences of this length follow."""
        if self._pinned is not None:
            return self._pinned
        index = length_class(tokens)
        if index not in self.by_class and self.nearest and self.by_class:
            index = min(self.by_class, key=lambda other: (abs(other - index), -other))
        return self.by_class.get(index, self.default)

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.state(layer, q, k, v).out

    def state(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        if torch.compiler.is_compiling():
            return compiled.attention(self.token, self.query_tile, layer, q, k, v)
        mode, selection = self.choose(layer, q, k, v, torch.is_grad_enabled())
        state = self.compute(layer, mode, selection, q, k, v)
        if self.weighs:
            self.influence.watch(layer.index, state.out)
        return state

    def choose(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, grad: bool) -> tuple[str, Selection | None]:
        """Learn and measure from one call, and say how it is to be computed: the mode, and the tiles it keeps."""
        call = self.begin(layer, Sight(q, k, v), grad)
        if call.mode == "dense":
            return call.mode, None
        return call.mode, self.kept(call, (q.shape[0], q.shape[2]), lambda: self.selection(layer, q, k))

    def begin(self, layer: Layer, sight: Sight, grad: bool) -> "Call":
        """The first half of `choose`, which context parallelism calls by itself: learn, measure, say the mode.

        sight: what lessons and profiles look at. grad: whether gradients are wanted of this call.
        """
        index = layer.index
        self._settle(index, sight.q.device)
        self.tokens[index] = layer.grid.tokens
        again = torch._C._current_graph_task_id() >= 0  # inside a backward: recomputation
        forward = self.forward
        known = None if forward is None else forward.live
        if forward is not None:
            forward.tokens = layer.grid.tokens
        live = grad if known is None else known
        free = self._free(layer, again)
        if not again and sight.q.device.type != "meta":  # shapes alone teach nothing
            if free or (self.learning and live):
                self._teach(layer, sight, LESSONS if free else 1, at_once=free)
            if self.look is not None and live and not self._looked_at(index):
                found = self.look.at(sight, layer.grid, self._generator(layer, sight.q.device))
                _add(self.looks if forward is None else forward.looks, {index: found})
            if self._profiles is not None:
                generator = self._generator(layer, sight.q.device)
                self._profiles[index] = measure(
                    sight, layer.grid, self.predictor(index), constants=self.profiled, generator=generator
                )
        mode = "dense" if free else self.mode_of(layer)
        self.computed[mode] += 1
        return Call(layer, mode, again, live)

    def _looked_at(self, index: int) -> bool:
        """Whether a forward of this step has shown a layer's tiles: one of several accumulated ones is enough."""
        return index in self.looks and bool(self.looks[index][-1].any())

    def mode_of(self, layer: Layer) -> str:
        """How a layer is computed now, beyond the dense calls that begin a training-free generation."""
        return self._mode_at(layer.index, layer.grid.tokens)

    def _mode_at(self, index: int, tokens: int) -> str:
        dense = not self.setting(tokens).sparse_layers[index]
        if self.active is not None and not self._forced:
            length = length_class(tokens)
            dense = dense or not (length in self.active or (self.open and length not in self.by_class))
        return "dense" if dense else self.mode

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
            return attend(q, k, v, selection, periphery=self.periphery(layer), backend=self.backend)

    def budget(self, layer: Layer) -> Tensor:
        """float32 (H,) of a call."""
        return self.setting(layer.grid.tokens).budgets[layer.index]

    def periphery(self, layer: Layer) -> Any:
        """`drop`, or the constants of a call's heads, float32 (H,)."""
        setting = self.setting(layer.grid.tokens)
        return "drop" if setting.drops[layer.index] else setting.constants[layer.index]

    def assign(
        self, index: int, budget: Sequence[float], constants: Sequence[float], sparse: bool, length: int | None = None
    ) -> None:
        """Give a layer other budgets (H) and constants of the periphery (H); compiled code is not compiled again.

        length: of this length class; None: of those that have no setting of their own.
        """
        setting = self.default if length is None else self.by_class.setdefault(length, self.default.copy())
        device = setting.budgets[index].device
        setting.budgets[index] = per_head("budget", budget, self.heads, device).clone()
        setting.constants[index] = torch.tensor(list(constants), device=device)
        setting.drops[index], setting.sparse_layers[index] = max(constants) == DROP, sparse

    def follow(self, plan: Plan | None, length: int | None = None) -> None:
        """Assign a plan, if there is one, to a length class, or to those that have none of their own."""
        for index, row in enumerate(zip(plan.budgets, plan.constants, plan.sparse, strict=True) if plan else ()):
            self.assign(index, *row, length=length)

    def selection(self, layer: Layer, q: Tensor, k: Tensor) -> Selection:
        """The tiles this layer keeps now."""
        tiles = {"query_tile": self.query_tile, "kv_tile": self.kv_tile}
        return select(q, k, layer.grid, predictor=self.predictor(layer.index), budget=self.budget(layer), **tiles)

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

    def structure(self, tokens: int) -> Any:
        """What a graph of this policy's kernels for a length holds for: all that is not in `tensors`."""
        setting, layers = self.setting(tokens), range(len(self.learners))
        modes = tuple(self._mode_at(index, tokens) for index in layers)
        known = tuple(self.predictor(index) is not None for index in layers)
        return tokens, modes, tuple(setting.drops), known, self.query_tile, self.kv_tile

    def tensors(self, tokens: int) -> list[Tensor]:
        """What kernels for a length read: budgets, constants and predictors of all layers, as they are now."""
        setting = self.setting(tokens)
        predictors = [one for index in range(len(self.learners)) if (one := self.predictor(index)) is not None]
        return [*setting.budgets, *setting.constants, *(x for one in predictors for x in (one.a, one.b))]

    @contextmanager
    def pinned(self, tokens: int) -> Iterator[list[Tensor]]:
        """Calls inside a `with` read these copies of `tensors` and leave nothing behind."""
        setting = self.setting(tokens).copy()
        frozen = [
            None if one is None else Predictor(one.a.clone(), one.b.clone())
            for one in (self.predictor(index) for index in range(len(self.learners)))
        ]
        before = self._pinned, self._frozen, self._kept
        self._pinned, self._frozen, self._kept = setting, frozen, {}
        try:
            yield self.tensors(tokens)
        finally:
            self._pinned, self._frozen, self._kept = before

    def arrived(self, forward: Forward) -> None:
        """A backward has come to this forward's output, so it trains: its lessons count."""
        _add(self.lessons, forward.lessons)
        _add(self.looks, forward.looks)
        forward.lessons, forward.looks = {}, {}

    def step_lessons(self) -> list[Lesson]:
        """Every layer's lesson of this step, which is over; one of no weight where there was none, so that all ranks'
        have one shape."""
        found, self.lessons = self.lessons, {}
        return [found.get(index, learner.nothing()) for index, learner in enumerate(self.learners)]

    def step_looks(self, look: Look) -> Tensor:
        """(L, C + 1, H): what this step, which is over, showed of several shapes of tiles."""
        found, self.looks = self.looks, {}
        device = self.default.budgets[0].device
        nothing = look.nothing(self.heads, device)
        return torch.stack([found.get(index, nothing).to(device) for index in range(len(self.learners))])

    def learn(self, lessons: dict[int, Lesson]) -> None:
        """Every layer takes its lesson, if there is one."""
        for index, lesson in lessons.items():
            self.learners[index].take(lesson)

    def forget(self) -> None:
        """Predictors begin anew: tiles are other tokens from now on."""
        rate = self.learners[0].lr
        self.learners = [self._make(learner.moments.cq.device) for learner in self.learners]
        for learner in self.learners:
            learner.lr = rate
        self.lessons = {}
        self.freeze()

    def restart(self) -> None:
        """The next call of this thread is the first of a generation: `free_steps` count from it, and in a training-free
        run nothing of the last one is used, so that a generation does not depend on those before it."""
        self._here.calls, self._here.span = {}, None
        if self.free_steps:
            self.learners = [self._make(learner.moments.cq.device) for learner in self.learners]

    @contextmanager
    def using(self, mode: str, *, learning: bool = False) -> Iterator[None]:
        """Another mode for the length of a `with`: evaluations neither teach nor change anything."""
        before = self.mode, self.learning, self._forced
        self.mode, self.learning, self._forced = mode, learning, True
        try:
            yield
        finally:
            self.mode, self.learning, self._forced = before

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

    def _teach(self, layer: Layer, sight: Sight, lessons: int, at_once: bool) -> None:
        learner = self.learners[layer.index]
        if self.collect and not at_once:
            forward = self.forward
            found = learner.look(sight, layer.grid, seed=self._seed(layer))
            _add(self.lessons if forward is None else forward.lessons, {layer.index: found})
            return
        # The closed form takes each sequence in once; only fine-tuning draws something new at every lesson.
        for lesson in range(lessons if learner.predictor is not None else 1):
            learner.learn(sight, layer.grid, seed=self._seed(layer) + lesson)

    def _free(self, layer: Layer, again: bool) -> bool:
        """Whether this is one of the dense calls that begin a training-free generation."""
        if not self.free_steps or self._profiles is not None:
            return False
        if layer.step is not None:  # counted from where this generation, or this one of a pipeline's two models, began
            first, last = getattr(self._here, "span", None) or (layer.step, layer.step)
            if layer.step < last:
                self.restart()
                first = layer.step
            self._here.span = first, layer.step
            return layer.step - first < self.free_steps
        calls = self._here.__dict__.setdefault("calls", {})
        calls[layer.index] = calls.get(layer.index, 0) + (not again)
        return calls[layer.index] <= self.free_steps

    def _settle(self, index: int, device: torch.device) -> None:
        """Move a layer's tensors to where its queries are: a model may be moved after the policy was installed."""
        learner = self.learners[index]
        if learner.moments.cq.device == device:
            return
        with torch.inference_mode(False):
            self.learners[index] = moved = self._make(device)
            moved.load_state_dict(learner.state_dict())
        moved.lr = learner.lr
        for setting in (self.default, *self.by_class.values()):
            setting.budgets[index] = setting.budgets[index].to(device)
            setting.constants[index] = setting.constants[index].to(device)
        if self._frozen is not None:
            self._frozen[index] = self.learners[index].predictor

    def _seed(self, layer: Layer) -> int:
        return hash((self.seed, self.step, layer.index)) & 0x7FFFFFFF

    def _generator(self, layer: Layer, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self._seed(layer))


def _add(total: dict[int, Any], more: dict[int, Any]) -> None:
    for index, one in more.items():
        total[index] = total[index] + one if index in total else one


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
