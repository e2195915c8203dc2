"""Two ComfyUI nodes around a loaded video model: reuse of earlier steps, and training-free sparse attention.

Both change nothing in the model: they are wrappers and an attention override of a clone of its patcher, so a bypassed
node leaves no trace, and each sampling run begins anew.
"""

import logging
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

import foveate as fv
from foveate.sparsity.hosted import Hosted

log = logging.getLogger("foveate")
REUSE, SPARSE = "foveate_reuse", "foveate_sparse"
RUN: ContextVar["Steps | None"] = ContextVar("foveate_comfyui_run", default=None)


class Steps(nn.Module):
    """What `foveate.reuse` sees of a sampling run: one module, whose output is the slope d clip / d sigma.

    ComfyUI's models answer with the clean clip that they expect, which moves with the noisy one; the slope is what
    samplers step along, and what changes slowly from step to step. fresh: the model's own answer, where it was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fresh: Tensor | None = None
        self.handle: fv.ReuseHandle | None = None
        self.strange = False

    def forward(self, hidden_states: Tensor, timestep: Tensor, context: Any, extra: dict, call: Callable) -> Tensor:
        self.fresh = call()
        return (hidden_states - self.fresh) / timestep.flatten()[0]


def place(options: dict[str, Any], sigma: float) -> tuple[int, int] | None:
    """The denoising step of a noise level, and how many there are; None where it is none of the schedule's."""
    sigmas = options.get("sample_sigmas")
    if sigmas is None:
        return None
    levels = [float(x) for x in sigmas]
    step = min(range(len(levels)), key=lambda index: abs(levels[index] - sigma))
    return (step, len(levels) - 1) if math.isclose(levels[step], sigma, rel_tol=1e-4) else None


class FoveateReuse:
    """Leaves out calls of the model where their measured error allows it."""

    CATEGORY, FUNCTION, RETURN_TYPES = "foveate", "patch", ("MODEL",)
    DESCRIPTION = "Reuse what earlier denoising steps computed. quality 1 is exact; interval above 0 goes in its place."

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802 - ComfyUI's name
        quality = {"default": 0.9, "min": 0.01, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "model": ("MODEL",),
                "quality": ("FLOAT", quality),
                "interval": ("INT", {"default": 0, "min": 0, "max": 32}),
            }
        }

    def patch(self, model: Any, quality: float, interval: int) -> tuple[Any]:
        config = fv.ReuseConfig(quality=quality, interval=interval or None, ranks="independent")
        model = model.clone()
        for kind, wrapper in ((WrappersMP.OUTER_SAMPLE, _sampling(config)), (WrappersMP.APPLY_MODEL, _step)):
            model.remove_wrappers_with_key(kind, REUSE)
            model.add_wrapper_with_key(kind, REUSE, wrapper)
        return (model,)


def _sampling(config: fv.ReuseConfig) -> Callable:
    def sampling(executor: Callable, *args: Any, **kwargs: Any) -> Any:
        run = Steps()
        with fv.reuse(run, config) as run.handle:
            token = RUN.set(run)
            try:
                return executor(*args, **kwargs)
            finally:
                RUN.reset(token)
                log.info("foveate: %.0f %% of the model's calls were held", 100 * run.handle.report().hit_rate)

    return sampling


