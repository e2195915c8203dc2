"""Where to run: context parallelism. The only folder that issues collectives."""

from foveate.parallel.handle import ParallelConfig, ParallelHandle, mean_over_ranks, parallelize

__all__ = ["ParallelConfig", "ParallelHandle", "mean_over_ranks", "parallelize"]
