"""Shapes of published video transformers, as far as their speed depends on them.

From their public configurations: Wan 2.1 https://huggingface.co/Wan-AI/Wan2.1-T2V-14B/blob/main/config.json (and
-1.3B), HunyuanVideo https://huggingface.co/docs/diffusers/api/models/hunyuan_video_transformer_3d, CogVideoX
https://huggingface.co/zai-org/CogVideoX-5b/blob/main/transformer/config.json (and -2b), LTX-Video
https://huggingface.co/Lightricks/LTX-Video/blob/main/transformer/config.json (0.9.7: -0.9.7-dev).
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Model:
    """layers with self-attention over the video; heads of `dim`; ffn: width of the feed-forward.

    cross: whether text is attended to by cross-attention, whose query and output projections every token passes.
    parameters: of the whole model; None: those of the matrices that a token passes.
    """

    name: str
    layers: int
    heads: int
    dim: int
    ffn: int
    cross: bool = True
    parameters: float | None = None

    @property
    def width(self) -> int:
        return self.heads * self.dim

    @property
    def passed(self) -> int:
        """Weights of a layer that every token is multiplied with."""
        return (6 if self.cross else 4) * self.width**2 + 2 * self.width * self.ffn

    @property
    def weights(self) -> float:
        return self.parameters or float(self.layers * (self.passed + 2 * self.width**2 * self.cross))


MODELS = {
    model.name: model
    for model in (
        Model(name="wan-1.3b", layers=30, heads=12, dim=128, ffn=8960, parameters=1.42e9),
        Model(name="wan-14b", layers=40, heads=40, dim=128, ffn=13824, parameters=14.3e9),
        # 20 layers with two streams and 40 with one: a video token passes 12 width^2 in each.
        Model(name="hunyuanvideo", layers=60, heads=24, dim=128, ffn=12288, cross=False, parameters=12.8e9),
        Model(name="cogvideox-2b", layers=30, heads=30, dim=64, ffn=7680, cross=False, parameters=1.7e9),
        Model(name="cogvideox-5b", layers=42, heads=48, dim=64, ffn=12288, cross=False, parameters=5.6e9),
        Model(name="ltx-2b", layers=28, heads=32, dim=64, ffn=8192, parameters=1.9e9),
        Model(name="ltx-13b", layers=48, heads=32, dim=128, ffn=16384, parameters=13e9),
    )
}


def find(name: str) -> Model:
    """A preset, or `LAYERSxHEADSxDIM` with a feed-forward of four times the width. ValueError for anything else."""
    if name in MODELS:
        return MODELS[name]
    own = re.fullmatch(r"(\d+)x(\d+)x(\d+)", name)
    if own is None or not all(map(int, own.groups())):
        raise ValueError(
            f"there is no model {name!r}; --model takes {', '.join(MODELS)}, or your own as LAYERSxHEADSxDIM: 32x24x96"
        )
    layers, heads, dim = map(int, own.groups())
    return Model(name=name, layers=layers, heads=heads, dim=dim, ffn=4 * heads * dim)
