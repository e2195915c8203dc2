"""The predictor of attention mass: two small matrices a head, from moments at first and then from the true mass.

After DSV (arXiv 2502.07590, its low-rank predictor) with two changes: the matrices apply to q and k as attention
sees them (after QK-norm and RoPE), they start in closed form, and they learn the mass of whole tiles.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads (G divides H), D head dim, r rank, O octants
(8 consecutive tokens), R query tiles, N key tiles (64 tokens), n sampled query tiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.attention import no_autocast
from foveate.kernels.select import octant_means, octant_sizes, project
from foveate.tiles import OCTANT, TILE, VideoGrid

NEGLIGIBLE = 1e-6  # eigenvalues of a moment below this share of the largest count as directions never seen
TINY = 1e-12  # weights below it are none
MASS_FLOOR = 1e-9  # below it a predicted mass gets no gradient, so that no logarithm is infinite
CHUNK = {"cpu": 1 << 20, "other": 1 << 25}  # exact weights held at once: in cache on a CPU, 128 MB elsewhere
BETAS = (0.9, 0.99)
EPS = 1e-8


class Moments:
    """Running averages over sequences of the second moments of octant means: `cq`, `ck` float32 (H, D, D).

    `ck` is taken about the sequence's own mean: what shifts all keys alike adds one constant to a query's logits,
    which softmax does not see, and the fit should spend no rank on it. `count`: sequences averaged so far, float32 ().
    """

    def __init__(self, heads: int, dim: int, device: torch.device | str = "cpu") -> None:
        self.cq = torch.zeros(heads, dim, dim, device=device)
        self.ck = torch.zeros(heads, dim, dim, device=device)
        self.count = torch.zeros((), device=device)

    @torch.no_grad()
    def update(self, q: Tensor, k: Tensor) -> None:
        """Take in q (B, S, H, D) and k (B, S, G, D), any float dtype. Raises ValueError for other shapes."""
        heads, dim, _ = self.cq.shape
        _check(q, k, heads, dim)
        with no_autocast(q.device):
            self.add(Lesson.of(second_moments(octant_means(q), project(octant_means(k), None, heads)), q.shape[0]))

    def add(self, lesson: "Lesson") -> None:
        """Take in `second_moments`; a lesson of no weight changes nothing."""
        self.count = self.count + lesson.weight
        share = lesson.weight / self.count.clamp_min(TINY)
        self.cq, self.ck = (old.lerp(new, share) for old, new in zip((self.cq, self.ck), lesson.mean(), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        return {"cq": self.cq.clone(), "ck": self.ck.clone(), "count": self.count.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where the state is for other heads or another head dim."""
        self.cq, self.ck, self.count = (_like(state, name, getattr(self, name)) for name in ("cq", "ck", "count"))


@dataclass(frozen=True, eq=False)
class Lesson:
    """What sequences say to a learner, as a value: lessons add up, over forwards and over ranks, before it takes them.

    total: float32 (2, H, D, D), second moments of queries and keys, or (2, H, D, r), gradients of the two matrices,
    summed by weight. weight: float32 (), how many. What is not finite has weight 0.
    """

    total: Tensor
    weight: Tensor

    @classmethod
    def of(cls, found: Tensor, count: int = 1) -> "Lesson":
        """A mean over `count` sequences. Nothing waits for the device."""
        fine = found.isfinite().all()
        return cls(torch.where(fine, found * count, 0.0), fine * float(count))

    def __add__(self, other: "Lesson") -> "Lesson":
        return Lesson(self.total + other.total, self.weight + other.weight)

    def mean(self) -> Tensor:
        return self.total / self.weight.clamp_min(TINY)


