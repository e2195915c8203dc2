"""How a layer's predictor learns beside training: moments at first, then gradients against the true mass of tiles.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads (G divides H), D head dim, r rank, O octants
(8 consecutive tokens), N key tiles (64 tokens), n sampled query tiles.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.attention import no_autocast
from foveate.kernels.select import octant_sizes
from foveate.sparsity.predictor import Lesson, Moments, Predictor, like, second_moments
from foveate.sparsity.sight import Sight, mean_valid, sample_rows, take_runs
from foveate.tiles import OCTANT, TILE, VideoGrid

MASS_FLOOR = 1e-9  # below it a predicted mass gets no gradient, so that no logarithm is infinite
BETAS = (0.9, 0.99)  # Adam's
EPS = 1e-8


class Learner:
    """Learns one layer's predictor beside a training run, from the q and k of each step; the model never notices.

    The first `start` observations fill the moments; then the closed form is made, and every further observation is
    one Adam step (rate `lr`, which may be changed at any time) on the cross-entropy between the true tile mass of
    `rows` sampled query tiles a head, over all keys, and the predicted one. `jitter`: noise on the octant means, in
    units of their standard deviation, against learning a few clips by heart (docs/log.md, Predictor).

    `loss`: the last step's cross-entropy, averaged over rows and heads, float32 () on the device, or None.
    """

    def __init__(
        self, heads: int, dim: int, *, rank: int = 16, rows: int = 1, lr: float = 5e-4, start: int = 20,
        jitter: float = 0.3, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if not 1 <= rank <= dim:
            raise ValueError(f"rank must lie in 1 ... {dim}, the head dim, got {rank}")
        if rows < 1 or start < 1 or lr < 0 or jitter < 0:
            raise ValueError(
                "a learner needs rows and start of at least 1, lr and jitter of at least 0, "
                f"got {rows=}, {start=}, {lr=}, {jitter=}"
            )
        self.rank, self.rows, self.lr, self.start, self.jitter = rank, rows, lr, start, jitter
        self.moments = Moments(heads, dim, device)
        self.seen, self.tuned = 0, torch.zeros((), dtype=torch.int64, device=device)
        # Queries' and keys' matrices in one tensor, and Adam's two averages of their gradients.
        self._weights, self._first, self._second = torch.zeros(3, 2, heads, dim, rank, device=device).unbind()
        self.loss: Tensor | None = None

    @property
    def predictor(self) -> Predictor | None:
        """What has been learned so far; None before `start` observations. Later steps do not change it."""
        return Predictor(*self._weights.unbind()) if self.seen >= self.start else None

    def learn(self, sight: Sight, grid: VideoGrid, *, scale: float | None = None, seed: int) -> None:
        """Learn from one training step's queries and keys, in tile order.

        One clip of the batch, drawn by `seed`, serves a fine-tuning step. The global random state is not touched,
        nothing is kept of the sight's graph, and nothing waits for the device. scale: 1 / sqrt(D) by default.
        """
        self.take(self.look(sight, grid, scale=scale, seed=seed))

    def look(self, sight: Sight, grid: VideoGrid, *, scale: float | None = None, seed: int) -> Lesson:
        """What a training step has to teach; nothing is learned before `take`."""
        scale = float(self.moments.cq.shape[1] ** -0.5 if scale is None else scale)
        device = sight.q.device
        # Generation may run in inference mode; what is learned there must serve elsewhere too.
        with torch.inference_mode(False), torch.no_grad(), no_autocast(device):
            if self.seen < self.start:
                return Lesson.of(second_moments(*sight.octants()), sight.q.shape[0])
            return Lesson.of(self._gradient(sight, grid, scale, torch.Generator(device).manual_seed(seed)))

    def nothing(self) -> Lesson:
        """A lesson of no weight, of the shape that one has now."""
        heads, dim = self.moments.cq.shape[:2]
        total = torch.zeros(2, heads, dim, dim if self.seen < self.start else self.rank, device=self.moments.cq.device)
        return Lesson(total, total.new_zeros(()))

    def take(self, lesson: Lesson) -> None:
        """Learn a lesson that was looked at since the last one was taken. One of no weight is left out."""
        with torch.inference_mode(False), torch.no_grad():
            if self.seen >= self.start:
                self._adam(lesson)
            else:
                self.moments.add(lesson)
                if self.seen + 1 == self.start:
                    if not self.moments.count:  # nothing was finite so far, and there is nothing to begin with
                        return
                    closed = Predictor.from_moments(self.moments, self.rank)
                    self._weights = torch.stack([closed.a, closed.b])
        self.seen += 1

    def _gradient(self, sight: Sight, grid: VideoGrid, scale: float, generator: torch.Generator) -> Tensor:
        clip = torch.randint(sight.q.shape[0], (1,), generator=generator, device=generator.device)
        rows = sample_rows(grid, sight.heads, self.rows, generator)
        target = sight.mass(clip, rows, scale)
        q_oct, k_oct = (x[0] for x in sight.octants(clip))
        q_oct, valid = take_runs(q_oct, rows, TILE // OCTANT)
        q_oct, k_oct = (_jittered(x, self.jitter, generator) for x in (q_oct, k_oct))
        self.loss, gradient = cross_entropy(self._weights, q_oct, k_oct, valid, target, grid.tokens, scale)
        return gradient

    def _adam(self, lesson: Lesson) -> None:
        fine, gradient = lesson.weight > 0, lesson.mean()
        tuned = self.tuned + fine
        first = self._first.lerp(gradient, 1 - BETAS[0])
        second = self._second.lerp(gradient.square(), 1 - BETAS[1])
        mean, square = (x / (1 - beta**tuned) for x, beta in zip((first, second), BETAS, strict=True))
        # Out of place, so that predictors already given out stay as they are.
        weights = self._weights - self.lr * mean / (square.sqrt() + EPS)
        before = (self._weights, self._first, self._second)
        after = (torch.where(fine, new, old) for new, old in zip((weights, first, second), before, strict=True))
        (self._weights, self._first, self._second), self.tuned = after, tuned

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors that a learner of the same arguments goes on from, bit by bit."""
        moments = {f"moments.{name}": value for name, value in self.moments.state_dict().items()}
        tensors = {name: getattr(self, "_" + name).clone() for name in ("weights", "first", "second")}
        return {**moments, **tensors, "seen": torch.tensor(self.seen), "tuned": self.tuned.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where the state is for other heads, another head dim or another rank."""
        self.moments.load_state_dict({name: state[f"moments.{name}"] for name in ("cq", "ck", "count")})
        for name in ("weights", "first", "second"):
            setattr(self, "_" + name, like(state, name, getattr(self, "_" + name)))
        self.seen, self.tuned = int(state["seen"]), like(state, "tuned", self.tuned)


def cross_entropy(
    weights: Tensor, q_oct: Tensor, k_oct: Tensor, valid: Tensor, target: Tensor, tokens: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Between true mass `target` (H, n, N) and the predicted one: its mean over rows and heads (), and its gradient.

    The latter is for weights (2, H, D, r), written out: autograd would save and launch more, and needs a mode of its
    own inside inference, compiled and recomputed forwards. q_oct (H, n, 8, D), of which `valid` exist; k_oct (H, O, D).
    """
    queries = q_oct.flatten(1, 2)
    q, k = queries @ weights[0], k_oct @ weights[1]
    shares = _shares(q, k, tokens, scale)
    by_tile = _by_tile(shares)
    mass = mean_valid(by_tile.unflatten(1, valid.shape[1:]), valid).clamp_min(MASS_FLOOR)
    loss = -(target * mass.log()).sum(-1).mean()
    slope = torch.where(mass > MASS_FLOOR, target / mass, 0.0) * (-1 / target[..., 0].numel())
    weight = valid.float() / valid.sum(-1, keepdim=True)
    slope = (weight.unsqueeze(-1) * slope.unsqueeze(2)).flatten(1, 2)  # (H, 8 n, N), of by_tile
    mean = (slope * by_tile).sum(-1, keepdim=True)
    logits = slope.sub_(mean).repeat_interleave(TILE // OCTANT, -1)[..., : shares.shape[-1]].mul_(shares).mul_(scale)
    return loss, torch.stack([queries.mT @ (logits @ k), k_oct.mT @ (logits.mT @ q)])


def _shares(q: Tensor, k: Tensor, tokens: int, scale: float) -> Tensor:
    """Softmax (H, L, O) of projected query octants (H, L, r) over key octants (H, O, r), each by its tokens."""
    return torch.add(octant_sizes(tokens, k.device).log(), q @ k.mT, alpha=scale).softmax(-1)


def _by_tile(shares: Tensor) -> Tensor:
    return pad(shares, (0, -shares.shape[-1] % (TILE // OCTANT))).unflatten(-1, (-1, TILE // OCTANT)).sum(-1)


def _jittered(x: Tensor, jitter: float, generator: torch.Generator) -> Tensor:
    if jitter == 0:
        return x
    spread = x.flatten(1).std(-1, correction=0).view(-1, *[1] * (x.dim() - 1))
    return x + jitter * spread * torch.randn(x.shape, generator=generator, device=x.device)
