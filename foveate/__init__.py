"""foveate: sparse training and state-reusing generation for video diffusion transformers."""

from foveate.attention import AttnState, Dense, Layer, Policy, attend, merge
from foveate.held.config import ReuseConfig
from foveate.held.handle import ReuseHandle, reuse
from foveate.held.report import ReuseReport
from foveate.parallel.handle import ParallelConfig, ParallelHandle, parallelize
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.handle import Handle, sparsify
from foveate.sparsity.policy import Sparse
from foveate.sparsity.predictor import Predictor
from foveate.sparsity.profile import profile
from foveate.sparsity.select import select
from foveate.tiles import Selection, VideoGrid

__version__ = "0.1.0.dev0"
__all__ = [
    "AttnState",
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
    "Selection",
    "Sparse",
    "SparsityConfig",
    "VideoGrid",
    "attend",
    "merge",
    "parallelize",
    "profile",
    "reuse",
    "select",
    "sparsify",
]
