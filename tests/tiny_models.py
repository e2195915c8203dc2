"""Tiny random models of diffusers, their inputs, policies that force the sparse backend, and comparisons, for tests."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from foveate.attention import AttnState, Layer, attend
from foveate.models import adapters
from foveate.tiles import Selection, VideoGrid

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")
TOLERANCE = 1e-5
ODD = (5, 7, 9)


@dataclass
class Case:
    """A tiny model: how to build it and its inputs for a grid, and how many text tokens join the attention."""

    build: Callable[[], nn.Module]
    inputs: Callable[[tuple[int, int, int]], dict]
    text: int = 0
    joint: bool = False  # other tokens beside the video, which the grid does not count
    rows: Callable[[tuple[int, int, int]], Tensor] | None = None  # places of the video's tokens in a packed sequence
    flat_mask: bool = False  # the plain processor wants an additive mask (B * H, S, S), not a bool one (B, H, S, S)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def wan(patch=(1, 2, 2), cls: str = "WanTransformer3DModel", **more) -> nn.Module:
    shape = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 3, "out_channels": 3, "text_dim": 8}
    sizes = {"freq_dim": 8, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 16}
    return getattr(diffusers, cls)(patch_size=patch, **(sizes | shape | more))


def wan_inputs(patch=(1, 2, 2), tokens: int = 6, per_token: bool = False, image: bool = False, **more):
    def make(grid: tuple[int, int, int]) -> dict:
        sizes = [size * edge for size, edge in zip(grid, patch, strict=True)]
        times = (2, grid[0] * grid[1] * grid[2]) if per_token else (2,)
        inputs = {"hidden_states": rand(2, 3, *sizes), "timestep": 1000 * torch.rand(times)}
        inputs |= {"encoder_hidden_states": rand(2, tokens, 8)} | more
        return inputs | ({"encoder_hidden_states_image": rand(2, 5, 8)} if image else {})

    return make


def cogvideox(rope: bool, patch_t: int | None = None) -> nn.Module:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=3, out_channels=3, time_embed_dim=8, num_layers=2,
        text_embed_dim=8, patch_size=2, patch_size_t=patch_t, sample_width=8, sample_height=8, sample_frames=9,
        max_text_seq_length=11, use_rotary_positional_embeddings=rope,
    )  # fmt: skip
    return model


def cogvideox_inputs(rope: bool, patch_t: int = 1):
    def make(grid: tuple[int, int, int]) -> dict:
        frames, height, width = grid[0] * patch_t, grid[1] * 2, grid[2] * 2
        inputs = {"hidden_states": rand(2, frames, 3, height, width), "timestep": 1000 * torch.rand(2)}
        if rope:
            angles = rand(grid[0] * grid[1] * grid[2], 16).repeat_interleave(2, dim=-1)
            inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
        return inputs | {"encoder_hidden_states": rand(2, 11, 8)}

    return make


def ltx() -> nn.Module:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
        num_layers=2, caption_channels=8,
    )  # fmt: skip


def ltx_inputs(grid: tuple[int, int, int]) -> dict:
    inputs = {"hidden_states": rand(2, grid[0] * grid[1] * grid[2], 4), "encoder_hidden_states": rand(2, 6, 8)}
    inputs |= {"timestep": 1000 * torch.rand(2), "encoder_attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    return inputs | dict(zip(("num_frames", "height", "width"), grid, strict=True))


TOKENS = 11
PADDED = torch.tensor([[1] * TOKENS, [1] * 4 + [0] * (TOKENS - 4)])  # one sequence without padding, one with


def hunyuan(**more) -> nn.Module:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, mlp_ratio=1.0, text_embed_dim=8, pooled_projection_dim=8, rope_axes_dim=(8, 12, 12),
        **more,
    )  # fmt: skip


def hunyuan_inputs(grid: tuple[int, int, int]) -> dict:
    frames, height, width = grid
    inputs = {"hidden_states": rand(2, 4, frames, 2 * height, 2 * width), "timestep": 1000 * torch.rand(2)}
    inputs |= {"encoder_hidden_states": rand(2, TOKENS, 8), "encoder_attention_mask": PADDED}
    return inputs | {"pooled_projections": rand(2, 8), "guidance": 1000 * torch.rand(2)}


def hunyuan15() -> nn.Module:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2, num_refiner_layers=1,
        mlp_ratio=1.0, text_embed_dim=8, text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=(8, 12, 12),
    )  # fmt: skip


def hunyuan15_inputs(grid: tuple[int, int, int]) -> dict:
    """Without an image: its tokens are masked too."""
    inputs = {"hidden_states": rand(2, 4, *grid), "timestep": 1000 * torch.rand(2)}
    inputs |= {"encoder_hidden_states": rand(2, TOKENS, 8), "encoder_attention_mask": PADDED}
    inputs |= {"encoder_hidden_states_2": rand(2, 5, 8), "image_embeds": torch.zeros(2, 3, 8)}
    return inputs | {"encoder_attention_mask_2": torch.tensor([[1, 1, 0, 0, 0], [1] * 5])}


def mochi() -> nn.Module:
    return diffusers.MochiTransformer3DModel(
        in_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2, pooled_projection_dim=16,
        text_embed_dim=8, time_embed_dim=8,
    )  # fmt: skip


def mochi_inputs(grid: tuple[int, int, int]) -> dict:
    frames, height, width = grid
    inputs = {"hidden_states": rand(2, 4, frames, 2 * height, 2 * width), "timestep": 1000 * torch.rand(2)}
    return inputs | {"encoder_hidden_states": rand(2, TOKENS, 8), "encoder_attention_mask": PADDED.bool()}


def ltx2(**more) -> nn.Module:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=16,
        audio_cross_attention_dim=32, num_layers=2, caption_channels=8, **more,
    )  # fmt: skip


def ltx2_inputs(grid: tuple[int, int, int]) -> dict:
    inputs = {"hidden_states": rand(2, grid[0] * grid[1] * grid[2], 4), "audio_hidden_states": rand(2, 7, 4)}
    inputs |= {"encoder_hidden_states": rand(2, TOKENS, 8), "audio_encoder_hidden_states": rand(2, TOKENS, 8)}
    inputs |= {"encoder_attention_mask": PADDED, "audio_encoder_attention_mask": PADDED}
    inputs |= {"timestep": 1000 * torch.rand(2, grid[0] * grid[1] * grid[2]), "audio_timestep": 1000 * torch.rand(2)}
    return inputs | dict(zip(("num_frames", "height", "width"), grid, strict=True)) | {"audio_num_frames": 7}


def minimax() -> nn.Module:
    return diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=32, hidden_size=48, num_layers=2, num_refiner_layers=1, ffn_dim=32,
        in_channels=3, audio_in_channels=4, text_dim=8, freq_dim=8, time_embed_hidden_dim=16, time_embed_dim=16,
        rope_freq_dim=4,
    )  # fmt: skip


def minimax_rows(grid: tuple[int, int, int]) -> Tensor:
    """Text, one conditioning frame, audio, video: as diffusers packs them."""
    before = TOKENS + grid[1] * grid[2] + 7
    return torch.arange(before, before + grid[0] * grid[1] * grid[2])


def minimax_inputs(grid: tuple[int, int, int]) -> dict:
    frames, height, width = grid
    frame, video = height * width, frames * height * width
    where = [torch.linspace(0, 32, size) for size in (height, width)]
    places = torch.stack(torch.meshgrid(*where, indexing="ij"), -1).flatten(0, 1)
    times = torch.arange(frames).repeat_interleave(frame) * 1.7 + TOKENS
    clip = torch.cat([times[:, None], places.repeat(frames, 1)], 1)
    words, audio = torch.zeros(TOKENS, 3), torch.zeros(7, 3)
    words[:, 0], audio[:, 0] = torch.arange(TOKENS), TOKENS + torch.arange(7)
    parts = [words, clip[:frame], audio, clip]
    tags = [part.new_full((len(part),), tag) for part, tag in zip(parts, (1, 0, 2, 0), strict=True)]
    rows = torch.arange(TOKENS + frame + 7 + video)
    return {
        "hidden_states": rand(2, frame + video, 12), "audio_hidden_states": rand(2, 7, 4),
        "encoder_hidden_states": rand(2, TOKENS, 8), "timestep": torch.tensor([0.3, 0.0]),
        "timestep_indices": torch.cat([torch.full_like(tag, i == 1) for i, tag in enumerate(tags)]).long(),
        "token_tags": torch.cat(tags).long(), "position_ids": torch.cat(parts), "text_indices": rows[:TOKENS],
        "video_indices": torch.cat([rows[TOKENS : TOKENS + frame], rows[-video:]]),
        "audio_indices": rows[TOKENS + frame : -video],
    }  # fmt: skip


CASES = {
    "wan": Case(wan, wan_inputs()),
    "wan22-per-token-time": Case(wan, wan_inputs(per_token=True)),
    "wan-patch-2-1-2": Case(lambda: wan((2, 1, 2)), wan_inputs((2, 1, 2))),
    "wan-image": Case(lambda: wan(image_dim=8, added_kv_proj_dim=64), wan_inputs(tokens=512, image=True)),
    "skyreels": Case(lambda: wan(cls="SkyReelsV2Transformer3DModel"), wan_inputs()),
    "cogvideox": Case(lambda: cogvideox(False), cogvideox_inputs(False), 11, flat_mask=True),
    "cogvideox15-rope": Case(lambda: cogvideox(True, 2), cogvideox_inputs(True, 2), 11, flat_mask=True),
    "ltx": Case(ltx, ltx_inputs, flat_mask=True),
    "vace": Case(
        lambda: wan(cls="WanVACETransformer3DModel", num_layers=1, vace_layers=[0], vace_in_channels=3),
        lambda grid: wan_inputs()(grid) | {"control_hidden_states": rand(2, 3, grid[0], 2 * grid[1], 2 * grid[2])},
    ),
    "hunyuan": Case(hunyuan, hunyuan_inputs, joint=True),
    "hunyuan-first-frame": Case(lambda: hunyuan(image_condition_type="token_replace"), hunyuan_inputs, joint=True),
    "hunyuan15": Case(hunyuan15, hunyuan15_inputs, joint=True),
    "mochi": Case(mochi, mochi_inputs, joint=True),
    "ltx2": Case(ltx2, ltx2_inputs, joint=True),
    "ltx23-split-gated": Case(
        lambda: ltx2(rope_type="split", gated_attn=True, perturbed_attn=True), ltx2_inputs, joint=True
    ),
    "minimax": Case(minimax, minimax_inputs, joint=True, rows=minimax_rows),
}
MAIN = ("wan", "cogvideox15-rope")


def make(name: str, grid: tuple[int, int, int] = ODD) -> tuple[nn.Module, dict]:
    """A model whose zero-initialised parameters are random too, and its inputs."""
    torch.manual_seed(0)
    model = CASES[name].build()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model, CASES[name].inputs(grid)


def results(model: nn.Module, *inputs: dict) -> dict[str, Tensor]:
    """Outputs, and all parameters' gradients of a fixed random mixture of them, one backward after all forwards."""
    model.zero_grad()
    outputs = [out for one in inputs for out in model(**one, return_dict=False)]
    weights = [torch.randn(out.shape, generator=torch.Generator().manual_seed(7)) for out in outputs]
    sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)} | grads


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Equal name by name, relative to each one's norm. A gradient that is zero but for rounding (a shift of all keys
    changes no softmax, so a bias of keys has none) only has to be so in both; it may be missing."""
    nothing = 1e-6 * max(expected.norm() for expected in theirs.values())
    for name in ours.keys() | theirs.keys():
        if name not in theirs or theirs[name].norm() < nothing:
            assert name not in ours or ours[name].norm() < nothing, f"{name}: should be zero"
            continue
        expected = theirs[name]
        error = (ours[name] - expected).norm() / expected.norm()
        assert error <= tolerance, f"{name}: relative error {error:.1e}, norm {expected.norm():.1e}"


class Kept:
    """Forces the sparse backend, keeping a fraction of the tiles at random (its own always); counts calls."""

    def __init__(self, fraction: float):
        self.fraction, self.calls, self.layers = fraction, Counter(), []

    def mask(self, index: int, grid: VideoGrid, batch: int, heads: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        tiles = grid.tiles()
        return (torch.rand(batch, heads, tiles, tiles, generator=generator) < self.fraction) | torch.eye(tiles).bool()

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.state(layer, q, k, v).out

    def state(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        self.calls[layer.name] += 1
        self.layers.append(layer)
        mask = self.mask(layer.index, layer.grid, q.shape[0], q.shape[2])
        return attend(q, k, v, Selection.from_dense(mask, layer.grid), backend="torch")


class Masked:
    """diffusers' own processor, given a mask that the model itself never passes."""

    def __init__(self, original, mask: Tensor):
        self.original, self.mask = original, mask

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        rotary_emb=None,
        image_rotary_emb=None,
    ):
        rotary = rotary_emb if image_rotary_emb is None else image_rotary_emb
        return self.original(attn, hidden_states, encoder_hidden_states, self.mask, rotary)


