"""foveate's training-free sparse attention as a diffusion attention backend of vLLM-Omni.

vLLM-Omni has a fixed list of backends, whose classes may be exchanged (`register_diffusion_backend`). This takes the
place of RAINFUSION_ATTN, which runs on Ascend NPUs only and is the one whose settings are those of block-sparse
attention: sparsity, start_step, end_step, skip_layers.

Shapes: B batch, S tokens, H heads, D head dim.
"""

import logging
import math
import weakref
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum, register_diffusion_backend
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available
from vllm_omni.platforms import current_omni_platform

from foveate import VideoGrid
from foveate.sparsity.hosted import Hosted

log = logging.getLogger("foveate")
DENSE_STEPS = 3  # where start_step is 0: predictors need some
IMPLS: weakref.WeakValueDictionary[int, "FoveateImpl"] = weakref.WeakValueDictionary()


def register() -> None:
    """vLLM-Omni's plugin loader calls this in every process; again it does nothing new."""
    if current_omni_platform.is_npu():
        log.info("foveate: RAINFUSION_ATTN stays what it is on NPUs, for which foveate has no kernels")
        return
    register_diffusion_backend(DiffusionAttentionBackendEnum.RAINFUSION_ATTN, f"{__name__}.FoveateBackend")


class FoveateBackend(AttentionBackend):
    accept_output_buffer = True

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return True  # by torch's attention

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []

    @staticmethod
    def get_name() -> str:
        return "FOVEATE"

    @staticmethod
    def get_impl_cls() -> type["FoveateImpl"]:
        return FoveateImpl


class FoveateImpl(AttentionImpl):
    """One layer's attention. Sparse is self-attention over the tokens of one video, from `start_step` on; all else is
    what the platform's default backend computes, or torch's where there is a mask."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ):
        given = backend_kwargs or {}
        if given.get("precision", "bf16") != "bf16":
            raise ValueError(f"foveate computes in the model's dtype: precision must be bf16, got {given['precision']}")
        if causal or qkv_layout not in (None, "BSND"):
            given = {}  # as it was
        settings = {
            "num_heads": num_heads, "head_size": head_size, "softmax_scale": softmax_scale, "causal": causal,
            "num_kv_heads": num_kv_heads, "prefix": prefix, "qkv_layout": qkv_layout,
        }  # fmt: skip
        self.scale, self.first, self.end = softmax_scale, given.get("start_step", 0), given.get("end_step", 0)
        self.masked = SDPABackend.get_impl_cls()(**settings)
        self.dense = self._default(head_size)(**settings)
        kept, number = 1 - given.get("sparsity", 0.0), _layer(prefix)
        self.hosted: Hosted | None = None
        if 0 < kept < 1 and number not in given.get("skip_layers", ()):
            _check_parallel()
            self.hosted = Hosted(kept, dense_steps=self.first or DENSE_STEPS)
        IMPLS[id(self)] = self

    @staticmethod
    def _default(head_size: int) -> type[AttentionImpl]:
        try:
            return get_attn_backend_for_role("self", head_size)[0].get_impl_cls()
        except NotImplementedError:  # a platform without one
            return SDPABackend.get_impl_cls()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata | None = None
    ) -> Tensor:
        """(B, S, H, D), on every platform."""
        grid = self._grid(query, key, attn_metadata)
        if grid is not None:
            return torch.ops.foveate_vllm_omni.attention(query, key, value, id(self), *grid)
        masked = attn_metadata is not None and attn_metadata.attn_mask is not None
        return (self.masked if masked else self.dense).forward(query, key, value, attn_metadata)

    def _grid(self, query: Tensor, key: Tensor, metadata: AttentionMetadata | None) -> tuple[int, ...] | None:
        """Frames, height and width of the video that the tokens are, if they are that and nothing else."""
        layout = None if metadata is None else metadata.video_layout
        if self.hosted is None or metadata is None or layout is None or layout.latent_grid is None:
            return None
        if metadata.attn_mask is not None or metadata.full_attn_spans is not None or metadata.joint_key is not None:
            return None
        tokens = math.prod(layout.latent_grid)
        alone = not layout.prefix_len and not layout.video_spans and layout.used_len in (None, tokens)
        return tuple(layout.latent_grid) if alone and query.shape[1] == key.shape[1] == tokens else None

    def video(self, query: Tensor, key: Tensor, value: Tensor, grid: VideoGrid) -> Tensor:
        assert self.hosted is not None

        def dense() -> Tensor:
            return self.dense.forward(query, key, value, None)

        context = get_forward_context() if is_forward_context_available() else None
        step = None if context is None else context.denoise_step_idx
        steps = None if context is None else context.total_denoise_steps
        if self.end and (step is None or steps is None or step >= steps - self.end):
            return dense()
        return self.hosted.attend(0, grid, step, query, key, value, dense, self.scale)


def _layer(prefix: str) -> int | None:
    """The number in a layer's name, such as `blocks.3.attn1`."""
    return next((int(part) for part in prefix.split(".") if part.isdigit()), None)


def _check_parallel() -> None:
    parallel = getattr(get_current_diffusion_config_or_none(), "parallel_config", None)
    for name in ("ring_degree", "allgather_degree"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"sparse attention needs whole sequences: {name} must be 1 (Ulysses keeps them whole)")


@torch.library.custom_op("foveate_vllm_omni::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor, impl: int, frames: int, height: int, width: int) -> Tensor:
    """Compiled blocks call this as one node, inside which the step decides what is computed."""
    return IMPLS[impl].video(query, key, value, VideoGrid(frames, height, width)).contiguous()


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, impl: int, frames: int, height: int, width: int) -> Tensor:
    return query.new_empty(query.shape)