@dataclass(frozen=True, eq=False)
class Predictor:
    """q . k ~ (q a) . (k b) up to a constant a query, per head: `a`, `b` float32 (H, D, r). A value."""

    a: Tensor
    b: Tensor

    def __post_init__(self) -> None:
        if self.a.dim() != 3 or self.a.shape != self.b.shape or not self.a.dtype == self.b.dtype == torch.float32:
            raise ValueError(
                "a predictor needs float32 a and b of one shape (H, D, r), got "
                f"{self.a.dtype} {tuple(self.a.shape)} and {self.b.dtype} {tuple(self.b.shape)}"
            )

    @classmethod
    def fit(cls, q: Tensor, k: Tensor, rank: int = 16) -> "Predictor":
        """Closed form from one sample, q (B, S, H, D) and k (B, S, G, D) in tile order. See `from_moments`."""
        moments = Moments(q.shape[2], q.shape[3], q.device)
        moments.update(q, k)
        return cls.from_moments(moments, rank)

    @classmethod
    def from_moments(cls, moments: Moments, rank: int = 16) -> "Predictor":
        """The rank-`rank` fit of Q K^T that is best in least squares over queries and keys of these moments.

        With the SVD Cq^1/2 Ck^1/2 = U S V^T: a = Cq^-1/2 U_r S_r^1/2 and b = Ck^-1/2 V_r S_r^1/2.
        Directions the moments have not seen get weight 0. Raises ValueError for a rank outside 1 ... D or no moments.
        """
        dim = moments.cq.shape[-1]
        if not 1 <= rank <= dim:
            raise ValueError(f"rank must lie in 1 ... {dim}, the head dim, got {rank}")
        if moments.count == 0:
            raise ValueError("the moments are empty; call Moments.update first")
        (root_q, inverse_q), (root_k, inverse_k) = _roots(moments.cq), _roots(moments.ck)
        u, sigma, vt = torch.linalg.svd(root_q @ root_k)
        weight = sigma[:, None, :rank].sqrt()
        a, b = inverse_q @ u[..., :rank] * weight, inverse_k @ vt.mT[..., :rank] * weight
        return cls(a.float(), b.float())

    def to(self, device: torch.device | str) -> "Predictor":
        return Predictor(self.a.to(device), self.b.to(device))


