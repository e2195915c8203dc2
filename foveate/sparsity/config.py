"""What a user may set about sparse attention: one frozen dataclass, checked when made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foveate.attention import BACKENDS
from foveate.sparsity.cadence import OFTEN

TOLERANCE = 0.005


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """How `sparsify` decides. All steps are training steps of the optimiser. Give a tolerance or a budget, not both."""

    tolerance: float | None = None
    """Allowed relative increase of the loss through sparse attention, measured in pairs; 0.005 without a budget."""
    budget: float | Sequence[float] | None = None
    """Kept fraction of the key tiles in (0, 1], one or one per head; then nothing is decided by the loss."""
    dense_layers: Sequence[int] = ()
    """Layers that stay dense whatever is measured; DSV keeps the first and the last (its section 4)."""
    periphery: Literal["auto", "drop", "pool"] | float = "auto"
    """What unselected tiles do: drop, pool (each takes part as its mean), or a number, a constant on the logits of
    those means (see `attend`). auto: each head's cheapest at equal error, of a few constants that are profiled."""
    tile_shape: Literal["auto"] | tuple[int, int, int] = "auto"
    """Frames, height and width of a tile, such as (4, 4, 4). auto: found in the first training steps, by the output
    errors of the model's own queries, keys and values (sparsity/shapes.py); predictors then learn anew."""
    rank: int = 16
    """Rank of the predictors."""
    query_tile: int | None = None
    """Tokens of a tile, of queries and of keys, 64 or 128. By default the one that the saved costs of the model's
    device say is faster at equal recall: 128 where flash-attn-4 is installed, 64 elsewhere."""
    rule: Literal["error", "dsv"] = "error"
    """How budgets are found: by error, or by dsv, DSV's own rule (arXiv 2502.07590): per head the smallest budget that
    holds `dsv_mass` of the attention mass, dropped periphery, layers sparse up to a mean budget of `dsv_threshold`."""
    dsv_mass: float = 0.9
    """Attention mass that rule dsv keeps."""
    dsv_threshold: float = 0.3
    """Largest mean budget of a layer that rule dsv makes sparse."""
    warmup: int = 100
    """Dense steps before anything is decided; predictors learn in them."""
    learn_from: int = 20
    """Steps whose queries and keys give the predictors their closed form; they are fine-tuned on all that follow."""
    often: int | None = None
    """Steps between measurements at first and while things change. `often`, `rare` and `teach_every` are found from the
    saved costs where they are not given: lessons and measurements then take at most 4 % of the step time."""
    rare: int | None = None
    """Steps between measurements when things are settled."""
    pairs: int = 2
    """Consecutive steps whose paired losses make one measurement."""
    teach_every: int | None = None
    """Steps between two lessons of the predictors, after the warm-up."""
    shift: float = 1.0
    """How much a change of the output counts where the loss does not show it, 0 ... 1 (sparsity/pairs.py). A model in
    sparse training bends to its own pattern; at 0 its loss alone is asked, which soon says that all is well."""
    loss_weight: float | None = None
    """The w of a loss w * mean((y - target)^2), where it is no simple number: those are found (pairs.py)."""
    training_free_steps: int = 0
    """For inference on an untouched model: so many denoising steps run dense and teach, then `budget` holds."""
    force: bool = False
    """Go sparse even where the saved costs say that dense is faster."""
    seed: int = 0
    """Seed of what lessons and profiles draw."""
    backend: str = "auto"
    """Backend of attention, as in `attend`."""

    def __post_init__(self) -> None:
        self._check_goal()
        number = isinstance(self.periphery, int | float) and math.isfinite(self.periphery)
        if not number and self.periphery not in ("auto", "drop", "pool"):
            raise ValueError(f"periphery must be auto, drop, pool or a finite number, got {self.periphery!r}")
        if self.tile_shape != "auto" and (
            len(self.tile_shape) != 3 or min(self.tile_shape) < 1 or math.prod(self.tile_shape) not in (64, 128)
        ):
            raise ValueError(f"tile_shape must be three sizes of 64 or 128 tokens together, got {self.tile_shape}")
        if self.query_tile not in (None, 64, 128):
            raise ValueError(f"query_tile must be 64 or 128 tokens, or None, got {self.query_tile}")
        if self.backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {self.backend!r}")
        for name in ("rank", "learn_from", "often", "rare", "pairs", "teach_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.rare is not None and self.rare < (self.often or OFTEN):
            raise ValueError(f"rare must be at least often, {self.often or OFTEN}, got {self.rare}")
        if any(index < 0 for index in self.dense_layers):
            raise ValueError(f"dense_layers are counted from 0, got {tuple(self.dense_layers)}")
        if self.warmup < 0 or (self.loss_weight is not None and self.loss_weight <= 0):
            raise ValueError(
                f"warmup must be at least 0 and loss_weight above 0, got {self.warmup}, {self.loss_weight}"
            )
        if not 0 <= self.shift <= 1:
            raise ValueError(f"shift must lie in 0 ... 1, got {self.shift}")
        if not (0 < self.dsv_mass < 1 and 0 < self.dsv_threshold <= 1):
            raise ValueError(f"dsv_mass and dsv_threshold are fractions, got {self.dsv_mass}, {self.dsv_threshold}")

    def _check_goal(self) -> None:
        if self.rule not in ("error", "dsv"):
            raise ValueError(f"rule must be error or dsv, got {self.rule!r}")
        given = [name for name in ("tolerance", "budget") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError("give a tolerance (budgets are found) or a budget (fixed), not both")
        if self.rule == "dsv" and given:
            raise ValueError(f"rule 'dsv' finds budgets from dsv_mass; it has no use for a {given[0]}")
        if self.rule == "dsv" and self.periphery not in ("auto", "drop"):
            raise ValueError("rule 'dsv' drops what it does not select; leave periphery as it is")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is a relative increase of the loss, in (0, 1), got {self.tolerance}")
        if self.budget is not None:
            values = [self.budget] if isinstance(self.budget, int | float) else list(self.budget)
            if not values or not all(0 < value <= 1 for value in values):
                raise ValueError(f"budget must be above 0 and at most 1, got {self.budget}")
        if self.training_free_steps < 0 or (self.training_free_steps and self.budget is None):
            raise ValueError("training_free_steps needs a budget, and to be at least 0: there is no loss to go by")

    @property
    def goal(self) -> float | None:
        """The tolerance that budgets are found by; None where they are given, or DSV's rule finds them."""
        if self.rule != "error" or self.budget is not None:
            return None
        return TOLERANCE if self.tolerance is None else self.tolerance
