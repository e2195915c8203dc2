"""Where to run: context parallelism. The only folder that issues collectives."""

from foveate.parallel.handle import ParallelConfig, ParallelHandle, mean_over_ranks, parallelize
from foveate.parallel.hosts import adopt_launcher

__all__ = ["ParallelConfig", "ParallelHandle", "adopt_launcher", "mean_over_ranks", "parallelize"]
