"""The rows of the adapter table: which models foveate knows, and where their self-attentions are.

docs/adding-a-model.md walks through one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foveate.models.cogvideox import CogVideoXProcessor, cogvideox_grid
from foveate.models.hunyuan import HunyuanVideoProcessor, hunyuan_grid
from foveate.models.ltx import LTXProcessor, ltx_grid
from foveate.models.ltx2 import LTX2Processor, LTX2Reader, ltx2_grid
from foveate.models.minimax import MiniMaxH3Processor, minimax_grid
from foveate.models.mochi import MochiProcessor, mochi_grid
from foveate.models.processor import Packed, Processor
from foveate.models.sharding import PerToken, Sharding
from foveate.models.wan import WanProcessor, wan_grid
from foveate.tiles import VideoGrid


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A row of the table.

    model: name of the class. attentions: regular expression of the self-attentions' names inside it; their order in
    the model is the order of layers, which must be the one they are called in: several expressions where it is not.
    grid(config, forward's inputs by name): the token grid of one forward, `Packed` where blocks see one sequence of
    video and other tokens.
    processor: what stands in for the processors named in `replaces` (others are refused: they would be lost).
    text_first: joint text tokens come before the video. Without a processor the model calls `policy` itself, in tile
    order, as the built-in VideoDiT does. sharding: where tokens enter and leave the blocks (models/sharding.py);
    without it a model cannot be run with context parallelism.
    readers: regular expression of the cross-attentions by which other tokens read the video, with the processor that
    stands in for theirs: it reads the video of all ranks.
    """

    model: str
    attentions: str | tuple[str, ...]
    grid: Callable[[Any, dict[str, Any]], VideoGrid | Packed] | None = None
    processor: type[Processor] | None = None
    replaces: tuple[str, ...] = ()
    text_first: bool = False
    readers: str = ""
    reader: type[Processor] | None = None
    sharding: Sharding | None = None


TABLE: list[Adapter] = [
    Adapter(
        model="VideoDiT",
        attentions=r"blocks\.\d+",
        sharding=Sharding(
            blocks=r"blocks\.\d+", video="x", per_token=(PerToken("rotary", dim=0),), grid="grid", in_tile_order=True
        ),
    ),
    Adapter(
        model="WanTransformer3DModel",
        attentions=r"blocks\.\d+\.attn1",
        grid=wan_grid,
        processor=WanProcessor,
        replaces=("WanAttnProcessor",),
        sharding=Sharding(
            blocks=r"blocks\.\d+", per_token=(PerToken("rotary_emb", dim=1), PerToken("temb", dim=1, ndim=4))
        ),
    ),
    Adapter(
        model="SkyReelsV2Transformer3DModel",
        attentions=r"blocks\.\d+\.attn1",
        grid=wan_grid,
        processor=WanProcessor,
        replaces=("SkyReelsV2AttnProcessor",),
        sharding=Sharding(
            blocks=r"blocks\.\d+", per_token=(PerToken("rotary_emb", dim=1), PerToken("temb", dim=2, ndim=4))
        ),
    ),
    Adapter(
        model="CogVideoXTransformer3DModel",
        attentions=r"transformer_blocks\.\d+\.attn1",
        grid=cogvideox_grid,
        processor=CogVideoXProcessor,
        replaces=("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"),
        text_first=True,
        sharding=Sharding(
            blocks=r"transformer_blocks\.\d+",
            text="encoder_hidden_states",
            per_token=(PerToken("image_rotary_emb", dim=0),),
        ),
    ),
    Adapter(
        model="LTXVideoTransformer3DModel",
        attentions=r"transformer_blocks\.\d+\.attn1",
        grid=ltx_grid,
        processor=LTXProcessor,
        replaces=("LTXVideoAttnProcessor",),
        sharding=Sharding(
            blocks=r"transformer_blocks\.\d+",
            per_token=(PerToken("image_rotary_emb", dim=1), PerToken("temb", dim=1)),
        ),
    ),
    Adapter(
        model="HunyuanVideoTransformer3DModel",
        attentions=r"(single_)?transformer_blocks\.\d+\.attn",
        grid=hunyuan_grid,
        processor=HunyuanVideoProcessor,
        replaces=("HunyuanVideoAttnProcessor2_0",),
        sharding=Sharding(
            blocks=r"(single_)?transformer_blocks\.\d+",
            per_token=(PerToken("freqs_cis", dim=0), PerToken("image_rotary_emb", dim=0)),
            whole=("token_replace_emb",),
        ),
    ),
    Adapter(
        model="HunyuanVideo15Transformer3DModel",
        attentions=r"transformer_blocks\.\d+\.attn",
        grid=hunyuan_grid,
        processor=HunyuanVideoProcessor,
        replaces=("HunyuanVideo15AttnProcessor2_0",),
        sharding=Sharding(blocks=r"transformer_blocks\.\d+", per_token=(PerToken("freqs_cis", dim=0),)),
    ),
    Adapter(
        model="MochiTransformer3DModel",
        attentions=r"transformer_blocks\.\d+\.attn1",
        grid=mochi_grid,
        processor=MochiProcessor,
        replaces=("MochiAttnProcessor2_0",),
        sharding=Sharding(blocks=r"transformer_blocks\.\d+", per_token=(PerToken("image_rotary_emb", dim=0),)),
    ),
    Adapter(
        model="WanVACETransformer3DModel",
        attentions=(r"vace_blocks\.\d+\.attn1", r"blocks\.\d+\.attn1"),
        grid=wan_grid,
        processor=WanProcessor,
        replaces=("WanAttnProcessor",),
        sharding=Sharding(
            blocks=r"(vace_)?blocks\.\d+",
            enters=(
                (r"blocks\.0|vace_blocks\.\d+", "hidden_states"),
                (r"vace_blocks\.0", "control_hidden_states"),
            ),
            leaves="norm_out",
            per_token=(PerToken("rotary_emb", dim=1),),
        ),
    ),
    Adapter(
        model="LTX2VideoTransformer3DModel",
        attentions=r"transformer_blocks\.\d+\.attn1",
        grid=ltx2_grid,
        processor=LTX2Processor,
        replaces=("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor"),
        readers=r"transformer_blocks\.\d+\.video_to_audio_attn",
        reader=LTX2Reader,
        sharding=Sharding(
            blocks=r"transformer_blocks\.\d+",
            per_token=(
                *(PerToken(name, dim=1) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate")),
                *(PerToken(name, dim=1, ndim=3) for name in ("video_rotary_emb", "ca_video_rotary_emb")),
                *(PerToken(name, dim=2, ndim=4) for name in ("video_rotary_emb", "ca_video_rotary_emb")),
            ),
        ),
    ),
    Adapter(
        model="MiniMaxH3Transformer3DModel",
        attentions=r"transformer_blocks\.\d+\.attn",
        grid=minimax_grid,
        processor=MiniMaxH3Processor,
        replaces=("MiniMaxH3AttnProcessor",),
        sharding=Sharding(
            blocks=r"transformer_blocks\.\d+",
            packed=True,
            per_token=(PerToken("adaln_indices", dim=0), PerToken("rotary_emb", dim=0)),
        ),
    ),
]