class MaskedInside:
    """diffusers' own processor, whose calls of torch's attention get a further mask (B, H, V, V) of the video in it.

    rows: places of the video's tokens in the sequence, the first ones by default.
    """

    def __init__(self, original, mask: Tensor, rows: Tensor | None):
        self.original, self.mask, self.rows = original, mask, rows

    def __call__(self, attn, hidden_states, *args, attention_mask=None, image_rotary_emb=None, **kwargs):
        more = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}  # diffusers reads these names
        kwargs |= {name: value for name, value in more.items() if value is not None}
        plain, turn = torch.nn.functional.scaled_dot_product_attention, iter(self.mask)

        def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more) -> Tensor:
            video = self.mask if len(query) == len(self.mask) else next(turn)[None]  # Mochi takes one clip at a time
            rows = torch.arange(video.shape[-1]) if self.rows is None else self.rows
            mask = torch.ones(*query.shape[:3], key.shape[2], dtype=torch.bool)
            mask[:, :, rows[:, None], rows] = video
            return plain(query, key, value, attn_mask=mask if attn_mask is None else mask & attn_mask, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
            return self.original(attn, hidden_states, *args, **kwargs)


def mask_tokens(model: nn.Module, case: Case, grid: VideoGrid, policy: Kept) -> None:
    """Puts `policy`'s choice into the plain model as token masks in the model's own order."""
    with adapters.install(model, policy) as installed:
        names = installed.layers
    back = torch.argsort(grid.order())
    for index, name in enumerate(names):
        tiles = policy.mask(index, grid, 2, 2)
        tokens = tiles.repeat_interleave(64, -1).repeat_interleave(64, -2)[..., : grid.tokens, : grid.tokens]
        tokens = tokens[..., back, :][..., back]
        tokens = tokens.roll((grid.text, grid.text), (-1, -2))  # the model has its text first
        attention = model.get_submodule(name)
        if case.joint:
            rows = None if case.rows is None else case.rows((grid.frames, grid.height, grid.width))
            attention.processor = MaskedInside(attention.processor, tokens, rows)
            continue
        if case.flat_mask:
            tokens = torch.zeros(tokens.shape).masked_fill(~tokens, -torch.inf).flatten(0, 1)
        attention.set_processor(Masked(attention.processor, tokens))
