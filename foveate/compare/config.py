"""The dials of `foveate compare`."""

from dataclasses import dataclass
from pathlib import Path

LEAST = 512  # windows of the Fréchet distance: fewer say little of a covariance of 64 features


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """How videos are compared."""

    fit: bool = False
    """Scale videos to the reference's size and cut them to the shorter, where they differ."""
    windows: int = 1024
    """Windows that the Fréchet distance is computed on, at least 512; 0 leaves it out."""
    vmaf: bool = True
    """Compute VMAF where ffmpeg has libvmaf."""
    lpips: Path | None = None
    """TorchScript file of LPIPS: two batches of pictures in, distances out (docs/compare.md)."""
    fvd: Path | None = None
    """TorchScript file of the I3D network, for FVD."""
    device: str = "cpu"
    """Device that the files of --lpips and --fvd run on."""
    clips: int = 8
    """Pairs at most that a page shows: the report's players, and the blind test."""
    seed: int = 0
    """Of windows, intervals and the choice of pairs."""

    def __post_init__(self) -> None:
        if self.clips < 1:
            raise ValueError(f"--clips must be at least 1, got {self.clips}")
        if self.windows and self.windows < LEAST:
            raise ValueError(f"--windows must be at least {LEAST}, or 0 for none, got {self.windows}")
