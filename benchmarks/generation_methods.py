"""Ways to generate with less attention, each installed on a fresh diffusers pipeline: ours, and peers at their best.

A `Method` is one setting of one family. Families: `exact`; `plain hold` of attention states and `states, undamped`
at fixed anchor intervals; `foveate` (its default, which holds outputs) and `foveate states`, at fixed intervals and by
`quality`, `foveate schedule` as calibrated; diffusers' FirstBlockCache, TaylorSeer, MagCache, SeaCache and pyramid
attention broadcast (PAB); cache-dit's DBCache. DiTango's own rule, on eight ranks
in one process (generation_ditango.py). TeaCache is not in diffusers 0.42.1. Ranges are each peer's own sensible one,
from nearly exact to visibly wrong; variants that its documentation offers are settings like any other.
"""

import importlib.util
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import generation_ditango

import foveate as fv

PARTS = "parts of foveate"
NODES = "states, near fresh"
INTERVALS = (2, 3, 4, 6)  # between anchors, for comparisons at equal fresh work
WARMUP = 5  # first steps of ours and of every peer that has such a setting
Install = Callable[[Any], AbstractContextManager[Any]]  # given a pipeline; what it enters is our handle or None


@dataclass(frozen=True)
class Method:
    family: str
    setting: str
    install: Install

    @property
    def name(self) -> str:
        return f"{self.family} {self.setting}".strip()


def reuse(**settings: Any) -> Install:
    """`fv.reuse` on the pipeline, removed at the end."""
    return lambda pipe: fv.reuse(pipe, fv.ReuseConfig(**{"warmup": WARMUP, **settings}))


def states(**settings: Any) -> Install:
    """Attention states in place of outputs."""
    return reuse(hold="attention", **settings)


def exact() -> list[Method]:
    return [Method("exact", "", lambda _: nullcontext()), Method("exact", "foveate", reuse(quality=1.0))]


def fixed(intervals: tuple[int, ...]) -> list[Method]:
    """Equal fresh work: the same steps computed, everything held in between."""
    return [
        Method(family, f"every {interval}", how(interval=interval))
        for interval in intervals
        for family, how in (
            ("plain hold", partial(states, order=0)),
            ("states, undamped", partial(states, damping=1.0)),
            ("foveate states", states),
            ("foveate", reuse),
        )
    ]


def variants() -> list[Method]:
    """Other settings of ours, tried on the choosing seeds only."""
    settings: dict[str, dict[str, Any]] = {
        "every 3, half damped": {"interval": 3, "damping": 0.5},
        "every 3, own group fresh": {"interval": 3, "local": "fresh"},
        "every 3, plain, own group fresh": {"interval": 3, "order": 0, "local": "fresh"},
        "every 3, warm-up 7": {"interval": 3, "warmup": 7},
        "quality 0.9, 8 states": {"quality": 0.9, "states": 8},
        "quality 0.9, held at most 4 steps": {"quality": 0.9, "max_hold": 4},
    }
    return [Method("variant", name, states(**how)) for name, how in settings.items()]


def by_quality(outputs: tuple[float, ...], attention: tuple[float, ...]) -> list[Method]:
    """Ours, planned by predicted error."""
    kinds = (("foveate", reuse, outputs), ("foveate states", states, attention))
    return [
        Method(family, f"quality {quality:g}", how(quality=quality))
        for family, how, qualities in kinds
        for quality in qualities
    ]


def scheduled(plan: "fv.Calibration | None", shares: tuple[float, ...]) -> list[Method]:
    """Ours, planned from exact runs of other videos; as many shares of the calls as are given."""
    if plan is None:
        return []
    return [Method("foveate schedule", f"{share:.0%} of the calls", reuse_planned(plan, share)) for share in shares]


def reuse_planned(plan: "fv.Calibration", share: float, **settings: Any) -> Install:
    return lambda pipe: fv.reuse(pipe, fv.ReuseConfig(schedule=plan.schedule(share), **settings))


def nodes(intervals: tuple[int, ...]) -> list[Method]:
    """Two nodes: keys of the own node fresh at every step, those of the other at anchors only.

    What crosses the link between nodes is what it is where whole layers, or outputs, are held at the same interval.
    """
    return [Method(NODES, f"every {n}", states(interval=n, groups=2, local="fresh")) for n in intervals]