class Sight:
    """What lessons and profiles look at: q (B, S, H, D), k and v (B, S, G, D) of whole sequences, any float dtype.

    A subclass may hold a part of the sequences only, and find out the rest (parallel/lessons.py).
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
        self.q, self.k, self.heads = q.detach(), k.detach(), q.shape[2]
        self.v = None if v is None else v.detach()

    def queries(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """float32 (B, H, R, 64, D): the queries of tiles `rows` (R,), zero where there are none, and bool (R, 64)."""
        places = (rows[:, None] * TILE + torch.arange(TILE, device=rows.device)).to(self.q.device)
        valid = places < self.q.shape[1]
        found = self.q[:, places.clamp(max=self.q.shape[1] - 1)]  # index_select would copy q where it is strided
        return found.float().movedim(3, 1) * valid.unsqueeze(-1), valid

    def tiles(self, count: int) -> slice:
        """Which of the `count` key tiles are here."""
        return slice(0, count)

    def join(self, x: Tensor) -> Tensor:
        """x (..., own tiles) of every rank -> (..., N)."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks that share the sequence."""
        return x

    def part(self, clip: int, groups: slice) -> "Sight":
        """Whole sequences of one clip and a run of key/value heads with the query heads that share them."""
        q, k, v = self._part(clip, groups)
        return Sight(q, k, v)

    def _part(self, clip: int, groups: slice) -> list[Tensor]:
        assert self.v is not None
        repeats = self.heads // self.k.shape[2]
        heads = slice(groups.start * repeats, groups.stop * repeats)
        pairs = ((self.q, heads), (self.k, groups), (self.v, groups))
        return [x[clip : clip + 1, :, some] for x, some in pairs]

    def octants(self, clips: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Octant means (B, H, O, D) of queries and of keys; of these clips (int64) only, where given."""
        q, k = ((x if clips is None else x.index_select(0, clips)) for x in (self.q, self.k))
        return octant_means(q), project(octant_means(k), None, self.heads)

    def mass(self, clip: Tensor, rows: Tensor, scale: float) -> Tensor:
        """`true_mass` of one clip, int64 (1,)."""
        return true_mass(self.q.index_select(0, clip), self.k.index_select(0, clip), rows, scale)


class Learner:
    """Learns one layer's predictor beside a training run, from the q and k of each step; the model never notices.

    The first `start` observations fill the moments; then the closed form is made, and every further observation is
    one Adam step (rate `lr`, which may be changed at any time) on the cross-entropy between the true tile mass of
    `rows` sampled query tiles a head, over all keys, and the predicted one. `jitter`: noise on the octant means, in
    units of their standard deviation, against learning a few clips by heart (docs/log.md, Predictor).

    `loss`: the last step's cross-entropy, averaged over rows and heads, float32 () on the device, or None.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        *,
        rank: int = 16,
        rows: int = 1,
        lr: float = 5e-4,
        start: int = 20,
        jitter: float = 0.3,
        device: torch.device | str = "cpu",
    ) -> None:
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

    def observe(self, q: Tensor, k: Tensor, grid: VideoGrid, *, scale: float | None = None, seed: int) -> None:
        """Learn from one training step's q (B, S, H, D) and k (B, S, G, D), tile order, any float dtype.

        One clip of the batch, drawn by `seed`, serves a fine-tuning step. The global random state is not touched,
        nothing is kept of q's and k's graph, and nothing waits for the device. scale: 1 / sqrt(D) by default.
        Raises ValueError where shapes do not fit.
        """
        heads, dim = self.moments.cq.shape[:2]
        _check(q, k, heads, dim, grid)
        self.learn(Sight(q, k), grid, scale=scale, seed=seed)

    def learn(self, sight: Sight, grid: VideoGrid, *, scale: float | None = None, seed: int) -> None:
        """As `observe`, from whatever gives the sight."""
        self.take(self.look(sight, grid, scale=scale, seed=seed))

    def look(self, sight: Sight, grid: VideoGrid, *, scale: float | None = None, seed: int) -> Lesson:
        """What a training step has to teach, as `observe` would; nothing is learned before `take`."""
        scale = float(self.moments.cq.shape[1] ** -0.5 if scale is None else scale)
        device = sight.q.device
        # Generation may run in inference mode; what is learned there must serve elsewhere too.
        with torch.inference_mode(False), torch.no_grad(), no_autocast(device):
            if self.seen < self.start:
                return Lesson.of(second_moments(*sight.octants()), sight.q.shape[0])
            return Lesson.of(self._gradient(sight, grid, scale, torch.Generator(device).manual_seed(seed)))

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
            setattr(self, "_" + name, _like(state, name, getattr(self, "_" + name)))
        self.seen, self.tuned = int(state["seen"]), _like(state, "tuned", self.tuned)


def sample_rows(grid: VideoGrid, heads: int, count: int, generator: torch.Generator) -> Tensor:
    """int64 (H, n): `count` different query tiles for each head, fewer where the grid has fewer.

    Tiles with text keep every key and teach nothing, so they are drawn only where there are no others.
    """
    tiles = grid.video // TILE if grid.text else grid.tiles()
    tiles = tiles or grid.tiles()
    lots = torch.rand(heads, tiles, generator=generator, device=generator.device)
    return lots.topk(min(count, tiles)).indices


