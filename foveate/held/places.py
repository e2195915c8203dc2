"""Where a forward stands in its denoising loop: step, noise level, branch, from what a pipeline says or its scheduler.

Noise levels are those of flow matching, 1 for pure noise and 0 for none: schedulers that scale the clip by alphas, or
add noise of any size to it, have s / (a + s) for a clip scaled by a with noise scaled by s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

ADVICE = (
    "reuse needs the denoising step and noise level of every forward: give foveate.reuse the pipeline and not its "
    "transformer, or enter handle.during(step=..., sigma=..., branch=...) around each forward"
)


@dataclass(frozen=True)
class Place:
    """steps: of the whole schedule, the last being steps - 1; None where nobody said. schedule: an object that a new
    generation makes anew, None where there is none. then: the noise level of the next step, where the sampler is
    Euler's for flow matching, which adds the output times the difference to the clip; None where it is another.
    """

    step: int
    sigma: float
    branch: str = ""
    steps: int | None = None
    schedule: Any = None
    then: float | None = None


class NoPlaceError(Exception):
    """The scheduler of the pipeline does not say where this forward stands. Its text is the reason."""


def place(told: Mapping[str, Any] | None, pipe: Any, time: Any = None) -> Place:
    """Of the forward that begins. told: by `cache_context`, see `Around.told`. time: what the model is given as its
    timestep, if anything. Raises `NoPlaceError` for a forward that stands at no one step of the pipeline's scheduler,
    and ValueError where step and noise level cannot be known.
    """
    told = told or {}
    branch, step, sigma = told.get("name") or "", told.get("step_index"), told.get("sigma")
    steps, scheduler = told.get("num_inference_steps"), getattr(pipe, "scheduler", None)
    timesteps = getattr(scheduler, "timesteps", None)
    if step is not None and sigma is not None:
        then = told.get("then")
        if then is None and is_euler(scheduler, int(step)):
            then = noise_level(scheduler, int(step) + 1)
        return Place(int(step), float(sigma), branch, steps, timesteps, then)
    if timesteps is None or not len(timesteps):
        raise ValueError(ADVICE)
    index = _index(scheduler, timesteps, getattr(pipe, "_current_timestep", None), time)
    level = noise_level(scheduler, index)
    if not agrees(time, float(timesteps[index]), level):
        raise NoPlaceError(
            "a forward has another timestep than the scheduler of the pipeline that was given: another pipeline calls "
            "this model"
        )
    then = noise_level(scheduler, index + 1) if is_euler(scheduler, index) else None
    return Place(index, level, branch, len(timesteps), timesteps, then)


def is_euler(scheduler: Any, index: int) -> bool:
    """Whether a step is `sample + (sigma of the next step - sigma) * output`."""
    name, config = "FlowMatchEulerDiscreteScheduler", getattr(scheduler, "config", None)
    ours = any(cls.__name__ == name for cls in type(scheduler).__mro__)
    return ours and not getattr(config, "stochastic_sampling", False) and len(scheduler.sigmas) > index + 1


def _index(scheduler: Any, timesteps: Tensor, now: Any, time: Any) -> int:
    """The scheduler's own index; before its first step that is where it was told to begin, or the pipeline's time. One
    that counts no steps (DDIM) is asked where it has the time that the model is given.
    """
    for name in ("step_index", "begin_index"):
        index = getattr(scheduler, name, None)
        if index is not None:
            return min(int(index), len(timesteps) - 1)
    if now is None and not hasattr(scheduler, "step_index"):
        now = time
    levels = _numbers(now)
    if len(levels) > 1:  # a time a frame, of which those that are done, or given, have none
        levels = [level for level in levels if level > 0]
    if len(levels) > 1:
        raise NoPlaceError("the frames of the clip have different noise levels, and what is held is moved by one")
    if not levels:
        return 0
    return int((timesteps.double().cpu() - levels[0]).abs().argmin())


def _numbers(value: Any) -> list[float]:
    """The different numbers of a time, in order; none of what is no time."""
    if isinstance(value, Tensor):
        return value.detach().double().flatten().unique().tolist()
    return [float(value)] if isinstance(value, float | int) else []


def agrees(time: Any, expected: float, level: float) -> bool:
    """Whether a timestep given to a model is the scheduler's, in one of the ways in which models are told it.

    level: the noise level there, which some are told. Of a time for each token, some of which are given and so have
    another, any may agree. Only where it is one of these ways at all: a model with its own is not judged.
    """
    given = _numbers(time)
    if not given or not 0 < given[-1] <= 1000:
        return True
    same = (expected, expected / 1000, 1000 - expected, 1 - expected / 1000, level)
    return any(abs(x - one) <= (4.0 if max(one, x) > 1 else 0.004) for x in given if x > 0 for one in same)


def noise_level(scheduler: Any, index: int) -> float:
    """Of a scheduler's index, in 0 ... 1. Raises ValueError for one that has neither sigmas nor alphas."""
    sigmas, alphas = getattr(scheduler, "sigmas", None), getattr(scheduler, "alphas_cumprod", None)
    if sigmas is not None and len(sigmas) > index:
        sigma = float(sigmas[index])
        if float(max(sigmas[0], sigmas[-1])) > 1:
            return sigma / (1 + sigma)
        inverted = getattr(getattr(scheduler, "config", None), "invert_sigmas", False)
        return 1 - sigma if inverted else sigma
    if alphas is None:
        raise ValueError(f"{type(scheduler).__name__} has neither sigmas nor alphas_cumprod. {ADVICE}")
    clip = float(alphas[int(scheduler.timesteps[index])])
    signal, noise = clip**0.5, (1 - clip) ** 0.5
    return noise / (signal + noise)
