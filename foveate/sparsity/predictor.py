"""The predictor of attention mass: two small matrices a head, in closed form from second moments of queries and keys.

After DSV (arXiv 2502.07590, its low-rank predictor) with two changes: the matrices apply to q and k as attention
sees them (after QK-norm and RoPE), they start in closed form, and they learn the mass of whole tiles (learner.py).

Shapes: B batch, S tokens in tile order, H heads, G key/value heads (G divides H), D head dim, r rank, O octants
(8 consecutive tokens).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.attention import no_autocast
from foveate.kernels.select import octant_means, project

NEGLIGIBLE = 1e-6  # eigenvalues of a moment below this share of the largest count as directions never seen
TINY = 1e-12  # weights below it are none


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
        self.cq, self.ck, self.count = (like(state, name, getattr(self, name)) for name in ("cq", "ck", "count"))


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


def like(state: Mapping[str, Tensor], name: str, current: Tensor) -> Tensor:
    value = state[name]
    if value.shape != current.shape:
        raise ValueError(
            f"the saved {name} is for {tuple(value.shape)}, this one for {tuple(current.shape)}: "
            "heads, head dim and rank must be those it was saved with"
        )
    return value.to(current.device, current.dtype, copy=True)


def _check(q: Tensor, k: Tensor, heads: int, dim: int) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[2:] != (heads, dim) or k.shape[3] != dim or heads % max(k.shape[2], 1):
        raise ValueError(
            f"q must be (B, S, {heads}, {dim}) and k (B, S, G, {dim}) with G dividing {heads}, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(f"q and k must be one batch of sequences, got {tuple(q.shape)} and {tuple(k.shape)}")
