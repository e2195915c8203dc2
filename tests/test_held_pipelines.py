"""State reuse in diffusers' Wan pipelines, with tiny random weights: where step, noise level and guidance come from"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foveate import ReuseConfig, reuse

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")
holding = partial(ReuseConfig, hold="attention")


def transformer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=8, patch_size=(1, 2, 2),
        freq_dim=8, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    for parameter in made.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return made.eval().requires_grad_(False)


def pipeline(second: bool = False, scheduler: str = "FlowMatchEulerDiscreteScheduler") -> Any:
    missing: Any = None
    pipe = diffusers.WanPipeline(
        tokenizer=missing, text_encoder=missing, vae=missing, scheduler=getattr(diffusers, scheduler)(),
        transformer=transformer(), transformer_2=transformer(1) if second else None,
        boundary_ratio=0.7 if second else None,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(
    pipe: Any, size: tuple[int, int, int] = (3, 10, 14), steps: int = 9, guidance: float = 3.0, batch: int = 2
) -> Tensor:
    """Latents. size: of the latents; frames, height and width need divide by nothing but the patch."""
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randn(2, batch, 5, 8, generator=draw)
    frames, height, width = size
    return pipe(
        prompt_embeds=prompts[0], negative_prompt_embeds=prompts[1], num_inference_steps=steps, guidance_scale=guidance,
        latents=torch.randn(batch, 4, *size, generator=draw), height=height * 8, width=width * 8,
        num_frames=4 * (frames - 1) + 1, output_type="latent",
    ).frames  # fmt: skip


@pytest.mark.parametrize("scheduler", ["FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"])
def test_wan_pipeline_exact_and_held(scheduler: str) -> None:
    """Two prompts in a batch, guidance in two calls, a grid that divides by nothing."""
    pipe = pipeline(scheduler=scheduler)
    if scheduler == "UniPCMultistepScheduler":
        pipe.scheduler = diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
    plain = run(pipe)
    with reuse(pipe, holding(quality=1.0)):
        torch.testing.assert_close(run(pipe), plain, rtol=0, atol=1e-4)
    with reuse(pipe, holding(interval=2, warmup=3)) as handle:
        held = run(pipe)
        report = handle.report()
        alone = run(pipe, size=(2, 12, 10), batch=1)
    error = float((held - plain).norm() / plain.norm())
    assert 0 < error < 0.1
    assert {record.branch for record in report.steps} == {"cond", "uncond"}
    sigmas = [record.sigma for record in report.steps if record.branch == "cond"]
    assert sigmas == sorted(sigmas, reverse=True)
    assert [record.reason for record in report.steps[::2]] == ["warm-up"] * 3 + ["interval"] * 6
    assert torch.equal(run(pipe), plain)
    with reuse(pipe, holding(interval=2, warmup=3)):
        assert torch.equal(run(pipe, size=(2, 12, 10), batch=1), alone), "something stale was used"


def test_first_order_beats_plain_hold_here_too() -> None:
    pipe = pipeline()
    plain = run(pipe, steps=20)

    def error(**config: Any) -> float:
        with reuse(pipe, holding(interval=3, **config)):
            return float((run(pipe, steps=20) - plain).norm())

    assert error() < error(order=0)


def test_step_and_sigma_from_the_scheduler_where_the_context_is_silent() -> None:
    """As in pipelines that enter cache_context with a name only."""
    pipe = pipeline()
    with reuse(pipe, holding(interval=2, warmup=3)) as handle:
        told = run(pipe)
        expected = [(record.step, record.branch, record.sigma) for record in handle.report().steps]
    original = pipe.transformer.cache_context
    pipe.transformer.cache_context = lambda name, **_: original(name)
    with reuse(pipe, holding(interval=2, warmup=3)) as handle:
        assert torch.equal(run(pipe), told)
        found = [(record.step, record.branch, record.sigma) for record in handle.report().steps]
    assert found == expected


def test_two_transformers_each_warm_up() -> None:
    """Wan 2.2: the model switches in mid-trajectory; the second begins with no states."""
    pipe = pipeline(second=True)
    plain = run(pipe, steps=14)
    with reuse(pipe, holding(interval=3, warmup=2)) as handle:
        held = run(pipe, steps=14)
        conds = [record for record in handle.report().steps if record.branch == "cond"]
        first, second = ([r for r in conds if r.model == name] for name in ("transformer", "transformer_2"))
        assert [r.reason for r in first[:3]] == [r.reason for r in second[:3]] == ["warm-up", "warm-up", "interval"]
        assert second[0].step == first[-1].step + 1 > 2
        assert float((held - plain).norm() / plain.norm()) < 0.1
        again = run(pipe, steps=14)
        assert torch.equal(again, held)
    assert torch.equal(run(pipe, steps=14), plain)


def test_guidance_changed_in_mid_generation_resets_slopes() -> None:
    pipe = pipeline()

    def lower(_: Any, step: int, time: Any, values: dict) -> dict:
        if step == 5:
            pipe._guidance_scale = 1.5
        return values

    with reuse(pipe, holding(interval=4, warmup=3)) as handle:
        draw = torch.Generator().manual_seed(1)
        prompts = torch.randn(2, 1, 5, 8, generator=draw)
        pipe(
            prompt_embeds=prompts[0], negative_prompt_embeds=prompts[1], num_inference_steps=9, output_type="latent",
            latents=torch.randn(1, 4, 2, 8, 8, generator=draw), height=64, width=64, num_frames=5,
            callback_on_step_end=lower,
        )  # fmt: skip
        reasons = [record.reason for record in handle.report().steps if record.branch == "cond"]
    assert reasons[5:8] == ["interval", "guidance", "guidance"]


def test_a_pipeline_without_a_transformer_is_refused() -> None:
    with pytest.raises(ValueError, match="has no transformer"):
        reuse(object())