def parts(plan: "fv.Calibration | None") -> list[Method]:
    """What each part of held outputs brings, at 40 % of the calls (`fixed` and `scheduled` have the whole)."""
    found = [
        Method(PARTS, "every 3, held as they are", reuse(interval=3, order=0)),
        Method(PARTS, "every 3, mended", reuse(interval=3, mend=True)),
    ]
    return found if plan is None else [*found, Method(PARTS, "scheduled", reuse_planned(plan, 0.4, mend=False))]


def cached(config: Callable[[Any], Any]) -> Install:
    """One of diffusers' caches: `config` is given the pipeline."""

    @contextmanager
    def install(pipe: Any) -> Iterator[None]:
        pipe.transformer.enable_cache(config(pipe))
        yield
        pipe.transformer.disable_cache()

    return install


def first_block(thresholds: tuple[float, ...]) -> list[Method]:
    from diffusers import FirstBlockCacheConfig

    return [
        Method("FirstBlockCache", f"threshold {x:g}", cached(lambda _, x=x: FirstBlockCacheConfig(threshold=x)))
        for x in thresholds
    ]


def taylorseer(intervals: tuple[int, ...]) -> list[Method]:
    """On the outputs of self-attention, orders 1 and 2, or `lite` on the whole model.

    The modules are named here, as diffusers 0.42.1's own pattern (`^blocks.*attn`, to be matched in full) finds nothing
    in Wan and so would do nothing. Factors in float32, which is kinder than its bfloat16.
    """
    import torch
    from diffusers import TaylorSeerCacheConfig

    def config(interval: int, **how: Any) -> Install:
        shared = {"disable_cache_before_step": WARMUP, "taylor_factors_dtype": torch.float32}
        return cached(lambda _: TaylorSeerCacheConfig(cache_interval=interval, **shared, **how))

    own = ["blocks[.][0-9]+[.]attn1"]
    variants: dict[str, dict[str, Any]] = {
        "order 1": {"max_order": 1, "cache_identifiers": own},
        "order 2": {"max_order": 2, "cache_identifiers": own},
        "lite": {"use_lite_mode": True},
    }
    return [
        Method("TaylorSeer", f"every {n}, {name}", config(n, **how))
        for n in intervals
        for name, how in variants.items()
    ]


def sea(thresholds: tuple[float, ...]) -> list[Method]:
    """SeaCache: the whole block stack skipped while a filtered latent has changed by less than the threshold.

    Its residual extrapolated, its default, with its two reuses in a row and with four.
    """
    from diffusers import SeaCacheConfig

    def config(threshold: float, row: int) -> Install:
        return cached(lambda _: SeaCacheConfig(threshold=threshold, max_consecutive_cached=row, retention_steps=WARMUP))

    return [
        Method("SeaCache", f"threshold {x:g}, at most {row} in a row", config(x, row))
        for x in thresholds
        for row in (2, 4)
    ]


def magnitudes(run: Callable[[Any], Any], pipe: Any, steps: int) -> list[float]:
    """MagCache's own calibration: what it prints of one run, the mean over both branches of guidance."""
    from diffusers import MagCacheConfig

    said = io.StringIO()
    with (
        redirect_stdout(said),
        cached(lambda _: MagCacheConfig(calibrate=True, num_inference_steps=steps))(pipe),
    ):
        run(pipe)
    found = [json.loads(line) for line in said.getvalue().splitlines() if line.startswith("[") and line[1:2].isdigit()]
    if not found:
        raise ValueError(f"MagCache printed no ratios: {said.getvalue()[:200]!r}")
    return [sum(row) / len(row) for row in zip(*found, strict=True)]


