"""foveate: sparse training and state-reusing generation for video diffusion transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foveate.attention import AttnState, Dense, Layer, Policy, attend, merge
from foveate.tiles import Selection, VideoGrid
from foveate.version import __version__ as __version__

if TYPE_CHECKING:
    from foveate.held.calibrate import Calibration, calibrate
    from foveate.held.config import ReuseConfig
    from foveate.held.handle import ReuseHandle, reuse
    from foveate.held.report import ReuseReport
    from foveate.held.schedule import Schedule
    from foveate.parallel.handle import ParallelConfig, ParallelHandle, parallelize
    from foveate.sparsity.artifact import load_sparse
    from foveate.sparsity.config import SparsityConfig
    from foveate.sparsity.handle import Handle, sparsify
    from foveate.sparsity.policy import Sparse
    from foveate.sparsity.predictor import Predictor
    from foveate.sparsity.profile import profile
    from foveate.sparsity.select import select

__all__ = [
    "AttnState",
    "Calibration",
    "Dense",
    "Handle",
    "Layer",
    "ParallelConfig",
    "ParallelHandle",
    "Policy",
    "Predictor",
    "ReuseConfig",
    "ReuseHandle",
    "ReuseReport",
    "Schedule",
    "Selection",
    "Sparse",
    "SparsityConfig",
    "VideoGrid",
    "attend",
    "calibrate",
    "load_sparse",
    "merge",
    "parallelize",
    "profile",
    "reuse",
    "select",
    "sparsify",
]

# Loaded when first asked for, so that `import foveate` costs little more than torch does.
_LATER = {
    "foveate.held.calibrate": ("Calibration", "calibrate"),
    "foveate.held.config": ("ReuseConfig",),
    "foveate.held.handle": ("ReuseHandle", "reuse"),
    "foveate.held.report": ("ReuseReport",),
    "foveate.held.schedule": ("Schedule",),
    "foveate.parallel.handle": ("ParallelConfig", "ParallelHandle", "parallelize"),
    "foveate.sparsity.artifact": ("load_sparse",),
    "foveate.sparsity.config": ("SparsityConfig",),
    "foveate.sparsity.handle": ("Handle", "sparsify"),
    "foveate.sparsity.policy": ("Sparse",),
    "foveate.sparsity.predictor": ("Predictor",),
    "foveate.sparsity.profile": ("profile",),
    "foveate.sparsity.select": ("select",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            found = getattr(import_module(module), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'foveate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