def take_runs(x: Tensor, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Runs of `length` rows of x (H, L, C) that begin at length * `rows` (H, n): (H, n, length, C) and which exist.

    The latter is bool (H, n, length), False past the end of x, where the last row is repeated.
    """
    index = rows.unsqueeze(-1) * length + torch.arange(length, device=x.device)
    places = index.clamp(max=x.shape[1] - 1)
    heads = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return x[heads, places], index < x.shape[1]


@torch.no_grad()
def true_mass(q: Tensor, k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """float32 (H, n, N): exact attention mass of every key tile for query tiles `rows` (H, n), each summing to 1.

    Of one sequence, q (1, S, H, D) and k (1, S, G, D), averaged over the query tile's tokens.
    """
    queries, valid = take_runs(q[0].transpose(0, 1), rows, TILE)
    mass = tile_lse(queries.flatten(1, 2).float() * scale, k[0]).softmax(-1)
    return mean_valid(mass.unflatten(1, valid.shape[1:]), valid)


def tile_lse(queries: Tensor, k: Tensor) -> Tensor:
    """float32 (H, m, N): log-sum-exp over every tile of keys k (s, G, D) for scaled queries (H, m, D), by chunks."""
    heads = queries.shape[0]
    tiles = max(1, CHUNK.get(k.device.type, CHUNK["other"]) // (queries[..., 0].numel() * TILE))
    parts = []
    for part in k.split(tiles * TILE):
        keys = part.float().permute(1, 2, 0).repeat_interleave(heads // k.shape[1], dim=0)
        logits = pad(queries @ keys, (0, -keys.shape[-1] % TILE), value=-torch.inf)
        parts.append(logits.unflatten(-1, (-1, TILE)).logsumexp(-1))
    return torch.cat(parts, -1)


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


def mean_valid(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x (H, n, L, N) over those of its L that are valid (H, n, L)."""
    weight = valid.to(x.dtype)
    weight = weight / weight.sum(-1, keepdim=True)
    return (weight.unsqueeze(-2) @ x).squeeze(-2)


def _jittered(x: Tensor, jitter: float, generator: torch.Generator) -> Tensor:
    if jitter == 0:
        return x
    spread = x.flatten(1).std(-1, correction=0).view(-1, *[1] * (x.dim() - 1))
    return x + jitter * spread * torch.randn(x.shape, generator=generator, device=x.device)


def second_moments(q_oct: Tensor, k_oct: Tensor) -> Tensor:
    """float32 (2, H, D, D): of octant means (B, H, O, D) of whole sequences, keys about each sequence's own mean."""
    pairs = q_oct, k_oct - k_oct.mean(2, keepdim=True)
    return torch.stack([(x.mT @ x).mean(0) / x.shape[2] for x in pairs])


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Square root and pseudo-inverse square root of symmetric matrices (H, D, D), float64."""
    values, vectors = torch.linalg.eigh(moment.double())
    seen = values > NEGLIGIBLE * values[:, -1:].clamp_min(torch.finfo(moment.dtype).tiny)
    roots = torch.where(seen, values, 0.0).sqrt()
    inverses = torch.where(seen, 1 / roots, 0.0)
    return vectors * roots.unsqueeze(-2) @ vectors.mT, vectors * inverses.unsqueeze(-2) @ vectors.mT


def _like(state: Mapping[str, Tensor], name: str, current: Tensor) -> Tensor:
    value = state[name]
    if value.shape != current.shape:
        raise ValueError(
            f"the saved {name} is for {tuple(value.shape)}, this one for {tuple(current.shape)}: "
            "heads, head dim and rank must be those it was saved with"
        )
    return value.to(current.device, current.dtype, copy=True)


def _check(q: Tensor, k: Tensor, heads: int, dim: int, grid: VideoGrid | None = None) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[2:] != (heads, dim) or k.shape[3] != dim or heads % max(k.shape[2], 1):
        raise ValueError(
            f"q must be (B, S, {heads}, {dim}) and k (B, S, G, {dim}) with G dividing {heads}, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[:2] != k.shape[:2] or (grid is not None and q.shape[1] != grid.tokens):
        expected = "" if grid is None else f" of {grid.tokens} tokens ({grid})"
        raise ValueError(f"q and k must be one batch of sequences{expected}, got {tuple(q.shape)} and {tuple(k.shape)}")
