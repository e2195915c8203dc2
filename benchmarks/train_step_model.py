"""The model of bench_train_step.py, and steps of it: forward, backward, optimiser, the handle's step, timed."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from train_step_summary import TEACH_EVERY, Setting

import foveate as fv
from foveate.attention import Layer
from foveate.models.adapters import install
from foveate.tiles import CUBE, VideoGrid

FIRST_MEASURED = TEACH_EVERY + 2  # the step after which a sparse run measures, where it is to
NEVER = 1 << 30

aten = torch.ops.aten
SAVED = [  # attention operators whose results outlive a checkpointed block
    torch.ops.foveate.attend.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


@dataclass(frozen=True)
class Shape:
    """A Wan transformer, and the short sequence that serves for first steps."""

    heads: int
    dim: int
    layers: int
    ffn: int
    text: int
    text_dim: int
    short: int

    def model(self, layers: int, device: str) -> Any:
        with torch.device(device):
            model = WanTransformer3DModel(
                num_attention_heads=self.heads, attention_head_dim=self.dim, in_channels=16, out_channels=16,
                text_dim=self.text_dim, freq_dim=256, ffn_dim=self.ffn, num_layers=layers, rope_max_seq_len=1024,
            )  # fmt: skip
        return model.train()


WAN = Shape(heads=12, dim=128, layers=30, ffn=8960, text=512, text_dim=4096, short=8192)
TOY = Shape(heads=2, dim=32, layers=6, ffn=128, text=16, text_dim=32, short=512)


def grid_of(tokens: int) -> VideoGrid:
    """A clip of that many tokens, a power of two: frames about half as many as rows and columns."""
    power = tokens.bit_length() - 1
    if tokens != 1 << power or power < 6:
        raise ValueError(f"tokens must be a power of two of at least 64, got {tokens}")
    frames = (power - 1) // 3
    height = (power - frames) // 2
    return VideoGrid(1 << frames, 1 << height, 1 << (power - frames - height))


# One step


@dataclass(frozen=True)
class Batch:
    latents: Tensor
    text: Tensor
    target: Tensor

    @classmethod
    def of(cls, shape: Shape, tokens: int, device: str, dtype: torch.dtype) -> "Batch":
        grid = grid_of(tokens)
        torch.manual_seed(tokens)
        size = (1, 16, grid.frames, 2 * grid.height, 2 * grid.width)  # patches of 1 x 2 x 2
        latents, target = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
        return cls(latents, torch.randn(1, shape.text, shape.text_dim, device=device, dtype=dtype), target)

    def loss(self, model: Any) -> Tensor:
        time = torch.tensor([500], device=self.latents.device)
        out = model(self.latents, time, self.text, return_dict=False)[0]
        return (out.float() - self.target.float()).square().mean()


@dataclass(frozen=True)
class Timing:
    """Seconds of a step and, of these, of the handle's part; peak GiB of the training part; its loss."""

    seconds: float
    handle: float
    peak: float | None
    loss: float


class Model:
    """The model, its optimiser, and how its blocks are checkpointed."""

    def __init__(self, shape: Shape, layers: int, device: str, attention: SDPBackend | None):
        self.shape, self.layers, self.device, self.attention = shape, layers, device, attention
        torch.manual_seed(0)
        self.net = shape.model(layers, device)
        for weight in self.net.parameters():  # tables of positions stay in float32, as in a loaded model
            weight.data = weight.data.bfloat16()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-5, fused=True)

    def checkpoint(self, mode: str) -> None:
        options: dict[str, Any] = {"use_reentrant": False}
        if mode == "attention":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED)
        self.net.enable_gradient_checkpointing(lambda block, *args: checkpoint(block.__call__, *args, **options))

    def step(self, batch: Batch, handle: fv.Handle | None = None) -> Timing:
        reset_peak(self.device)
        began = now(self.device)
        with dense_attention(self.attention):
            loss = batch.loss(self.net)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        trained = now(self.device)
        most = peak(self.device)
        if handle is not None:
            with dense_attention(self.attention):
                handle.step()
        done = now(self.device)
        return Timing(done - began, done - trained, most, float(loss.detach()))

    def dense_by(self, backend: str) -> Any:
        """For a `with`: dense attention by one of foveate's kernels; as diffusers runs it where none is named."""
        return install(self.net, Always(backend)) if backend else nullcontext()

    def handle(self, setting: Setting, query_tile: int, measure: bool) -> fv.Handle:
        """The model sparsified and, by first steps on a short clip, in the stage that the setting is about."""
        periphery: Any = setting.periphery
        config = fv.SparsityConfig(
            budget=1.0 if setting.budget is None else setting.budget, periphery=periphery,
            dense_layers=setting.dense_layers(self.layers), query_tile=query_tile, learn_from=1,
            warmup=NEVER if setting.learns else 1, often=FIRST_MEASURED - 1 if measure else NEVER, rare=NEVER,
            pairs=1, teach_every=TEACH_EVERY, tile_shape=CUBE, force=True,
        )  # fmt: skip
        handle = fv.sparsify(self.net, config)
        short = Batch.of(self.shape, self.shape.short, self.device, torch.bfloat16)
        for _ in range(TEACH_EVERY - 1):  # the first step of full length, which warms up, is then one with a lesson
            self.step(short, handle)
        assert handle.decision.active is not setting.learns
        return handle


class Always:
    """A policy: dense attention by one kernel."""

    def __init__(self, backend: str):
        self.backend = backend

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fv.attend(q, k, v, backend=self.backend).out


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> float | None:
    """GiB; None where nobody counts."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def dense_attention(backend: SDPBackend | None) -> Any:
    return nullcontext() if backend is None else sdpa_kernel(backend)
