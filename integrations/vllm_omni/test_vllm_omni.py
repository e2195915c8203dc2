"""vLLM-Omni's own Attention layer and Wan block run through the backend, on a CPU (see README.md).

python -m pytest integrations/vllm_omni
"""

import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vllm-omni is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("torchvision") is None:  # imported for models that are not used here
    import transformers.utils

    transformers.utils.is_torchvision_available()  # remembered, as absent
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)

from vllm_omni import platforms
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.platforms.interface import UnspecifiedOmniPlatform


class Cpu(UnspecifiedOmniPlatform):
    """vLLM-Omni has no platform for CPUs: backends are found as its others do, and torch's attention is CUDA's way."""

    def is_cuda(self) -> bool:
        return True

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend: Any, head_size: int, allow_trtllm_default: bool = False):
        name = (selected_backend or "TORCH_SDPA").upper()
        cls.validate_diffusion_attn_backend(name)
        return DiffusionAttentionBackendEnum[name].get_path()


platforms.current_omni_platform = Cpu()

from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, VideoTokenLayout  # noqa: E402
from vllm_omni.diffusion.attention.layer import Attention  # noqa: E402
from vllm_omni.diffusion.attention.selector import _cached_get_backend_cls  # noqa: E402
from vllm_omni.diffusion.config import set_current_diffusion_config  # noqa: E402
from vllm_omni.diffusion.data import parse_attention_config  # noqa: E402
from vllm_omni.diffusion.forward_context import set_forward_context, set_forward_context_denoise_step_idx  # noqa: E402

import foveate.sparsity.hosted  # noqa: E402

GRID = (4, 8, 16)
TOKENS = 512


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By the plugin's entry point; sparse attention pays at any length."""
    import foveate_vllm_omni

    monkeypatch.setattr(foveate.sparsity.hosted.Hosted, "_pays", lambda *_: True)
    _cached_get_backend_cls.cache_clear()
    foveate_vllm_omni.register()
    yield
    DiffusionAttentionBackendEnum.RAINFUSION_ATTN.clear_override()
    _cached_get_backend_cls.cache_clear()


def config(ring: int = 1, **sparse: Any) -> Any:
    chosen = {"default": {"backend": "RAINFUSION_ATTN", "block_sparse": sparse}} if sparse else None
    degrees = {"ring_degree": ring, "ulysses_degree": 1, "allgather_degree": 1, "sequence_parallel_size": 1}
    return types.SimpleNamespace(
        diffusion_attention_config=parse_attention_config(chosen), model_class_name="WanPipeline",
        parallel_config=types.SimpleNamespace(**degrees),
    )  # fmt: skip


def layer(**sparse: Any) -> Attention:
    with set_current_diffusion_config(config(**sparse)):
        return Attention(2, 32, False, 32**-0.5, prefix="blocks.1.attn1", qkv_layout="BSND").eval()


@contextmanager
def step(number: int) -> Iterator[None]:
    with set_forward_context(omni_diffusion_config=config()):
        set_forward_context_denoise_step_idx(number)
        yield


def qkv(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(1, TOKENS, 2, 32, generator=draw) for _ in range(3)]


def video() -> AttentionMetadata:
    return AttentionMetadata(video_layout=VideoTokenLayout(prefix_len=0, latent_grid=GRID, used_len=TOKENS))


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@torch.inference_mode()
def run(attention: Attention, steps: int = 5) -> list[torch.Tensor]:
    found = []
    for number in range(steps):
        with step(number):
            found.append(attention(*qkv(number), video()))
    return found


def test_the_first_steps_are_dense_and_later_ones_keep_what_was_asked_for() -> None:
    exact, sparse = run(layer()), layer(sparsity=0.5, start_step=2)
    assert sparse.attn_backend.get_name() == "FOVEATE"
    found = run(sparse)
    for number in range(2):
        assert torch.equal(found[number], exact[number])
    for number in range(2, 5):
        assert 1e-3 < error(found[number], exact[number]) < 1  # noise: what is not kept is missed
    again = run(sparse)
    assert all(map(torch.equal, again, found))  # another request begins anew
    nearly = run(layer(sparsity=1e-6, start_step=2))
    assert max(map(error, nearly, exact)) < 1e-4  # every tile is kept


