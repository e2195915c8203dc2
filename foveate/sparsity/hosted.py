"""Training-free sparse attention for engines that hand over q, k, v of a layer, and no model to install anything in.

Shapes: B batch, S tokens in raster order, H heads, G key/value heads (G divides H), D head dim.
"""

import logging
import math
from collections.abc import Callable

from torch import Tensor

from foveate import costs
from foveate.attention import Layer
from foveate.sparsity.policy import Sparse
from foveate.sparsity.sight import Sight
from foveate.tiles import VideoGrid

log = logging.getLogger("foveate")


class Hosted:
    """One generation at a time; its layers are made when they are first seen.

    kept: share of the key tiles that is kept, in (0, 1]; the others take part pooled. dense_steps: first denoising
    steps of a generation, which the engine computes densely and each layer's predictor is fitted in, at least 1.
    force: sparse even where the saved costs of the device say that it does not pay, which is logged once.
    """

    def __init__(self, kept: float, *, dense_steps: int = 3, force: bool = False, backend: str = "auto"):
        if not 0 < kept <= 1:
            raise ValueError(f"kept must lie in (0, 1], the share of the key tiles, got {kept}")
        if dense_steps < 1:
            raise ValueError(f"dense_steps must be at least 1: they show which tiles matter, got {dense_steps}")
        self.kept, self.dense_steps, self.force, self.backend = kept, dense_steps, force, backend
        self._layers: dict[int, tuple[VideoGrid, Sparse]] = {}
        self._told = False
        self.computed = {"dense": 0, "sparse": 0}

    def restart(self) -> None:
        """The next call belongs to another generation. A step that goes back says so by itself."""
        self._layers.clear()

    def attend(
        self,
        index: int,
        grid: VideoGrid,
        step: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dense: Callable[[], Tensor],
        scale: float | None = None,
    ) -> Tensor:
        """Self-attention of a layer, (B, S, H, D). q (B, S, H, D), k and v (B, S, G, D), S the grid's tokens.

        step: of denoising; None where the engine does not say: then the first `dense_steps` calls are dense. dense: the
        engine's own attention of the same. scale: of the logits, 1 / sqrt(D) by default.
        """
        if not self._pays(grid.tokens, q):
            self.computed["dense"] += 1
            return dense()
        known = self._layers.get(index)
        if known is None or known[0] != grid or known[1].dim != q.shape[-1]:
            known = self._layers[index] = grid, self._made(index, q)
        policy, layer = known[1], Layer(0, f"layer {index}", grid, step)
        if scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5):
            q = q * (scale * q.shape[-1] ** 0.5)
        order = grid.order().to(q.device)
        q, k, v = q[:, order], k[:, order], v[:, order]
        call = policy.begin(layer, Sight(q, k, v), grad=False)
        self.computed[call.mode] += 1
        if call.mode == "dense":
            return dense()
        out = policy.compute(layer, call.mode, policy.selection(layer, q, k), q, k, v).out
        return out[:, grid.inverse().to(q.device)]

    def _made(self, index: int, q: Tensor) -> Sparse:
        policy = Sparse(
            1, q.shape[2], q.shape[3], budget=self.kept, periphery="pool", seed=index, backend=self.backend,
            query_tile=costs.here(q.device).tile, device=q.device, start=max(1, self.dense_steps // 2),
        )  # fmt: skip
        policy.free_steps, policy.mode = self.dense_steps, "sparse"
        return policy

    def _pays(self, tokens: int, q: Tensor) -> bool:
        if self.force:
            return True
        table, heads, dim, passes = costs.here(q.device), q.shape[2], q.shape[3], ("forward_ms",)
        sparse = table.sparse(tokens, heads, dim, self.kept, pooled=1.0, passes=passes)
        if sparse < table.dense(tokens, heads, dim, passes=passes):
            return True
        if not self._told:
            self._told = True
            log.warning(
                "sparse attention does not pay at %d tokens with %.0f %% of the tiles kept, by the saved costs of this "
                "device: layers of this length stay dense; a smaller share, or force, makes them sparse",
                tokens, 100 * self.kept,
            )  # fmt: skip
        return False