def mag(ratios: list[float], thresholds: tuple[float, ...], rows: tuple[int, ...]) -> list[Method]:
    """MagCache: block residuals repeated while the ratios of their sizes, measured before, say little changes."""
    from diffusers import MagCacheConfig

    def config(threshold: float, row: int) -> Install:
        return cached(
            lambda _: MagCacheConfig(
                threshold=threshold, max_skip_steps=row, num_inference_steps=len(ratios), mag_ratios=ratios,
                retention_ratio=WARMUP / len(ratios),
            )
        )  # fmt: skip

    if not ratios:
        return []
    return [
        Method("MagCache", f"threshold {x:g}, at most {row} in a row", config(x, row))
        for x in thresholds
        for row in rows
    ]


def pab(ranges: tuple[int, ...], timesteps: tuple[tuple[int, int], ...]) -> list[Method]:
    """Pyramid attention broadcast of self-attention, skipped inside a range of timesteps (0 ... 1000).

    As diffusers 0.42.1 ships it, a module has one state for both calls of a step, so that Wan's branch without a prompt
    gets the other's attention; here it has one a branch, as diffusers' other caches have, or it would not compete.
    """
    from diffusers import PyramidAttentionBroadcastConfig

    def install(skip: int, window: tuple[int, int]) -> Install:
        def config(pipe: Any) -> Any:
            return PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=skip, spatial_attention_timestep_skip_range=window,
                current_timestep_callback=lambda: pipe.current_timestep,
            )  # fmt: skip

        @contextmanager
        def entered(pipe: Any) -> Iterator[None]:
            with cached(config)(pipe):
                keep_branches_apart(pipe.transformer)
                yield

        return entered

    return [
        Method("PAB", f"every {n} in {window[0]}-{window[1]}", install(n, window))
        for window in timesteps
        for n in ranges
    ]  # fmt: skip


def keep_branches_apart(transformer: Any) -> None:
    """Give every PAB hook one state for each `cache_context`."""
    from diffusers.hooks.hooks import StateManager
    from diffusers.hooks.pyramid_attention_broadcast import (
        _PYRAMID_ATTENTION_BROADCAST_HOOK as HOOK,
    )
    from diffusers.hooks.pyramid_attention_broadcast import (
        PyramidAttentionBroadcastHook,
        PyramidAttentionBroadcastState,
    )

    class Apart(PyramidAttentionBroadcastHook):
        manager: Any

        @property
        def state(self) -> Any:
            return self.manager.get_state()

        def reset_state(self, module: Any) -> None:
            self.manager.reset()

    for module in transformer.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = None if registry is None else registry.get_hook(HOOK)
        if hook is not None:
            del hook.state
            hook.__class__ = Apart
            hook.manager = StateManager(PyramidAttentionBroadcastState)  # pyright: ignore[reportArgumentType]


def ditango(ratios: tuple[float, ...], *, steps: int) -> list[Method]:
    """Attention states by DiTango's rule for what is computed, its knob the share of states that are held."""

    def install(ratio: float) -> Install:
        @contextmanager
        def entered(pipe: Any) -> Iterator[None]:
            with generation_ditango.install(pipe, ratio, steps)[1]:
                yield

        return entered

    return [Method("DiTango's rule", f"ratio {ratio:g}", install(ratio)) for ratio in ratios]


def cache_dit(thresholds: tuple[float, ...], *, steps: int) -> list[Method]:
    """DBCache, its first block always computed, alone or with its TaylorSeer calibrator; none where not installed."""
    if importlib.util.find_spec("cache_dit") is None:
        return []
    import cache_dit as package  # pyright: ignore[reportMissingImports]

    logging.getLogger("CACHE_DIT").setLevel(logging.WARNING)

    def install(threshold: float, first: int, order: int) -> Install:
        @contextmanager
        def entered(pipe: Any) -> Iterator[None]:
            config = package.DBCacheConfig(
                Fn_compute_blocks=first, Bn_compute_blocks=0, residual_diff_threshold=threshold,
                max_warmup_steps=WARMUP, num_inference_steps=steps,
            )  # fmt: skip
            calibrator = package.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
            package.enable_cache(pipe, cache_config=config, calibrator_config=calibrator)
            try:
                yield
            finally:
                package.disable_cache(pipe)

        return entered

    return [
        Method(
            "cache-dit", f"F{first} threshold {x:g}" + (f" order {order}" if order else ""), install(x, first, order)
        )
        for x in thresholds
        for first, order in ((1, 0), (1, 1))
    ]