def _step(executor: Callable, x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Around `BaseModel.apply_model(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)`."""
    run, options = RUN.get(), _options(args, kwargs)
    levels = t.flatten().tolist()
    where = place(options, levels[0]) if min(levels) == max(levels) > 0 else None
    if run is None or run.handle is None or where is None:
        if run is not None and not run.strange:
            run.strange = True
            log.warning(
                "foveate: the sampler calls the model at noise levels that its schedule does not have; these calls are "
                "computed. Euler and multistep samplers (dpmpp_2m, uni_pc, lcm) keep to the schedule"
            )
        return executor(x, t, *args, **kwargs)
    (step, steps), sigma = where, levels[0]
    top = float(options["sample_sigmas"][0])
    level = sigma / (1 + sigma) if top > 1 else sigma  # of noise that is added to the whole clip
    branch = ",".join(map(str, options.get("cond_or_uncond", ())))
    context, given = kwargs.get("c_crossattn"), {name: value for name, value in kwargs.items() if name not in HIDDEN}
    run.fresh = None
    with run.handle.during(step=step, sigma=level, branch=branch, steps=steps):
        slope = run(x, t, context, given, lambda: executor(x, t, *args, **kwargs))
    return x - sigma * slope if run.fresh is None else run.fresh


HIDDEN = ("c_crossattn", "control", "transformer_options")  # compared by itself; new objects at every step


def _options(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's `transformer_options`, wherever they stand among its arguments."""
    found = kwargs.get("transformer_options")
    return found if found is not None else next((x for x in args if isinstance(x, dict) and "sigmas" in x), {})


class Attention:
    """Sparse attention of a sampling run: which forward runs, and its layers."""

    def __init__(self, kept: float, dense_steps: int, force: bool):
        self.settings = {"kept": kept, "dense_steps": dense_steps, "force": force}
        Hosted(**self.settings)  # says what is wrong before anything is computed
        self.hosted: Hosted | None = None
        self.grid: fv.VideoGrid | None = None
        self.step: int | None = None
        self.number = 0

    def sampling(self, executor: Callable, *args: Any, **kwargs: Any) -> Any:
        self.hosted = hosted = Hosted(**self.settings)
        try:
            return executor(*args, **kwargs)
        finally:
            self.hosted = self.grid = None
            if not sum(hosted.computed.values()):
                log.warning(
                    "foveate: no self-attention of this model is over the tokens of the video alone: all of it stayed "
                    "dense. Wan's and LTX's are; models that attend to text and video together are not"
                )

    def forward(self, executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Around the diffusion model's forward, x (B, C, T, H, W)."""
        options, patch = _options(args, kwargs), getattr(executor.class_obj, "patch_size", 1)
        patch = patch if isinstance(patch, tuple | list) else (patch,) * 3
        if isinstance(x, Tensor) and x.dim() == 5 and len(patch) == 3:
            self.grid = fv.VideoGrid(*(math.ceil(size / edge) for size, edge in zip(x.shape[2:], patch, strict=True)))
        sigmas, now = options.get("sample_sigmas"), options.get("sigmas")
        self.number, self.step = 0, None
        if sigmas is not None and now is not None:
            self.step = int((sigmas.to(now.device) - now.flatten()[0]).abs().argmin())
        try:
            return executor(x, *args, **kwargs)
        finally:
            self.grid = None

    def override(self, inner: Callable | None) -> Callable:
        """For `transformer_options["optimized_attention_override"]`. inner: the override that was there before."""

        def attention(func: Callable, q: Tensor, k: Tensor, v: Tensor, heads: int, *rest: Any, **kwargs: Any) -> Tensor:
            def dense() -> Tensor:
                if inner is not None:
                    return inner(func, q, k, v, heads, *rest, **kwargs)
                return func(q, k, v, heads, *rest, **kwargs)

            shaped = bool(kwargs.get("skip_reshape"))  # (B, H, S, D); else (B, S, H * D)
            tokens = 0 if self.grid is None else self.grid.tokens
            video = tokens == q.shape[-2] == k.shape[-2]
            if self.hosted is None or self.grid is None or not video or rest or kwargs.get("mask") is not None:
                return dense()
            flat = not kwargs.get("skip_output_reshape")
            parts = [x.transpose(1, 2) if shaped else x.unflatten(-1, (heads, -1)) for x in (q, k, v)]
            self.number += 1

            def as_host() -> Tensor:
                found = dense()
                return found.unflatten(-1, (heads, -1)) if flat else found.transpose(1, 2)

            out = self.hosted.attend(self.number, self.grid, self.step, *parts, as_host)
            return out.flatten(2) if flat else out.transpose(1, 2)

        return attention


class FoveateSparse:
    """Keeps a share of the key tiles from some step on; the first steps are dense and show which tiles matter."""

    CATEGORY, FUNCTION, RETURN_TYPES = "foveate", "patch", ("MODEL",)
    DESCRIPTION = "Training-free sparse attention for long videos. force: also where saved costs say it does not pay."

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802 - ComfyUI's name
        return {
            "required": {
                "model": ("MODEL",),
                "kept": ("FLOAT", {"default": 0.15, "min": 0.01, "max": 1.0, "step": 0.01}),
                "dense_steps": ("INT", {"default": 3, "min": 1, "max": 32}),
                "force": ("BOOLEAN", {"default": False}),
            }
        }

    def patch(self, model: Any, kept: float, dense_steps: int, force: bool) -> tuple[Any]:
        attention = Attention(kept, dense_steps, force)
        model = model.clone()
        for kind, one in (
            (WrappersMP.OUTER_SAMPLE, attention.sampling),
            (WrappersMP.DIFFUSION_MODEL, attention.forward),
        ):
            model.remove_wrappers_with_key(kind, SPARSE)
            model.add_wrapper_with_key(kind, SPARSE, one)
        options = model.model_options["transformer_options"] = dict(model.model_options["transformer_options"])
        name = "optimized_attention_override"
        options[name] = attention.override(options.get(name))
        return (model,)


NODE_CLASS_MAPPINGS = {"FoveateReuse": FoveateReuse, "FoveateSparse": FoveateSparse}
NODE_DISPLAY_NAME_MAPPINGS = {"FoveateReuse": "Reuse steps (foveate)", "FoveateSparse": "Sparse attention (foveate)"}
