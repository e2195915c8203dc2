"""State reuse in diffusers' Wan pipelines, with tiny random weights: where step, noise level and guidance come from"""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_pipelines
import torch
from torch import Tensor, nn

from foveate import ReuseConfig, reuse
from foveate.held.places import NoPlaceError, place

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


@pytest.mark.parametrize("name", tiny_pipelines.PIPELINES)
def test_every_pipeline_is_exact_and_held(name: str) -> None:
    """Steps, noise levels and branches come from each pipeline's own ways of telling them, or its scheduler's."""
    pipe, given = tiny_pipelines.made(name)
    models = [pipe.transformer, *([pipe.transformer_2] if getattr(pipe, "transformer_2", None) is not None else [])]
    calls = [0]

    def note(*_: Any) -> None:
        calls[0] += 1

    for model in models:
        model.register_forward_pre_hook(note)
    plain = tiny_pipelines.call(pipe, given)
    whole, calls[0] = calls[0], 0
    with reuse(pipe, ReuseConfig(quality=1.0)):
        assert torch.equal(tiny_pipelines.call(pipe, given), plain)
    assert calls[0] == whole
    calls[0] = 0
    with reuse(pipe, ReuseConfig(interval=3)) as handle:
        held = tiny_pipelines.call(pipe, given)
        report, once = handle.report(), calls[0]
        assert torch.equal(tiny_pipelines.call(pipe, given), held)
        assert "latents" in given or not torch.equal(tiny_pipelines.call(pipe, given, seed=2), held)
    assert once <= 0.6 * whole
    assert calls[0] == (2 if "latents" in given else 3) * once
    assert 0 < (held - plain).norm() < 0.1 * plain.norm()
    sigmas = [record.sigma for record in report.steps]
    assert sigmas == sorted(sigmas, reverse=True)
    assert 0 < sigmas[-1] < 0.5 < 0.9 < sigmas[0] <= 1
    assert len({record.branch for record in report.steps}) == whole // 20
    assert torch.equal(tiny_pipelines.call(pipe, given), plain)


@pytest.mark.parametrize("name", tiny_pipelines.TRANSFORMERS)
def test_any_transformer_is_held_without_an_adapter(name: str) -> None:
    """Nothing inside is touched, answers have the model's own form, and every tensor of them is predicted."""
    torch.manual_seed(0)
    model, given = tiny_pipelines.TRANSFORMERS[name]()
    model.eval().requires_grad_(False)
    processors = {name: module.processor for name, module in model.named_modules() if hasattr(module, "processor")}
    keys = set(model.state_dict())

    def answers(handle: Any) -> list[Any]:
        found = []
        for step in range(8):
            level = 1 - step / 10
            inputs = given | {"hidden_states": given["hidden_states"] * level, "timestep": given["timestep"] * level}
            with handle.during(step=step, sigma=level, steps=8) if handle else nullcontext(), torch.no_grad():
                found.append(model(**inputs))
        return found

    plain = answers(None)
    with reuse(model, ReuseConfig(interval=3)) as handle:
        held = answers(handle)
        assert {n: m.processor for n, m in model.named_modules() if hasattr(m, "processor")} == processors
        assert handle.report().hit_rate == 0.5
    for step, (ours, theirs) in enumerate(zip(held, plain, strict=True)):
        assert type(ours) is type(theirs)
        for a, b in zip(ours.values(), theirs.values(), strict=True):
            assert torch.equal(a, b) == (step in (0, 1, 4, 7))
            assert a is None or a.dtype == b.dtype
    assert set(model.state_dict()) == keys
    assert all(torch.equal(x[0], y[0]) for x, y in zip(answers(None), plain, strict=True))


def test_places_where_schedulers_and_pipelines_say_little() -> None:
    """DDIM counts no steps; Cosmos 2 gives its model the noise level of a schedule above 1; frames have their own
    times, of which those that are given are done."""
    ddim, karras = diffusers.DDIMScheduler(), tiny_pipelines.flow()
    ddim.set_timesteps(10)
    karras.set_timesteps(sigmas=[80.0, 20.0, 5.0, 1.0, 0.1])
    pipe = SimpleNamespace(scheduler=ddim)
    given = [time.expand(2).to(torch.bfloat16) for time in ddim.timesteps]
    assert [place(None, pipe, time).step for time in given] == list(range(10))
    pipe = SimpleNamespace(scheduler=karras)
    for index, sigma in enumerate(karras.sigmas[:-1]):
        karras._step_index = index
        assert place(None, pipe, sigma / (1 + sigma)).sigma == pytest.approx(float(sigma / (1 + sigma)))
    frames = SimpleNamespace(scheduler=tiny_pipelines.flow(), _current_timestep=torch.tensor([0.0, 0, 501, 501]))
    frames.scheduler.set_timesteps(3)
    near = frames.scheduler.timesteps[1]
    assert place(None, frames, torch.tensor([[20.0, 20, near, near]])).step == 1
    frames._current_timestep[3] = 900
    with pytest.raises(NoPlaceError, match="different noise levels"):
        place(None, frames)


def test_a_pipeline_without_a_transformer_is_refused() -> None:
    with pytest.raises(ValueError, match="has no transformer"):
        reuse(object())