def test_what_is_no_video_alone_is_dense() -> None:
    sparse, exact = layer(sparsity=0.5, start_step=1), layer()
    q, k, v = qkv(0)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    mask[:, 500:] = False
    with torch.inference_mode(), step(4):
        for metadata in (None, AttentionMetadata(attn_mask=mask)):
            assert torch.equal(sparse(q, k, v, metadata), exact(q, k, v, metadata))
        assert torch.equal(sparse(q, k[:, :77], v[:, :77], None), exact(q, k[:, :77], v[:, :77], None))
        assert error(sparse(q, k, v, video()), exact(q, k, v, video())) == 0  # its first call is dense


def test_skipped_layers_the_last_steps_and_what_cannot_run() -> None:
    exact = run(layer())
    assert all(map(torch.equal, run(layer(sparsity=0.5, start_step=1, skip_layers="1")), exact))
    with pytest.raises(ValueError, match="precision"):
        layer(sparsity=0.5, precision="fp8")
    with pytest.raises(ValueError, match="ring_degree"):
        layer(ring=2, sparsity=0.5)


def test_in_a_compiled_block_the_step_still_decides() -> None:
    sparse = layer(sparsity=0.5, start_step=2)
    expected = run(sparse)
    torch.compiler.reset()
    compiled = torch.compile(sparse, backend="eager")
    assert max(map(error, run(compiled), expected)) < 1e-5


def test_short_clips_stay_dense_and_say_so(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.undo()
    caplog.set_level(logging.WARNING)
    assert all(map(torch.equal, run(layer(sparsity=0.5, start_step=1)), run(layer())))
    assert "does not pay" in caplog.text


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """vLLM's configuration and groups of one process, which its layers ask for."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment
    from vllm_omni.diffusion.distributed import parallel_state

    chosen = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(chosen), pytest.MonkeyPatch.context() as patch:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591"}.items():
            patch.setenv(name, value)
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        yield chosen
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def wan(chosen: Any) -> torch.nn.Module:
    from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

    with set_current_diffusion_config(chosen), set_forward_context(omni_diffusion_config=chosen):
        model = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, text_dim=16, freq_dim=32, ffn_dim=64, num_layers=2,
            rope_max_seq_len=64,
        ).float()  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=draw)
        weight.data = torch.ones_like(weight) if "norm" in name else 0.5 * drawn / max(1, weight[0].numel()) ** 0.5
    return model.eval()


@torch.inference_mode()
def steps_of(model: torch.nn.Module, chosen: Any, vllm_config: Any) -> list[torch.Tensor]:
    found, draw = [], torch.Generator().manual_seed(1)
    clip, text = torch.randn(1, 16, 4, 16, 32, generator=draw), torch.randn(1, 6, 16, generator=draw)
    with set_forward_context(vllm_config=vllm_config, omni_diffusion_config=chosen):
        for number in range(4):
            set_forward_context_denoise_step_idx(number)
            found.append(model(clip, torch.tensor([900.0 - 100 * number]), text)[0])
    return found


def test_vllm_omnis_own_wan(world: Any) -> None:
    exact = steps_of(wan(config()), config(), world)
    chosen = config(sparsity=0.5, start_step=2)
    sparse = wan(chosen)
    found = steps_of(sparse, chosen, world)
    assert torch.equal(found[1], exact[1])
    assert 1e-5 < error(found[3], exact[3]) < 0.1
    layers = {name: part.attention.hosted for name, part in sparse.named_modules() if isinstance(part, Attention)}
    assert {name: hosted.computed["sparse"] for name, hosted in layers.items()} == {
        "blocks.0.attn1.attn": 2, "blocks.0.attn2.attn": 0, "blocks.1.attn1.attn": 2, "blocks.1.attn2.attn": 0,
    }  # fmt: skip
