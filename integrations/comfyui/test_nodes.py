"""ComfyUI's own patcher, guider and samplers run a tiny Wan of ComfyUI's through both nodes (see README.md).

COMFYUI=/path/to/ComfyUI python -m pytest integrations/comfyui
"""

import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

COMFYUI = os.environ.get("COMFYUI", "")
if not Path(COMFYUI, "comfy", "model_patcher.py").exists():
    pytest.skip("COMFYUI names no checkout of ComfyUI", allow_module_level=True)


def _torchvision() -> None:
    """ComfyUI imports it for models that are not used here; its wheels need the CUDA build of torch."""
    import transformers.utils

    if importlib.util.find_spec("torchvision") is None:
        transformers.utils.is_torchvision_available()  # remembered, as absent
        names = ("torchvision", "torchvision.transforms")
        modules = [types.ModuleType(name) for name in names]
        for name, module in zip(names, modules, strict=True):
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        modules[0].transforms = modules[1]  # type: ignore[attr-defined]
        sys.modules.update(zip(names, modules, strict=True))


_torchvision()
sys.path.insert(0, COMFYUI)
arguments, sys.argv = sys.argv, ["main.py", "--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.model_base  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.supported_models  # noqa: E402

sys.argv = arguments
FOLDER = Path(__file__).parent / "foveate_nodes"
spec = importlib.util.spec_from_file_location(
    "foveate_nodes", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
)
assert spec is not None
assert spec.loader is not None
package = importlib.util.module_from_spec(spec)  # as ComfyUI loads custom nodes
sys.modules["foveate_nodes"] = package
spec.loader.exec_module(package)
REUSE, SPARSE = package.NODE_CLASS_MAPPINGS["FoveateReuse"], package.NODE_CLASS_MAPPINGS["FoveateSparse"]


@pytest.fixture(scope="module")
def model() -> Any:
    shape = {"dim": 64, "ffn_dim": 128, "num_heads": 2, "num_layers": 2, "freq_dim": 32, "text_dim": 16, "text_len": 8}
    config = comfy.supported_models.WAN21_T2V(
        {"image_model": "wan2.1", "model_type": "t2v", "in_dim": 16, "out_dim": 16, **shape}
    )
    config.set_inference_dtype(torch.float32, None)
    made = comfy.model_base.WAN21(config, device="cpu")
    draw = torch.Generator().manual_seed(0)
    for name, weight in made.named_parameters():
        drawn = torch.randn(weight.shape, generator=draw)
        weight.data = 1 + 0.1 * drawn if "norm" in name else 0.5 * drawn / max(1, weight[0].numel()) ** 0.5
    return comfy.model_patcher.ModelPatcher(made, torch.device("cpu"), torch.device("cpu"))


@pytest.fixture
def calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a call of the model: its batch."""
    found, wan = list[int](), model.model.diffusion_model
    plain = wan.forward_orig
    monkeypatch.setattr(
        wan, "forward_orig", lambda x, *args, **kwargs: found.append(len(x)) or plain(x, *args, **kwargs)
    )
    return found


@torch.inference_mode()  # as ComfyUI runs its graphs
def clip(model: Any, *, seed: int = 0, steps: int = 12, sampler: str = "euler", guidance: float = 3.0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 16, 8, 16, 16, generator=draw)
    text = [[[torch.randn(1, 8, 16, generator=draw), {}]] for _ in range(2)]
    latents = torch.zeros_like(noise)
    return comfy.sample.sample(
        model, noise, steps, guidance, sampler, "simple", *text, latents, disable_pbar=True, seed=seed
    )


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_reuse_holds_calls_alike_in_every_run_and_leaves_the_model_alone(
    model: Any, calls: list[int], caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    exact = clip(model)
    whole = len(calls)
    (reusing,) = REUSE().patch(model, 0.9, 3)
    (nothing,) = REUSE().patch(model, 1.0, 0)
    assert torch.equal(clip(nothing), exact)
    found = []
    for _ in range(2):
        calls.clear()
        found.append(clip(reusing))
        assert len(calls) <= 0.6 * whole
    assert torch.equal(*found)
    assert 0 < error(found[0], exact) < 0.1
    assert "of the model's calls were held" in caplog.text
    calls.clear()
    assert torch.equal(clip(model), exact)
    assert len(calls) == whole


def test_other_samplers_sizes_and_guidance(model: Any, calls: list[int]) -> None:
    (reusing,) = REUSE().patch(model, 0.9, 3)
    for settings in ({"sampler": "dpmpp_2m"}, {"sampler": "uni_pc"}, {"guidance": 1.0}, {"steps": 9, "seed": 4}):
        calls.clear()
        exact, whole = clip(model, **settings), len(calls)
        calls.clear()
        held = clip(reusing, **settings)
        assert len(calls) < 0.8 * whole, settings
        assert error(held, exact) < 0.15, settings


def test_a_sampler_that_leaves_the_schedule_is_computed_and_said(model: Any, calls: list[int], caplog: Any) -> None:
    exact, whole = clip(model, sampler="dpm_2"), len(calls)
    (reusing,) = REUSE().patch(model, 0.9, 3)
    calls.clear()
    assert error(clip(reusing, sampler="dpm_2"), exact) < 0.15
    assert len(calls) <= whole
    assert "does not have" in caplog.text


def test_an_interrupted_run_leaves_nothing_behind(
    model: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (reusing,) = REUSE().patch(model, 0.9, 3)
    expected = clip(reusing, seed=1)
    plain = model.model.diffusion_model.forward_orig

    def stops(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(calls) == 3:
            raise InterruptedError
        return plain(*args, **kwargs)

    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(model.model.diffusion_model, "forward_orig", stops)
        with pytest.raises(InterruptedError):
            clip(reusing)
    assert torch.equal(clip(reusing, seed=1), expected)


def test_sparse_attention_that_keeps_everything_is_exact_and_less_is_close(model: Any, caplog: Any) -> None:
    exact = clip(model)
    (whole,) = SPARSE().patch(model, 1.0, 2, True)
    assert error(clip(whole), exact) < 1e-4
    (half,) = SPARSE().patch(model, 0.5, 2, True)
    found = clip(half)
    assert 1e-6 < error(found, exact) < 0.2
    assert torch.equal(clip(half), found)
    assert torch.equal(clip(model), exact)
    caplog.clear()
    (short,) = SPARSE().patch(model, 0.5, 2, False)
    assert torch.equal(clip(short), exact)  # 512 tokens
    assert "does not pay" in caplog.text


def test_both_nodes_together_and_another_ones_override(model: Any, calls: list[int]) -> None:
    exact, whole = clip(model), len(calls)
    seen = list[int]()
    theirs = model.clone()
    theirs.model_options["transformer_options"]["optimized_attention_override"] = lambda func, q, *args, **kwargs: (
        seen.append(q.shape[1]) or func(q, *args, **kwargs)
    )
    (both,) = REUSE().patch(SPARSE().patch(theirs, 0.5, 2, True)[0], 0.9, 2)
    calls.clear()
    assert error(clip(both), exact) < 0.25
    assert len(calls) < 0.8 * whole
    assert 512 in seen  # cross-attention's queries, and the dense steps


@pytest.mark.parametrize("settings", [(0.0, 3), (0.5, 0)])
def test_settings_are_checked_before_anything_runs(model: Any, settings: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        SPARSE().patch(model, *settings, True)
    with pytest.raises(ValueError, match="quality"):
        REUSE().patch(model, 0.0, 0)
